"""State that rests elsewhere than on the device: in host memory, or in files. `OffloadPolicy` is what to start with."""

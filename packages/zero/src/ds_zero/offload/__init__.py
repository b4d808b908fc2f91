"""State that rests elsewhere than on the device: in host memory, or in files. `placement.Placement` is what to start with."""

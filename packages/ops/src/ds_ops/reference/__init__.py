"""Every op in plain torch: the specification, the fallback without native kernels, and the oracle of the tests."""

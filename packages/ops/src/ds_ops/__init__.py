"""Kernels, optimizers, quantizers and asynchronous file I/O, each with a plain torch reference."""

"""Kernels in Triton for generation on a GPU, each with a plain torch reference. Nothing here is imported before a device needs it.

Triton comes with torch's CUDA builds; without it `triton_obstacle` says so, and the references run. With TRITON_INTERPRET=1 the same
kernels run on the CPU, an instruction at a time: that is how they are tested without a device.
"""

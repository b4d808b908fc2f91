"""Tensor parallelism, sequences, experts."""

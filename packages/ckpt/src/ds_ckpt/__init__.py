"""Logical, pickle-free, atomic checkpoints that resume on any layout."""

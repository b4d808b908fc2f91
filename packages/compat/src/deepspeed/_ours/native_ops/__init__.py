"""Builders, files, devices, layers with codes."""

"""What forward and backward do with the units of a model."""

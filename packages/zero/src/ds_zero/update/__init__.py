"""What a step of the optimizer does."""

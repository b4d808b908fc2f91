"""Reading, writing, loading and checking the values of a sharded model."""

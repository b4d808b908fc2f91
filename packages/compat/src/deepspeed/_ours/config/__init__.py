"""The configuration as clients give it."""

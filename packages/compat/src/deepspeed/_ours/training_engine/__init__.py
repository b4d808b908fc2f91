"""The engine and how it starts."""

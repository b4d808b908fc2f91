"""The data pipeline."""

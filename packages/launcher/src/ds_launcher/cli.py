"""`ds` by the name that it had in this package."""

from ds_config.ds_command import main

__all__ = ["main"]

"""The section of the configuration file that ds-comm owns. Imported only by who reads a configuration."""

from __future__ import annotations

from ds_config import StrictModel

__all__ = ["CommsLoggerConfig"]


class CommsLoggerConfig(StrictModel):
    """`comms_logger`: count and time every collective, by operation and message size.

    While it is enabled each operation on an accelerator is waited for, which costs speed.
    """

    enabled: bool = False
    prof_all: bool = True  # otherwise only what prof_ops names
    prof_ops: tuple[str, ...] = ()  # operations (`all_reduce`) or units (`layers.0`)
    verbose: bool = False  # one log line per operation
    debug: bool = False  # operations of different units are counted apart

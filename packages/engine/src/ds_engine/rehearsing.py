"""`ds_engine.rehearse`: a script as one rank of a world that is not there (`ds_comm.rehearsal`)."""

from __future__ import annotations

from ds_comm.rehearsal.rehearse_cli import rehearse

__all__ = ["rehearse"]

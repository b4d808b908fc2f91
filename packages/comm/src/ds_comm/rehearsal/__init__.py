"""A world of W ranks in one process: one rank is real, and each collective takes the time that described links would take.

`fabric` is the links as data, and how long an operation over them takes. `rehearsal_group` is torch's process group, `pacing` waits on
behalf of ranks that are not there, `traffic` keeps what was sent and what was waited for. `staging` puts all of it in the place of
torch's own backends for one process, before a user's script runs. What tensors hold after a collective are this rank's own values
in the place of the others': finite, and without meaning.
"""

from __future__ import annotations

from ds_comm.rehearsal.fabric import Fabric, Link, fabric_from, preset_names
from ds_comm.rehearsal.staging import RehearsalOptions, is_rehearsal, rehearsal_traffic, start_rehearsal, stop_rehearsal
from ds_comm.rehearsal.traffic import LinkTransfer, TransferSummary, summarise

__all__ = [
    "Fabric",
    "Link",
    "LinkTransfer",
    "RehearsalOptions",
    "TransferSummary",
    "fabric_from",
    "is_rehearsal",
    "preset_names",
    "rehearsal_traffic",
    "start_rehearsal",
    "stop_rehearsal",
    "summarise",
]

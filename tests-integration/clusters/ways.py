"""The launchers of `ds run` that a cluster here can have, and what each needs."""

from __future__ import annotations

import os

import pytest
import services
from jobs import Site

__all__ = ["WAYS", "way"]

WAYS = ("ssh", "pdsh", "slurm", "openmpi", "mpich")
_NEEDS = {"pdsh": ("pdsh",), "openmpi": ("mpirun.openmpi",), "mpich": ("mpirun.mpich",)}


def way(name: str, site: Site, request: pytest.FixtureRequest) -> None:
    """Bring what `name` needs into the environment of the site's jobs, or skip with the line to have it."""
    if reason := services.absent(*_NEEDS.get(name, ())):
        pytest.skip(reason)
    if name == "slurm":
        site.env |= request.getfixturevalue("slurm")
    if name in ("openmpi", "mpich"):
        tools = site.folder / "tools"
        tools.mkdir()
        (tools / "mpirun").write_text(f'#!/bin/sh\nexec {services.found(f"mpirun.{name}")} "$@"\n')
        (tools / "mpirun").chmod(0o755)
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        site.env |= {"PATH": f"{tools}:{os.environ['PATH']}", **allowed}

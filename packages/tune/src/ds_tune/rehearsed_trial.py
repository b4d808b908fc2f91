"""A trial in a world that is not there: `python -m ds_tune.rehearsed_trial ORDER.json SCRIPT [ARGUMENTS]`.

The script runs as rank 0 of a `RehearsedWorld` until the trial's own end (`DS_TRIAL`); its messages take what the described links would
take. Ranks of other stages, whose messages it needs, are rehearsed before.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_comm.rehearsal.fabric import as_json, fabric_from
from ds_comm.rehearsal.rehearse_cli import run_rank
from ds_config.errors import ConfigError, DsError

__all__ = ["RehearsedWorld", "main"]

_ENDLESS = 1 << 30  # the trial ends by itself


@dataclass(frozen=True, slots=True)
class RehearsedWorld:
    """Ranks that are not there.

    Attributes:
        size: Their number.
        links: A preset, a file of `ds comm bench --json`, or a description, as `ds rehearse` takes them.
        node_size: Ranks of a node; None: the links'.
    """

    size: int
    links: str
    node_size: int | None = None

    @classmethod
    def of(cls, links: str, size: int, nodes: int) -> RehearsedWorld:
        """Check what the command line says.

        Raises:
            ConfigError: no such links ("rehearsal-links"); a world without ranks, or one that the nodes do not divide ("tune-options").
        """
        if size < 2 or nodes < 0 or (nodes and size % nodes):
            raise ConfigError(
                f"trials over {links} in a world of {size} ranks" + f" on {nodes} nodes" * bool(nodes),
                code="tune-options",
                fix="Give --world-size N, at least 2, and a number of --nodes that divides it.",
            )
        fabric_from(links, None)
        return cls(size, links, size // nodes if nodes else None)

    def order(self) -> dict[str, Any]:
        """Return what the rehearsed process reads. JSON-able."""
        fabric = as_json(fabric_from(self.links, self.node_size))
        order = {"world_size": self.size, "steps": _ENDLESS, "warm_up": 0, "label": "", "python": sys.executable}
        return order | {"fabric": fabric}


def main(argv: list[str]) -> int:
    """Run one trial; returns its exit status. Asked to end by SIGTERM, it ends the script first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    order = json.loads(Path(argv[0]).read_text())
    with tempfile.TemporaryDirectory(prefix="ds-tune-") as folder:
        try:
            run_rank((argv[1], argv[2:]), 0, order, {}, Path(folder))
        except DsError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

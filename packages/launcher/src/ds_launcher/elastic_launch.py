"""Runs one host's part of a job whose ranks are started again after a failure and whose hosts may come and go.

A process of its own below the keeper: it imports torch, whose elastic agent does the meeting of hosts, the numbering of
ranks and the restarts. The agent sets torchrun's variables; `ds_launcher.shim` adds ours in each rank. `ds_launcher.membership` notices
the hosts that the agent would wait for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from ds_launcher.failures import closing_lines, exit_status, explain
from ds_launcher.membership import LEFT, HostBeats, Round, Store, WatchedRendezvous
from ds_launcher.procfs import USER_SIGNALS, descendants, send

__all__ = ["main"]

_BACKEND = "ds-c10d"
_PORT = 29400  # of an endpoint without one, as torchrun has it
_KEEP_ALIVES = 3  # missed by a host before the next meeting does not wait for it
_LAST_CALL_S = 5  # for further hosts, once the fewest have come


def main(argv: list[str]) -> int:
    """Run `python -m ds_launcher.elastic SPEC`: SPEC is the JSON that `ds_launcher.job` writes."""
    spec = json.loads(argv[0])
    # torch's own way to share a store keeps, on all but its host, the address of a host of an earlier round that may be gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(1, round(spec["grace"]))))
    if spec["log_dir"]:
        return _run(spec, Path(spec["log_dir"]))
    with tempfile.TemporaryDirectory(prefix="ds-run-") as folder:
        return _run(spec, Path(folder))


def _run(spec: dict[str, Any], folder: Path) -> int:
    # Here, in the agent's process, torch is needed; `ds run` itself never imports it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    handlers: list[WatchedRendezvous] = []
    _register(spec, handlers)
    keep_alive_s = max(1, int(spec["host_timeout"] / 10)) if spec["host_timeout"] else 5
    config = LaunchConfig(
        min_nodes=spec["min_nodes"],
        max_nodes=spec["max_nodes"],
        nproc_per_node=spec["nproc"],
        run_id=spec["run_id"],
        role="default",
        rdzv_backend=_BACKEND,
        rdzv_endpoint=spec["endpoint"],
        rdzv_configs={
            "keep_alive_interval": keep_alive_s,
            "keep_alive_max_attempt": _KEEP_ALIVES,
            "last_call_timeout": _LAST_CALL_S,
        },
        max_restarts=spec["max_restarts"],
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL),
        log_line_prefix_template="[rank${rank}] ",
    )
    for number in USER_SIGNALS:
        signal.signal(number, _pass_on)
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "ds_launcher.shim", *spec["command"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"rank {rank} failed first ({explain(failure.exitcode)}); no restart is left")
        written = sorted(folder.glob(f"**/attempt_*/{failure.local_rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        lines = written[-1].read_bytes().splitlines() if written else []
        sys.stderr.buffer.write(b"".join(line + b"\n" for line in closing_lines(lines)))
        return exit_status(failure.exitcode)
    except SignalException as error:
        for handler in handlers:
            handler.close(LEFT)
        return 128 + error.sigval
    except RendezvousClosedError:
        _say(
            f"the job {spec['run_id']!r} has ended at the rendezvous {spec['endpoint']}; another one needs its own --run-id"
        )
        return 1
    except RendezvousTimeoutError:
        _say(f"fewer than {spec['min_nodes']} hosts came to the rendezvous {spec['endpoint']} (--nnodes)")
        return 1
    except RendezvousError as error:
        _say(f"the rendezvous {spec['endpoint']} cannot be reached ({error}); {_ADVICE}")
        return 1
    return 0


_ADVICE = "where no host is sure to stay, `ds rendezvous` on one outside of the job keeps it"


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal of the user to the ranks that the agent started (signal handler)."""
    for proc in descendants(os.getpid()):
        if proc.parent == os.getpid() and _is_rank(proc.pid):
            send(proc, number)


def _is_rank(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return False


def _register(spec: dict[str, Any], handlers: list[WatchedRendezvous]) -> None:
    """Make torch's launcher know our handler: its own c10d one, watched where there can be several hosts."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def create(params: RendezvousParameters) -> Any:
        backend, store = create_backend(params)
        handler = WatchedRendezvous(create_handler(store, backend, params), _BACKEND, lambda met: _line(spec, met))
        handlers.append(handler)
        return handler

    rendezvous_handler_registry.register(_BACKEND, create)


def _line(spec: dict[str, Any], met: Round) -> HostBeats | None:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    lost_after_s = spec["host_timeout"]
    if not lost_after_s:
        return None
    host, port = parse_rendezvous_endpoint(spec["endpoint"], default_port=_PORT)

    def open_store() -> Store:
        client: Store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=lost_after_s)
        )
        return client

    def cut_off() -> None:
        _say(
            f"the rendezvous {spec['endpoint']} was lost: no answer for {lost_after_s:g} s (--host-timeout); {_ADVICE}"
        )
        os._exit(1)  # the agent may be inside a call to the store that never ends; the keeper ends the ranks

    return HostBeats(met, lost_after_s, open_store, _say, cut_off)


def _say(text: str) -> None:
    sys.stderr.write(f"ds run: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

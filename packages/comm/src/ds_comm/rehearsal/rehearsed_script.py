"""`python -m ds_comm.rehearsal.rehearsed_script ORDER.json SCRIPT [ARGUMENTS]`: a script as one rank of a world that is not there.

The script runs unchanged until the steps that were asked for have ended, or until its own end. What was seen is written as JSON.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_comm.rehearsal.fabric import Curve, Fabric, Link
from ds_comm.rehearsal.rehearsal_group import MissingRankError
from ds_comm.rehearsal.staging import (
    RehearsalOptions,
    end_rehearsed_step,
    rehearsal_traffic,
    start_rehearsal,
    stop_rehearsal,
)
from ds_comm.rehearsal.step_marks import StepClock
from ds_config.errors import DsError

__all__ = ["main"]


class _Enough(BaseException):
    """The steps that were asked for have ended."""


def main(argv: list[str]) -> int:
    """Rehearse a script; returns its exit status, 0 where it was ended after the last step."""
    order: dict[str, Any] = json.loads(Path(argv[0]).read_text())
    options = RehearsalOptions(_fabric(order["fabric"]), order["world_size"], order["rank"], Path(order["messages"]))
    device = _device()
    mark, seconds = _clock(device)

    def ended(steps: int) -> None:
        end_rehearsed_step()
        if steps == order["warm_up"] and device is not None:
            torch.cuda.reset_peak_memory_stats(device)
        if steps >= order["warm_up"] + order["steps"]:
            raise _Enough

    clock = StepClock(mark, ended)
    start_rehearsal(options)
    remove = clock.install()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: clock.model_runs())
    status, error, missing = 0, "", None
    sys.argv = argv[1:]
    sys.path.insert(0, str(Path(argv[1]).resolve().parent))
    try:
        runpy.run_path(argv[1], run_name="__main__")
    except _Enough:
        pass
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status:
            error = f"exit status {status}" if isinstance(end.code, int) else str(end.code)
    except MissingRankError as problem:
        status, error, missing = 1, traceback.format_exc(), problem.rank
    except DsError as problem:
        if (
            problem.code != "rehearsal-save" or not clock.count
        ):  # the steps before the first save are what was asked for
            status, error = 1, traceback.format_exc()
    except BaseException:
        status, error = 1, traceback.format_exc()
    finally:
        handle.remove()
        remove()
    traffic = [asdict(record) for record in rehearsal_traffic()]  # synchronizes: marks can be read then
    result = {
        "order": order,
        "status": status,
        "error": error,
        "missing": missing,
        "steps": [step.as_dict() for step in clock.steps(seconds)],
        "traffic": traffic,
        "memory": _memory(device),
        "device": "cpu" if device is None else torch.cuda.get_device_name(device),
    }
    Path(order["out"]).write_text(json.dumps(result))
    stop_rehearsal()
    return status


def _fabric(data: Mapping[str, Any]) -> Fabric:
    fields = dict(data)
    inside, between = (Link(**fields.pop(name)) for name in ("inside", "between"))
    curves, flows, busy = (_curves(fields.pop(name, {})) for name in ("curves", "flows", "busy"))
    return Fabric(**fields, inside=inside, between=between, curves=curves, flows=flows, busy=busy)


def _curves(by_op: Mapping[str, Any]) -> dict[str, Curve]:
    return {op: tuple((int(n), float(s)) for n, s in points) for op, points in by_op.items()}


def _device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _memory(device: torch.device | None) -> dict[str, int]:
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device is None:
        return {"host_peak": host}
    peak = torch.cuda.max_memory_allocated(device)
    return {"host_peak": host, "device_peak": peak, "device_reserved": torch.cuda.max_memory_reserved(device)}


def _clock(device: torch.device | None) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """Return what takes the time, and what reads it in seconds of `time.perf_counter`. On a device it is an event of the current stream."""
    if device is None:
        return time.perf_counter, float
    torch.cuda.synchronize(device)
    origin: Any = torch.cuda.Event(enable_timing=True)
    origin.record()
    origin_s = time.perf_counter()

    def mark() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return mark, lambda event: origin_s + float(origin.elapsed_time(event)) * 1e-3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What only importing torch and the native modules can tell, found out in a process of its own.

`python -m ds_ops.probe` runs one stage after the other and writes one JSON line before and one after each. A library that
kills the process (an instruction this CPU does not have, a driver that hangs) then costs the stages after it, and the last
line says which stage it was; `ds_ops.machine` reads the lines.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

__all__ = ["STAGES", "main"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cuda() -> dict[str, Any]:
    """Starts the driver."""
    import torch

    if not torch.version.cuda and not torch.version.hip:
        return {"available": False, "devices": []}
    indices = range(torch.cuda.device_count())
    return {
        "available": torch.cuda.is_available(),
        "devices": [
            f"{torch.cuda.get_device_name(i)}, capability {'.'.join(map(str, torch.cuda.get_device_capability(i)))}"
            for i in indices
        ],
    }


def _triton() -> dict[str, Any]:
    return {"version": importlib.import_module("triton").__version__}


def _native() -> dict[str, Any]:
    import ds_ops._native as native

    loaded = {name: native.load(name) for name in ("_cpu", "_cuda")}
    cpu = loaded["_cpu"].module
    return {
        "reasons": {name: one.reason for name, one in loaded.items()},
        "files": {name: str(getattr(one.module, "__file__", "")) for name, one in loaded.items() if one.module},
        "isa": cpu.isa_name() if cpu else "",
        "isa_supported": cpu.isa_supported() if cpu else "",
        "build": native.build_info(),
    }


def _kernels() -> dict[str, Any]:
    """Report what compiles CUDA kernels here, and how many of the table are compiled for this machine's devices."""
    import torch

    import ds_ops.cuda_launch as cuda_launch

    if not torch.cuda.is_available():
        return {}
    if reason := cuda_launch.obstacle():
        return {"obstacle": reason}
    from ds_ops.build_kernels import kernel_rows, kernel_table, present_capabilities

    here = cuda_launch.runtime()
    rows = kernel_rows(here.compiler, present_capabilities(), kernel_table())
    return {
        "compiler": here.compiler.name,
        "folder": str(here.images.folder),
        "compiled": sum(bool(row.path) for row in rows),
        "all": len(rows),
        "unkept": next((origin.unkept for origin in here.origins if origin.unkept), ""),
    }


def _trial() -> dict[str, Any]:
    """Run a small step with native kernels and with the reference: the largest difference must be rounding."""
    import torch

    import ds_ops.registry as registry
    from ds_ops.apply_update import update
    from ds_ops.reference import update as reference
    from ds_ops.update_rules import AdamHyper, UpdateRule, UpdateSpec, UpdateTensors, adam_coefficients

    (op,) = [each for each in registry.ops() if each.name == "update"]
    spec = UpdateSpec(UpdateRule.ADAM, adam_coefficients(AdamHyper(1e-3, (0.9, 0.999), 1e-8, 0.01), 1))

    def stepped(run: Callable[..., Any]) -> torch.Tensor:
        p, g, m, v = (torch.linspace(0.1, 1.0 + k, 1003, device="cpu") for k in range(4))
        run(spec, UpdateTensors([p], [g], ([m], [v])))
        return p

    worst = float((stepped(update) - stepped(reference.update)).abs().max())
    return {"backend": registry.choose(op, "cpu", torch.float32).backend.name, "difference": worst}


def _io() -> dict[str, Any]:
    from ds_ops.gds import why_not
    from ds_ops.io import backends

    return {"backends": backends(), "gds": why_not()}


def _ops() -> dict[str, Any]:
    """List the backend that runs each op, per device and dtype."""
    import torch

    from ds_ops.all_ops import every_op

    catalog = every_op()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = [_choice(op, device, dtype) for op in catalog.ops for device in devices for dtype in _DTYPES]
    names = sorted({backend.name for op in catalog.ops for backend in op.backends})
    return {"rows": rows, "broken": [list(pair) for pair in catalog.broken], "backends": names}


def _choice(op: Any, device: str, dtype: str) -> dict[str, Any]:
    import torch

    from ds_config.errors import UnsupportedError
    from ds_ops.registry import choose

    row: dict[str, Any] = {"op": op.name, "summary": op.summary, "device": device, "dtype": dtype}
    try:
        choice = choose(op, device, getattr(torch, dtype))
    except UnsupportedError as error:
        return {**row, "backend": "", "error": error.message, "rejected": []}
    rejected = [
        {"backend": name, "reason": str(why), "fix": getattr(why, "fix", "")}
        for name, why in choice.rejected
        if not getattr(why, "elsewhere", False)
    ]
    return {**row, "backend": choice.backend.name, "error": "", "rejected": rejected}


STAGES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "native": _native,
    "trial": _trial,
    "io": _io,
    "cuda": _cuda,
    "triton": _triton,
    "kernels": _kernels,
    "ops": _ops,
}


def main(out: TextIO) -> None:
    """Run all stages; a stage that raises is a line like the others."""
    for name, stage in STAGES.items():
        out.write(json.dumps({"begin": name}) + "\n")
        out.flush()
        try:
            line: dict[str, Any] = {"stage": name, "found": stage()}
        except Exception as error:  # a broken installation can raise anything, and that is the answer
            line = {"stage": name, "error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(line) + "\n")
        out.flush()


if __name__ == "__main__":
    main(sys.stdout)

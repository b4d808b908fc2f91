"""`python -m ds_accel`: which devices this machine has, why others are not used, and what the chosen one can do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from ds_accel.accelerator import Accelerator
from ds_accel.detection import detect, get_accelerator
from ds_config.errors import DsError

__all__ = ["main"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _facts(accelerator: Accelerator) -> dict[str, str]:
    """Return the lines of the table: what it is called, and verdicts with reasons."""
    rows = {
        "device": f"{accelerator.name}, {accelerator.device_count()} of it, torch {torch.__version__}",
        "communication": str(accelerator.comm_backend),
    }
    for dtype in _DTYPES:
        verdict = accelerator.supports(dtype)
        rows[str(dtype).removeprefix("torch.")] = f"{'yes' if verdict else 'no'}: {verdict.reason}"
    graphs = accelerator.graphs()
    rows["graphs"] = f"{'yes' if graphs else 'no'}: {graphs.reason}"
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when the device that was forced cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m ds_accel", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(arguments).json
    try:
        detection, rows = str(detect()), _facts(get_accelerator())
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"detection": detection.splitlines(), **rows}, indent=1))
    else:
        width = max(map(len, rows))
        print(detection, *(f"{name:{width}}  {value}" for name, value in rows.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Floating-point operations of a model of one's own, counted by torch while it runs once: for `StepWork.flops` and MFU.

`transformer_flops_per_token` is a formula for decoders. This counts what torch dispatches: matrix products, convolutions and attention, a
multiply-add as two; elementwise work and kernels that torch does not know count nothing. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_monitor.sinks.sink import require

__all__ = ["FlopCount", "count_flops"]


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations of one run.

    Attributes:
        total: Of forward and backward.
        by_operator: By the name of the operator, such as "aten.mm".
        by_module: By the qualified name of the module that called it, with the name of its class in front; modules contain their own.
    """

    total: int
    by_operator: Mapping[str, int]
    by_module: Mapping[str, int]


def count_flops(run: Callable[[], Any]) -> FlopCount:
    """Run a function once, such as a forward and backward of one microbatch, and count its floating-point operations.

    What is computed again for activation checkpointing counts, too: for MFU count with checkpointing off.

        work = count_flops(lambda: loss_fn(model(x), y).backward())
        meter.step(StepWork(samples=len(x), flops=work.total))

    Raises:
        UnsupportedError: torch is not installed ("monitor-extra").
    """
    counter = require("torch.utils.flop_counter", "flops", "torch").FlopCounterMode(display=False)
    with counter:
        run()
    counts = counter.get_flop_counts()
    by_operator = {str(operator): int(flops) for operator, flops in counts.get("Global", {}).items()}
    by_module = {name: int(sum(operators.values())) for name, operators in counts.items() if name != "Global"}
    return FlopCount(int(counter.get_total_flops()), by_operator, by_module)

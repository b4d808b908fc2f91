"""Generators of programs: pure functions of the number of stages and microbatches.

They give only forwards and backwards. Transfers and reductions are added by `ds_pipe.passes`.
"""

from __future__ import annotations

from ds_config.errors import PlanError
from ds_pipe.actions import Action, Op, Program

__all__ = ["accumulation", "gpipe", "one_f_one_b"]


def accumulation(microbatches: int) -> Program:
    """Gradient accumulation, which is the one-stage pipeline: forward and backward in turn, `microbatches` times."""
    return one_f_one_b(1, microbatches)


def gpipe(stages: int, microbatches: int) -> Program:
    """All forwards, then all backwards: Huang et al., GPipe, arXiv:1811.06965 section 2.3.

    Keeps the activations of every microbatch alive. Bubble (stages - 1) / (microbatches + stages - 1).
    """
    _check(stages, microbatches)
    return Program(
        tuple(
            _row(Op.FORWARD, s, range(microbatches)) + _row(Op.BACKWARD, s, range(microbatches)) for s in range(stages)
        )
    )


def one_f_one_b(stages: int, microbatches: int) -> Program:
    """One forward, one backward: Narayanan et al., PipeDream-Flush, arXiv:2104.04473 section 2.2.

    The same bubble as GPipe; stage s keeps the activations of at most `stages - s` microbatches.
    """
    _check(stages, microbatches)
    rows = []
    for s in range(stages):
        warm = min(stages - 1 - s, microbatches)
        steady = microbatches - warm
        row = _row(Op.FORWARD, s, range(warm))
        for m in range(steady):
            row += (Action(Op.FORWARD, s, m + warm), Action(Op.BACKWARD, s, m))
        rows.append(row + _row(Op.BACKWARD, s, range(steady, microbatches)))
    return Program(tuple(rows))


def _row(op: Op, stage: int, microbatches: range) -> tuple[Action, ...]:
    return tuple(Action(op, stage, m) for m in microbatches)


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise PlanError(
            f"a program needs at least one stage and one microbatch, got {stages} stages and {microbatches} microbatches",
            code="program-size",
            fix="Set gradient_accumulation_steps and the number of stages to 1 or more.",
        )

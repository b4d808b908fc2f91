"""Which rank holds which stage, when there are more stages than ranks (*virtual stages*).

looped(ranks=3, stages=6)   stage 0 1 2 3 4 5 on rank 0 1 2 0 1 2: interleaved
vee(ranks=3)                stage 0 1 2 3 4 5 on rank 0 1 2 2 1 0: down and back, the loss is where the data is
"""

from __future__ import annotations

from typing import Final

from ds_config.errors import PlanError

__all__ = ["check_size", "looped", "vee"]

_MOST: Final = 2**20


def looped(ranks: int, stages: int) -> tuple[int, ...]:
    """Stage s on rank `s mod ranks`; as many stages on every rank."""
    check_size(ranks, stages)
    if stages % ranks:
        raise PlanError(
            f"{stages} stages do not spread evenly over {ranks} ranks",
            code="program-size",
            fix=f"Make the number of stages a multiple of {ranks}.",
        )
    return tuple(stage % ranks for stage in range(stages))


def vee(ranks: int) -> tuple[int, ...]:
    """Place two stages on each rank, down the ranks and back up."""
    check_size(ranks, 1)
    return (*range(ranks), *reversed(range(ranks)))


def check_size(stages: int, microbatches: int) -> None:
    """Refuse programs of nothing, and those that would take minutes and gigabytes to write down.

    Raises:
        PlanError: fewer than one stage or microbatch, or more than 2**20 microbatches ("program-size").
    """
    if microbatches > _MOST:
        raise PlanError(
            f"a program of {microbatches} microbatches; every step lists them all, and takes at most {_MOST}",
            code="program-size",
            fix="Lower gradient_accumulation_steps (or train_batch_size, which gives it), or take larger microbatches.",
        )
    if stages < 1 or microbatches < 1:
        raise PlanError(
            f"a program needs at least one stage and one microbatch, got {stages} stages and {microbatches} microbatches",
            code="program-size",
            fix="Set gradient_accumulation_steps and the number of stages to 1 or more.",
        )

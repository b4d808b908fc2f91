"""The schedules by name: each is a placement, a memory cap and a rule for the one generator in `listing.py`.

They give only what computes. Transfers, reductions and gathers are added by `ds_pipe.program_passes`. Memory is counted in microbatches
that a stage holds; `p` ranks, `m` microbatches, forward F, input gradient I, weight gradient W.

| name | stages | bubble of a step when F = I = W | rank r holds at most | |
|---|---|---|---|---|
| `gpipe` | p | 3(p-1) | m | Huang et al., arXiv:1811.06965 |
| `1f1b` | p | 3(p-1) | p - r | Narayanan et al., arXiv:2104.04473, 2.2 |
| `interleaved` | vp | 3(p-1)/v | p + (p-2r-1)/v | the same, 2.2 |
| `zb-h1` | p | about p-1 | p | Qi et al., arXiv:2401.10241, 2.2 |
| `zb-h2` | p | none between steps | 2p-1 | the same |
| `zbv` | 2p | none between steps if m >= 2p | 3p/2 by default, p at least | Qi et al., arXiv:2405.15362 |
| `dualpipe-v` | 2p | | p + 1 | DeepSeek-AI, DualPipe, cut in half: forwards and backwards in pairs |
| `list_scheduled` | any | the least found for measured costs | the cap given | |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs
from ds_pipe.listing import SchedulePriority, ScheduleProblem, generate
from ds_pipe.schedule_timing import simulate
from ds_pipe.stage_placement import check_size, looped, vee

__all__ = [
    "SCHEDULES",
    "PipelineSpec",
    "accumulation",
    "dualpipe_v",
    "gpipe",
    "inference",
    "interleaved",
    "list_scheduled",
    "make_program",
    "one_f_one_b",
    "placement_of",
    "zb_h1",
    "zb_h2",
    "zbv",
]


def accumulation(microbatches: int) -> Program:
    """Build the program of gradient accumulation, the one-stage pipeline.

    Forward, then backward, `microbatches` times.
    """
    return one_f_one_b(1, microbatches)


def gpipe(stages: int, microbatches: int) -> Program:
    """Build the GPipe program: all forwards, then all backwards.

    Stores the activations of every microbatch.
    """
    check_size(stages, microbatches)
    return generate(_even(looped(stages, stages), microbatches, [math.inf] * stages), SchedulePriority(flush=True))


def one_f_one_b(stages: int, microbatches: int) -> Program:
    """Build the 1F1B program: one forward, one backward, with the bubble of GPipe.

    Stage s stores the activations of at most `stages - s` microbatches.
    """
    check_size(stages, microbatches)
    return generate(_even(looped(stages, stages), microbatches, range(stages, 0, -1)), SchedulePriority())


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Program:
    """Build the interleaved 1F1B program with `virtual` stages per rank, which divides the bubble by `virtual`.

    Best when `ranks` divides `microbatches`.
    """
    check_size(ranks, microbatches)
    problem = _even(looped(ranks, ranks * virtual), microbatches, [math.inf] * ranks)
    ahead = tuple(2 * (ranks - r - 1) + (virtual - 1) * ranks + 1 for r in range(ranks))
    return _best(
        replace(problem, ahead=ahead), [SchedulePriority(grouped=ranks, pair=True), SchedulePriority(grouped=ranks)]
    )


def zb_h1(stages: int, microbatches: int) -> Program:
    """Build the ZB-H1 program: weight gradients fill the bubbles of 1F1B.

    No rank stores more activations than 1F1B's first rank.
    """
    check_size(stages, microbatches)
    problem = _even(looped(stages, stages), microbatches, [stages] * stages)
    bounded = replace(problem, ahead=tuple(range(stages, 0, -1)))
    return _best_of([(problem, _SPLIT), (bounded, _SPLIT)])


def zb_h2(stages: int, microbatches: int) -> Program:
    """Build the ZB-H2 program, whose only bubble is at the start, with up to `2 stages - 1` microbatches in memory."""
    check_size(stages, microbatches)
    problem = _even(looped(stages, stages), microbatches, [2 * stages - 1] * stages)
    return _best(problem, _SPLIT)


def zbv(ranks: int, microbatches: int, cap: float | None = None) -> Program:
    """Build the ZB-V program: two stages per rank, down and back up, with split backwards.

    Args:
        cap: Stage activations that a rank may store; by default 3 x `ranks`, which is 1.5 times those of 1F1B's first
            rank.
    """
    check_size(ranks, microbatches)
    return _best(_even(vee(ranks), microbatches, [3 * ranks if cap is None else cap] * ranks), _SPLIT)


def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """Build the DualPipeV program: ZB-V's placement, with forwards and whole backwards in pairs.

    The transfers of each action of a pair overlap with the computation of the other action. Backwards at the end are
    split.
    """
    check_size(ranks, microbatches)
    problem = _even(vee(ranks), microbatches, [2 * ranks + 2] * ranks)
    return generate(problem, SchedulePriority("end", pair=True))


def inference(stages: int, microbatches: int, rank_of: Sequence[int] | None = None) -> Program:
    """Forwards only, in order. `rank_of` places more stages than ranks."""
    check_size(stages, microbatches)
    ranks = tuple(range(stages)) if rank_of is None else tuple(rank_of)
    order = sorted((m + s, s, m) for m in range(microbatches) for s in range(stages))
    return Program(
        tuple(
            tuple(Action(ActionKind.FORWARD, s, m) for _, s, m in order if ranks[s] == r) for r in range(max(ranks) + 1)
        )
    )


def list_scheduled(
    microbatches: int, costs: Costs, rank_of: Sequence[int], cap: float | Sequence[float] = math.inf
) -> Program:
    """Search for the best program for measured costs under a memory cap.

    Ranked by shortest period, then span, then least memory.

    Args:
        costs: Times and activation memory of every stage.
        rank_of: The rank of every stage.
        cap: Activation memory of every rank, or one number for all, in the unit of `costs.activation`.
    Raises:
        PlanError: a single microbatch exceeds the cap ("program-cap"), or numbers do not fit ("program-costs").
    Cost: about 30 programs are generated and timed: 1 s for 1,000 actions.
    """
    check_size(len(rank_of), microbatches)
    if costs.stages != len(rank_of) or set(rank_of) != set(range(max(rank_of) + 1)):
        raise PlanError(
            f"{costs.stages} stages have costs, {len(rank_of)} have ranks {tuple(rank_of)}",
            code="program-costs",
            fix="Give every stage its costs and a rank; number ranks from 0 without gaps.",
        )
    ranks = max(rank_of) + 1
    caps = (float(cap),) * ranks if isinstance(cap, (int, float)) else tuple(map(float, cap))
    problem = ScheduleProblem(tuple(rank_of), microbatches, costs, caps)
    depth = len(rank_of)
    bounds: list[tuple[int, ...]] = [(), (depth,) * ranks, (2 * depth - 1,) * ranks]
    first = [min(s for s, r in enumerate(rank_of) if r == rank) for rank in range(ranks)]
    bounds += [tuple(depth - s for s in first), tuple(2 * (depth - s) - 1 for s in first)]
    rules = [replace(rule, grouped=g, patience=w) for rule in _SPLIT for g in (0, ranks) for w in (0.0, 0.5)]
    rules += [SchedulePriority(), SchedulePriority(pair=True), SchedulePriority("end", pair=True)]
    return _best_of((replace(problem, ahead=ahead), rules) for ahead in bounds)


_SPLIT = (SchedulePriority("always"), SchedulePriority("always", pair=True))

SCHEDULES: dict[str, Callable[[int, int], Program]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "dualpipe-v": dualpipe_v,
}


def placement_of(name: str, ranks: int, virtual: int = 2) -> tuple[int, ...]:
    """Return the rank of every stage under the schedule `name`; `list_scheduled` and `inference` as 1F1B."""
    if name in ("zbv", "dualpipe-v"):
        return vee(ranks)
    return looped(ranks, ranks * (virtual if name == "interleaved" else 1))


def make_program(name: str, ranks: int, microbatches: int, virtual: int = 2) -> Program:
    """Build the program of the schedule `name`.

    Args:
        name: A key of `SCHEDULES`, or `inference`.
        virtual: Stages per rank, for `interleaved`.
    Raises:
        PlanError: there is no such schedule ("program-name").
    """
    if name == "interleaved":
        return interleaved(ranks, microbatches, virtual)
    if name == "inference":
        return inference(ranks, microbatches)
    if name not in SCHEDULES:
        raise PlanError(
            f"there is no schedule {name!r}",
            code="program-name",
            fix=f"Use one of {', '.join([*SCHEDULES, 'inference'])}; `ds_pipe.list_scheduled` makes one from measured costs.",
        )
    return SCHEDULES[name](ranks, microbatches)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """How a model was cut: enough to make its programs, without the model.

    Attributes:
        schedule: A name `make_program` knows.
        ranks: Of one pipeline.
        virtual: Stages a rank, for `interleaved`.
        partition: Name of the method that chose which layers go together; "" where there was no choice by name.
        seeded: Whether every layer was made from a seed of its own.
    """

    schedule: str
    ranks: int
    virtual: int = 2
    partition: str = ""
    seeded: bool = False

    def __post_init__(self) -> None:
        check_options(self, ranks=">= 1", virtual=">= 1")

    def program(self, microbatches: int) -> Program:
        """Build the program of the compute actions of a step."""
        return make_program(self.schedule, self.ranks, microbatches, self.virtual)


def _even(rank_of: tuple[int, ...], microbatches: int, caps: Iterable[float]) -> ScheduleProblem:
    return ScheduleProblem(rank_of, microbatches, Costs.even(len(rank_of)), tuple(map(float, caps)))


def _best(problem: ScheduleProblem, rules: Iterable[SchedulePriority]) -> Program:
    return _best_of([(problem, rules)])


def _best_of(candidates: Iterable[tuple[ScheduleProblem, Iterable[SchedulePriority]]]) -> Program:
    """Return the program with the shortest period, then span, over all problems and rules; the first of equals."""
    best_key: tuple[float, float] | None = None
    best = Program(())
    for problem, rules in candidates:
        for rule in rules:
            program = generate(problem, rule)
            timing = simulate(program, problem.costs)
            key = (round(timing.period, 9), round(timing.span, 9))
            if best_key is None or key < best_key:
                best_key, best = key, program
    return best

"""How DeepSpeed cuts a model over the files of its regular layout: which rank's flat tensor holds what. Decided from names and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["EXPERT", "Flat", "FlatPiece", "Regular", "plan_flats"]


EXPERT: Final = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


_ALIGN: Final = 2  # elements: a part of a flat group starts at four bytes of fp16


@dataclass(frozen=True, slots=True)
class Regular:
    """How the run is cut that will load the files; DeepSpeed resumes in no other way.

    Attributes:
        stage: Of ZeRO: 1, 2 or 3.
        ranks: Data-parallel ranks (of each pipeline stage).
        dtype: Of the model's parameters: "float32", "float16" or "bfloat16".
        groups: Parameter names of each optimizer group, in the order they were given to the optimizer. None: as the meta says.
        experts: Ranks that share the experts of a layer (`ep_size`).
        pipeline: The first layer of each pipeline stage, starting with 0; () without a pipeline.
        layers: Of the pipeline, all stages together; 0: up to the last that has parameters.
        tied: Keys of tied layers with the numbers of the layers that share their parameters, `tied_modules.KEY.*`.
        sub_group_size: `zero_optimization.sub_group_size`, in elements; stage 3 only.
    """

    stage: int
    ranks: int
    dtype: str = "float32"
    groups: tuple[tuple[str, ...], ...] | None = None
    experts: int = 1
    pipeline: tuple[int, ...] = ()
    layers: int = 0
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sub_group_size: int = 10**9

    def __post_init__(self) -> None:
        reasons = []
        if self.stage not in (1, 2, 3) or self.ranks < 1 or self.dtype not in ("float32", "float16", "bfloat16"):
            reasons.append(f"stage {self.stage} on {self.ranks} ranks in {self.dtype}")
        if self.experts < 1 or self.ranks % self.experts or (self.experts > 1 and (self.stage == 3 or self.pipeline)):
            reasons.append(f"experts over {self.experts} of {self.ranks} ranks with stage {self.stage}")
        if self.pipeline and (self.stage != 1 or self.pipeline[0] or list(self.pipeline) != sorted(set(self.pipeline))):
            reasons.append(f"pipeline stages that start at layers {list(self.pipeline)} with ZeRO stage {self.stage}")
        if reasons:
            raise UnsupportedError(
                f"DeepSpeed's regular layout has no {'; no '.join(reasons)}",
                code="ckpt-foreign-layout",
                fix="Pipelines go with stage 1, experts with stages 1 and 2; the ranks of experts divide the ranks.",
            )


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """Elements start..stop of a parameter, flattened, and `pad` zeros behind them."""

    name: str
    start: int
    stop: int
    pad: int = 0


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat tensor of a rank: its pieces, and zeros up to `numel` elements. `group`: the optimizer group it is of."""

    group: int
    pieces: tuple[FlatPiece, ...]
    numel: int

    @property
    def padding(self) -> int:
        """Zeros at the end."""
        return self.numel - sum(p.stop - p.start + p.pad for p in self.pieces)


def plan_flats(groups: Sequence[Mapping[str, int]], layout: Regular, rank: int) -> tuple[Flat, ...]:
    """Plan the flat tensors of data-parallel rank `rank`.

    `groups`: name -> number of elements, experts under their global numbers.
    """
    out: list[Flat] = []
    for number, group in enumerate(groups):
        if layout.stage == 3:
            out.extend(_parts_of_each(number, group, layout, rank))
        else:
            shared, part, parts = _own(group, layout, rank)
            out.append(_part_of_all(number, shared, part, parts))
    return tuple(out)


def _own(group: Mapping[str, int], layout: Regular, rank: int) -> tuple[Mapping[str, int], int, int]:
    """Return the parameters of a group that `rank` shares, the index of its partition, and their number.

    These are all parameters of the group, or the experts that the rank owns.
    """
    if layout.experts == 1 or not any(EXPERT.fullmatch(name) for name in group):
        return group, rank, layout.ranks
    rank_experts = {
        n: size for n, size in group.items() if _owner(n, group, layout.experts)[0] == rank % layout.experts
    }
    return rank_experts, rank // layout.experts, layout.ranks // layout.experts


def _owner(name: str, group: Mapping[str, int], experts: int) -> tuple[int, str]:
    """Return which of the ranks that share experts has expert `name`, and the expert's name on that rank."""
    match = EXPERT.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"the optimizer group of {name!r} mixes experts and other parameters",
            code="ckpt-foreign",
            fix="Give experts groups of their own.",
        )
    number = int(match[2])
    ids = {int(m[2]) for n in group if (m := EXPERT.fullmatch(n)) and m[1] == match[1]}
    if len(ids) % experts or ids != set(range(len(ids))):
        raise CheckpointError(
            f"{match[1]}* has the experts {sorted(ids)}, which do not divide over {experts} ranks",
            code="ckpt-foreign",
            fix="Choose a number of ranks that divides the experts.",
        )
    each = len(ids) // experts
    return number // each, f"{match[1]}{number % each}{match[3]}"


def _part_of_all(number: int, group: Mapping[str, int], part: int, parts: int) -> Flat:
    total = sum(group.values())
    step = _ALIGN * parts
    each = -(-total // step) * step // parts
    low, high, at = part * each, (part + 1) * each, 0
    pieces = []
    for name, numel in group.items():
        start, stop = max(low, at), min(high, at + numel)
        if start < stop:
            pieces.append(FlatPiece(name, start - at, stop - at))
        at += numel
    return Flat(number, tuple(pieces), each)


def _parts_of_each(number: int, group: Mapping[str, int], layout: Regular, rank: int) -> Iterator[Flat]:
    whole = sum(-(-numel // layout.ranks) for numel in group.values()) <= layout.sub_group_size
    pieces: list[FlatPiece] = []
    size = 0
    for index, (name, numel) in enumerate(group.items(), 1):
        each = -(-numel // layout.ranks)
        start, stop = min(rank * each, numel), min((rank + 1) * each, numel)
        pieces.append(FlatPiece(name, start, stop, each - (stop - start)))
        size += each
        if index == len(group) or (size >= layout.sub_group_size and not whole):
            yield Flat(number, tuple(pieces), size)
            pieces, size = [], 0

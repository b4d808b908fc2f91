"""How DeepSpeed cuts a model over the files of its regular layout: which rank's flat tensor holds what. Decided from names and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["EXPERT", "Flat", "FlatPiece", "Regular", "alignment_paddings", "plan_flats", "round_robin_order"]


EXPERT: Final = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


_ALIGN: Final = 2  # elements: a part of a flat group starts at four bytes of fp16


_SUB_GROUP: Final = 10**9  # elements


_PARAM_BYTES: Final = 16  # what `aligned` parameters begin at, in the model's dtype


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
        functions: Numbers of the layers that are functions, uses of a tied layer by one among them: DeepSpeed has no files of those.
        place: What the topology adds to the names of layers' files: `model_00` where it has an axis of tensor slices, of one rank here.
        tied: Keys of tied layers with the numbers of the layers that share their parameters, `tied_modules.KEY.*`.
        nested: What the model's own state dict has dicts of, by the start of the names in them, as Megatron's: ("encoder", "encoder.layers").
        sub_group_size: `zero_optimization.sub_group_size`, in elements; stage 3 only.
        round_robin: `zero_optimization.round_robin_gradients`: a group's parameters lie dealt out, one to each rank in turn;
            stages 1 and 2 only.
        aligned: `zero_optimization.parameter_alignment`: every parameter begins at 16 bytes; stages 1 and 2 only.

    The last three are None for what the configuration in the meta says.
    """

    stage: int
    ranks: int
    dtype: str = "float32"
    groups: tuple[tuple[str, ...], ...] | None = None
    experts: int = 1
    pipeline: tuple[int, ...] = ()
    layers: int = 0
    functions: tuple[int, ...] = ()
    place: str = ""
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    nested: tuple[str, ...] = ()
    sub_group_size: int | None = None
    round_robin: bool | None = None
    aligned: bool | None = None

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

    def completed(self, config: Mapping[str, Any]) -> Self:
        """Return the layout with what is None taken from the configuration of a DeepSpeed run."""
        zero = config.get("zero_optimization") or {}
        size, dealt, aligned = (zero.get(k) for k in ("sub_group_size", "round_robin_gradients", "parameter_alignment"))
        known = int(size) if isinstance(size, int | float) and size else _SUB_GROUP
        return replace(
            self,
            sub_group_size=known if self.sub_group_size is None else self.sub_group_size,
            round_robin=dealt is True if self.round_robin is None else self.round_robin,
            aligned=aligned is True if self.aligned is None else self.aligned,
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
            out.append(_part_of_all(number, shared, alignment_paddings(shared, layout), part, parts))
    return tuple(out)


def round_robin_order(number: int, parts: int) -> list[int]:
    """List which of `number` parameters lie one behind the other where they are dealt out over `parts` ranks."""
    return [index for part in range(parts) for index in range(part, number, parts)]


def alignment_paddings(group: Mapping[str, int], layout: Regular) -> list[int]:
    """List the zeros behind each parameter of a group that has them in this order; none behind the last."""
    align = _PARAM_BYTES // (4 if layout.dtype == "float32" else 2) if layout.aligned else 1
    out, at = [], 0
    for index, numel in enumerate(group.values(), 1):
        out.append(-(at + numel) % align if index < len(group) else 0)
        at += numel + out[-1]
    return out


def _own(group: Mapping[str, int], layout: Regular, rank: int) -> tuple[Mapping[str, int], int, int]:
    """Return the parameters of a group that `rank` shares as they lie, the index of its partition, and their number.

    These are all parameters of the group, or the experts that the rank owns.
    """
    part, parts = rank, layout.ranks
    if layout.experts > 1 and any(EXPERT.fullmatch(name) for name in group):
        group = {n: size for n, size in group.items() if _owner(n, group, layout.experts)[0] == rank % layout.experts}
        part, parts = rank // layout.experts, layout.ranks // layout.experts
    if layout.round_robin:
        names = list(group)
        group = {names[i]: group[names[i]] for i in round_robin_order(len(names), parts)}
    return group, part, parts


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


def _part_of_all(number: int, group: Mapping[str, int], paddings: Sequence[int], part: int, parts: int) -> Flat:
    step = _ALIGN * parts
    each = -(-(sum(group.values()) + sum(paddings)) // step) * step // parts
    low, high, at = part * each, (part + 1) * each, 0
    pieces = []
    for (name, numel), padding in zip(group.items(), paddings, strict=True):
        end = at + numel
        start, stop = min(max(low, at), end), max(min(high, end), at)
        pad = max(0, min(high, end + padding) - max(low, end))
        if start < stop or pad:
            pieces.append(FlatPiece(name, start - at, stop - at, pad))
        at = end + padding
    return Flat(number, tuple(pieces), each)


def _parts_of_each(number: int, group: Mapping[str, int], layout: Regular, rank: int) -> Iterator[Flat]:
    most = _SUB_GROUP if layout.sub_group_size is None else layout.sub_group_size
    whole = sum(-(-numel // layout.ranks) for numel in group.values()) <= most
    pieces: list[FlatPiece] = []
    size = 0
    for index, (name, numel) in enumerate(group.items(), 1):
        each = -(-numel // layout.ranks)
        start, stop = min(rank * each, numel), min((rank + 1) * each, numel)
        pieces.append(FlatPiece(name, start, stop, each - (stop - start)))
        size += each
        if index == len(group) or (size >= most and not whole):
            yield Flat(number, tuple(pieces), size)
            pieces, size = [], 0

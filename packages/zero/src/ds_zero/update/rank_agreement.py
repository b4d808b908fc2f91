"""What the ranks agree on: when a model is sharded the settings, before an update settings, the gradient's norm, and which parameters nobody used.

A rank with another learning rate, clipping or weight decay would update its shard in another way, and nothing else would tell. So settings
are compared as text: the options of `shard` once, before anything is changed; the values of optimizer groups in every step, by a digest that
travels in the message of 8 bytes a parameter in which ranks agree on a step anyway.

An element that several ranks hold counts once in the norm. The ranks of a family agree on its parameters; all ranks that the model was
given to on everything else, and where the model is on more ranks than those, all of them on the norm. Every rank asks in the order of
families, then for the model, then for the norm.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm as comm
from ds_comm import Group, find_differences
from ds_comm.metadata import digest_of, metadata_device
from ds_comm.reduction_group import ReductionGroup
from ds_config.errors import PlanError
from ds_ops.stream import total_squares
from ds_zero.layout.shard_options import ShardOptions
from ds_zero.layout.units import DENSE
from ds_zero.runtime.gradient_norms import REPLACED, replaced_on_some
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.unit import Unit

__all__ = [
    "StepFacts",
    "StepSettings",
    "agree",
    "check_differences",
    "first_nonfinite",
    "group_settings",
    "option_settings",
    "square_of",
    "weight_of",
]

# ---- settings


# Groups are compared where they communicate, scratch files of ranks are where their hosts have room.
_OF_ONE_RANK = frozenset({"group", "norm", "folder", "io"})
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_COMPARED = frozenset(_PLAIN)


def option_settings(options: ShardOptions, inner: Optimizer | None = None) -> dict[str, str]:
    """Return the options of `shard` as text by dotted name, with the class of the optimizer and the values of its groups."""
    settings: dict[str, str] = {}
    for field in dataclasses.fields(options):
        if field.name not in _OF_ONE_RANK:
            _collect(field.name, getattr(options, field.name), settings)
    if inner is not None:
        settings |= {"optimizer": type(inner).__name__, **group_settings(inner)}
    return settings


def _collect(name: str, value: Any, settings: dict[str, str]) -> None:
    if isinstance(value, Enum):
        settings[name] = value.name
    elif isinstance(value, _PLAIN) or (
        isinstance(value, (tuple, list)) and all(isinstance(one, _PLAIN) for one in value)
    ):
        settings[name] = repr(value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _OF_ONE_RANK:
                _collect(f"{name}.{field.name}", getattr(value, field.name), settings)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, settings)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _collect(f"{name}[{i}]", item, settings)
    elif isinstance(value, Tensor):
        if value.device.type == "cpu":  # a device would be waited for
            settings[name] = repr(value.tolist())
    else:  # functions and objects: their texts hold addresses
        settings[name] = type(value).__name__


def group_settings(inner: Optimizer) -> dict[str, str]:
    """Return what the user may set of each group, as text: `lr of group 0`. What an optimizer counts for itself is left out."""
    settings: dict[str, str] = {"groups": str(len(inner.param_groups))}
    for number, group in enumerate(inner.param_groups):
        for key in ("lr", *(key for key in inner.defaults if key != "lr")):
            if key in group:
                _collect(f"{key} of group {number}", group[key], settings)
    return settings


class StepSettings:
    """What is to be the same on every rank in a step, as text; made anew only where something has changed.

    Attributes:
        text: Values of the groups of `inner`, and of the step, by name.
        digest: Of `text`, 32 bits.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._values: list[Any] = []
        self._kinds: list[type] = []
        self.text: dict[str, str] = {}
        self.digest = 0

    def read(self, of_step: Mapping[str, float]) -> None:
        """Take the values of now, and numbers `of_step`."""
        values: list[Any] = list(of_step.values())
        for group in self._inner.param_groups:
            for key in self._inner.defaults:
                value = group.get(key)
                if type(value) is tuple:
                    values += value
                else:
                    values.append(value)
        kinds = [type(value) for value in values]
        # Others, as tensors, may have another value and be equal to themselves.
        if kinds == self._kinds and values == self._values and _COMPARED.issuperset(kinds):
            return
        self._values, self._kinds = values, kinds
        self.text = group_settings(self._inner) | {key: repr(value) for key, value in of_step.items()}
        self.digest = digest_of(self.text, 4)


def check_differences(settings: Mapping[str, str], group: Group, what: str) -> None:
    """Compare settings over `group`, and raise on every rank what differs. Collective.

    Raises:
        PlanError: with the values of all ranks, or of the first and the first that differs ("zero-ranks-differ").
    """
    differing = find_differences(settings, group, unit=what)
    if not differing:
        return
    lines = [f"{key}: {_by_rank(values, group)}" for key, values in list(differing.items())[:8]]
    more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
    raise PlanError(
        f"the ranks {what} with different settings:\n  " + "\n  ".join(lines) + more,
        code="zero-ranks-differ",
        fix="Give every rank the same values; what depends on the rank (data, seeds) is no setting of `shard` or of an optimizer group.",
    )


def _by_rank(values: Sequence[str | None], group: Group) -> str:
    other = next(i for i, value in enumerate(values) if value != values[0])
    return " and ".join(f"{values[i] or 'absent'} on rank {group.ranks[i]}" for i in (0, other))


def _pair_of(settings: StepSettings, sent: int) -> tuple[float, float]:
    """Return two numbers whose sums over ranks tell whether all ranks have the same settings and have sent the same sums: 15 bits and their square."""
    digest = zlib.crc32(b"%d %d" % (settings.digest, sent)) & 0x7FFF
    return float(digest), float(digest * digest)


def _is_same(total: float, squares: float, ranks: int) -> bool:
    """Whether `_pair_of` was the same on all ranks: only then is the mean of squares the square of the mean. Sums are exact in fp64."""
    return int(squares) * ranks == int(total) ** 2


# ---- a step


def weight_of(unit: Unit, divisor: int) -> float:
    """Return the extra factor of a unit's gradient sum: 1 where its reduction group's divisor is `divisor`."""
    return divisor / unit.groups.reduction_group.divisor


def square_of(units: Sequence[Unit], divisor: int) -> float:
    """This rank's share of the sum of squares of the reduced gradients, times `divisor` squared: that of the dense family.

    Summed in fp64, with an error below 1e-9 at any length. Reads each gradient once, unless its square was taken when it was summed over the
    ranks, or when it left the device; waits once for each device.
    """
    total, asked = 0.0, dict[torch.device, list[Tensor]]()
    for unit in units:
        gradients = unit.gradients
        if not gradients.has_sums:
            continue
        weight = (weight_of(unit, divisor) / gradients.applied) ** 2 / unit.groups.counts
        measured = gradients.square
        if measured is None:
            measured = total_squares([_real(grad) for grad in gradients.sums or ()])
        if isinstance(measured, Tensor):
            asked.setdefault(measured.device, []).append(measured * weight)
        else:
            total += measured * weight
    return total + sum(float(torch.stack(squares).sum()) for squares in asked.values())


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The same on every rank.

    Attributes:
        square: Sum of squares of the summed gradient; None where nobody asked.
        unused: For each trained unit the numbers of parameters that no rank used.
        extra: Sums over the ranks of the numbers that the caller sent along.
        failed: On how many ranks an update that had begun in backward failed.
    """

    square: float | None
    unused: list[set[int]]
    extra: tuple[float, ...] = ()
    failed: int = 0


def agree(
    sharding: ShardedModel,
    settings: StepSettings,
    *,
    wants_norm: bool,
    extra: Sequence[float] = (),
    failed: bool = False,
) -> StepFacts:
    """Agree over ranks on the step's norm, unused parameters and failures, by an all-reduce of 8 bytes a parameter.

    Where some rank holds gradients that were not sent they are summed first, and the ranks agree once more.

    Another all-reduce for each reduction group but dense, and one of 16 bytes where the model is on more ranks.

    Args:
        settings: What is to be the same on every rank.
        wants_norm: Whether to measure the gradient.
        extra: Numbers of the caller to sum over the ranks, as many on every rank.
        failed: Whether an update that had begun in backward failed on this rank.
    Raises:
        PlanError: in strict mode, on every rank, if only some of those that have a parameter used it
        ("ranks-diverged"); if none did, where the options do not ignore that ("zero-unused"); if settings differ ("zero-ranks-differ"),
        or the order of what was summed ("zero-sums-differ").
    """
    units, reducing = [u for u in sharding.units if u.spec.trained], sharding.runtime.reducing
    written, replaced = reducing.attributes.writes, reducing.attributes.replaced
    square = square_of(units, sharding.families[DENSE].divisor) if wants_norm else 0.0
    beyond = wants_norm and sharding.everyone.ranks != sharding.group.ranks
    totals = [square, float(failed), float(len(reducing.leftovers))]
    if beyond:
        message = torch.tensor(totals, dtype=torch.float64, device=metadata_device(sharding.everyone))
        comm.all_reduce(message, group=sharding.everyone, unit="norm")
        totals = message.tolist()
    absent = {n: reducing.unused[n] for n in reducing.trained}
    unused: dict[int, set[int]] = {}
    partly: list[str] = []
    unequal: list[str] = []
    size = 1
    for name in sorted(sharding.families, key=lambda name: name == DENSE):
        group_units = [u for u in units if u.spec.family == name]
        mine = (
            *((0.0,) * len(totals) if beyond else totals),
            float(len(partly)),
            written,
            written**2,
            float(len(unequal)),
            *_pair_of(settings, reducing.sent),
            *extra,
        )
        users, more = _count(group_units, (absent, replaced), sharding.families[name], mine if name == DENSE else ())
        size = sharding.families[name].group.size
        for unit, counts in zip(group_units, users, strict=True):
            names = [info.name for info in unit.spec.params]
            unequal += [names[i] for i, n in enumerate(counts) if 0 < n // REPLACED < size]
            counts = [n % REPLACED for n in counts]
            unused[unit.number] = {i for i, n in enumerate(counts) if n == 0}
            partly += [names[i] for i, n in enumerate(counts) if 0 < n < size]
    square, failures, leftovers, others, writes, squares, replacing, digests, digest_squares, *extra_sums = more
    if beyond:
        square, failures, leftovers = totals
    if leftovers:
        reducing.reduce_leftovers()
        return agree(sharding, settings, wants_norm=wants_norm, extra=extra, failed=failed)
    if unequal or replacing or size * squares != writes**2:
        raise replaced_on_some(unequal)
    replaced.clear()
    if (partly or others) and sharding.options.strict:
        raise _diverged(partly, sharding.group.size)
    if any(unused.values()) and not sharding.options.ignore_unused_parameters:
        raise _unused([u.spec.params[i].name for u in units for i in sorted(unused[u.number])])
    if not _is_same(digests, digest_squares, size):
        check_differences(settings.text, sharding.families[DENSE].group, "step")
        raise _mixed(sharding.families[DENSE].group)
    reducing.forget_sent()
    return StepFacts(
        square if wants_norm else None, [unused[u.number] for u in units], tuple(extra_sums), int(failures)
    )


def _count(
    units: Sequence[Unit],
    marks: tuple[Mapping[int, set[int]], Mapping[int, set[int]]],
    family: ReductionGroup,
    extra: tuple[float, ...],
) -> tuple[list[list[float]], tuple[float, ...]]:
    """Count for each unit how many ranks of a reduction group used each parameter; also sum `extra`. Collective.

    Args:
        marks: Of each unit the members that this rank has not used, and those whose gradient it has dropped or replaced.
    """
    absent, replaced = marks
    sizes = [len(unit.params) for unit in units]
    rows, base = [1.0] * sum(sizes), 0
    for unit in units:
        for i in absent[unit.number]:
            rows[base + i] = 0.0
        for i in replaced.get(unit.number, ()):
            rows[base + i] += REPLACED
        base += len(unit.params)
    rows += extra
    if family.group.size > 1 and rows:
        counts = torch.tensor(rows, dtype=torch.float64, device=metadata_device(family.group))
        comm.all_reduce(counts, group=family.group, unit="step")
        rows = counts.tolist()  # one read of the device where the group is one of devices
    found = []
    for size in sizes:
        found.append(rows[:size])
        rows = rows[size:]
    return found, tuple(rows)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _unused(names: Sequence[str]) -> PlanError:
    return PlanError(
        f"ignore_unused_parameters is False, and no rank used these parameters in the last step: {_shown(names)}",
        code="zero-unused",
        fix="Let the loss depend on them, freeze them before they are sharded, or set ignore_unused_parameters = true.",
    )


def _diverged(names: Sequence[str], size: int) -> PlanError:
    return PlanError(
        f"some of {size} ranks used these parameters in the last step and some did not: {_shown(names) or 'those of other families'}",
        code="ranks-diverged",
        fix="Make every rank take the same path, or shard without strict=True: absent gradients then count as zeros.",
    )


def _mixed(group: Group) -> PlanError:
    return PlanError(
        f"the gradients of this step were summed over ranks {list(group.ranks)} in another order on each of them: one backward went through several "
        "models while the ranks took different paths, or some ranks began a backward again",
        code="zero-sums-differ",
        fix="Make one model of those that share a loss, or call one backward for each; after an error in backward, begin anew on all ranks.",
    )


def first_nonfinite(sharding: ShardedModel, units: Sequence[Unit]) -> str | None:
    """Find the first parameter whose reduced gradient is not finite, the same on every rank. Collective.

    Called only when a step is skipped, which is rare.
    """
    order = {p.name: i for i, p in enumerate(p for u in units for p in u.spec.params)}
    nonfinite: list[tuple[int, str]] = []
    for unit in units:
        for piece in sharding.pieces(unit):
            grad = unit.gradients.view(piece.start, piece.stop)
            if grad is not None and not grad.isfinite().all():
                nonfinite.append((order[piece.name], sharding.logical[piece.name].name))
    gathered = comm.all_gather_json(min(nonfinite, default=None), sharding.everyone, unit="step")
    first: list[Any] = min((one for one in gathered if one is not None), default=[0, None])
    return None if first[1] is None else str(first[1])

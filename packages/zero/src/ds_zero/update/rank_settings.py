"""What must be the same on every rank, as text to compare: the options of `shard` and the values of optimizer groups.

A rank with another learning rate, clipping or weight decay would update its shard in another way, and nothing else would tell. Options are
compared once, before anything is changed; the values of groups in every step, by a digest that travels in the message of 8 bytes a
parameter in which ranks agree on a step anyway (`step_reduction.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_comm import Group, find_differences
from ds_comm.metadata import digest_of
from ds_config.errors import PlanError
from ds_zero.layout.shard_options import ShardOptions

__all__ = ["check_differences", "group_settings", "option_settings", "pair_of", "same_pairs"]

# Groups are compared where they communicate, scratch files of ranks are where their hosts have room.
_OF_ONE_RANK = frozenset({"group", "norm", "folder", "io"})
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


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


def pair_of(settings: Mapping[str, str], divisor: float) -> tuple[float, float]:
    """Return two numbers whose sums over ranks tell whether all ranks have the same settings: a digest of 15 bits and its square.

    Args:
        divisor: What the gradients of the step are divided by, which is to be the same, too.
    """
    digest = digest_of({**settings, "divisor": repr(divisor)}, 2)
    return float(digest), float(digest * digest)


def same_pairs(sums: Sequence[float], ranks: int) -> bool:
    """Whether `pair_of` was the same on all ranks: only then is the mean of squares the square of the mean. Sums are exact in fp64."""
    total, squares = (int(one) for one in sums)
    return squares * ranks == total * total

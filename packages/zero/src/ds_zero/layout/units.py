"""Which parameters form a unit, and which of its model states are cut into shards. Pure; no tensor.

*Model states* are parameters, gradients and optimizer state. A `ShardingStrategy` says which of them are cut into one shard a rank and which
every rank keeps whole; a ZeRO stage is a value of it. Reference: Rajbhandari et al. 2020, "ZeRO", section 5.

Parameters may share a unit when their *key* is equal: element format, optimizer group, family, and whether they stay gathered. A unit
*belongs* to the module whose forward needs it. Without sharded parameters a unit is a run of parameters in registration order, cut at
`max_numel`. With sharded parameters it is a module's subtree, split further while it is above `max_numel`; a parameter of at most
`persist_numel` elements stays gathered (it would cost a collective to save next to nothing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ds_config.option_checks import check_options
from ds_zero.layout.elements import Kind

__all__ = [
    "DENSE",
    "STAGES",
    "ModuleInfo",
    "ParamInfo",
    "ShardingStrategy",
    "UnitBytes",
    "UnitSizePolicy",
    "UnitSpec",
    "plan_units",
]


@dataclass(frozen=True, slots=True)
class ShardingStrategy:
    """Which model states are cut into shards.

    Attributes:
        shard_optim: The optimizer updates (and keeps state for) this rank's shard only.
        shard_grads: A rank keeps the gradient of its shard only, from every backward on; otherwise it keeps all of them until
            the microbatch after which they are reduced.
        shard_params: Between uses a rank keeps its shard of the parameters only.
    """

    shard_optim: bool
    shard_grads: bool
    shard_params: bool

    def __post_init__(self) -> None:
        if (self.shard_params and not self.shard_grads) or (self.shard_grads and not self.shard_optim):
            raise ValueError(f"parameters shard only with gradients, gradients only with optimizer state; got {self}")


STAGES: Mapping[int, ShardingStrategy] = {
    0: ShardingStrategy(shard_optim=False, shard_grads=False, shard_params=False),
    1: ShardingStrategy(shard_optim=True, shard_grads=False, shard_params=False),
    2: ShardingStrategy(shard_optim=True, shard_grads=True, shard_params=False),
    3: ShardingStrategy(shard_optim=True, shard_grads=True, shard_params=True),
}
"""The four ZeRO stages."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit on one rank.

    Attributes:
        full: Kept bytes of the parameters in the format forward uses.
        shard: Kept bytes of the master shard; 0 where it is a part of full.
        grads: Bytes of this rank's share of the gradients from backward to update: of memory of its own, which is kept, or of the
            gradients that it is made of, which is not.
        optim: Kept bytes of the optimizer's per-element state.
        gathered: Passing bytes while the unit is in use.
        arena: Passing bytes while its gradients travel.
        copied: Passing bytes of gradients that are being copied to the host, of all units together.
        staged: Bytes of its new weights while they are copied from the host.
        host, file: Bytes of the above that are kept there instead of on the device.
    """

    full: int = 0
    shard: int = 0
    grads: int = 0
    optim: int = 0
    gathered: int = 0
    arena: int = 0
    copied: int = 0
    staged: int = 0
    host: int = 0
    file: int = 0

    @property
    def persistent_bytes(self) -> int:
        return self.full + self.shard + self.grads + self.optim


DENSE = "dense"
"""The family of parameters that nobody assigned to one."""

OUTSIDE = "outside_model."
"""How the names of parameters begin that are trained with a model and in no module of it, see `model_members.py`."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What the planner knows of one parameter.

    Attributes:
        name: Qualified name.
        shape: Its true shape.
        dtype: Format name of the element (`"float32"`).
        module: Qualified name of the module that owns it (`""` for the root).
        group: Number of the optimizer group that updates it; None when no optimizer does.
        family: Name of the set of ranks it lives on and is averaged over, see `reduction_groups.py`.
        layout: How its unit is laid out.
        rule: Number of the precision rule that applies to it; None for the general one.
        states: Tensors per element that its optimizer keeps.
        logical: Name of the tensor of a checkpoint that it is, or a part of; "": its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    group: int | None
    family: str = DENSE
    layout: Kind = "flat"
    rule: int | None = None
    states: int = 2
    logical: str = ""

    @property
    def shared_name(self) -> str:
        """Return the name that all ranks of its family know it by: a tied weight has other names on other stages."""
        return self.logical or self.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        return self.group is not None


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module.

    Attributes:
        name: Qualified.
        callable: Whether it has a forward of its own (a ModuleList has none).
        kind: Its class, with the module that defines it; empty where only names of parameters are known.
    """

    name: str
    callable: bool = True
    kind: str = ""


@dataclass(frozen=True, slots=True)
class UnitSizePolicy:
    """How large units may be, and what stays gathered. Sizes in elements.

    Attributes:
        max_numel: Cut above this; a single parameter above it is a unit of its own. None: an eighth of the model.
        persist_numel: With sharded parameters, parameters up to this size stay gathered ...
        persist_total: ... as long as all of them together stay below this. What is in no module of the model always stays: no forward would gather it.
        leaves: Qualified names of modules that are never split (a hint; results do not depend on it).
    """

    max_numel: int | None = None
    persist_numel: int = 100_000
    persist_total: int | None = None
    leaves: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_options(self, max_numel=">= 0", persist_numel=">= 0", persist_total=">= 0")


@dataclass(frozen=True)
class UnitSpec:
    """One unit: its parameters in registration order, and what is kept of them. Its name is the same on all ranks that have it."""

    name: str
    module: str
    params: tuple[ParamInfo, ...]
    strategy: ShardingStrategy

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @cached_property
    def trained(self) -> bool:
        return self.params[0].trained

    @cached_property
    def family(self) -> str:
        return self.params[0].family

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {p.name: p.shape for p in self.params}


_SMALLEST = 1 << 20
"""Elements; below this a collective is mostly latency, so a cut gains nothing."""


def plan_units(
    params: Sequence[ParamInfo], modules: Iterable[ModuleInfo], residency: ShardingStrategy, policy: UnitSizePolicy
) -> tuple[UnitSpec, ...]:
    """Group `params` (registration order) into units, ordered by their first parameter.

    Every parameter is in exactly one unit. O(parameters x module depth).
    """
    total = sum(p.numel for p in params)
    largest = max((p.numel for p in params), default=0)
    if not residency.shard_params:
        limit = policy.max_numel if policy.max_numel is not None else max(total // 8, _SMALLEST)
        return _ordered(params, _runs(params, residency, limit))
    limit = policy.max_numel if policy.max_numel is not None else max(total // 8, largest)
    stay = _persistent(params, policy)
    unsharded = ShardingStrategy(residency.shard_optim, residency.shard_grads, shard_params=False)
    # What stays is not gathered on the way, so nothing is gained by cutting it finer than what is never gathered.
    coarse = limit if policy.max_numel is not None else max(limit, _SMALLEST)
    small = _runs([p for p in params if p.name in stay], unsharded, coarse)
    large = _subtrees([p for p in params if p.name not in stay], modules, residency, (limit, policy.leaves))
    return _ordered(params, [*small, *large])


def _key(param: ParamInfo) -> tuple[object, ...]:
    return param.dtype, param.group, param.family, param.layout, param.rule, param.states


def _runs(params: Sequence[ParamInfo], residency: ShardingStrategy, limit: int) -> list[UnitSpec]:
    cut = [part for run in _by_key(params) for part in _cut(run, limit)]
    return [UnitSpec(part[0].shared_name, "", tuple(part), residency) for part in cut]


def _persistent(params: Sequence[ParamInfo], policy: UnitSizePolicy) -> set[str]:
    stay: set[str] = set()
    left = math.inf if policy.persist_total is None else policy.persist_total
    for param in params:
        if param.name.startswith(OUTSIDE):
            stay.add(param.name)
        elif param.numel <= policy.persist_numel and param.numel <= left:
            stay.add(param.name)
            left -= param.numel
    return stay


def _subtrees(
    params: Sequence[ParamInfo],
    modules: Iterable[ModuleInfo],
    residency: ShardingStrategy,
    limits: tuple[int, frozenset[str]],
) -> list[UnitSpec]:
    tree = _Tree({"": True}, {"": []}, {"": []})
    for info in modules:
        if info.name:
            tree.callable[info.name], tree.children[info.name], tree.params[info.name] = info.callable, [], []
            tree.children[info.name.rpartition(".")[0]].append(info.name)
    for param in params:
        tree.params[param.module].append(param)
    rank_of = {p.name: i for i, p in enumerate(params)}
    groups: list[tuple[str, list[ParamInfo]]] = []
    _split(tree, "", limits, groups)
    units: list[UnitSpec] = []
    limit, leaves = limits
    for module, members in groups:
        most = math.inf if module in leaves else limit
        for run in _by_key(sorted(members, key=lambda p: rank_of[p.name])):
            units.extend(UnitSpec(part[0].shared_name, module, tuple(part), residency) for part in _cut(run, most))
    return units


class _Tree(NamedTuple):
    """By qualified name of a module."""

    callable: dict[str, bool]
    children: dict[str, list[str]]
    params: dict[str, list[ParamInfo]]

    def below(self, name: str) -> list[ParamInfo]:
        return [*self.params[name], *(p for child in self.children[name] for p in self.below(child))]


def _split(
    tree: _Tree, name: str, limits: tuple[int, frozenset[str]], groups: list[tuple[str, list[ParamInfo]]]
) -> list[ParamInfo]:
    """Append (module, parameters) of units below module `name`; return parameters that a caller's forward must cover."""
    limit, leaves = limits
    members = tree.below(name)
    if name and tree.callable[name] and (sum(p.numel for p in members) <= limit or name in leaves):
        if members:
            groups.append((name, members))
        return []
    left = list(tree.params[name])
    for child in tree.children[name]:
        left.extend(_split(tree, child, limits, groups))
    if not tree.callable[name]:  # a container has no forward, so what it owns is its parent's to gather
        return left
    if left:
        groups.append((name, left))
    return []


def _by_key(params: Iterable[ParamInfo]) -> list[list[ParamInfo]]:
    runs: dict[tuple[object, ...], list[ParamInfo]] = {}
    for param in params:
        runs.setdefault(_key(param), []).append(param)
    return list(runs.values())


def _cut(run: Sequence[ParamInfo], limit: float) -> list[list[ParamInfo]]:
    parts: list[list[ParamInfo]] = [[]]
    numel = 0
    for param in run:
        if parts[-1] and numel + param.numel > limit:
            parts.append([])
            numel = 0
        parts[-1].append(param)
        numel += param.numel
    return parts


def _ordered(params: Sequence[ParamInfo], units: Iterable[UnitSpec]) -> tuple[UnitSpec, ...]:
    rank_of = {p.name: i for i, p in enumerate(params)}
    return tuple(sorted(units, key=lambda u: rank_of[u.params[0].name]))

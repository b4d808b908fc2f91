"""`deepspeed.utils.groups`, of experts: who shares the experts of this process's MoE layers, under the name `ep_size_N`.

An expert group shares one copy of all experts; the ranks of an expert data group hold the same ones. Known are those of the engines
that have not ended, the newest before others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from deepspeed._ours.base.raising import refused
from deepspeed._ours.base.runtime_utils import bwc_tensor_model_parallel_world_size
from deepspeed._ours.communication.group_getters import _get_sequence_data_parallel_group, get_model_parallel_world_size
from ds_comm import Group, as_group, world_group
from ds_engine import Engine
from ds_moe import ExpertGroups, MOELayer, make_places


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """The two groups of a name.

    Attributes:
        expert: Shares one copy of all experts.
        data: Holds the same experts.
    """

    expert: Group
    data: Group


_engines: list[ref[Engine]] = []  # whose layers have the groups, the oldest first
_sizes: WeakKeyDictionary[dist.ProcessGroup, dict[int, bool]] = WeakKeyDictionary()  # of `_create_expert...`, by world


def share_experts(engine: Engine) -> None:
    """Note an engine, whose MoE layers say who shares experts, until `forget_experts` or its end."""
    _engines[:] = [known for known in _engines if known() is not None]
    _engines.append(ref(engine))


def forget_experts(engine: Engine) -> None:
    """Drop the groups of an engine that has ended."""
    _engines[:] = [known for known in _engines if known() not in (None, engine)]


def _named(places: ExpertGroups, batch: Group) -> tuple[str, ExpertPair]:
    """Name the groups of a layer. Where every rank has all experts, the ranks of the batch hold the same."""
    size = places.expert.size
    return f"ep_size_{size}", ExpertPair(places.expert, places.data if size > 1 else batch)


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, mp_size: int | None = None, pp_size: int | None = None, mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False, folding_spec: Any = None,
) -> None:  # fmt: skip
    """Make the groups of `ep_size_N` over the world, and note them. Collective over the world."""
    del mp_mode
    if folding_spec is not None or any(size not in (None, 1) for size in (mp_size, pp_size)):
        raise refused("expert-groups-of-degrees", mp_size, pp_size, folding_spec)
    make_places(expert_parallel_size_, data_first=use_data_before_expert_parallel_)
    if (world := world_group().link) is not None:
        _sizes.setdefault(world, {})[expert_parallel_size_] = use_data_before_expert_parallel_


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups of `ep_size_N` beside the ranks that `mpu` says share layers: one. Collective over the world."""
    shared = None if mpu is None else bwc_tensor_model_parallel_world_size(mpu)
    _create_expert_and_data_parallel(
        expert_parallel_size_, shared, use_data_before_expert_parallel_=use_data_before_expert_parallel_
    )


def _pairs() -> dict[str, ExpertPair]:
    """The groups by name; nothing here keeps one alive. Those that were made before are the same again (`ds_comm.common_group`)."""
    sizes = {} if (world := world_group().link) is None else _sizes.get(world, {})
    pairs = dict(_named(make_places(size, data_first=first), world_group()) for size, first in sizes.items())
    for engine in (engine for known in _engines if (engine := known()) is not None):
        placed = (vars(module).get("places") for module in engine.module.modules())
        pairs |= dict(_named(p, engine.mesh["gradient"]) for p in placed if isinstance(p, ExpertGroups))
    return pairs


def _pair(getter: str, group_name: str) -> ExpertPair:
    pairs = _pairs()
    if group_name not in pairs:
        names = " and ".join(sorted(pairs))
        raise refused("expert-group-name", getter, group_name, f"; known are {names}" if names else "")
    return pairs[group_name]


_GETTERS: Mapping[str, Callable[[ExpertPair], Any]] = {
    "_get_expert_parallel_group": lambda pair: pair.expert.pg,
    "_get_expert_parallel_group_ranks": lambda pair: list(pair.expert.ranks),
    "_get_expert_parallel_rank": lambda pair: pair.expert.rank,
    "_get_expert_parallel_world_size": lambda pair: pair.expert.size,
    "_get_expert_parallel_src_rank": lambda pair: pair.expert.ranks[0],
    "_get_expert_data_parallel_group": lambda pair: pair.data.pg,
    "_get_expert_data_parallel_group_ranks": lambda pair: list(pair.data.ranks),
    "_get_expert_data_parallel_rank": lambda pair: pair.data.rank,
    "_get_expert_data_parallel_world_size": lambda pair: pair.data.size,
    "_get_expert_broadcast_src_rank": lambda pair: pair.data.ranks[0],
}
"""Functions of a name that tell something of its groups; an unknown name raises an AssertionError ("compat-call-order")."""


def _getter(name: str, tell: Callable[[ExpertPair], Any]) -> Callable[[str], Any]:
    def ask(group_name: str) -> Any:
        return tell(_pair(name, group_name))

    ask.__name__ = ask.__qualname__ = name
    return ask


globals().update({name: _getter(name, tell) for name, tell in _GETTERS.items()})


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Return torch's expert group of every known name."""
    return {name: pair.expert.pg for name, pair in _pairs().items()}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Return torch's expert data group of every known name."""
    return {name: pair.data.pg for name, pair in _pairs().items()}


def _get_max_expert_size() -> int | None:
    """Return the largest N of the known `ep_size_N`; None without one, as upstream."""
    return max((pair.expert.size for pair in _pairs().values()), default=None)


def _get_max_expert_size_name() -> str:
    """Return the name of the largest expert group."""
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    """Return torch's largest expert group; unknown, it is an AssertionError ("compat-call-order")."""
    return _pair("_get_expert_parallel_group", _get_max_expert_size_name()).expert.pg


def _get_broadcast_src_rank() -> int:
    """Return the world rank of the first of those that train on different samples."""
    return as_group(_get_sequence_data_parallel_group()).ranks[0]


def _get_expert_model_parallel_world_size() -> int:
    """Return over how many ranks experts are cut: the tensor-parallel ones, where a layer says that its experts are."""
    modules = (module for known in _engines if (engine := known()) is not None for module in engine.module.modules())
    cut = any(isinstance(module, MOELayer) and not module.how.split for module in modules)
    ranks: int = get_model_parallel_world_size() if cut else 1
    return ranks


LIVE = frozenset({"expert_tensor_parallel_world_size"})  # a variable of upstream's, which changes with the engines


def __getattr__(name: str) -> int:
    if name not in LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _get_expert_model_parallel_world_size()

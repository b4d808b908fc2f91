"""What a checkpoint of a run holds, and how a run goes on from one.

param/<name>  optim/<name>/<state>   logical tensors, in the master format     from ds_zero
buffer/<name>                        persistent buffers of the model            the first rank's that holds them
rng/<rank>/<stream>                  random states of each rank                 used again only on as many ranks
onebit/<rank>/<kind>/<message>       error feedback of a 1-bit optimizer        used again only on as many ranks
meta                                 counters, scalars of the optimizer, scheduler, data position, config, client state
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ds_ckpt
import ds_monitor
from ds_ckpt import LoadOptions, LocalCheckpointer
from ds_ckpt.engines import Checkpointer
from ds_comm import LocalShard, Mesh
from ds_comm.placement import TensorShard
from ds_comm.reduction_group import logical_of, param_sharding
from ds_config.errors import CheckpointError
from ds_engine.plan import Plan
from ds_zero import ShardedModel, ShardedOptimizer

__all__ = ["CheckpointedRun", "Contents", "contents_of", "keep_near", "load_run", "save_run"]

_FORMAT = 1
_log = logging.getLogger("ds_engine")


class CheckpointedRun(Protocol):
    """What is saved of an engine."""

    plan: Plan
    module: nn.Module
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    checkpointer: Checkpointer
    mesh: Mesh
    device: torch.device

    @property
    def sharding(self) -> ShardedModel:
        """The units of the model."""

    def progress(self) -> dict[str, int]:
        """Return the counters, as JSON values."""

    def set_progress(self, saved: Mapping[str, int]) -> None:
        """Go on with these counters."""

    def record(self) -> dict[str, Any]:
        """Return the configuration, as JSON values."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What is saved of a run: this rank's shards, the same meta and aliases on every rank."""

    shards: list[LocalShard]
    meta: dict[str, Any]
    aliases: dict[str, str]


def contents_of(
    run: CheckpointedRun, client: Mapping[str, Any], *, frozen: bool = True, buffers: bool = False
) -> Contents:
    """Collect the contents of a checkpoint of `run`. Collective.

    Args:
        frozen: Whether to include parameters that need no gradient.
        buffers: Save this rank's buffers on every rank, not those of a single rank.
    """
    if run.optimizer is not None:
        run.optimizer.synchronise()
    counters, loader = run.progress(), run.training_dataloader
    meta = {
        "format": _FORMAT,
        "world": run.mesh["world"].size,
        "counters": counters,
        "config": run.record(),
        "client": dict(client),
        "optimizer": None if run.optimizer is None else run.optimizer.state_dict(),
        "onebit": getattr(_inner(run), "error_numels", {}),
        "scheduler": None if run.lr_scheduler is None else run.lr_scheduler.state_dict(),
        # None of torch's DataLoader and of others that do not know where they stand: a resumed run begins their order again.
        "data": loader.state_dict() | {"taken": counters["taken"]} if hasattr(loader, "state_dict") else None,
    }
    still = [n for n, p in run.module.named_parameters() if not p.requires_grad]
    left_out = set() if frozen else {f"param/{run.sharding.logical[n].name}" for n in still}
    buffer_shards = [s for n, s in _buffers(run.module) if buffers or _gives(run, n)]
    model = [*(s for s in run.sharding.param_shards() if s.shard.name not in left_out), *buffer_shards]
    aliases = {name: stored for name, stored in _aliases(run).items() if stored not in left_out}
    shards = [*model, *_optim_shards(run), *_error_shards(run), *_random_shards(run, _random_states(run.device))]
    return Contents(shards, meta, aliases)


def save_run(run: CheckpointedRun, path: str, client: Mapping[str, Any], *, frozen: bool = True) -> str:
    """Write a checkpoint of `run`. Collective. Returns where it is.

    Args:
        frozen: Whether parameters that need no gradient are in it, too.
    """
    what = contents_of(run, client, frozen=frozen)
    run.checkpointer.save(path, what.shards, what.meta, aliases=what.aliases)
    del what
    run.sharding.put_away()
    ds_monitor.event("engine/saved", path=path)
    return path


def keep_near(run: CheckpointedRun, near: LocalCheckpointer) -> None:
    """Take a copy of `run` on the nodes, if it is time for one. Collective."""
    step = run.progress()["steps"]
    if not near.due(step):
        return
    what = contents_of(run, {}, buffers=True)
    others = [shard.shard.name for name, shard in _buffers(run.module) if not _gives(run, name)]
    near.offer(step, what.shards, what.meta, what.aliases, others)
    del what
    run.sharding.put_away()


def load_run(
    run: CheckpointedRun, root: str, tag: str | None, parts: frozenset[str], near: LocalCheckpointer | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from the checkpoint `root/tag`, or from the newest in `root`. Collective.

    Args:
        parts: Which of "optimizer", "scheduler", "data" and "run" (counters, random states) to restore besides the model;
            "partly" leaves tensors of the model alone that the checkpoint lacks, and those of the checkpoint unread that the
            model lacks.
        near: Without a tag, a newer copy on the nodes goes before.
    """
    run.checkpointer.wait()
    path = f"{root}/{tag}" if tag is not None else _newest(root, missing=near is not None)
    manifest = None if path is None else ds_ckpt.inspect(path)
    if tag is None and near is not None and "partly" not in parts:
        requests: list[_Wanted] = []

        def wanted(meta: Mapping[str, Any], names: list[str]) -> list[LocalShard]:
            requests[:] = [_wanted(run, meta, names, parts)]
            return requests[0].shards

        reached = -1 if manifest is None else int(manifest.meta.get("counters", {}).get("steps", -1))
        restored = near.restore_near(wanted, newer_than=reached)
        if restored is not None:
            return _taken_up(run, f"the nodes' copy of step {restored[0]}", restored[1], (requests[0], parts))
    if path is None or manifest is None:
        _log.warning("%s holds no complete checkpoint; nothing was loaded", root)
        return None, None
    want = _wanted(run, manifest.meta, list(manifest.tensors), parts)
    options = LoadOptions(prefixes=want.prefixes, strict="partly" not in parts)
    meta = ds_ckpt.load(path, want.shards, group=run.mesh["world"], options=options)
    return _taken_up(run, path, meta, (want, parts))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is read into a run, and from under which prefixes; random states only where they are used again."""

    shards: list[LocalShard]
    prefixes: tuple[str, ...]
    buffers: list[tuple[str, LocalShard]]
    states: dict[str, Tensor]
    resumed: bool


def _wanted(run: CheckpointedRun, meta: Mapping[str, Any], names: Collection[str], parts: frozenset[str]) -> _Wanted:
    """Select the tensors to load into `run` from a checkpoint with this meta and these tensor names."""
    # A checkpoint that was converted from another library's has no random states.
    random_states = any(name.startswith("rng/") for name in names)
    as_many = meta.get("world") == run.mesh["world"].size
    resumed = "run" in parts and random_states and as_many
    buffers = _buffers(run.module)
    shards, prefixes = [*run.sharding.param_shards(), *(shard for _, shard in buffers)], ["param/", "buffer/"]
    if "partly" in parts:
        known = set(names)
        shards = [shard for shard in shards if shard.shard.name in known]
    if "optimizer" in parts and run.optimizer is not None:
        run.optimizer.materialize(sorted({n.rpartition("/")[2] for n in names if n.startswith("optim/")}))
        shards += _optim_shards(run)
        prefixes.append("optim/")
        _expect_errors(run, meta.get("onebit", {}), as_many)
        shards += _error_shards(run)
        prefixes += ["onebit/"] if as_many else []
    states = _random_states(run.device)
    if resumed:
        shards += _random_shards(run, states)
        prefixes.append("rng/")
    return _Wanted(shards, tuple(prefixes), buffers, states, resumed)


def _taken_up(
    run: CheckpointedRun, path: str, meta: Mapping[str, Any], what: tuple[_Wanted, frozenset[str]]
) -> tuple[str, dict[str, Any]]:
    """Go on with what was read."""
    want, parts = what
    if meta.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} was not written by an engine (format {meta.get('format')!r}, expected {_FORMAT})",
            code="engine-checkpoint",
            fix="Read it with ds_ckpt.load and the names it holds.",
        )
    _set_buffers(run.module, want.buffers)
    _restore(run, meta, parts)
    if want.resumed:
        _set_random_states(run.device, want.states)
    ds_monitor.event("engine/loaded", path=path)
    return path, meta["client"]


def _restore(run: CheckpointedRun, meta: Mapping[str, Any], parts: frozenset[str]) -> None:
    if "optimizer" in parts and run.optimizer is not None and meta["optimizer"] is not None:
        run.optimizer.load_state_dict(meta["optimizer"])
    run.sharding.refresh()
    if "scheduler" in parts and run.lr_scheduler is not None and meta["scheduler"] is not None:
        run.lr_scheduler.load_state_dict(meta["scheduler"])
    if "data" in parts and hasattr(run.training_dataloader, "load_state_dict") and meta["data"] is not None:
        run.training_dataloader.load_state_dict(meta["data"])
    if "run" in parts:
        run.set_progress(meta["counters"])


def _newest(root: str, *, missing: bool = False) -> str | None:
    """Find the newest checkpoint in `root`. `missing`: the directory may not exist."""
    if "://" not in root and not os.path.isdir(root):
        if missing:
            return None
        raise CheckpointError(
            f"there is no checkpoint directory {root} (working directory: {Path.cwd()})",
            code="ckpt-not-found",
            fix="Check the path, or start without load_checkpoint().",
        )
    latest = ds_ckpt.find_latest(root)
    return None if latest is None else str(latest)


# --- tensors


def _buffers(module: nn.Module) -> list[tuple[str, LocalShard]]:
    """Return persistent buffers by name; their shards are views, or copies of non-contiguous buffers."""
    persistent = set(module.state_dict(keep_vars=True)) if _has_buffers(module) else set()
    return [
        (n, _whole(f"buffer/{logical_of(n, buffer).name}", buffer))
        for n, buffer in module.named_buffers()
        if n in persistent
    ]


def _gives(run: CheckpointedRun, name: str) -> bool:
    """Whether a buffer is saved as this rank has it.

    Buffers differ between ranks (running means of a BatchNorm): all are of one rank, always the same; of a family, of its first.
    """
    family = param_sharding(run.module.get_buffer(name)).family
    if family is None:
        return all(run.mesh[axis].rank == 0 for axis in ("gradient", "tensor"))
    return family.group.rank == 0


def _set_buffers(module: nn.Module, loaded: Iterable[tuple[str, LocalShard]]) -> None:
    """Put what was loaded into copies where it belongs. Buffers that were loaded in place stay the same tensors."""
    for name, shard in loaded:
        owner, _, leaf = name.rpartition(".")
        buffers = module.get_submodule(owner)._buffers
        old = buffers[leaf]
        if old is not None and not old.is_contiguous():
            buffers[leaf] = shard.data.view(old.shape)


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def _optim_shards(run: CheckpointedRun) -> list[LocalShard]:
    if run.optimizer is None:
        return []
    return [shard for shard in run.optimizer.shards() if shard.shard.name.startswith("optim/")]


def _inner(run: CheckpointedRun) -> torch.optim.Optimizer | None:
    return None if run.optimizer is None else run.optimizer.inner


def _error_shards(run: CheckpointedRun) -> list[LocalShard]:
    errors: dict[str, Tensor] = getattr(_inner(run), "error_tensors", dict)()
    return [_whole(f"onebit/{run.mesh.rank}/{name}", tensor) for name, tensor in errors.items()]


def _expect_errors(run: CheckpointedRun, saved: Mapping[str, int], as_many: bool) -> None:
    expect = getattr(_inner(run), "expect_errors", None)
    if expect is None:
        return
    expect(saved if as_many else {})
    if saved and not as_many and run.mesh.rank == 0:
        _log.info("error feedback of the 1-bit optimizer is of another number of ranks and starts at zero")


def _random_shards(run: CheckpointedRun, states: Mapping[str, Tensor]) -> list[LocalShard]:
    return [_whole(f"rng/{run.mesh.rank}/{name}", state) for name, state in states.items()]


def _whole(name: str, tensor: Tensor) -> LocalShard:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LocalShard(TensorShard.whole(name, tuple(tensor.shape), dtype), tensor.detach().reshape(-1).contiguous())


def _aliases(run: CheckpointedRun) -> dict[str, str]:
    """Map further names of tied parameters to their stored name, so that other readers find them."""
    first: dict[int, str] = {id(p): name for name, p in run.module.named_parameters()}
    every: Iterable[tuple[str, nn.Parameter]] = run.module.named_parameters(remove_duplicate=False)
    logical = run.sharding.logical
    # What has a logical name of its own has no other: the module's names may be other parameters' on other ranks.
    plain = {name for name in first.values() if logical[name].name == name}
    return {f"param/{n}": f"param/{first[id(p)]}" for n, p in every if first[id(p)] != n and first[id(p)] in plain}


# --- random streams


def _random_states(device: torch.device) -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    del version
    python = torch.tensor([*words, 0 if gauss is None else 1], dtype=torch.int64)
    spare = torch.tensor([0.0 if gauss is None else gauss], dtype=torch.float64)
    states = {"torch": torch.get_rng_state(), "python": python, "python-spare": spare}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    *words, has_spare = states["python"].tolist()
    random.setstate((3, tuple(words), float(states["python-spare"]) if has_spare else None))
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)

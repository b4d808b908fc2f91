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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ds_ckpt
import ds_monitor
from ds_ckpt import LoadOptions
from ds_ckpt.engines import Checkpointer
from ds_comm import LocalShard, Mesh
from ds_comm.family import assignment_of
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError
from ds_zero import ShardedOptimizer, Sharding
from ds_zero.layout.families import logical_of

__all__ = ["Run", "load_run", "save_run"]

_FORMAT = 1
_log = logging.getLogger("ds_engine")


class Run(Protocol):
    """What is saved of an engine."""

    module: nn.Module
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    checkpointer: Checkpointer
    mesh: Mesh
    device: torch.device

    @property
    def sharding(self) -> Sharding:
        """The units of the model."""

    def progress(self) -> dict[str, int]:
        """The counters, as JSON."""

    def set_progress(self, saved: Mapping[str, int]) -> None:
        """Go on with these counters."""

    def record(self) -> dict[str, Any]:
        """The configuration, as JSON."""


def save_run(run: Run, path: str, client: Mapping[str, Any], *, frozen: bool = True) -> str:
    """Write a checkpoint of `run`. Collective. Returns where it is.

    Args:
        frozen: Whether parameters that need no gradient are in it, too.
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
        "data": None if loader is None else loader.state_dict() | {"taken": counters["taken"]},
    }
    still = [n for n, p in run.module.named_parameters() if not p.requires_grad]
    left_out = set() if frozen else {f"param/{run.sharding.logical[n].name}" for n in still}
    # Buffers differ between ranks (running means of a BatchNorm): all are of one rank, always the same; of a family, of its first.
    first = all(run.mesh[name].rank == 0 for name in ("gradient", "tensor"))
    family = {n: assignment_of(buffer).family for n, buffer in run.module.named_buffers()}
    buffers = [s for n, s in _buffers(run.module) if (first if (of := family[n]) is None else of.group.rank == 0)]
    model = [*(s for s in run.sharding.param_shards() if s.shard.name not in left_out), *buffers]
    aliases = {name: stored for name, stored in _aliases(run).items() if stored not in left_out}
    shards = [*model, *_optim_shards(run), *_error_shards(run), *_random_shards(run, _random_states(run.device))]
    run.checkpointer.save(path, shards, meta, aliases=aliases)
    del shards, model
    run.sharding.put_away()
    ds_monitor.event("engine/saved", path=path)
    return path


def load_run(run: Run, root: str, tag: str | None, parts: frozenset[str]) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from the checkpoint `root/tag`, or from the newest in `root`. Collective.

    Args:
        parts: Which of "optimizer", "scheduler", "data" and "run" (counters, random states) to restore besides the model;
            "partly" leaves tensors of the model alone that the checkpoint lacks, and those of the checkpoint unread that the
            model lacks.
    """
    run.checkpointer.wait()
    path = f"{root}/{tag}" if tag is not None else _newest(root)
    if path is None:
        _log.warning("%s holds no complete checkpoint; nothing was loaded", root)
        return None, None
    manifest = ds_ckpt.inspect(path)
    # A checkpoint that was converted from another library's has no random states.
    random_states = any(name.startswith("rng/") for name in manifest.tensors)
    as_many = manifest.meta.get("world") == run.mesh["world"].size
    resumed = "run" in parts and random_states and as_many
    buffers = _buffers(run.module)
    shards, prefixes = [*run.sharding.param_shards(), *(shard for _, shard in buffers)], ["param/", "buffer/"]
    if "partly" in parts:
        shards = [shard for shard in shards if shard.shard.name in manifest.tensors]
    if "optimizer" in parts and run.optimizer is not None:
        run.optimizer.materialize(sorted({n.rpartition("/")[2] for n in manifest.tensors if n.startswith("optim/")}))
        shards += _optim_shards(run)
        prefixes.append("optim/")
        _expect_errors(run, manifest.meta.get("onebit", {}), as_many)
        shards += _error_shards(run)
        prefixes += ["onebit/"] if as_many else []
    states = _random_states(run.device)
    if resumed:
        shards += _random_shards(run, states)
        prefixes.append("rng/")
    options = LoadOptions(prefixes=tuple(prefixes), strict="partly" not in parts)
    meta = ds_ckpt.load(path, shards, group=run.mesh["world"], options=options)
    if meta.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} was not written by an engine (format {meta.get('format')!r}, expected {_FORMAT})",
            code="engine-checkpoint",
            fix="Read it with ds_ckpt.load and the names it holds.",
        )
    _set_buffers(run.module, buffers)
    _restore(run, meta, parts)
    if resumed:
        _set_random_states(run.device, states)
    ds_monitor.event("engine/loaded", path=path)
    return path, meta["client"]


def _restore(run: Run, meta: Mapping[str, Any], parts: frozenset[str]) -> None:
    if "optimizer" in parts and run.optimizer is not None and meta["optimizer"] is not None:
        run.optimizer.load_state_dict(meta["optimizer"])
    run.sharding.refresh()
    if "scheduler" in parts and run.lr_scheduler is not None and meta["scheduler"] is not None:
        run.lr_scheduler.load_state_dict(meta["scheduler"])
    if "data" in parts and run.training_dataloader is not None and meta["data"] is not None:
        run.training_dataloader.load_state_dict(meta["data"])
    if "run" in parts:
        run.set_progress(meta["counters"])


def _newest(root: str) -> str | None:
    if "://" not in root and not os.path.isdir(root):
        raise CheckpointError(
            f"there is no checkpoint directory {root} (working directory: {Path.cwd()})",
            code="ckpt-not-found",
            fix="Check the path, or start without load_checkpoint().",
        )
    found = ds_ckpt.find_latest(root)
    return None if found is None else str(found)


# --- tensors


def _buffers(module: nn.Module) -> list[tuple[str, LocalShard]]:
    """Persistent buffers by name; their shards are views of them, or copies of those that are not contiguous."""
    persistent = set(module.state_dict(keep_vars=True)) if _has_buffers(module) else set()
    return [
        (n, _whole(f"buffer/{logical_of(n, buffer).name}", buffer))
        for n, buffer in module.named_buffers()
        if n in persistent
    ]


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


def _optim_shards(run: Run) -> list[LocalShard]:
    if run.optimizer is None:
        return []
    return [shard for shard in run.optimizer.shards() if shard.shard.name.startswith("optim/")]


def _inner(run: Run) -> torch.optim.Optimizer | None:
    return None if run.optimizer is None else run.optimizer.inner


def _error_shards(run: Run) -> list[LocalShard]:
    errors: dict[str, Tensor] = getattr(_inner(run), "error_tensors", dict)()
    return [_whole(f"onebit/{run.mesh.rank}/{name}", tensor) for name, tensor in errors.items()]


def _expect_errors(run: Run, saved: Mapping[str, int], as_many: bool) -> None:
    expect = getattr(_inner(run), "expect_errors", None)
    if expect is None:
        return
    expect(saved if as_many else {})
    if saved and not as_many and run.mesh.rank == 0:
        _log.info("error feedback of the 1-bit optimizer is of another number of ranks and starts at zero")


def _random_shards(run: Run, states: Mapping[str, Tensor]) -> list[LocalShard]:
    return [_whole(f"rng/{run.mesh.rank}/{name}", state) for name, state in states.items()]


def _whole(name: str, tensor: Tensor) -> LocalShard:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LocalShard(TensorShard.whole(name, tuple(tensor.shape), dtype), tensor.detach().reshape(-1).contiguous())


def _aliases(run: Run) -> dict[str, str]:
    """Second names of tied parameters, so that other readers find them."""
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

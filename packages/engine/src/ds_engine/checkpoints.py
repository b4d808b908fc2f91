"""What a checkpoint of a run holds, and how a run goes on from one.

param/<name>  optim/<name>/<state>   logical tensors, in the master format     from ds_zero
buffer/<name>                        persistent buffers of the model            the first rank's that holds them
rng/<rank>/<stream>                  random states of each rank                 used again only on as many ranks
onebit/<rank>/<kind>/<message>       error feedback of a 1-bit optimizer        used again only on as many ranks
meta                                 counters, scalars of the optimizer, scheduler, data position, config, client state,
                                     extra states of modules
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ds_ckpt
import ds_monitor
from ds_ckpt import LoadOptions, LocalCheckpointer
from ds_ckpt.client_state import format_of
from ds_ckpt.engines import Checkpointer
from ds_comm import LocalShard, Mesh, all_gather_json
from ds_comm.placement import TensorShard
from ds_comm.reduction_group import logical_of, param_sharding
from ds_config.errors import CheckpointError
from ds_engine.all_or_nothing import anywhere
from ds_engine.client_states import FORMATS, decode_client_state
from ds_engine.extra_states import encode_extra_states, set_extra_states
from ds_engine.load_differences import compare, refuse_or_name
from ds_engine.plan import Plan
from ds_pipe import PipelineModule
from ds_zero import ShardedModel, ShardedOptimizer

__all__ = ["CheckpointedRun", "Contents", "contents_of", "keep_near", "load_run", "save_run"]

_log = logging.getLogger("ds_engine")
_BY_RANK = "by rank"
_TENSORS = frozenset({"weights", "optimizer"})


class CheckpointedRun(Protocol):
    """What is saved of an engine.

    Attributes:
        torn: Of "weights" and "optimizer", which a load that failed has changed in part.
    """

    torn: set[str]
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
        client: As `client_states.encode_client_state` returned it.
        frozen: Whether to include parameters that need no gradient.
        buffers: Save this rank's buffers on every rank, not those of a single rank.
    """
    if run.optimizer is not None:
        run.optimizer.synchronise()
    counters, loader = run.progress(), run.training_dataloader
    still = sorted({run.sharding.logical[n].name for n, p in run.module.named_parameters() if not p.requires_grad})
    everywhere = still
    if run.mesh["pipe"].size > 1 or len(run.sharding.families) > 1:  # ranks hold different ones
        every = all_gather_json(still, run.mesh["world"], unit="frozen")
        everywhere = sorted({name for names in every for name in names})
    extra = encode_extra_states(run.module, run.mesh)
    meta = {
        "format": format_of({"client": client, "extra": extra}),
        "world": run.mesh["world"].size,
        "counters": counters,
        "config": run.record(),
        "client": dict(client),
        "extra": extra,
        "optimizer": None if run.optimizer is None else run.optimizer.common_state_dict(),
        "frozen": everywhere,  # for layouts that know frozen parameters from those without a gradient so far
        "onebit": _messages(run),
        "scheduler": None if run.lr_scheduler is None else run.lr_scheduler.state_dict(),
        # None of torch's DataLoader and of others that do not know where they stand: a resumed run begins their order again.
        "data": loader.state_dict() | {"taken": counters["taken"]} if hasattr(loader, "state_dict") else None,
    }
    left_out = set() if frozen else {f"param/{name}" for name in still}
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
        parts: Which of "weights" (and buffers), "optimizer", "scheduler", "data" and "run" (counters, random states) to restore;
            "exact", "model" and "any-optimizer" say what may differ, see `load_differences.py`: without them what the
            checkpoint lacks begins as it is, what nothing asks for is not used, and each is named in a line.
        near: Without a tag, a newer copy on the nodes goes before.
    """
    run.checkpointer.wait()
    path = f"{root}/{tag}" if tag is not None else _newest(root, missing=near is not None)
    manifest = None if path is None else ds_ckpt.inspect(path)
    if tag is None and near is not None:
        requests: list[_Wanted] = []

        def wanted(meta: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[LocalShard]:
            requests[:] = [_wanted(run, "the nodes' copy", _Stored(meta, shapes, {}), parts, [])]
            return requests[0].shards

        reached = -1 if manifest is None else int(manifest.meta.get("counters", {}).get("steps", -1))
        restored = near.restore_near(wanted, newer_than=reached)
        if restored is not None:
            origin = _taken_up(run, f"the nodes' copy of step {restored[0]}", restored[1], requests[0])
            run.torn -= parts
            return origin, {}
    if path is None or manifest is None:
        _log.warning("%s holds no complete checkpoint; nothing was loaded", root)
        return None, None
    client = decode_client_state(manifest.meta, path, run.mesh["world"])  # it may fail, so before the run changes
    if manifest.meta.get("format") not in FORMATS:
        raise CheckpointError(
            f"{path} was not written by an engine (format {manifest.meta.get('format')!r}, expected one of {FORMATS})",
            code="engine-checkpoint",
            fix="Read it with ds_ckpt.load and the names it holds.",
        )
    shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    stored = _Stored(manifest.meta, shapes, manifest.aliases)
    begun, undo = list[bool](), list[Callable[[], None]]()

    def begins() -> None:
        begun.append(True)
        run.torn |= parts & _TENSORS

    try:
        want = _wanted(run, path, stored, parts, undo)
        _compare(run, path, stored, want)
        shards = [shard for shard in want.shards if stored.name_of(shard.shard.name) in shapes]
        # Frozen parameters and buffers are stored in the format of the run that saved them, and DeepSpeed's in that of the module.
        options = LoadOptions(prefixes=want.prefixes, strict=False, cast=True, begins=begins)
        meta = ds_ckpt.load(path, shards, group=run.mesh["world"], options=options)
        origin = _taken_up(run, path, meta, want)
    except BaseException:
        for act in undo if not begun else ():
            act()
        raise
    run.torn -= parts
    return origin, client


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a checkpoint has: its meta, the shapes of its tensors by name, and further names of some."""

    meta: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    aliases: Mapping[str, str]

    def name_of(self, name: str) -> str:
        """Return the name that a tensor is stored under."""
        return self.aliases.get(name, name)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is read into a run, and from under which prefixes; random states only where they are used again.

    Attributes:
        fresh: Trained parameters of this rank of which no optimizer state is stored.
        sources: Parameters of this rank that are read from one of another name: copies of an untied part of a tied layer.
    """

    shards: list[LocalShard]
    prefixes: tuple[str, ...]
    buffers: list[tuple[str, LocalShard]]
    states: dict[str, Tensor]
    resumed: bool
    parts: frozenset[str]
    fresh: Sequence[str]
    sources: Mapping[str, str]


def _wanted(
    run: CheckpointedRun, path: str, stored: _Stored, parts: frozenset[str], undo: list[Callable[[], None]]
) -> _Wanted:
    """Select the tensors to load into `run` from a checkpoint, and make the optimizer state that they fill; `undo` gets what takes it back."""
    parts = _with_optimizer(run, path, stored.meta, parts)
    if "optimizer" in parts and run.optimizer is not None:
        owners = {name.split("/", 1)[1].rpartition("/")[0] for name in stored.shapes if name.startswith("optim/")}
        run.optimizer.keep_state_of(owners, anywhere(run.mesh))
    # A checkpoint that was converted from another library's has no random states.
    random_states = any(name.startswith("rng/") for name in stored.shapes)
    as_many = stored.meta.get("world") == run.mesh["world"].size
    resumed = "run" in parts and random_states and as_many
    buffers = _buffers(run.module) if "weights" in parts else []
    weights = run.sharding.param_shards() if "weights" in parts else []
    shards = [*weights, *(shard for _, shard in buffers)]
    prefixes = ["param/", "buffer/"] if "weights" in parts else []
    sources, fresh = _sources(run, stored), []
    if "optimizer" in parts and run.optimizer is not None:
        shapes = _optim_shapes(stored.shapes, sources)
        undo.append(run.optimizer.materialize(shapes))
        fresh = _stateless(run, stored, shapes)
        shards += _optim_shards(run)
        prefixes.append("optim/")
        _expect_errors(run, stored.meta.get("onebit", {}), as_many)
        shards += _error_shards(run)
        prefixes += ["onebit/"] if as_many else []
    states = _random_states(run.device)
    if resumed:
        shards += _random_shards(run, states)
        prefixes.append("rng/")
    if sources:
        shards = [LocalShard(replace(s.shard, name=_under(s.shard.name, sources)), s.data) for s in shards]
    return _Wanted(shards, tuple(prefixes), buffers, states, resumed, parts, fresh, sources)


def _with_optimizer(run: CheckpointedRun, path: str, meta: Mapping[str, Any], parts: frozenset[str]) -> frozenset[str]:
    """Check that the state of an optimizer of this class was saved. Returns `parts`, less the optimizer where it was not and need not be."""
    saved = meta.get("optimizer")
    if "optimizer" not in parts or run.optimizer is None or (saved is not None and run.optimizer.is_saved_class(saved)):
        return parts
    found = "no optimizer state" if saved is None else f"the optimizer state of {saved['class']}, which is not used"
    if "any-optimizer" not in parts:
        raise CheckpointError(
            f"{path} has {found}; this run's optimizer is {type(run.optimizer.inner).__name__}",
            code="optimizer-class",
            fix="Go on with the optimizer that was saved, or begin its state anew with strict=False, or load_optimizer_states=False.",
        )
    if run.mesh.rank == 0:
        _log.warning("%s has %s", path, found)
    return parts - {"optimizer"}


def _sources(run: CheckpointedRun, stored: _Stored) -> dict[str, str]:
    """Map parameters that another cut of the model has not, to those that they were part of there."""
    if not isinstance(run.module, PipelineModule):
        return {}
    names = {logical.name for logical in run.sharding.logical.values()}
    found = {
        name: next((s for s in run.module.sources_of(name) if f"param/{s}" in stored.shapes), None)
        for name in names
        if f"param/{name}" not in stored.shapes
    }
    return {name: source for name, source in found.items() if source is not None}


def _under(name: str, sources: Mapping[str, str]) -> str:
    """Return the name in the checkpoint of one of the run's tensors."""
    kind, _, rest = name.partition("/")
    owner, slash, key = rest.rpartition("/") if kind == "optim" else (rest, "", "")
    return f"{kind}/{sources[owner]}{slash}{key}" if owner in sources else name


def _optim_shapes(shapes: Mapping[str, Sequence[int]], sources: Mapping[str, str]) -> dict[str, Sequence[int]]:
    """Select the shapes of optimizer state; what is read from another name is also listed under its own."""
    found = {name: shape for name, shape in shapes.items() if name.startswith("optim/")}
    for name, source in sources.items():
        prefix = f"optim/{source}/"
        found |= {f"optim/{name}/{n.removeprefix(prefix)}": shape for n, shape in found.items() if n.startswith(prefix)}
    return found


def _stateless(run: CheckpointedRun, stored: _Stored, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """List trained parameters that are stored without state, if the checkpoint has any state at all."""
    logical = run.sharding.logical
    trained = {logical[info.name].name for u in run.sharding.units if u.spec.trained for info in u.spec.params}
    owners = {name.removeprefix("optim/").rpartition("/")[0] for name in shapes}
    return sorted(n for n in trained - owners if owners and stored.name_of(f"param/{n}") in stored.shapes)


def _compare(run: CheckpointedRun, path: str, stored: _Stored, want: _Wanted) -> None:
    """Refuse or name what the checkpoint and the run do not have in common. Collective."""
    names = {name for name, shape in stored.shapes.items() if name.startswith(want.prefixes) and 0 not in shape}
    local = [shard.shard for shard in want.shards if math.prod(shard.shard.shape)]
    asked = {stored.name_of(shard.name) for shard in local}
    asked = {name for name in asked if name in names or name.startswith(("param/", "buffer/"))}
    found = compare(run.mesh["world"], names, asked, want.fresh)
    if isinstance(run.module, PipelineModule):
        further = [name for name in found.unused if _is_further_copy(run.module, name, stored)]
        found = replace(found, unused=[n for n in found.unused if n not in further], further=further)
    refuse_or_name(path, found, names, want.parts, lead=run.mesh.rank == 0)


def _is_further_copy(module: PipelineModule, name: str, stored: _Stored) -> bool:
    """Whether a stored tensor is of a copy of an untied part of a tied layer, whose first is stored, too."""
    kind, _, rest = name.partition("/")
    owner, slash, key = rest.rpartition("/") if kind == "optim" else (rest, "", "")
    source = module.untied_source(owner)
    return source is not None and f"{kind}/{source}{slash}{key}" in stored.shapes


def _taken_up(run: CheckpointedRun, path: str, meta: Mapping[str, Any], want: _Wanted) -> str:
    """Go on with what was read. Returns `path`."""
    _set_buffers(run.module, want.buffers)
    _restore(run, meta, want)
    if want.resumed:
        _set_random_states(run.device, want.states)
    ds_monitor.event("engine/loaded", path=path)
    return path


def _restore(run: CheckpointedRun, meta: Mapping[str, Any], want: _Wanted) -> None:
    parts = want.parts
    if "optimizer" in parts and run.optimizer is not None and meta["optimizer"] is not None:
        saved = {key: value for key, value in meta["optimizer"].items() if key != "tensors"}  # they were filled before
        saved["scalars"] = {
            key: {**of, **{name: of[source] for name, source in want.sources.items() if source in of}}
            for key, of in saved["scalars"].items()
        }
        run.optimizer.load_state_dict(saved)
    run.sharding.refresh()
    if "weights" in parts:
        set_extra_states(run.module, meta.get("extra") or {})
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
    # Not by a state dict: a program's own may have other names.
    unsaved = {(id(inner), name) for inner in module.modules() for name in inner._non_persistent_buffers_set}
    return [
        (n, _whole(f"buffer/{logical_of(n, buffer).name}", buffer))
        for n, buffer in module.named_buffers()
        if (id(module.get_submodule(n.rpartition(".")[0])), n.rpartition(".")[2]) not in unsaved
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


def _optim_shards(run: CheckpointedRun) -> list[LocalShard]:
    if run.optimizer is None:
        return []
    return [shard for shard in run.optimizer.shards() if shard.shard.name.startswith("optim/")]


def _inner(run: CheckpointedRun) -> torch.optim.Optimizer | None:
    return None if run.optimizer is None else run.optimizer.inner


def _error_shards(run: CheckpointedRun) -> list[LocalShard]:
    errors: dict[str, Tensor] = getattr(_inner(run), "error_tensors", dict)()
    return [_whole(f"onebit/{run.mesh.rank}/{name}", tensor) for name, tensor in errors.items()]


def _messages(run: CheckpointedRun) -> dict[str, Any]:
    """Return the elements of each message of a 1-bit optimizer: those of every rank where stages have others. Collective for pipelines."""
    numels: dict[str, int] = getattr(_inner(run), "error_numels", {})
    if run.mesh["pipe"].size == 1 or not hasattr(_inner(run), "error_numels"):
        return numels
    every = all_gather_json(numels, run.mesh["world"], unit="onebit")
    return numels if all(one == numels for one in every) else {_BY_RANK: every}


def _expect_errors(run: CheckpointedRun, saved: Mapping[str, Any], as_many: bool) -> None:
    expect = getattr(_inner(run), "expect_errors", None)
    if expect is None:
        return
    numels = saved[_BY_RANK][run.mesh.rank] if as_many and _BY_RANK in saved else saved
    expect(numels if as_many else {})
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
    python = torch.tensor([*words, 0 if gauss is None else 1], dtype=torch.int64, device="cpu")
    spare = torch.tensor([0.0 if gauss is None else gauss], dtype=torch.float64, device="cpu")
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

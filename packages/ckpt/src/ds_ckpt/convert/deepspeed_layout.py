"""DeepSpeed's layouts as logical tensors: regular (ZeRO 1, 2, 3) and universal, read; universal, written (`regular`: the other).

Regular, ZeRO 1 and 2: each data-parallel rank's file has one flat fp32 slice per optimizer group; the slices of all ranks,
end to end, are the group's parameters in the order of `param_shapes` (padding at the end). ZeRO 3: each rank's flat groups,
end to end, hold ceil(n / world) elements of every parameter in order. Optimizer states have exactly the layout of the fp32 slices.
Pipeline stages and tensor-parallel ranks have optimizer files of their own (`rank_files`); how the parts of tensor-parallel ranks join:
`part_joins`. Experts are numbered on each of the ranks that share them; their optimizer groups are spread over every n-th rank.
Universal: one folder per parameter with whole tensors.
Without ZeRO (stage 0) the model's file has torch's own optimizer state, by the place of a parameter in its group, and of fp16
and bf16 the fp32 weights beside it, whole or flat by group.

Names become `param/<name>` (fp32 master, or what the module file has for frozen ones), `buffer/<name>`,
`optim/<name>/<state>`. Scalars and counters become meta as `ds_engine` keeps it, so the result can be resumed from.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ckpt.client_state import format_of
from ds_ckpt.convert.client_entries import client_json
from ds_ckpt.convert.deepspeed_folders import check_files, tag_folder
from ds_ckpt.convert.module_states import split_state
from ds_ckpt.convert.part_joins import PartJoins
from ds_ckpt.convert.pickled import load_pt, require_pickle
from ds_ckpt.convert.rank_files import TIED, RankFiles
from ds_ckpt.convert.regular_plan import round_robin_order
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, foreign_reader
from ds_ckpt.convert.universal import write_universal
from ds_ckpt.jsontext import Json, from_json, to_json
from ds_ckpt.shard_tensors import dtype_name
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["open_deepspeed", "write_universal"]

_EXPERT_NAME = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
_INTERNAL = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
    ]
)


@dataclass(slots=True)
class _Found:
    """What has been collected while the files of a checkpoint are walked through."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[Json] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    scale: Json = None
    clip: float | None = None
    left_out: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@foreign_reader
def open_deepspeed(
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    allow_pickle: bool = False,
    groups: Sequence[Sequence[str]] | None = None,
    parallel_info: Mapping[str, Any] | None = None,
    rows: Mapping[str, int] | None = None,
) -> TensorSource:
    """Open a DeepSpeed checkpoint (the folder of a tag, or the folder of tags) as unsharded tensors.

    Args:
        parallel_info: Takes the place of `universal_checkpoint_info` in files of tensor-parallel ranks, and is needed where they have none:
            lists of patterns of parameter names by `tp_replicated_parameter_patterns`, `parameter_with_row_parallelism_patterns`
            and the others. Tensors that none of them names are cut along their first dimension.
        groups: Names of the parameters of each optimizer group, in order. Files of stage 0 do not say them: without `groups`,
            a single group is all parameters in the order of the model, and state that does not fit is left out.
        rows: Of the parameters of the model that goes on. The universal layout has vocabularies without what they were padded by: they
            get zeros up to these.
    Raises:
        UnsupportedError: "ckpt-pickle" without `allow_pickle`; "ckpt-foreign-layout": AutoEP, or tensor-parallel ranks whose files do
            not say how their parts join, in the regular layout (convert to the universal layout with DeepSpeed first).
        CheckpointError: "ckpt-not-found", "ckpt-foreign": missing files, sizes that do not add up; "ckpt-latest",
            "ckpt-damaged".
    Cost: every file is read once for its checksum; then files are mapped, and a tensor is assembled when it is read.
    """
    require_pickle(allow_pickle, f"the DeepSpeed checkpoint {path}")
    folder = tag_folder(Path(path), tag)
    check_files(folder)
    files = RankFiles.among(folder.iterdir())
    if not files.models:
        raise CheckpointError(
            f"{folder} has no *_model_states.pt file", code="ckpt-not-found", fix="Give the folder of a tag."
        )
    by_mp = {mp: [load_pt(file) for file in paths] for mp, paths in files.models.items()}
    first = by_mp[min(by_mp)]
    universal = (folder / "zero").is_dir()
    degree = 1 if universal else files.degree({mp: states[0] for mp, states in by_mp.items()})
    joins = PartJoins({}, 1) if universal else _joins(folder, first[0], (degree, bool(files.experts)), parallel_info)
    ranks = [_collected(files, by_mp, (rank, degree), groups, universal) for rank in range(degree)]
    collected = ranks[0]  # whose groups, scalars and buffers those of the others are, too
    collected.entries = joins.entries([each.entries for each in ranks])
    if universal:
        _universal(collected, folder / "zero", first, rows or {})
    # Frozen parameters may have been left out, names of tied ones with them.
    aliases = {alias: target for alias, target in collected.aliases.items() if target in collected.entries}
    meta = _meta(collected, first[0])
    if degree > 1:
        shapes = {k.removeprefix("param/"): e.shape for k, e in collected.entries.items() if k.startswith("param/")}
        meta["cuts"] = from_json(to_json({name: joins.cut_of(name, shape) for name, shape in shapes.items()}))
        meta["vocabulary"] = joins.vocabulary
        meta["source"] |= {"unused_patterns": sorted(joins.unused(shapes))}
    return TensorSource(collected.entries, aliases, meta)


def _collected(
    files: RankFiles,
    by_mp: Mapping[int, Sequence[Mapping[str, Any]]],
    tensor_rank: tuple[int, int],
    groups: Sequence[Sequence[str]] | None,
    universal: bool,
) -> _Found:
    """Collect what one tensor-parallel rank (of so many) has, over all stages. Of the universal layout, this is all but the optimizer."""
    collected = _Found()
    stages = {mp: by_mp[mp] for mp in files.stages_of(*tensor_rank)}
    _layers_and_experts(collected, files.parts_of(*tensor_rank), [states[0] for states in stages.values()])
    tied: dict[str, TensorEntry] = {}
    for mp, states in stages.items():
        _module(collected, states)
        if not universal and (ranks := [load_pt(file)["optimizer_state_dict"] for file in files.optims.get(mp, ())]):
            _optimizer(collected, states, ranks)
        elif not universal and states[0].get("optimizer") is not None:
            _replicated(collected, states[0]["optimizer"], groups if len(stages) == 1 else None)
        elif not universal and any(
            states[0].get("param_shapes") or ()
        ):  # said where the optimizer has files of its own
            _without_optimizer(collected, files, mp)
        _keep_first(collected, tied, states[0], mp)
    return collected


def _without_optimizer(collected: _Found, files: RankFiles, mp: int) -> None:
    """Say that there is no optimizer file of model-parallel rank `mp`: who keeps weights alone removes those of all."""
    if files.optims:
        raise CheckpointError(
            f"the files of the optimizer of model-parallel rank {mp} are missing (*mp_rank_{mp:02d}*_optim_states.pt); others are here",
            code="ckpt-foreign",
            fix="Complete the checkpoint.",
        )
    collected.left_out.append(f"optimizer of model-parallel rank {mp} (there is no *_optim_states.pt)")


def _keep_first(collected: _Found, tied: dict[str, TensorEntry], state: Mapping[str, Any], mp: int) -> None:
    """Take what is of a tied layer from the first stage that has one, and name what is another on stage `mp`: its copy of an untied part.

    DeepSpeed calls the copies alike. `tied` has what earlier stages said, and is added to.
    """
    shapes = [*(state.get("param_shapes") or ()), state.get("frozen_param_shapes") or {}]
    for name in sorted({name for group in shapes for name in group if name.startswith(TIED)}):
        first, entry = tied.get(f"param/{name}"), collected.entries.get(f"param/{name}")
        if first is None or entry is None:
            tied |= {
                key: found
                for key, found in collected.entries.items()
                if key == f"param/{name}" or key.rpartition("/")[0] == f"optim/{name}"
            }
        elif not torch.equal(first.read(), entry.read()):
            collected.left_out.append(f"{name} of model-parallel rank {mp}, another than that of the first")
    collected.entries |= tied


def _joins(
    folder: Path, first: Mapping[str, Any], ranks: tuple[int, bool], override: Mapping[str, Any] | None
) -> PartJoins:
    """Return how the parts of tensor-parallel ranks join; raise UnsupportedError where nobody says it.

    Args:
        ranks: How many they are, and whether there are files of experts.
    """
    (degree, experts), reasons = ranks, []
    info = first.get("universal_checkpoint_info") if override is None else override
    if info is not None and override is None and set(info) <= {"universal_checkpoint_version"}:
        info = None  # of a program that knew of no tensor-parallel ranks
    if first.get("ds_autoep_layers"):
        reasons.append("experts of AutoEP")
    if degree > 1 and info is None:
        reasons.append(
            f"{degree} tensor-parallel ranks and no universal_checkpoint_info, which says how their parts join"
        )
    if degree > 1 and experts:
        reasons.append("experts on tensor-parallel ranks")
    if reasons:
        raise UnsupportedError(
            f"{folder} has {', '.join(reasons)}",
            code="ckpt-foreign-layout",
            fix="Give `parallel_info` (of ds ckpt convert: --parallel-info FILE), or convert the checkpoint with DeepSpeed's "
            "ds_to_universal.py, and read the result.",
        )
    return PartJoins(info if degree > 1 and info else {}, degree)


def _module(collected: _Found, states: Sequence[Mapping[str, Any]]) -> None:
    """Buffers, frozen parameters, tied names; parameters too, until the optimizer's master copy replaces them."""
    first = states[0]
    buffers = set(first.get("buffer_names") or ())
    module, extra = split_state(first.get("module"))
    collected.extra |= extra
    shared = dict(first.get("shared_params") or _same_memory(module, buffers))
    known = {
        *(first.get("frozen_param_shapes") or ()),
        *(n for group in first.get("param_shapes") or () for n in group),
    }
    for name, tensor in module.items():
        # At stage 3 an empty tensor keeps the place of one that is elsewhere.
        if name not in shared and (tensor.numel() or name in buffers or name not in known):
            key = f"buffer/{name}" if name in buffers else f"param/{name}"
            collected.entries[key] = TensorEntry(
                tuple(tensor.shape), dtype_name(tensor.dtype), partial(_itself, tensor)
            )
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [state["frozen_param_fragments"][name] for state in states]
        whole = parts[:1] if parts[0].numel() == shape.numel() else parts
        pieces = [(part, 0, part.numel()) for part in whole]
        collected.entries[f"param/{name}"] = TensorEntry(
            tuple(shape), dtype_name(parts[0].dtype), partial(_assembled, pieces, tuple(shape))
        )
    collected.aliases.update({f"param/{name}": f"param/{target}" for name, target in shared.items()})


def _same_memory(module: Mapping[str, Tensor], buffers: set[str]) -> dict[str, str]:
    """Map further names of tied parameters to the first: files of stage 0 list every name, with one memory."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, tensor in module.items():
        if tensor.numel() and name not in buffers:
            owner = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
            if owner != name:
                shared[name] = owner
    return shared


def _layers_and_experts(
    collected: _Found, parts: Iterable[tuple[str, Path]], states: Sequence[Mapping[str, Any]]
) -> None:
    """Collect the tensors in the model files of pipeline layers and of experts; the optimizer's master copies replace these later."""
    buffers = {name for state in states for name in state.get("buffer_names") or ()}
    known = {name for state in states for group in state.get("param_shapes") or [] for name in group}
    tied = {name.removeprefix(TIED).partition(".")[2] for name in known if name.startswith(TIED)}
    for layer, file in parts:
        tensors, extra = split_state(load_pt(file))
        collected.extra |= {layer + name if name else layer.removesuffix("."): value for name, value in extra.items()}
        for name, tensor in tensors.items():
            whole = layer + name
            if not (layer and name in tied and whole not in known | buffers):
                key = f"buffer/{whole}" if whole in buffers else f"param/{whole}"
                collected.entries[key] = TensorEntry(
                    tuple(tensor.shape), dtype_name(tensor.dtype), partial(_itself, tensor)
                )


def _optimizer(collected: _Found, states: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> None:
    count = ranks[0].get("partition_count", len(ranks))
    expected = max(count) if isinstance(count, list | tuple) else int(count)
    if expected != len(ranks):
        raise CheckpointError(
            f"the checkpoint was written by {expected} ranks, {len(ranks)} optimizer files are here",
            code="ckpt-foreign",
            fix="Complete the checkpoint.",
        )
    if "fp32_flat_groups" in ranks[0]:
        inner = [rank["optimizer_state_dict"] for rank in ranks]
        flat = [[group.reshape(-1) for group in rank["fp32_flat_groups"]] for rank in ranks]
        _stage3(collected, states[0]["param_shapes"], flat, inner)
    else:
        _stage12(collected, states[0]["param_shapes"], ranks)
        inner = [rank["base_optimizer_state"] for rank in ranks]
    param_groups = inner[0].get("param_groups", []) if isinstance(inner[0], Mapping) else []
    stage3 = "fp32_flat_groups" in ranks[0]
    for index, group in enumerate(param_groups):
        if index == len(collected.groups):  # later pipeline stages have the groups of the first again
            collected.groups.append({k: v for k, v in group.items() if k != "params"})
            collected.names.append([])
        collected.names[index].extend(_names_of(states[0], group.get("params", [index]) if stage3 else [index], count))
    collected.scale = collected.scale or _scale(ranks[0].get("loss_scaler"))
    collected.clip = ranks[0].get("clip_grad")


def _replicated(collected: _Found, saved: Mapping[str, Any], names: Sequence[Sequence[str]] | None) -> None:
    """Collect the optimizer of stage 0: state by a parameter's place in its group, or flat with one state a group."""
    inner = saved.get("optimizer_state_dict", saved)
    groups, states = inner.get("param_groups") or [], inner.get("state") or {}
    flat, masters = "fp32_groups_flat" in saved, saved.get("fp32_groups")
    masters = [[part] for part in saved["fp32_groups_flat"]] if flat else masters
    shapes = {key.removeprefix("param/"): e.shape for key, e in collected.entries.items() if key.startswith("param/")}
    names = names or ([list(shapes)] if len(groups) == 1 else [])
    tensors: dict[tuple[str, str], tuple[Tensor, int]] = {}
    scalars: dict[str, dict[str, float]] = {}
    for index, (group, owners) in enumerate(zip(groups, names, strict=False)):
        offset = 0
        for place, name in enumerate(owners if flat else owners[: len(group["params"])]):
            part = 0 if flat else place
            state = {"": masters[index][part]} if masters else {}
            for key, value in {**state, **states.get(group["params"][part], {})}.items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[name, key] = (value.reshape(-1), offset)
                elif value is not None:
                    scalars.setdefault(key, {})[name] = float(value)
            offset += torch.Size(shapes.get(name, ())).numel() if flat else 0
    whole = len(names) == len(groups) and all(
        flat or len(group["params"]) == len(owners) for group, owners in zip(groups, names, strict=True)
    )
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    if not whole or any(
        n not in sizes or not (t.numel() >= o + sizes[n] if flat else t.numel() == sizes[n])
        for (n, _), (t, o) in tensors.items()
    ):
        collected.left_out.append("optimizer (no ZeRO: its states carry no parameter names)")
        return
    for (name, key), (tensor, offset) in tensors.items():
        _add(collected, name, shapes[name], [(tensor, offset, sizes[name])], key)
    collected.scalars.update(scalars)
    collected.groups.extend({k: v for k, v in group.items() if k != "params"} for group in groups)
    collected.names.extend(list(owners) for owners in names)
    if "cur_scale" in saved:
        counts = {"cur_iter": saved.get("cur_iter", 0), "last_overflow_iter": saved.get("last_overflow_iter", -1)}
        dynamic = saved.get("dynamic_loss_scale", False)
        collected.scale = _scale(SimpleNamespace(cur_scale=saved["cur_scale"], dynamic=dynamic, **counts))


def _names_of(state: Mapping[str, Any], flats: Sequence[int], count: Any) -> list[str]:
    """List the parameters of an optimizer group in order, with those of the experts of all ranks.

    Args:
        count: Ranks that share each flat; one number for all at stage 3.
    """
    shapes, config = state["param_shapes"], state.get("ds_config")
    zero = (config.get("zero_optimization") or {}) if isinstance(config, Mapping) else {}
    out = []
    for flat in flats:
        names, by_flat = list(shapes[flat]), isinstance(count, list | tuple)
        if by_flat and zero.get("round_robin_gradients") is True:  # they lie dealt out, `param_shapes` names them so
            order = round_robin_order(len(names), int(count[flat]))
            names = [name for _, name in sorted(zip(order, names, strict=True))]
        owners = max(count) // int(count[flat]) if by_flat else 1
        out += [_global_name(name, shapes[flat], owner) for owner in range(owners) for name in names]
    return out


def _scale(scaler: Any) -> Json:
    """Convert the state of a DeepSpeed loss scaler to the form that ds_zero stores; None without a loss scale."""
    if not hasattr(scaler, "cur_scale") or (not getattr(scaler, "dynamic", False) and scaler.cur_scale == 1):
        return None
    return {
        "scale": float(scaler.cur_scale),
        "tolerance": int(getattr(scaler, "cur_hysteresis", 1)),
        "step": int(getattr(scaler, "cur_iter", 0)),
        "last_overflow": int(getattr(scaler, "last_overflow_iter", -1)),
    }


def _stage12(collected: _Found, shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> None:
    counts = ranks[0]["partition_count"]
    for group, names in enumerate(shapes):
        parts = int(counts[group]) if isinstance(counts, list | tuple) else len(ranks)
        owners = len(ranks) // parts  # ranks that share the experts of this group; 1 for all other groups
        for owner in range(owners):
            owner_ranks = ranks[owner::owners]
            renamed = {_global_name(name, names, owner): torch.Size(shape) for name, shape in names.items()}
            _group12(collected, group, renamed, owner_ranks)


def _global_name(name: str, names: Iterable[str], owner: int) -> str:
    """Return the name of an expert's parameter in the whole model, from its name on rank `owner`.

    A name that belongs to no expert is returned unchanged.
    """
    match = _EXPERT_NAME.fullmatch(name)
    if match is None or not owner:
        return name
    each = len({other[2] for n in names if (other := _EXPERT_NAME.fullmatch(n)) and other[1] == match[1]})
    return f"{match[1]}{owner * each + int(match[2])}{match[3]}"


def _group12(collected: _Found, group: int, names: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
    slices = [rank["single_partition_of_fp32_groups"][group] for rank in ranks]
    paddings = (ranks[0].get("param_alignment_paddings") or {group: None})[group]
    offset = 0
    inner = [rank["base_optimizer_state"] for rank in ranks]
    states = [_group_state(each if isinstance(each, list) else each["state"], group) for each in inner]
    limits = [piece.numel() for piece in slices]
    for index, (name, shape) in enumerate(names.items()):
        numel = shape.numel()
        _add(collected, name, tuple(shape), list(_across(slices, offset, numel)))
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.dim():
                parts = [state[key] for state in states]
                _add(collected, name, tuple(shape), list(_across(parts, offset, numel, limits)), key)
            else:
                collected.scalars.setdefault(key, {})[name] = float(value)
        offset += numel + (paddings[index] if paddings else 0)
    if offset > sum(limits):
        raise _does_not_add_up(group, offset, sum(limits))


def _group_state(states: Any, group: int) -> Mapping[str, Any]:
    # Elastic checkpoints keep a list with one state per group, others torch's dict by index.
    return dict(states[group] if isinstance(states, list) else states.get(group, {}))


def _stage3(
    collected: _Found,
    shapes: Sequence[Mapping[str, Any]],
    flat: Sequence[Sequence[Tensor]],
    inner: Sequence[Mapping[str, Any]],
) -> None:
    world, offset = len(flat), 0
    every = {name: shape for group in shapes for name, shape in group.items()}
    states = [[_group_state(inner[rank]["state"], i) for i in range(len(flat[rank]))] for rank in range(world)]
    ends = list(accumulate(part.numel() for part in flat[0]))
    for name, shape in every.items():
        each = -(-torch.Size(shape).numel() // world)
        pieces = [p for rank in range(world) for p in _across(flat[rank], offset, each)]
        _add(collected, name, tuple(shape), pieces)
        own = states[0][min(bisect_right(ends, offset), len(ends) - 1)] if ends else {}
        for key, value in own.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                collected.scalars.setdefault(key, {})[name] = float(value)
                continue
            # Other groups may not have this state; their place is taken by their numbers, which are not read.
            rows = [[of.get(key, part) for of, part in zip(states[r], flat[r], strict=True)] for r in range(world)]
            _add(collected, name, tuple(shape), [p for row in rows for p in _across(row, offset, each)], key)
        offset += each
    have = sum(part.numel() for part in flat[0])
    if offset > have:
        raise _does_not_add_up(0, offset, have)


def _across(
    parts: Sequence[Tensor], offset: int, numel: int, limits: Sequence[int] | None = None
) -> Iterator[tuple[Tensor, int, int]]:
    """Locate elements offset..offset+numel in `parts` laid end to end: yield (tensor, start, length)."""
    at = 0
    for index, part in enumerate(parts):
        size = limits[index] if limits else part.numel()
        low, high = max(offset, at), min(offset + numel, at + size)
        if low < high:
            yield part.reshape(-1), low - at, high - low
        at += size


def _add(
    collected: _Found, name: str, shape: tuple[int, ...], pieces: list[tuple[Tensor, int, int]], state: str = ""
) -> None:
    key = f"optim/{name}/{state}" if state else f"param/{name}"
    dtype = dtype_name(pieces[0][0].dtype) if pieces else "float32"
    collected.entries[key] = TensorEntry(shape, dtype, partial(_assembled, pieces, shape))


def _itself(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def _assembled(pieces: Sequence[tuple[Tensor, int, int]], shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    flat = (
        torch.cat([part.reshape(-1)[start : start + n] for part, start, n in pieces])
        if pieces
        else torch.empty(0, device="cpu")
    )
    if flat.numel() < numel:
        raise CheckpointError(
            f"a tensor of shape {list(shape)} has only {flat.numel()} elements",
            code="ckpt-foreign",
            fix="The file is damaged.",
        )
    return flat[:numel].reshape(shape)


def _does_not_add_up(group: int, wanted: int, have: int) -> CheckpointError:
    return CheckpointError(
        f"optimizer group {group} has {have} elements, its parameters need {wanted}",
        code="ckpt-foreign",
        fix="The checkpoint is incomplete, or of a layout this program does not know.",
    )


def _universal(collected: _Found, zero: Path, states: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> None:
    shapes = {name: tuple(shape) for group in states[0].get("param_shapes") or [] for name, shape in group.items()}
    # DeepSpeed repeats buffers and further names of tied parameters here, which the model's file has.
    again = {*(states[0].get("buffer_names") or ()), *(key.removeprefix("param/") for key in collected.aliases)}
    for folder in sorted(p for p in zero.iterdir() if p.is_dir() and p.name not in again):
        name = folder.name
        if not (folder / "fp32.pt").is_file():
            raise CheckpointError(f"{folder}/fp32.pt is missing", code="ckpt-not-found", fix="Complete the checkpoint.")
        for file in sorted(folder.glob("*.pt")):
            key, content = file.stem, load_pt(file)
            if key == "step":
                collected.scalars.setdefault("step", {})[name] = float(content)
                continue
            tensor = content["param"] if isinstance(content, dict) else content
            if (
                isinstance(content, dict)
                and content.get("vocab_tensor")
                and (more := rows.get(name, 0) - len(tensor)) > 0
            ):
                tensor = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
            shape = tuple(
                tensor.shape
            )  # of stage 3 it may be flat; of tensor-parallel ranks the model's file has shapes of parts
            if tensor.dim() == 1 and torch.Size(shapes.get(name, ())).numel() == tensor.numel():
                shape = shapes[name]
            _add(collected, name, shape, [(tensor.reshape(-1), 0, tensor.numel())], "" if key == "fp32" else key)
    common = load_pt(zero / "optimizer_state.pt")
    collected.scale, collected.clip = _scale(common.get("loss_scaler")), common.get("clip_grad")
    inner = common.get("optimizer_state_dict", common)
    groups = common.get("param_groups") or inner.get("param_groups") or []
    collected.groups.extend({k: v for k, v in g.items() if k != "params"} for g in groups)
    steps = [s["step"] for s in (inner.get("state") or {}).values() if isinstance(s, Mapping) and "step" in s]
    if steps and "step" not in collected.scalars:
        names = {
            key.split("/", 1)[1]
            for key in collected.entries
            if f"optim/{key.split('/', 1)[1]}/exp_avg" in collected.entries
        }
        collected.scalars["step"] = {name: float(steps[0]) for name in sorted(names)}


def _meta(collected: _Found, state: Mapping[str, Any]) -> dict[str, Json]:
    """Build the meta of a checkpoint in the form that ds_engine stores.

    `left_out` names the values that JSON cannot hold.
    """
    left_out = list(collected.left_out)

    def plain(value: Any, name: str) -> Json:
        try:
            return from_json(to_json(_simple(value)))  # a copy: who writes the meta turns it into JSON
        except CheckpointError as error:
            left_out.append(f"{name}: {error.message}")
            return None

    client = client_json({k: v for k, v in state.items() if k not in _INTERNAL}, left_out)
    extra = client_json(collected.extra, left_out)
    meta = {
        "format": format_of({"client": client, "extra": extra}),
        "world": int(state.get("dp_world_size") or 1) * int(state.get("mp_world_size") or 1),
        "counters": {
            "steps": int(state.get("global_steps") or 0),
            "samples": int(state.get("global_samples") or 0),
            "micro_steps": 0,  # not in these files, and never a number within a step
            "skipped": int(state.get("skipped_steps") or 0),
        },
        "config": {
            **({} if collected.clip is None else {"gradient_clipping": float(collected.clip)}),
            **(plain(state.get("ds_config") or {}, "config") or {}),
        },
        "client": client,
        "extra": extra,
        "optimizer": _optimizer_meta(collected, plain),
        "scheduler": plain(state.get("lr_scheduler"), "scheduler"),
        "data": None,
        "source": {"program": "deepspeed", "version": str(state.get("ds_version"))},
    }
    meta["left_out"] = left_out
    return meta


def _optimizer_meta(collected: _Found, plain: Callable[[Any, str], Json]) -> Json:
    if not collected.groups and not collected.scalars:
        return None
    return {
        "format": 1,
        "groups": [plain(group, "optimizer.groups") for group in collected.groups],
        "scalars": dict(collected.scalars),
        "loss_scale": collected.scale,
        **({"names": list(collected.names)} if collected.names else {}),
    }


def _simple(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic) and value.ndim == 0:
        return value.item()
    if isinstance(value, Mapping):
        return {str(k): _simple(v) for k, v in value.items()}
    return [_simple(v) for v in value] if isinstance(value, list | tuple | set) else value

"""Writes DeepSpeed's universal layout: a folder per parameter, and one file of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.convert.client_entries import client_entries
from ds_ckpt.convert.module_states import extra_entries
from ds_ckpt.convert.pickled import SubparamShape, clip_of, require_pickle, save_pt, scaler_of
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, never_stepped
from ds_ckpt.jsontext import Json
from ds_config.errors import CheckpointError
from ds_config.regular_file import replace_text

__all__ = ["cut_entries", "write_universal"]


def write_universal(
    source: TensorSource, out: str | os.PathLike[str], tag: str, *, allow_pickle: bool = False, flat: bool = False
) -> Path:
    """Write `source` as `out/tag` in DeepSpeed's universal layout; DeepSpeed loads it with `checkpoint.load_universal`.

    `source` has our names; meta["optimizer"] as ds_engine keeps it gives groups and scalars. The order of the groups
    must be that of the optimizer that will load it. Both spellings of the model file are written, so ZeRO 1, 2 and 3 find
    theirs; frozen parameters and buffers are in it (DeepSpeed itself does not restore those from a universal checkpoint).

    Args:
        flat: Write each tensor alone and flat, as DeepSpeed does of stage 3, which only stage 3 loads.

    Raises:
        UnsupportedError: "ckpt-pickle" without `allow_pickle`.
        CheckpointError: "ckpt-target-exists"; "ckpt-foreign": no optimizer groups in the meta.
    """
    require_pickle(allow_pickle, "DeepSpeed's universal layout")
    root = Path(out)
    target, zero = root / tag, root / tag / "zero"
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists", code="ckpt-target-exists", fix="Choose another tag or directory.")
    source = _unpadded(source)
    optimizer = source.meta.get("optimizer") or {}
    groups = optimizer.get("groups") or []
    if not groups:
        raise CheckpointError(
            "the checkpoint's meta has no optimizer groups",
            code="ckpt-foreign",
            fix="Export one that an engine has saved.",
        )
    trained = _trained(source)
    for part in (tag, *trained, *(state for states in trained.values() for state in states)):
        _check_part(part)
    zero.mkdir(parents=True)
    steps, cuts = dict((optimizer.get("scalars") or {}).get("step") or {}), source.meta.get("cuts") or {}
    for name, states in trained.items():
        folder, cut = zero / name, cut_entries(cuts.get(name))
        folder.mkdir()
        for state in ("", *states):
            entry = source.entries.get(f"optim/{name}/{state}" if state else f"param/{name}")
            shape = source.entries[f"param/{name}"].shape
            if entry is not None and entry.shape != shape:
                if state == "step":
                    steps[name] = float(entry.read())
                continue
            whole = torch.zeros(shape, device="cpu") if entry is None else entry.read().float()
            save_pt(whole.flatten() if flat else {"param": whole, **cut}, folder / f"{state or 'fp32'}.pt")
        if name in steps:
            torch.save(torch.tensor(float(steps[name]), device="cpu"), folder / "step.pt")
    save_pt(_common(groups, steps, source.meta), zero / "optimizer_state.pt")
    model = _model_file(source, trained)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model, target / file)
    replace_text(root / "latest_universal", tag)
    return target


def cut_entries(stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what stands beside a tensor: how tensor-parallel ranks are to cut it. What nobody said anything of has one rank."""
    if stored is None:
        return {"cat_dim": 0}
    several = stored.get("sub_param_shape")
    return {**stored, "sub_param_shape": SubparamShape(**several)} if several else dict(stored)


def _check_part(name: str) -> None:
    """Raise unless `name` is one part of a path: names come from the checkpoint, which may be written by anyone."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise CheckpointError(
            f"{name!r} would be the name of a folder, and leads out of it",
            code="ckpt-foreign",
            fix="Do not use this checkpoint, or export it in another format.",
        )


def _trained(source: TensorSource) -> dict[str, list[str]]:
    """Map each parameter that has optimizer states to the names of these states."""
    out: dict[str, list[str]] = {}
    for key in source.entries:
        if key.startswith("optim/"):
            name, _, state = key.removeprefix("optim/").rpartition("/")
            if f"param/{name}" in source.entries:
                out.setdefault(name, []).append(state)
    for names, unused in zip(
        (source.meta.get("optimizer") or {}).get("names") or (), never_stepped(source), strict=False
    ):
        like_the_group = next((out[name] for name in names if name in out), [])
        out.update({name: [state for state in like_the_group if state != "step"] for name in unused})
    return out


def _common(groups: Sequence[Json], steps: Mapping[str, float], meta: Mapping[str, Json]) -> dict[str, Any]:
    step = torch.tensor(float(next(iter(steps.values()), 0.0)), device="cpu")
    with_params = [{**group, "params": []} for group in groups]
    version = str((meta.get("source") or {}).get("version") or _DEEPSPEED)
    # DeepSpeed clips by what it loads, not by its own configuration.
    common: dict[str, Any] = {"param_groups": with_params, "ds_version": version, "clip_grad": clip_of(meta)}
    if (scaler := scaler_of(meta)) is not None:
        common |= {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic}
    common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": with_params}
    return common


_DEEPSPEED = "0.19.8"  # the version whose reader was checked against this writer


def _unpadded(source: TensorSource) -> TensorSource:
    """Leave out the rows that vocabularies were padded by: a reader pads them for its own number of ranks."""
    size, cuts = source.meta.get("vocabulary"), source.meta.get("cuts") or {}
    entries = dict(source.entries)
    for key, entry in source.entries.items():
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0] if kind == "optim" else rest
        if size and (cuts.get(name) or {}).get("vocab_tensor") and entry.shape and entry.shape[0] > size:
            entries[key] = TensorEntry((size, *entry.shape[1:]), entry.dtype, partial(_rows, entry, size))
    return replace(source, entries=entries)


def _rows(entry: TensorEntry, size: int) -> Tensor:
    return entry.read()[:size].contiguous()


def _model_file(source: TensorSource, trained: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    meta, counters = source.meta, dict(source.meta.get("counters") or {})
    module = {}
    buffers = []
    for key, entry in source.entries.items():
        kind, _, name = key.partition("/")
        if kind == "buffer":
            buffers.append(name)
        if kind == "buffer" or (kind == "param" and name not in trained):
            module[name] = entry.read()
    shapes = {name: torch.Size(source.entries[f"param/{name}"].shape) for name in trained}
    prefix = "param/"
    shared = {a.removeprefix(prefix): t.removeprefix(prefix) for a, t in source.aliases.items() if a.startswith(prefix)}
    return {
        "module": {**module, **extra_entries(meta.get("extra"))},
        "buffer_names": buffers,
        "param_shapes": [shapes],
        "shared_params": shared,
        "optimizer": None,
        "lr_scheduler": meta.get("scheduler"),
        "global_steps": int(counters.get("steps", 0)),
        "global_samples": int(counters.get("samples", 0)),
        "skipped_steps": int(counters.get("skipped", 0)),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": meta.get("config") or {},
        "ds_version": str((meta.get("source") or {}).get("version") or _DEEPSPEED),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        **client_entries(meta.get("client")),
    }

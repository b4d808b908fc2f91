"""Checkpoints in the layout that the plan asks for: ours, or DeepSpeed's own (`checkpoint.layout`), which is also read.

Writing goes by way of a checkpoint of ours: rank 0 reads it and writes DeepSpeed's files, which need pickle. Reading goes the
other way, through an unpickler that can make tensors, numbers and text, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_ckpt import LocalCheckpointer, find_latest
from ds_ckpt.checkpoint_list import hold_newest
from ds_ckpt.convert.deepspeed_folders import check_tag, check_target, named_tag, publish_folder, usable_tag
from ds_ckpt.convert.deepspeed_layout import open_deepspeed
from ds_ckpt.convert.module_states import nested_parts
from ds_ckpt.convert.regular import Regular, write_regular
from ds_ckpt.convert.tensor_source import open_checkpoint, write_checkpoint
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_ckpt.local import new_token
from ds_ckpt.manifest_owner import has_manifest
from ds_comm import Group, all_gather_json, barrier
from ds_config.errors import CheckpointError, UnsupportedError
from ds_engine.checkpoints import CheckpointedRun, load_run, save_run
from ds_engine.client_states import encode_client_state
from ds_engine.plan import Plan
from ds_pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_zero import STAGES

__all__ = ["latest_tag", "layout_of", "load", "save", "translated"]

_log = logging.getLogger("ds_engine")


def save(run: CheckpointedRun, root: str, tag: str, client: Mapping[str, Any], *, frozen: bool) -> str:
    """Write `root/tag` in the plan's layout. Collective. Returns its path. For the rest see `checkpoints.save_run`.

    Args:
        client: Rank 0's is stored.
    """
    plan = run.plan
    check_tag(root, tag)
    client = encode_client_state(client, run.mesh["world"])
    layout = plan.foreign and layout_of(plan, run.mesh["data"], run.module)
    if layout:
        _on_one(lambda: check_target(root, tag), run.mesh["world"], f"{root}/{tag} was not written")
    if layout:
        _check_shared(root, run.mesh["world"])
    path = f"{root}/{_draft_of(tag) if layout else tag}"
    save_run(run, path, client, frozen=frozen)
    if not layout:
        return path
    run.checkpointer.wait()
    return _write_as_deepspeed(root, tag, layout, run.mesh["world"])


def load(
    run: CheckpointedRun, root: str, tag: str | None, parts: frozenset[str], near: LocalCheckpointer | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from `root/tag`, or from the newest of `root`, in whichever layout it is. Collective. See `checkpoints.load_run`."""
    if tag is not None:
        check_tag(root, tag)
    if not run.plan.foreign and not run.plan.universal:
        with _newest(root, run.mesh["world"]) if tag is None and near is None else nullcontext(tag) as chosen:
            return load_run(run, root, chosen, parts, near)
    tag = tag or latest_tag(root, run.mesh["world"], run.plan.universal)
    with translated(root, tag, run) as copy:
        path, client = load_run(run, root, copy or tag, parts)
    return (f"{root}/{tag}" if copy and path else path), client


@contextmanager
def _newest(root: str, group: Group) -> Iterator[str | None]:
    """Choose the newest complete checkpoint of `root` for all ranks, and keep other jobs from removing it meanwhile. Collective."""
    release: list[Callable[[], None]] = []

    def choose() -> str | None:
        tag, end = hold_newest(root, TRANSFER_S)
        release.append(end)
        return tag

    try:
        yield _on_one(choose, group, f"no checkpoint of {root} was chosen")
    finally:
        for end in release:
            end()


def _check_shared(root: str, group: Group) -> None:
    """Check that the ranks save into one directory, which rank 0 reads to write DeepSpeed's files.

    Raises:
        CheckpointError: on every rank ("ckpt-tag-differs").
    """
    roots: list[str] = all_gather_json(os.path.abspath(root), group, unit="checkpoint")
    if len(set(roots)) > 1:
        raise CheckpointError(
            f"ranks save to different places in DeepSpeed's layout: {sorted(set(roots))[:5]}",
            code="ckpt-tag-differs",
            fix="Give every rank the same directory, or leave checkpoint.layout out.",
        )


def layout_of(plan: Plan, group: Group, model: nn.Module) -> Regular:
    """Determine how the files of a run are sharded over the ranks that share the optimizer state.

    A PipelineModule is written with one file per layer and with ZeRO 1, the one stage that DeepSpeed's pipelines resume
    with.

    Raises:
        UnsupportedError: a rank has several stages of the model, which DeepSpeed has not ("ckpt-foreign-layout").
    """
    stage = next(number for number, strategy in STAGES.items() if strategy == plan.residency)
    dtype, files = str(plan.precision.param or torch.float32).removeprefix("torch."), plan.foreign
    cut = Regular(stage, group.size, dtype)
    if files is not None:
        size = files.sub_group_size or None
        cut = replace(cut, round_robin=files.round_robin, aligned=files.aligned, sub_group_size=size)
    if not isinstance(model, PipelineModule):
        replaced = type(model).state_dict is not nn.Module.state_dict or "state_dict" in vars(model)
        return replace(cut, nested=nested_parts(model.state_dict())) if replaced else cut
    if model.rank_of != tuple(range(model.num_stages)):
        raise UnsupportedError(
            f"the stages of a model with schedule {model.schedule!r} lie on ranks {list(model.rank_of)}; DeepSpeed's lie one on each",
            code="ckpt-foreign-layout",
            fix="Leave checkpoint.layout out, or use a schedule with one stage a rank: 1f1b, gpipe, zb-h1, zb-h2.",
        )
    tied: dict[str, list[int]] = {}
    functions = []
    for number, layer in enumerate(model.specs):
        if isinstance(layer, TiedLayerSpec):
            tied.setdefault(layer.key, []).append(number)
        if not isinstance(layer, LayerSpec | nn.Module) or (isinstance(layer, TiedLayerSpec) and layer.forward_fn):
            functions.append(number)
    shared = tuple((key, tuple(numbers)) for key, numbers in tied.items())
    place = model.places.topology.get_rank_repr(group.ranks[group.rank])
    return replace(
        cut,
        stage=1,
        pipeline=model.parts[:-1],
        layers=len(model.specs),
        functions=tuple(functions),
        place=place,
        tied=shared,
    )


def _draft_of(tag: str) -> str:
    """Name of the checkpoint of ours that `tag` is made from."""
    return f"{tag}.draft"


def _write_as_deepspeed(root: str, tag: str, layout: Regular, group: Group) -> str:
    """Turn the complete checkpoint `_draft_of(tag)` into DeepSpeed's `root/tag`, and remove it. Collective. Returns the path.

    An older checkpoint `root/tag` is replaced. Cost: rank 0 reads and writes everything.

    Raises:
        CheckpointError: on every rank ("ckpt-foreign").
    """
    source = Path(root) / _draft_of(tag)

    def write() -> None:
        content = open_checkpoint(source)
        publish_folder(root, tag, lambda folder: write_regular(content, folder, tag, layout, allow_pickle=True))
        shutil.rmtree(source)

    _on_one(write, group, f"{root}/{tag} was not written in DeepSpeed's layout")
    return f"{root}/{tag}"


def latest_tag(root: str, group: Group, universal: bool = False) -> str | None:
    """Return the tag of the checkpoint to load, on every rank: see `deepspeed_folders.usable_tag`. Collective.

    With `universal` the file `latest_universal` goes before.

    None where a checkpoint of our own format is to be looked for: there is no file `latest`, or it names none, and there is one.
    """

    def choose() -> str | None:
        try:
            return (named_tag(root, "latest_universal") if universal else None) or usable_tag(root)
        except CheckpointError:
            if "://" not in root and find_latest(root) is not None:
                return None
            raise

    return _on_one(choose, group, f"{root} holds no checkpoint that can be loaded")


@contextmanager
def translated(root: str, tag: str | None, run: CheckpointedRun) -> Iterator[str | None]:
    """Translate DeepSpeed's checkpoint `root/tag` for `run`; yield the tag of the result, None for another format. Collective.

    The translated checkpoint is removed at exit. What the files do not say is the run's: parameters of the optimizer's groups (stage 0),
    rows that vocabularies were padded by (universal).
    """
    source = Path(root) / (tag or "")
    if tag is None or has_manifest(source) or not any(source.glob("*model_states.pt")):
        yield None
        return

    group, names = run.mesh["world"], None if run.optimizer is None else run.optimizer.common_state_dict()["names"]
    local_rows = {one.name: one.shape[0] for one in run.sharding.logical.values() if one.shape}
    rows = {
        name: size
        for of_rank in all_gather_json(local_rows, group, unit="checkpoint")
        for name, size in of_rank.items()
    }

    def write() -> str:
        target = Path(root) / f"{tag}.translated-{new_token()}"  # a name that nobody else has
        content = open_deepspeed(source, allow_pickle=True, groups=names, rows=rows)
        for what in content.meta["left_out"]:
            _log.warning("%s: not read: %s", source, what)
        write_checkpoint(content, target)
        return target.name

    copy = _on_one(write, group, f"{source} was not read")
    try:
        yield copy
    except CheckpointError as error:
        if copy is not None:  # a folder that is there for nobody to see
            error.message = error.message.replace(copy, tag)
        raise
    finally:
        barrier(group)
        if group.rank == 0 and copy is not None:
            shutil.rmtree(Path(root) / copy, ignore_errors=True)


def _on_one(work: Callable[[], str | None], group: Group, what: str) -> str | None:
    """Return what `work` gives on rank 0; every rank learns how it ended, so that no rank waits for one that failed."""

    def tried() -> str | None:
        try:
            return work()
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error.message}", code=error.code, fix=error.fix) from error
        except Exception as error:  # sent to all ranks, whatever it is
            message = f"{what}: {type(error).__name__}: {error}"
            raise CheckpointError(message, code="ckpt-foreign", fix="See the error of rank 0.") from error

    result: str | None = Coordinator(group).first(tried, patience_s=TRANSFER_S)
    return result

"""Upstream's functions of its universal layout: what ranks have of one parameter, joined by `ds_ckpt.convert`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import not_supported, raising, refused
from ds_ckpt.convert.part_joins import PartJoins
from ds_ckpt.convert.pickled import load_pt, save_pt
from ds_ckpt.convert.universal import cut_entries
from ds_config.regular_file import leads_out

_STATES = ("fp32", "exp_avg", "exp_avg_sq")


@raising(ValueError)
def check_joins(universal_checkpoint_info: Mapping[str, Any]) -> None:
    """Check that a checkpoint says of all its tensors how the parts of ranks join.

    Raises:
        UnsupportedError: some layer was cut in a way that cannot be said ("ckpt-foreign-layout"); a ValueError, too.
    """
    PartJoins(universal_checkpoint_info, 1)


def shapes_by_tensor_rank(
    slice_shapes_by_tp: Sequence[Mapping[str, Sequence[int]]], pp_degree: int, tp_degree: int
) -> dict[str, list[Sequence[int] | None]]:
    """List the shapes that the tensor-parallel ranks have of each parameter.

    Args:
        slice_shapes_by_tp: Of each model-parallel rank, those of the first stage before those of the second.
    Raises:
        CheckpointError: a parameter that several stages have differs between them ("compat-files"); an AssertionError, too.
    """
    every: list[dict[str, Sequence[int]]] = [{} for _ in range(tp_degree)]
    for rank, shapes in enumerate(slice_shapes_by_tp[: pp_degree * tp_degree]):
        for name, shape in shapes.items():
            first = every[rank % tp_degree].setdefault(name, shape)
            if first != shape:
                raise refused("stages-disagree", name, first, shape)
    names = dict.fromkeys(name for shapes in every for name in shapes)
    return {name: [shapes.get(name) for shapes in every] for name in names}


def parts_of_ranks(
    param_base_path: str, state: str, tp_degree: int, slice_shapes: Sequence[Sequence[int]] | None = None
) -> list[Any]:
    """Read what each tensor-parallel rank has of a state: fragments `<rank>/<state>.<data rank>`, laid end to end.

    A rank that has no fragment has no element: its part is empty. Of `step` the first fragment is returned.

    Args:
        slice_shapes: Of the ranks' parts. Without them parts are flat, and ranks without fragments are left out.
    Raises:
        CheckpointError: fragments of a rank that has elements are missing ("compat-files"); an AssertionError, too.
    """
    every = [_fragments(Path(param_base_path, str(rank)), state) for rank in range(tp_degree)]
    if state == "step":
        return [fragments[0] for fragments in every if fragments]
    if slice_shapes is None:
        return [torch.cat(fragments) for fragments in every if fragments]
    if not any(every):  # a parameter that has never had a gradient has no state
        return []
    for rank, (fragments, shape) in enumerate(zip(every, slice_shapes, strict=True)):
        if not fragments and torch.Size(shape).numel():
            raise refused("fragments-missing", param_base_path, state, rank, list(shape))
    return [
        torch.cat([*fragments, torch.empty(0, device="cpu")]).reshape(tuple(shape))
        for fragments, shape in zip(every, slice_shapes, strict=True)
    ]


def _fragments(folder: Path, state: str) -> list[Tensor]:
    found = [(int(m[1]), path) for path in folder.glob("*") if (m := re.fullmatch(rf"{state}\.(\d+)", path.name))]
    return [load_pt(path) for _, path in sorted(found)]


@raising(AssertionError, "ckpt-foreign")
def merge_tp_slices(
    uc_info: Mapping[str, Any],
    dir: str,  # noqa: A002  upstream's name
    slice_dir: str,
    tp_degree: int,
    name_and_shapes: tuple[str, Sequence[Sequence[int]] | None],
) -> set[str]:
    """Join what the tensor-parallel ranks have of a parameter and of its optimizer's states, and write them into `dir/<name>`.

    Returns:
        The patterns of `uc_info` that do not fit this parameter.
    Raises:
        CheckpointError: parts that are not those that `uc_info` speaks of ("ckpt-foreign"); an AssertionError, too.
    """
    name, shapes = name_and_shapes
    joins, folder = PartJoins(uc_info, tp_degree), Path(dir, name)
    if leads_out(dir, name):
        raise refused("experts-outside", name, dir)
    folder.mkdir(parents=True, exist_ok=True)
    source = os.path.join(slice_dir, name)
    if steps := parts_of_ranks(source, "step", tp_degree):
        save_pt(steps[0], folder / "step.pt")
    for state in _STATES:
        if parts := parts_of_ranks(source, state, tp_degree, shapes):
            whole = joins.join(name, parts, state=state != "fp32")
            save_pt({**cut_entries(joins.cut_of(name, whole.shape)), "param": whole}, folder / f"{state}.pt")
    return joins.unused([name])


def restored_cut(param: Any) -> Any:
    """Return what a parameter says of how it is cut (`ds_autotp_universal_checkpoint_meta`); None where it says nothing."""
    return getattr(param, "ds_autotp_universal_checkpoint_meta", None)


def narrow_sub_params(
    full_view: Tensor, partition_dim: int, sub_dim_sizes: Sequence[int],
    shard_widths: Sequence[Sequence[int]] | None, tp_rank: int, tp_world_size: int, uc_version: float,
) -> Tensor:  # fmt: skip
    """Cut a rank's stretch of each of the parts of a dim, and lay them end to end, flat.

    Args:
        shard_widths: Of each part, what each rank has. Layouts before 0.4 do not say it: there parts are cut evenly.
    Raises:
        CheckpointError: parts or stretches that are not all of the dim, or cannot be even ("compat-files"); an AssertionError, too.
    """
    if uc_version < 0.4:
        shard_widths = [_even(size, tp_world_size, "sub_param_shard_widths") for size in sub_dim_sizes]
    widths = shard_widths or []
    tiles = [sum(part) for part in widths] == list(sub_dim_sizes) and sum(sub_dim_sizes) == full_view.shape[
        partition_dim
    ]
    if not tiles or any(len(part) != tp_world_size for part in widths):
        raise refused("parts-tile", list(sub_dim_sizes), shard_widths, full_view.shape[partition_dim], tp_world_size)
    parts = full_view.split(list(sub_dim_sizes), partition_dim)
    mine = [part.split(list(width), partition_dim)[tp_rank] for part, width in zip(parts, widths, strict=True)]
    return torch.cat(mine, partition_dim).flatten()


def _even(size: int, ranks: int, unsaid: str) -> list[int]:
    if size % ranks:
        raise refused("part-uneven", size, ranks, unsaid)
    return [size // ranks] * ranks


def cut_as_marked(
    current_param: Any, ckpt_dict: Mapping[str, Any], full_hp_param: Tensor, tp_rank: int, tp_world_size: int, state_key:
    str = "fp32",
) -> Tensor | None:  # fmt: skip
    """Cut a rank's part of a whole tensor, flat, as the parameter says it is cut; None where it does not say.

    Raises:
        CheckpointError: it says that it cannot be restored, or what it says does not fit ("compat-files").
    """
    del ckpt_dict, state_key
    marks = restored_cut(current_param) or {}
    conversion = marks.get("conversion") or {}
    if why := conversion.get("unsupported_reason") or ("affine_map" in conversion and "it is cut by an affine map"):
        raise refused("cut-unknown", why)
    if marks.get("replicated"):
        return full_hp_param.flatten()
    dim, shape = marks.get("partition_dim"), marks.get("logical_shape")
    if dim is None or shape is None:
        return None
    whole, sizes, several = full_hp_param.view(shape), marks.get("sub_param_sizes"), marks.get("sub_param_shape")
    if sizes is None and several is not None:
        dim = getattr(several, "partition_dim", dim)
        sizes = getattr(several, "shape", several)[dim]
    if sizes is not None:
        sizes, version = [sizes] if isinstance(sizes, int) else sizes, marks.get("universal_checkpoint_version", 0.0)
        return narrow_sub_params(
            whole, dim, sizes, marks.get("sub_param_shard_widths"), tp_rank, tp_world_size, version
        )
    widths = marks.get("partition_sizes") or _even(whole.shape[dim], tp_world_size, "partition_sizes")
    return whole.split(list(widths), dim)[tp_rank].flatten()


def _cut_as_joined(stored: Mapping[str, Any], param: Tensor, rank: int, ranks: int) -> Tensor:
    """Cut a rank's part of a whole tensor, flat, as its file says that it was joined. Of the parameter's shape it is whole on every rank."""
    whole: Tensor = stored["param"]
    if whole.shape == param.shape:
        return whole.flatten()
    if stored.get("vocab_tensor") and len(whole) < len(param) * ranks:
        whole = torch.cat([whole, whole.new_zeros(len(param) * ranks - len(whole), *whole.shape[1:])])
    dim, parts = stored.get("cat_dim", 0), stored.get("param_n_sub_params", 1)
    if several := stored.get("sub_param_shape"):
        dim, sizes = several.partition_dim, several.shape[several.partition_dim]
        whole = whole.view([sum(size) if isinstance(size, Sequence) else size for size in several.shape])
        sizes = sizes if isinstance(sizes, Sequence) else [sizes]
    else:
        sizes = [whole.shape[dim] // parts] * parts
    return narrow_sub_params(whole, dim, sizes, None, rank, ranks, 0.0)


@torch.no_grad()
def load_hp_checkpoint_state(
    self: Any, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> Any:
    """Load this rank's fragment of one parameter from its folder of a universal checkpoint. `step` is returned.

    Args:
        self: A parameter of a program's own optimizer, with upstream's `_hp_mapping`: `get_hp_fragment()`, `lp_fragment_address` and
            `optim_fragment`, which gets the states.
    Raises:
        UnsupportedError: a parameter of ours, which `engine.load_checkpoint` loads; experts on several ranks ("compat-argument").
        CheckpointError: what is stored does not fit the parameter ("compat-files").
    """
    mapping = getattr(self, "_hp_mapping", None)
    if mapping is None:
        raise not_supported(
            "the state of a single parameter was to be loaded from a universal checkpoint",
            "Call engine.load_checkpoint with `checkpoint.load_universal`, which cuts every tensor for this rank.",
        )
    mapping.optim_fragment, step, address = {}, None, mapping.lp_fragment_address
    for path in sorted(Path(folder).glob("*.pt")):
        stored = load_pt(path)
        if path.stem == "step":
            step = stored
            continue
        if stored.get("is_expert_param") and ep_size > 1:
            raise not_supported(
                f"{folder} has experts, of which rank {ep_rank} of {ep_size} was to load its own",
                "Call engine.load_checkpoint with `checkpoint.load_universal`.",
            )
        part = cut_as_marked(self, stored, stored["param"], tp_rank, tp_world_size, path.stem)
        if part is None:
            part = _cut_as_joined(stored, self, tp_rank, tp_world_size)
        if address.start + address.numel > part.numel():
            raise refused("fragment-size", path, part.numel(), address.start, address.numel)
        fragment = part[address.start : address.start + address.numel]
        if path.stem == "fp32":
            mapping.get_hp_fragment().copy_(fragment)
        else:
            mapping.optim_fragment[path.stem] = fragment.clone()
    return step


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Let each parameter load itself: `param.load_hp_checkpoint_state(folder, tp_rank, tp_world_size)`."""
    for param in param_list:
        param.load_hp_checkpoint_state = partial(load_hp_checkpoint_state, param)

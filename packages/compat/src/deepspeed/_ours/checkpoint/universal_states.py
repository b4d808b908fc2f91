"""Upstream's functions of its universal layout: what ranks have of one parameter, joined by `ds_ckpt.convert`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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
        torch.cat([*fragments, torch.empty(0)]).reshape(tuple(shape))
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


def load_hp_checkpoint_state(*args: Any, **options: Any) -> Any:
    """Refuse: a single parameter is not loaded, `engine.load_checkpoint` loads universal checkpoints as a whole.

    Raises:
        UnsupportedError: always ("compat-argument").
    """
    raise not_supported(
        "the state of a single parameter was to be loaded from a universal checkpoint",
        "Call engine.load_checkpoint with `checkpoint.load_universal`, which cuts every tensor for this rank.",
    )

"""Which ranks form which groups, as upstream numbers them; and which of a checkpoint's files hold what. Arithmetic only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed._ours.base.forwarding import method, tells
from deepspeed._ours.base.raising import refused
from deepspeed._ours.base.runtime_utils import asked_of
from ds_comm import MeshSpec
from ds_config.errors import CheckpointError
from ds_config.regular_file import leads_out, replacing
from ds_moe.expert_groups import place_ranks
from ds_moe.module_list_block import ListedBlock
from ds_moe.packed_experts import PackedExperts


def expert_parallel_ranks(
    world_size: int, tensor_parallel_size_: int, expert_parallel_size_: int, pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """List the expert-parallel groups, and the expert-data-parallel groups that replicate the same experts.

    Args:
        use_data_before_expert_parallel_: Replicas of the same experts are neighbours instead.
    """
    degrees = {"tensor": tensor_parallel_size_, "pipe": pipeline_parallel_size_}
    ranks = place_ranks(
        MeshSpec.fit(world_size, **degrees), expert_parallel_size_, data_first=use_data_before_expert_parallel_
    )
    return [list(group) for group in ranks.expert], [list(group) for group in ranks.data]


# ---- files of a checkpoint: stage x tensor rank x data rank -> the files that hold it


class model_2d_descriptor:  # noqa: N801  upstream's name
    """What each (stage, tensor rank) of one data-parallel rank reads: indices of source files."""

    def __init__(
        self, old_pp_degree: int, old_tp_degree: int, new_pp_degree: int | None = None, new_tp_degree: int | None = None
    ) -> None:
        self.pp_degree = new_pp_degree or old_pp_degree
        self.tp_degree = new_tp_degree or old_tp_degree
        self._data: dict[tuple[int, int], list[int]] = {
            place: [] for place in product(range(self.pp_degree), range(self.tp_degree))
        }

    def add_data(self, pp_index: int, tp_index: int, data: Sequence[int]) -> None:
        """Let it read these, too."""
        self._data[pp_index, tp_index] += data

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """List the files that a (stage, tensor rank) position reads; None selects all stages, or all tensor ranks."""
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        tensors = range(self.tp_degree) if tp_index is None else [tp_index]
        return [file for place in product(stages, tensors) for file in self._data[place]]


@dataclass(frozen=True)
class model_3d_desc:  # noqa: N801  upstream's name
    """The degrees that a checkpoint was written with, or is to be read with: stages, tensor ranks, data ranks."""

    pp_degree: int = 1
    tp_degree: int = 1
    dp_degree: int = 1

    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def get_desc(self) -> str:
        """Format the degrees as text: pipeline, tensor, data."""
        return f"{self.pp_degree},{self.tp_degree},{self.dp_degree}"

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether each degree of `target_3d_desc` divides this one's, and what does not."""
        pairs = (
            ("pp", self.pp_degree, target_3d_desc.pp_degree),
            ("tp", self.tp_degree, target_3d_desc.tp_degree),
            ("dp", self.dp_degree, target_3d_desc.dp_degree),
        )
        wrong = [f"{name} degree {old} -> {new}" for name, old, new in pairs if new < 1 or old % new]
        return not wrong, wrong

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[model_2d_descriptor]:
        """List, for each data rank of `target_3d_desc`, the files of this checkpoint that each position reads.

        File (stage p, tensor t, data d) has the index `p * tp + t + d * pp * tp`. Neighbouring stages and tensor ranks
        are merged; the
        files of a merged position, all data ranks of a source position before the next, are split equally over the new
        data ranks.

        Raises:
            PlanError: a degree does not divide ("compat-argument").
        """
        del verbose
        target = target_3d_desc
        fits, wrong = self.can_reshape(target)
        if not fits:
            raise refused("degrees-divide", self.get_desc(), target.get_desc(), ", ".join(wrong))
        plans = [model_2d_descriptor(target.pp_degree, target.tp_degree) for _ in range(target.dp_degree)]
        stages, tensors = self.pp_degree // target.pp_degree, self.tp_degree // target.tp_degree
        layer = self.pp_degree * self.tp_degree
        for p, t in product(range(target.pp_degree), range(target.tp_degree)):
            old = product(range(p * stages, (p + 1) * stages), range(t * tensors, (t + 1) * tensors))
            files = [q * self.tp_degree + u + rank * layer for q, u in old for rank in range(self.dp_degree)]
            each = len(files) // target.dp_degree
            for data, plan in enumerate(plans):
                plan.add_data(p, t, files[data * each : (data + 1) * each])
        return plans


_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:\w*_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def parallel_metadata(mpu: Any) -> dict[str, dict[str, int]]:
    """Return a checkpoint's record of the parallel degrees of `mpu`."""
    stages = asked_of(mpu, ("pipe_parallel", "pipeline_model_parallel"), "world_size", 1)
    tensors = asked_of(mpu, ("slice_parallel", "tensor_model_parallel", "model_parallel"), "world_size", 1)
    return {"checkpoint_parallel_dimensions": {"pp_degree": int(stages), "tp_degree": int(tensors)}}


def get_model_3d_descriptor(dir: str) -> model_3d_desc:  # noqa: A002  upstream's name
    """Return the degrees of upstream's checkpoint in a folder, from its files' records and names.

    Raises:
        CheckpointError: only some files record the degrees, or the records differ ("compat-files").
    """
    return DeepSpeedCheckpoint(dir).original


def _degrees(folder: Path, states: Sequence[Mapping[str, Any]], optims: Sequence[str]) -> model_3d_desc:
    recorded = [state.get("checkpoint_parallel_dimensions") for state in states]
    if any(dimensions is None for dimensions in recorded) and any(dimensions is not None for dimensions in recorded):
        raise _bad(
            folder, "checkpoint_parallel_dimensions is missing from model-state files of a checkpoint that has it"
        )
    if any(dimensions != recorded[0] for dimensions in recorded):
        raise _bad(folder, "checkpoint_parallel_dimensions disagrees across model-state files")
    ranks = {match[1] for path in optims if (match := _OPTIM.fullmatch(Path(path).name))}
    first = recorded[0] if recorded else None
    pp, tp = (1, max(1, len(states))) if first is None else (int(first["pp_degree"]), int(first["tp_degree"]))
    return model_3d_desc(pp, tp, max(1, len(ranks)))


def _bad(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {what}",
        code="compat-files",
        fix="Save the checkpoint again, or remove files that do not belong to it.",
    )


class ZeROCheckpoint:
    """The files of upstream's ZeRO checkpoint in a folder, by the place that wrote them; `reshape` joins places."""

    def __init__(self, dir: str) -> None:  # noqa: A002  upstream's name
        self.dir = dir
        self.src_3d = self.target_3d = get_model_3d_descriptor(dir)
        self.file_list = DeepSpeedCheckpoint(dir).zero_files
        self.num_files = len(self.file_list)

    get_src_tp_degree = tells("src_3d.tp_degree", "Return the checkpoint's tensor-parallel degree.")

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Read it as one of these degrees."""
        self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """List the files that a position of the target degrees reads."""
        plan = self.src_3d.reshape(self.target_3d)[dp_index]
        return [self.file_list[file] for file in plan.get_data(pp_index, tp_index)]


def _differs(axis: str, meaning: str) -> Any:
    name = f"{axis}_degree"
    return method(lambda self: getattr(self, name) != getattr(self.original, name), meaning)


class DeepSpeedCheckpoint:
    """Upstream's ZeRO checkpoint in a folder, to look into: its files by place, what its model files say, its degrees.

    `ds_ckpt.convert` reads the tensors. Every model file is read once, by an unpickler that makes data only.
    """

    def __init__(
        self,
        dir: str,  # noqa: A002  upstream's name
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        self.dir = dir
        names = sorted(path for path in Path(dir).iterdir() if path.is_file())
        self.file_list = [str(path) for path in names]
        self.mp_rank_files = [str(path) for path in names if _MODEL.fullmatch(path.name)]
        self.zero_files = [str(path) for path in names if _OPTIM.fullmatch(path.name)]
        self.layer_files = [str(path) for path in names if path.name.startswith("layer_")]
        self.model_state_metadata = [
            torch.load(file, map_location="cpu", weights_only=True) for file in self.mp_rank_files
        ]
        self.original = _degrees(Path(dir), self.model_state_metadata, self.zero_files)
        self.tp_degree = tp_degree or self.original.tp_degree
        self.pp_degree = pp_degree or self.original.pp_degree
        self.dp_degree = dp_degree or self.original.dp_degree

    def get_checkpoint_info(self, info_key: str = "universal_checkpoint_info") -> Any:
        """Return an entry of the first model file; None where the entry is missing."""
        return self.model_state_metadata[0].get(info_key) if self.model_state_metadata else None

    def get_iteration(self) -> int:
        """Steps that were done."""
        return int(self.get_checkpoint_info("iteration") or self.get_checkpoint_info("global_steps") or 0)

    is_change_tp_degree = _differs("tp", "Whether it is to be read with other tensor ranks than it was written with.")

    is_change_pp_degree = _differs("pp", "Whether with other stages.")

    is_change_dp_degree = _differs("dp", "Whether with other data-parallel ranks.")


def expert_layers(model_state_metadata: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Concatenate the model files' records of layers with replaced experts (`ds_autoep_layers`).

    Raises:
        CheckpointError: a record is not a list ("compat-files").
    """
    layers: list[Any] = []
    for state in model_state_metadata:
        entries = state.get("ds_autoep_layers", [])
        if not isinstance(entries, list):
            raise refused("layers-list")
        layers += entries
    return layers


_FIELDS = ("moe_layer_id", "module_path", "num_experts", "num_local_experts", "ep_size", "expert_key_prefix")


def cut_layers(model: nn.Module) -> list[dict[str, Any]]:
    """Build a checkpoint's record of the layers under expert parallelism (`ds_autoep_layers`)."""
    blocks = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, PackedExperts | ListedBlock)]
    rows = [(name, layer.num_experts, layer.ep_size) for name, layer in blocks]
    records = [
        (number, name, experts, experts // ranks, ranks, name) for number, (name, experts, ranks) in enumerate(rows)
    ]
    return [dict(zip(_FIELDS, row, strict=True)) for row in records]


def check_layers(layers: Any) -> None:
    """Whether what a checkpoint says of such layers can be read.

    Raises:
        CheckpointError: it is no list, or an entry lacks a field ("compat-files"); a RuntimeError, too.
    """
    lacking = [set(_FIELDS).difference(entry) for entry in layers] if isinstance(layers, list) else []
    if not isinstance(layers, list) or any(lacking):
        what = (
            f"missing fields {sorted(set().union(*lacking))}"
            if lacking
            else f"a {type(layers).__name__}, expected a list"
        )
        raise refused("layers-malformed", what)


def fragment_path(temp_dir: str, param_name: str, state_name: str, dp_rank: int) -> str:
    """Return the path of a data-parallel rank's fragment of a parameter's state, named as by upstream's converter."""
    return os.path.join(temp_dir, param_name, "0", f"{state_name}.{dp_rank:02d}")


def join_expert_fragments(
    temp_dir: str, output_dir: str, expert_param_info: Mapping[str, Mapping[str, Any]], slice_shapes: Mapping[str, Sequence[int]],
    dp_degree: int, tp_degree: int, use_data_before_expert_parallel: bool,
) -> None:  # fmt: skip
    """Write the states of all experts' parameters, whole, into upstream's universal layout.

    Raises:
        CheckpointError: parts that do not make up the experts, or layers cut over ranks ("compat-files").
    """
    for name, info in expert_param_info.items():
        ranks, folder = info["ep_size"], Path(output_dir, "zero", name)
        if leads_out(output_dir, f"zero/{name}"):
            raise refused("experts-outside", name, output_dir)
        if tp_degree != 1 or dp_degree % ranks or slice_shapes[name][0] * ranks != info["num_experts"]:
            raise refused("experts-parts", name, slice_shapes[name][0], dp_degree, tp_degree, info)
        owners = torch.arange(dp_degree, device="cpu")
        # Those of one expert group after the other: neighbours, or every so many-th rank.
        owners = owners if use_data_before_expert_parallel else owners.view(-1, ranks).t().flatten()
        folder.mkdir(parents=True, exist_ok=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            parts = [
                torch.load(fragment_path(temp_dir, name, state, rank), weights_only=True) for rank in owners.tolist()
            ]
            whole = torch.cat([part.flatten() for part in parts]).view(-1, *slice_shapes[name][1:])
            facts = {"is_expert_param": True, "ep_num_experts": info["num_experts"]}
            with replacing(folder / f"{state}.pt") as draft, draft.open("wb") as file:
                torch.save({"param": whole, **facts}, file)
        steps = Path(fragment_path(temp_dir, name, "step", 0))
        if steps.is_file():
            with replacing(folder / "step.pt") as draft, draft.open("wb") as file:
                torch.save(torch.load(steps, weights_only=True), file)

"""DeepSpeed's regular layout (ZeRO 1, 2, 3; pipeline stages; experts), written: where elements lie, then the files.

Words: a *flat* is one flat tensor of one rank, the part of an optimizer group (of a sub-group at stage 3) that the rank
updates; its *pieces* are ranges of parameters, end to end. Optimizer states have the layout of the fp32 flats.

- Stages 1 and 2: a group's parameters end to end (dealt out by rank with `round_robin_gradients`, each at 16 bytes with
  `parameter_alignment`), padded to a multiple of 2 * ranks, cut into equal parts. The fp32 flats are stored without the
  padding at the end, the optimizer's states with it.
- Stage 3: of every parameter each rank has ceil(n / ranks) elements, padded; a flat is those of a sub-group end to end.
- Experts belong to groups of their own, spread over every `experts`-th rank; files have one global expert each, flats
  use the numbers that the experts have on their rank.
- A pipeline stage is a model-parallel rank with groups of its own; the model is in one file per layer. Parameters of tied layers
  are in the groups of every stage that has one, and in the file of each of those layers.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ds_ckpt.convert.client_entries import client_entries
from ds_ckpt.convert.deepspeed_folders import check_tag
from ds_ckpt.convert.module_states import extra_entries, in_parts
from ds_ckpt.convert.pickled import FragmentAddress, LossScaler, clip_of, require_pickle, save_pt, scaler_of
from ds_ckpt.convert.regular_plan import (
    EXPERT,
    Flat,
    FlatPiece,
    Regular,
    _own,
    _owner,
    alignment_paddings,
    plan_flats,
)
from ds_ckpt.convert.tensor_source import TensorSource, never_stepped
from ds_ckpt.jsontext import Json
from ds_ckpt.local import new_token
from ds_ckpt.shard_tensors import torch_dtype
from ds_config.errors import CheckpointError, UnsupportedError
from ds_config.regular_file import replace_text

__all__ = ["EXPERT", "Flat", "FlatPiece", "Regular", "plan_flats", "write_regular"]

_LAYER: Final = re.compile(r"(\d+)\.(.*)")
_TIED: Final = re.compile(r"tied_modules\.([^.]+)\.(.*)")
_VERSION: Final = "0.19.8"  # whose loader was checked against these files


def write_regular(
    source: TensorSource, out: str | os.PathLike[str], tag: str, layout: Regular, *, allow_pickle: bool = False
) -> Path:
    """Write `source` as `out/tag` as DeepSpeed itself would have, for runs cut as `layout` says; `latest` names it.

    `source` has our names; meta["optimizer"] as ds_engine keeps it gives groups, scalars and the loss scale.

    Raises:
        UnsupportedError: "ckpt-pickle" without `allow_pickle`; "ckpt-foreign-layout": what this layout cannot hold.
        CheckpointError: "ckpt-target-exists"; "ckpt-foreign": groups that are not known or do not fit the parameters.
    Cost: one rank's file in host memory; a tensor is read once for each rank that has a part of it.
    """
    require_pickle(allow_pickle, "DeepSpeed's regular layout")
    root = Path(out)
    check_tag(root, tag)
    target, draft = root / tag, root / f".tmp-{tag}-{new_token()}"
    if target.exists():
        raise CheckpointError(f"{target} exists", code="ckpt-target-exists", fix="Choose another tag or directory.")
    layout = layout.completed(source.meta.get("config") or {})
    stages = _stages(source, layout)
    draft.mkdir(parents=True)
    try:
        for index, stage in enumerate(stages):
            _RankFileWriter(source, layout, draft, stage).write(index)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    replace_text(root / "latest", tag)
    return target


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one model-parallel rank has: names, the optimizer groups, what else the meta knows of those, layer numbers, and DeepSpeed's
    names of its copies of untied parts of tied layers."""

    names: set[str]
    groups: list[list[str]]
    known: list[Json]
    layers: range
    copies: Mapping[str, str]


class _RankFileWriter:
    """The files of one model-parallel rank: all of the model, or one pipeline stage of it."""

    def __init__(self, source: TensorSource, layout: Regular, folder: Path, stage: _Stage) -> None:
        self.source, self.layout, self.folder = source, layout, folder
        self.names, self.groups, self.known, self.layers = stage.names, stage.groups, stage.known, stage.layers
        self.copies = stage.copies
        self.trained = {n for group in stage.groups for n in group}
        self.unused = {n for group in never_stepped(source) for n in group}
        self.meta, self.optimizer = source.meta, dict(source.meta.get("optimizer") or {})

    def write(self, mp: int) -> None:
        """Write all files of the model-parallel rank number `mp`."""
        prefix = "bf16_" if self.layout.dtype == "bfloat16" else ""
        for rank in range(self.layout.ranks):
            body = {"optimizer_state_dict": self._optimizer(rank), "ds_config": self._config(), "ds_version": _VERSION}
            save_pt(body, self.folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
        if self.layout.stage == 3:
            for rank in range(self.layout.ranks):
                save_pt(self._model(rank), self.folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt")
            return
        save_pt(self._model(0), self.folder / f"mp_rank_{mp:02d}_model_states.pt")
        self._layers()
        self._experts(mp)

    # ---- the optimizer's file

    def _optimizer(self, rank: int) -> dict[str, Any]:
        flats = plan_flats([self._sizes(names) for names in self.groups], self.layout, rank)
        inner = {
            "state": dict(enumerate(self._states(flat) for flat in flats)),
            "param_groups": self._param_groups(flats),
        }
        fp32 = [self._filled(flat, "") for flat in flats]
        ranks = self.layout.ranks
        scaler = (scaler_of(self.meta) if self.layout.dtype == "float16" else None) or LossScaler(1.0)
        body: dict[str, Any] = {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic, "overflow": False}
        body["zero_stage"] = self.layout.stage
        if self.layout.stage == 3:
            return {**body, "partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": fp32}
        parts = [_own(self._sizes(names), self.layout, rank)[2] for names in self.groups]
        return {
            **body,
            # DeepSpeed clips by what it loads, not by its own configuration.
            "clip_grad": clip_of(self.meta),
            "base_optimizer_state": inner,
            # Copies: a view would be stored with all it is a part of.
            "single_partition_of_fp32_groups": [
                f[: p.numel - p.padding].clone() for f, p in zip(fp32, flats, strict=True)
            ],
            "group_paddings": [flat.padding for flat in flats],
            "param_alignment_paddings": [
                alignment_paddings(_own(self._sizes(names), self.layout, rank)[0], self.layout) for names in self.groups
            ],
            "partition_count": parts,
            "ds_version": _VERSION,
            "param_slice_mappings": [self._addresses(flat) for flat in flats],
        }

    def _param_groups(self, flats: Sequence[Flat]) -> list[dict[str, Any]]:
        out = []
        for number, names in enumerate(self.groups):
            group = {**self.known[number], "params": [i for i, flat in enumerate(flats) if flat.group == number]}
            if EXPERT.fullmatch(names[0]):
                group = {**group, "moe": True, "name": f"ep_size_{self.layout.experts}"}
            out.append({k: tuple(v) if k == "betas" else v for k, v in group.items()})
        return out

    def _states(self, flat: Flat) -> dict[str, Any]:
        names = [name for name in self.groups[flat.group] if name not in self.unused]
        states: dict[str, Any] = {}
        for key, values in (self.optimizer.get("scalars") or {}).items():
            numbers = {values[n] for n in names if n in values}
            if len(numbers) > 1 or (numbers and any(n not in values for n in names)):
                raise UnsupportedError(
                    f"the parameters of optimizer group {flat.group} differ in {key!r}: {sorted(numbers)[:5]}",
                    code="ckpt-foreign-layout",
                    fix="DeepSpeed keeps one per group; use its universal layout.",
                )
            if numbers:
                states[key] = torch.tensor(float(numbers.pop()), device="cpu")
        for key in self._state_keys(names):
            states[key] = self._filled(flat, key)
        return states

    def _state_keys(self, names: Sequence[str]) -> list[str]:
        """List the optimizer states that the parameters `names` of a group have.

        Every parameter must have all of these states, each of the parameter's shape.
        """
        entries = self.source.entries
        keys = sorted({k.rpartition("/")[2] for n in names for k in entries if k.startswith(f"optim/{n}/")} - {"step"})
        for name, key in itertools.product(names, keys):
            entry = entries.get(f"optim/{name}/{key}")
            if entry is None or entry.shape != entries[f"param/{name}"].shape:
                raise UnsupportedError(
                    f"the state {key!r} of {name!r} is {'absent' if entry is None else f'of shape {list(entry.shape)}'}",
                    code="ckpt-foreign-layout",
                    fix="Only states that lie like the parameters fit into DeepSpeed's flat tensors.",
                )
        return keys

    def _filled(self, flat: Flat, state: str) -> Tensor:
        out = torch.zeros(flat.numel, device="cpu")
        at = 0
        for piece in flat.pieces:
            entry = self.source.entries.get(f"optim/{piece.name}/{state}" if state else f"param/{piece.name}")
            numel = piece.stop - piece.start
            if numel and entry is not None:
                out[at : at + numel] = entry.read().reshape(-1)[piece.start : piece.stop]
            at += numel + piece.pad
        return out

    def _addresses(self, flat: Flat) -> dict[str, FragmentAddress]:
        out, at = {}, 0
        for piece in flat.pieces:
            if piece.start < piece.stop:
                out[self._local_name(piece.name)] = FragmentAddress(piece.stop - piece.start, at)
            at += piece.stop - piece.start + piece.pad
        return out

    # ---- the model's files

    def _model(self, rank: int) -> dict[str, Any]:
        counters = dict(self.meta.get("counters") or {})
        partitioned, piped = self.layout.stage == 3, bool(self.layout.pipeline)
        frozen = [n for n in self._frozen() if self.layout.stage > 1]
        shared = {a: t for a, t in self._shared().items() if t in self.names}
        stages = len(self.layout.pipeline) or 1
        moe = _experts_of(n for names in self.groups for n in names)
        return {
            "module": None if piped else self._module(partitioned),
            "buffer_names": [
                self._named(key.partition("/")[2]) for key in self.source.entries if self._has(key, "buffer")
            ],
            "optimizer": None,
            "param_shapes": self._shapes(),
            "frozen_param_shapes": {self._named(n): torch.Size(self.source.entries[f"param/{n}"].shape) for n in frozen}
            or None,
            "shared_params": shared,
            "frozen_param_fragments": {self._named(n): self._fragment(n, rank) for n in frozen} or None,
            "lr_scheduler": self.meta.get("scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": int(counters.get("skipped", 0)),
            "global_steps": int(counters.get("steps", 0)),
            "global_samples": int(counters.get("samples", 0)),
            "dp_world_size": self.layout.ranks,
            "mp_world_size": stages,
            **({"checkpoint_parallel_dimensions": {"pp_degree": stages, "tp_degree": 1}} if piped else {}),
            "ds_config": self._config(),
            "ds_version": _VERSION,
            **({"num_experts": [len(ids) for ids in moe.values()], "ds_autoep_layers": None} if moe else {}),
            **client_entries(self.meta.get("client")),
        }

    def _module(self, partitioned: bool) -> dict[str, Any]:
        # Tied names hold the same object, which is stored once.
        out: dict[str, Any] = {}
        for key in self.source.entries:
            kind, _, name = key.partition("/")
            if kind not in ("param", "buffer") or name not in self.names or EXPERT.fullmatch(name):
                continue
            empty = partitioned and kind == "param"
            out[name] = torch.empty(0, dtype=torch_dtype(self.layout.dtype), device="cpu") if empty else self._half(key)
        shared = {alias: out[target] for alias, target in self._shared().items() if target in out}
        return in_parts({**out, **shared, **extra_entries(self.meta.get("extra"))}, self.layout.nested)

    def _half(self, key: str) -> Tensor:
        """Read a tensor for the model files: a trained parameter in the model's dtype, any other tensor unchanged."""
        value, name = self.source.entries[key].read(), key.partition("/")[2]
        return value.to(torch_dtype(self.layout.dtype)) if name in self.trained else value

    def _shapes(self) -> list[dict[str, torch.Size]]:
        flats = plan_flats([self._sizes(names) for names in self.groups], self.layout, 0)
        each = [[p.name for p in f.pieces] for f in flats] if self.layout.stage == 3 else self.groups
        local_names = [self._local(names) if self.layout.stage < 3 else {n: n for n in names} for names in each]
        return [
            {local: torch.Size(self.source.entries[f"param/{name}"].shape) for name, local in names.items()}
            for names in local_names
        ]

    def _fragment(self, name: str, rank: int) -> Tensor:
        whole = self._half(f"param/{name}")
        if self.layout.stage < 3:
            return whole
        each = -(-whole.numel() // self.layout.ranks)
        part = whole.reshape(-1)[rank * each : (rank + 1) * each]
        return torch.cat([part, part.new_zeros(each - part.numel())])

    def _layers(self) -> None:
        if not self.layout.pipeline:
            return
        # DeepSpeed needs those of modules without tensors, too; its tools take the first file for the embedding's.
        layers: dict[int, dict[str, Any]] = {n: {} for n in self.layers if n not in self.layout.functions}
        for key in self.source.entries:
            kind, _, name = key.partition("/")
            if kind in ("param", "buffer") and name in self.names:
                numbers, leaf = _place(name, self.layout)
                for number in set(numbers) & layers.keys():
                    layers[number][leaf] = self._half(key)
        for name, value in extra_entries(self.meta.get("extra")).items():
            numbers, leaf = _place(name, self.layout)
            for number in set(numbers) & layers.keys():
                layers[number][leaf] = value
        place = self.layout.place and f"-{self.layout.place}"
        for number, state in layers.items():
            save_pt(state, self.folder / f"layer_{number:02d}{place}-model_states.pt")

    def _experts(self, mp: int) -> None:
        for layer, (prefix, ids) in enumerate(_experts_of(n for names in self.groups for n in names).items()):
            for number in sorted(ids):
                expert_prefix = f"{prefix}{number}."
                state = {n: self._half(f"param/{n}") for n in sorted(self.names) if n.startswith(expert_prefix)}
                save_pt(state, self.folder / f"layer_{layer}_expert_{number}_mp_rank_{mp:02d}_model_states.pt")

    # ---- names

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        return {n: torch.Size(self.source.entries[f"param/{n}"].shape).numel() for n in names}

    def _local(self, names: Sequence[str]) -> dict[str, str]:
        """Map the global names of a group's parameters on rank 0 to their names on that rank."""
        sizes, _, _ = _own(self._sizes(names), self.layout, 0)
        return {name: self._local_name(name) for name in sizes}

    def _named(self, name: str) -> str:
        return self.copies.get(name, name)

    def _local_name(self, name: str) -> str:
        name = self._named(name)
        if self.layout.experts == 1 or not EXPERT.fullmatch(name):
            return name
        every = {n: 0 for names in self.groups for n in names if EXPERT.fullmatch(n)}
        return _owner(name, every, self.layout.experts)[1]

    def _frozen(self) -> list[str]:
        named = [key.partition("/")[2] for key in self.source.entries if self._has(key, "param")]
        return [n for n in named if n not in self.trained]

    def _has(self, key: str, kind: str) -> bool:
        key_kind, _, name = key.partition("/")
        return key_kind == kind and name in self.names

    def _shared(self) -> dict[str, str]:
        aliases = self.source.aliases.items()
        return {a.removeprefix("param/"): t.removeprefix("param/") for a, t in aliases if a.startswith("param/")}

    def _config(self) -> Json:
        return self.meta.get("config") or {}


def _stages(source: TensorSource, layout: Regular) -> list[_Stage]:
    """Split names and optimizer groups into pipeline stages; a single stage without a pipeline."""
    names = {key.partition("/")[2] for key in source.entries if key.startswith(("param/", "buffer/"))}
    groups, known = _groups(source, layout), list((source.meta.get("optimizer") or {}).get("groups") or [])
    if not layout.pipeline:
        return [_Stage(names, groups, known, range(0), {})]
    unknown = sorted(n for n in names if not _place(n, layout)[0])
    if unknown:
        raise UnsupportedError(
            f"{unknown[0]!r} is in no layer of a pipeline (names of layers begin with their number)",
            code="ckpt-foreign-layout",
            fix="Say in Regular(tied=...) which layers share parameters, or use the universal layout.",
        )
    copies = _copies(names, layout)
    last = max((number + 1 for n in names for number in _place(n, layout)[0]), default=0)
    out = []
    for low, high in itertools.pairwise((*layout.pipeline, max(last, layout.layers))):
        here = range(low, high)
        first = {n: layers[0] for n in names if (layers := sorted(set(_place(n, layout)[0]) & set(here)))}
        own = {copy: source for copy, source in copies.items() if copy in first}
        first = {n: number for n, number in first.items() if n not in own.values()}
        stage_groups = [
            (known[i], stage_names) for i, group in enumerate(groups) if (stage_names := _ordered(group, first, own))
        ]
        out.append(
            _Stage(set(first), [group for _, group in stage_groups], [what for what, _ in stage_groups], here, own)
        )
    return out


def _copies(names: set[str], layout: Regular) -> dict[str, str]:
    """Map the copies of untied parts of tied layers, `NUMBER.PATH`, to the first, `tied_modules.KEY.PATH`, which is DeepSpeed's name of all."""
    keys = {number: key for key, numbers in layout.tied for number in numbers}
    matches = [match for n in names if (match := _LAYER.fullmatch(n)) is not None and int(match[1]) in keys]
    sources = {match[0]: f"tied_modules.{keys[int(match[1])]}.{match[2]}" for match in matches}
    return {copy: source for copy, source in sources.items() if source in names}


def _place(name: str, layout: Regular) -> tuple[tuple[int, ...], str]:
    """Return the layers that have a parameter or buffer, and its name in these layers.

    No layers where they are not known.
    """
    if (match := _LAYER.fullmatch(name)) is not None:
        return (int(match[1]),), match[2]
    tied = _TIED.fullmatch(name)
    return (dict(layout.tied).get(tied[1], ()), tied[2]) if tied else ((), name)


def _ordered(group: Sequence[str], first: Mapping[str, int], copies: Mapping[str, str]) -> list[str]:
    """Order the parameters of `group` that a stage has, given the `first` layer of each there.

    Tied parameters are in the order in which that stage comes to their layers; its copies have the places of the first ones.
    """
    instead = {source: copy for copy, source in copies.items() if copy in group}
    others = [instead.get(n, n) for n in group if copies.get(n) not in group]
    stage_names = [n for n in others if n in first]
    shared = {n for n in stage_names if _TIED.fullmatch(n) or n in copies}
    tied = iter(sorted((n for n in stage_names if n in shared), key=first.__getitem__))
    return [next(tied) if n in shared else n for n in stage_names]


def _groups(source: TensorSource, layout: Regular) -> list[list[str]]:
    """List the parameters of each optimizer group, in order.

    Raises CheckpointError "ckpt-foreign" where the groups are not known.
    """
    optimizer = source.meta.get("optimizer") or {}
    named = layout.groups if layout.groups is not None else optimizer.get("names")
    number = len(optimizer.get("groups") or [])
    if not named or len(named) != number:
        raise CheckpointError(
            f"the checkpoint has {number} optimizer groups, and names of the parameters of {len(named or ())}",
            code="ckpt-foreign",
            fix="Give Regular(groups=...): the names of each group in the order they were given to the optimizer.",
        )
    trained = {k.removeprefix("optim/").rpartition("/")[0] for k in source.entries if k.startswith("optim/")}
    shapes = {k.removeprefix("param/"): e.shape for k, e in source.entries.items() if k.startswith("param/")}
    empty = {n for n, shape in shapes.items() if 0 in shape}  # DeepSpeed counts them as frozen
    frozen = source.meta.get("frozen")
    skipped = empty | ((shapes.keys() if frozen is None else set(frozen)) - trained)
    groups = [[str(n) for n in names if (frozen is None and not trained) or n not in skipped] for names in named]
    flat, trained = [n for names in groups for n in names], trained - empty
    wrong = sorted((set(flat) ^ trained) & (trained | (set(flat) - shapes.keys())))
    if wrong or len(set(flat)) != len(flat) or not all(groups):
        raise CheckpointError(
            f"the groups do not name every trained parameter once: {', '.join(wrong[:5]) or 'one is named twice'}",
            code="ckpt-foreign",
            fix="Name each parameter that has optimizer states in one group.",
        )
    return groups


def _experts_of(names: Iterator[str]) -> dict[str, set[int]]:
    """Find the layers with experts, in the order of `names`: prefix -> numbers of its experts."""
    out: dict[str, set[int]] = {}
    for name in names:
        match = EXPERT.fullmatch(name)
        if match is not None:
            out.setdefault(match[1], set()).add(int(match[2]))
    return out

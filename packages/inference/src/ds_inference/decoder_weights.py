"""A checkpoint's tensors become the runner's weights, one at a time: read, put in order, cast, kept.

A checkpoint is anything that maps names to tensors: a folder of safetensors (`Folder`: a tensor is read when it is asked for), or a
module's `state_dict()`, whose tensors are used as they are where a role is exactly one of them.
"""

from __future__ import annotations

import errno
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ds_config.errors import CheckpointError, DsError
from ds_config.regular_file import read_regular_text
from ds_inference.families import Sources
from ds_inference.quantize import Weight, dequantised
from ds_inference.spec import DecoderSpec, ExpertsSpec, WeightSource
from ds_ops.formats import QuantTensor

__all__ = ["Folder", "Prefixed", "arranged", "read_config", "read_weights", "typed_folder_errors", "unread"]

_MOST_CONFIG_BYTES: Final = 2**24
_MOST_LAYERS: Final = 10_000
_LAYER_NUMBER: Final = re.compile(r"\.(\d+)\.")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def typed_folder_errors(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make `read`, whose first argument is a folder or a module, raise CheckpointError for whatever a torn folder makes it raise.

    Errors of a module, and memory that ran out on a device, stay what they are.
    """

    @functools.wraps(read)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        source: object = args[0] if args else kwargs.get("source")
        try:
            return read(*args, **kwargs)
        except (DsError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # readers of sizes, names and headers have no list of what may be wrong with them
            if isinstance(source, nn.Module):
                raise
            no_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
            fix = "Its files do not fit each other or were cut; copy or download the folder again."
            raise CheckpointError(
                f"{source} cannot be read: {type(error).__name__}: {str(error)[:500]}",
                code="inference-folder",
                fix="Take a smaller model, or a cache of fewer tokens; or its config.json is damaged."
                if no_memory
                else fix,
            ) from error

    return call


def read_config(folder: str | PathLike[str], name: str = "config.json") -> dict[str, Any]:
    """Read the `config.json` of a folder, or another one, which may be missing: it is empty then.

    Raises:
        CheckpointError: there is none, or it is not JSON ("inference-folder").
    """
    file = Path(folder) / name
    if name != "config.json" and not file.exists():
        return {}
    try:
        config: dict[str, Any] = json.loads(read_regular_text(file, _MOST_CONFIG_BYTES))
        if type(config) is not dict:
            raise ValueError("it is no JSON object")
        for key in ("num_hidden_layers", "num_layers", "n_layer"):
            if type(layers := config.get(key, 1)) is int and not 1 <= layers <= _MOST_LAYERS:
                raise ValueError(f"{key} is {layers}, and a model has 1 to {_MOST_LAYERS} layers")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}",
            code="inference-folder",
            fix="Give the folder that save_pretrained wrote: config.json and *.safetensors.",
        ) from error
    return config


class Folder(Mapping[str, Tensor]):
    """The tensors of all `*.safetensors` in a folder; each access reads one. Close it, or use it as a context."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{folder} has no *.safetensors",
                code="inference-folder",
                fix="Save the model with save_pretrained (safetensors is its default); pickled files are not read.",
            )
        self._files = [safe_open(file, framework="pt") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118  # not a dict

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where.clear()
        self._files.clear()


def read_weights(
    spec: DecoderSpec, sources: Sources, checkpoint: Mapping[str, Weight], keep: Callable[[str, Weight], Weight | None]
) -> dict[str, Weight]:
    """Read the weight of every role from a checkpoint.

    Args:
        checkpoint: Names to tensors, or to codes (`packed_checkpoints`).
        keep: Converts a role's full tensor: casts, shards, quantizes; returns None to drop the tensor. Called once a
        role, in order.
    Raises:
        CheckpointError: a tensor is missing ("inference-missing"); all missing tensors are named.
        ValueError: a tensor's shape is not the one that the configuration implies.
    """
    named = Prefixed(checkpoint)
    weights: dict[str, Weight] = {}
    missing: list[str] = []
    for role, choices in sources.items():
        numbers = range(len(spec.layers)) if "{i}" in role else range(1)
        for i in numbers:
            feed = spec.layers[i].feed if "{i}" in role else None
            chosen = _choose(choices, i, named)
            if chosen is None:
                if not all(choice.optional for choice in choices):
                    missing.append(choices[0].names[0].replace("{i}", str(i)))
                continue
            full = role.replace("{i}", str(i))
            whole = _make(chosen, i, named, spec, feed)
            _check_shape(spec, full, i, tuple(whole.shape))
            weight = keep(full, whole)
            del whole  # before the next one is read
            if weight is not None:
                weights[full] = weight
    needed = {"embed.weight"} if spec.tied else {"embed.weight", "head.weight"}
    missing += sorted(role for role in needed if role not in weights)
    if missing:
        raise CheckpointError(
            f"the checkpoint of a {spec.family} model lacks {', '.join(missing[:8])}"
            + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
            code="inference-missing",
            fix="Check that the folder is complete and that config.json belongs to it.",
        )
    return weights


def unread(spec: DecoderSpec, sources: Sources, checkpoint: Mapping[str, Weight]) -> list[str]:
    """List the weights of layers that no role reads: what they do to an answer, a runner of these roles would leave out."""
    named, known = Prefixed(checkpoint), set[str]()
    for role, choices in sources.items():
        for name in (name for choice in choices for name in choice.names):
            for i in range(len(spec.layers)) if "{i}" in role else range(1):
                feed = spec.layers[i].feed
                experts = feed.count if "{e}" in name and isinstance(feed, ExpertsSpec) else 1
                each = (name.replace("{i}", str(i)).replace("{e}", str(e)) for e in range(experts))
                known.update(named.checkpoint_name(one) for one in each if one in named)
    left = []
    for name in checkpoint:
        of_layer = _LAYER_NUMBER.search(name)
        if (
            name in known or of_layer is None or int(of_layer[1]) >= len(spec.layers)
        ):  # further ones predict several tokens
            continue
        module, _, kind = name.rpartition(".")
        if kind == "weight" or (
            kind == "bias" and f"{module}.weight" in checkpoint
        ):  # else a mask that files of old models have
            left.append(name)
    return left


class Prefixed(Mapping[str, Any]):
    """Names as the declarations have them; a checkpoint may lack the first part (`model.`), or have one more in front."""

    def __init__(self, inner: Mapping[str, Any]) -> None:
        self._inner = inner
        self._names = {name: name for name in inner}
        for name in inner:
            for front in ("model.language_model.", "language_model.model.", "language_model."):
                if name.startswith(front):
                    self._names.setdefault(("" if front == "language_model." else "model.") + name[len(front) :], name)
            for front in ("model.", "transformer.", "gpt_neox."):
                self._names.setdefault(front + name, name)

    def __getitem__(self, name: str) -> Any:
        return self._inner[self._names[name]]

    def checkpoint_name(self, name: str) -> str:
        """Return the name that the checkpoint has for `name`."""
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _choose(choices: tuple[WeightSource, ...], i: int, checkpoint: Mapping[str, Weight]) -> WeightSource | None:
    for choice in choices:
        if all(name.replace("{i}", str(i)).replace("{e}", "0") in checkpoint for name in choice.names):
            return choice
    return None


def _make(source: WeightSource, i: int, checkpoint: Mapping[str, Weight], spec: DecoderSpec, feed: Any) -> Weight:
    names = [name.replace("{i}", str(i)) for name in source.names]
    if source.layout == "stack" and isinstance(feed, ExpertsSpec):
        each = [[checkpoint[name.replace("{e}", str(e))] for name in names] for e in range(feed.count)]
        codes = _stacked_codes([part for parts in each for part in parts])
        if codes is not None:
            return replace(codes, shape=(feed.count, codes.rows // feed.count, codes.cols))
        numbers = [[dequantised(part) for part in parts] for parts in each]
        return torch.stack([torch.cat(parts) if len(parts) > 1 else parts[0] for parts in numbers])
    tensors = [checkpoint[name] for name in names]
    (first, *others) = tensors
    if isinstance(first, QuantTensor) and not others and source.layout in ("swapped", "paired"):
        return _paired_codes(first) if source.layout == "paired" else first  # codes are [E, out, in] already
    if source.layout == "rows" and (codes := _stacked_codes(tensors)) is not None:
        return codes
    return arranged(source, [dequantised(part) for part in tensors], i, spec)


def _stacked_codes(tensors: Sequence[Weight]) -> QuantTensor | None:
    """Put codes of matrices under each other; None where some are no codes, or of another kind."""
    codes = [part for part in tensors if isinstance(part, QuantTensor)]
    if len(codes) != len(tensors) or len({(c.spec, c.cols) for c in codes}) != 1:
        return None
    rows, first = sum(c.rows for c in codes), codes[0]
    return QuantTensor(torch.cat([c.wire for c in codes]), first.spec, first.cols, (rows, first.cols), first.dtype)


def _paired_codes(codes: QuantTensor) -> QuantTensor:
    """Put the rows of gates, which alternate with those of values, before them."""
    rows = codes.wire.view(codes.shape[0], codes.shape[1], -1)
    return replace(codes, wire=torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1).flatten(0, 1))


def _check_shape(spec: DecoderSpec, role: str, i: int, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a role's tensor is not of the shape that the configuration implies (`typed_folder_errors` names the folder).

    Before anything is allocated by the configuration's sizes alone: a damaged one may name any number.
    """
    expected = _expected_shape(spec, role, i)
    if expected is None or shape == expected:
        return
    raise ValueError(
        f"{role} has shape {list(shape)}; the configuration of the {spec.family} model implies {list(expected)}"
    )


def _expected_shape(spec: DecoderSpec, role: str, i: int) -> tuple[int, ...] | None:
    """Return the shape of a matrix between residual stream, heads and hidden units; None for other roles."""
    if role in ("embed.weight", "head.weight"):
        return spec.vocab, spec.embed or spec.hidden
    if not role.startswith("layers."):
        return None
    attention, feed = spec.layers[i].attention, spec.layers[i].feed
    name = role.split(".", 2)[2]
    if name == "attention.out.weight":
        return spec.hidden, attention.heads * attention.value_width
    if name == "attention.qkv.weight":
        keys_and_values = attention.kv_heads * (attention.width + attention.value_width)
        return attention.heads * attention.width + keys_and_values, spec.hidden
    if isinstance(feed, ExpertsSpec):
        matrices = {
            "feed.experts.up": (feed.count, 2 * feed.width, spec.hidden),
            "feed.experts.down": (feed.count, spec.hidden, feed.width),
            "feed.router.weight": (feed.count, spec.hidden),
        }
        return matrices.get(name)
    rows = 2 * feed.width if feed.gated else feed.width
    return {"feed.up.weight": (rows, spec.hidden), "feed.down.weight": (spec.hidden, feed.width)}.get(name)


def arranged(source: WeightSource, parts: list[Tensor], i: int, spec: DecoderSpec) -> Tensor:
    """Combine the tensors that a source names into the role's tensor, by the source's form."""
    if source.layout == "columns":
        parts = [part.t() for part in parts]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if source.layout in ("heads", "groups"):
        attention = spec.layers[i].attention
        queries = 1 if source.layout == "heads" else attention.heads // attention.kv_heads
        rows = whole.view(-1, queries + 2, attention.width, *whole.shape[1:])
        cut = (rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :])
        whole = torch.cat([part.reshape(-1, *whole.shape[1:]) for part in cut])
    elif source.layout == "flat":
        whole = whole.flatten()
    elif source.layout == "shards":
        q, v, k = whole.view(4, 3, -1, *whole.shape[1:]).transpose(0, 1)
        whole = torch.cat([part.reshape(-1, *whole.shape[1:]) for part in (q, k, v)])
    elif source.layout in ("swapped", "paired"):
        whole = whole.transpose(1, 2) if whole.dim() == 3 else whole
        if source.layout == "paired":
            whole = torch.cat([whole[:, 0::2], whole[:, 1::2]], dim=1)
    return whole

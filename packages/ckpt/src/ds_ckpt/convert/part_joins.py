"""How the parts that tensor-parallel ranks have of a parameter join: what `universal_checkpoint_info` in DeepSpeed's files says of it.

A map of blocks (`affine_map`, of 0.19.8) says it element by element. Lists of patterns say it otherwise: every rank has the whole
tensor, the mean is meant, the tensor is cut along its second dimension, or is made of several that are cut one by one (query, key and
value in one matrix). A tensor that no pattern names is cut along its first dimension. The states of an optimizer are cut as their parameter is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.convert.tensor_source import TensorEntry
from ds_config.errors import CheckpointError, DsError, UnsupportedError

__all__ = ["PartJoins"]

_WIDTHS_SINCE = 0.4
"""The version of the information from which on it says how wide the parts of each rank are."""

_LISTS = frozenset([
    "tp_replicated_parameter_patterns", "parameter_to_average_patterns", "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns", "parameter_with_2_sub_params_cat_dim_0",
])  # fmt: skip


class PartJoins:
    """The joins of one checkpoint.

    Args:
        info: `universal_checkpoint_info` of its files; empty: every tensor is cut along its first dimension.
        degree: How many ranks have a part of each layer.
    Raises:
        UnsupportedError: the information says of some tensors that it cannot be said how they join, or is newer than this program
            ("ckpt-foreign-layout").
    """

    def __init__(self, info: Mapping[str, Any], degree: int) -> None:
        blocks = info.get("affine_map") or {}
        if unknown := dict(info.get("autotp_unsupported_parameter_patterns") or {}):
            raise _unsupported("; ".join(f"{pattern}: {why}" for pattern, why in unknown.items()))
        if int(blocks.get("version", 1)) > 1:
            raise _unsupported(f"a map of blocks of version {blocks['version']}, which is newer than 1")
        self.degree, self._info = degree, info
        self._blocks: Mapping[str, Mapping[str, Any]] = blocks.get("params") or {}
        self._several = [(p, spec) for spec in info.get("parameter_with_sub_params") or () for p in spec["patterns"]]
        self._has_widths = float(info.get("universal_checkpoint_version") or 0.0) >= _WIDTHS_SINCE

    def shape(self, name: str, shapes: Sequence[Sequence[int]], *, state: bool = False) -> tuple[int, ...]:
        """Return the shape of the whole tensor, a vocabulary's with its padding, from those of the ranks' parts."""
        return tuple(self._padded(name, [torch.empty(tuple(s), device="meta") for s in shapes], state).shape)

    def join(self, name: str, parts: Sequence[Tensor], *, state: bool = False) -> Tensor:
        """Return the whole tensor, without the rows that a vocabulary was padded by for the ranks to divide it.

        Args:
            parts: Of the ranks, in order.
            state: Whether it is a state of the optimizer, and not the parameter.
        Raises:
            CheckpointError: the parts are not those that the information speaks of ("ckpt-foreign").
            UnsupportedError: a state of a parameter that ranks hold multiplied by a factor ("ckpt-foreign-layout").
        """
        whole = self._padded(name, parts, state)
        is_vocabulary = self._matches("vocabulary_parameter_patterns", name)
        return whole[: self.vocabulary] if is_vocabulary and self.vocabulary else whole

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary before it was padded; None where nobody says it."""
        size = self._info.get("original_vocab_size")
        return None if size is None else int(size)

    def _padded(self, name: str, parts: Sequence[Tensor], state: bool) -> Tensor:
        try:
            return self._joined(name, parts, state)
        except DsError:
            raise
        except (RuntimeError, IndexError, KeyError, ValueError) as error:
            raise _wrong(name, parts, str(error)[:200]) from error

    def entries(self, parts: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
        """Join what the ranks have, `param/<name>` and `optim/<name>/<state>`; buffers are those of the first.

        A vocabulary keeps the rows that it was padded by: the model that goes on has them.

        Raises:
            CheckpointError: a tensor is not on every rank ("ckpt-foreign").
        """
        whole = dict(parts[0])
        for key in dict.fromkeys(key for each in parts for key in each) if len(parts) > 1 else ():
            present = [each[key] for each in parts if key in each]
            if len(present) < len(parts):
                raise CheckpointError(
                    f"{key} is on {len(present)} of {len(parts)} tensor-parallel ranks",
                    code="ckpt-foreign",
                    fix="Complete the checkpoint.",
                )
            kind, _, name = key.partition("/")
            if kind != "buffer":
                state = kind == "optim"
                name = name.rpartition("/")[0] if state else name
                shape = self.shape(name, [part.shape for part in present], state=state)
                whole[key] = TensorEntry(shape, present[0].dtype, partial(self._read, name, present, state))
        return whole

    def _read(self, name: str, parts: Sequence[TensorEntry], state: bool) -> Tensor:
        return self._padded(name, [part.read() for part in parts], state).contiguous()

    def unused(self, names: Iterable[str]) -> set[str]:
        """Return the patterns of the lists that fit none of these parameters."""
        lists = (patterns for key, patterns in self._info.items() if key in _LISTS)
        there, known = {pattern for each in lists for pattern in each}, list(names)
        there |= {pattern for pattern, _ in self._several}
        return {pattern for pattern in there if not any(re.match(pattern, name) for name in known)}

    def cut_of(self, name: str, shape: Sequence[int]) -> dict[str, Any]:
        """Return what DeepSpeed's universal layout says beside a whole tensor, of this shape, of how it is to be cut."""
        cut: dict[str, Any] = {"vocab_tensor": True} if self._matches("vocabulary_parameter_patterns", name) else {}
        if self._matches("tp_replicated_parameter_patterns", name) or self._matches(
            "parameter_to_average_patterns", name
        ):
            return cut
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            return {"cat_dim": 0, "param_n_sub_params": 2, **cut}
        for pattern, spec in self._several:
            if re.match(pattern, name):
                dim, sizes = int(spec["partition_dim"]), list(spec["shape"])
                if isinstance(sizes[dim], int):  # how many there are, where the reader expects their sizes
                    sizes[dim] = (shape[dim] // sizes[dim],) * sizes[dim]
                several = {"patterns": list(spec["patterns"]), "shape": sizes, "partition_dim": dim}
                return {"sub_param_shape": several, **cut}
        return {"cat_dim": 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0, **cut}

    def _joined(self, name: str, parts: Sequence[Tensor], state: bool) -> Tensor:
        for pattern, entry in self._blocks.items():
            if re.match(pattern, name):
                return _placed(name, entry, parts, state)
        if self._matches("tp_replicated_parameter_patterns", name):
            if not parts[0].is_meta and any(not torch.equal(parts[0], part) for part in parts[1:]):
                raise ValueError("every rank should have the same")
            return parts[0]
        if self._matches("parameter_to_average_patterns", name):
            return torch.stack(list(parts)).mean(0)
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            halves = [part.shape[0] // 2 for part in parts]
            return _interleaved(parts, [halves, halves], 0)
        for pattern, spec in self._several:
            if re.match(pattern, name):
                return self._several_joined(pattern, spec, parts)
        return torch.cat(list(parts), 1 if self._matches("parameter_with_row_parallelism_patterns", name) else 0)

    def _several_joined(self, pattern: str, spec: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
        dim, shape = int(spec["partition_dim"]), list(spec["shape"])
        sizes = shape[dim]
        if self._has_widths:
            said = self._info.get("sub_param_shard_widths") or {}
            if pattern not in said:
                raise ValueError(f"it records no sub_param_shard_widths for {pattern}")
            widths = [[int(n) for n in each] for each in said[pattern]]
        else:
            if isinstance(sizes, int):  # how many there are, of one size
                total = sum(part.shape[dim] for part in parts)
                sizes = (total // sizes,) * sizes
            if any(size % self.degree for size in sizes):
                raise ValueError(
                    f"{sizes} do not divide by {self.degree} ranks, and the widths of the parts are not there"
                )
            widths = [[size // self.degree] * self.degree for size in sizes]
        if any(len(each) != self.degree for each in widths):
            raise ValueError(f"widths of {[len(each) for each in widths]} ranks for {self.degree}")
        known = [sum(n) if isinstance(n, tuple | list) else int(n) for n in shape]
        known[dim] = sum(map(sum, widths))
        known = list(torch.empty(sum(part.numel() for part in parts), device="meta").reshape(known).shape)
        views = [
            part.reshape([*known[:dim], sum(each[rank] for each in widths), *known[dim + 1 :]])
            for rank, part in enumerate(parts)
        ]
        return _interleaved(views, widths, dim)

    def _matches(self, key: str, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self._info.get(key) or ())


def _interleaved(parts: Sequence[Tensor], widths: Sequence[Sequence[int]], dim: int) -> Tensor:
    """Join tensors of which each rank has a part of each, one behind the other: first those of the first tensor.

    Args:
        widths: Of each tensor the sizes of the ranks' parts along `dim`.
    """
    split = [part.split([each[rank] for each in widths], dim) for rank, part in enumerate(parts)]
    return torch.cat([pieces[i] for i in range(len(widths)) for pieces in split], dim)


def _placed(name: str, entry: Mapping[str, Any], parts: Sequence[Tensor], state: bool) -> Tensor:
    """Copy the blocks of a map to where they are in the whole tensor."""
    shape = tuple(entry["logical_shape"])
    whole = parts[0].new_empty(shape)
    if whole.is_meta:
        return whole
    flat, covered = whole.view(-1), torch.zeros(whole.numel(), dtype=torch.bool, device="cpu")
    for rank, held in entry["ranks"].items():
        there = parts[int(rank)].reshape(-1)
        for block in held["pieces"]:
            scale = float(block.get("scale", 1.0))
            if scale != 1.0 and state:
                raise _unsupported(f"states of {name}, which ranks hold multiplied by {scale:g}")
            size = tuple(block["shape"])
            (start, steps), (at, strides) = block["source"], block["dest"]
            taken = torch.as_strided(there, size, tuple(strides), there.storage_offset() + at)
            torch.as_strided(flat, size, tuple(steps), start).copy_(taken if scale == 1.0 else taken / scale)
            torch.as_strided(covered, size, tuple(steps), start).fill_(True)
    if not bool(covered.all()):
        raise ValueError(f"the map of blocks leaves {int((~covered).sum())} elements out")
    return whole


def _wrong(name: str, parts: Sequence[Tensor], why: str) -> CheckpointError:
    return CheckpointError(
        f"the parts of {name}, {[list(part.shape) for part in parts]}, do not join as universal_checkpoint_info says: {why}",
        code="ckpt-foreign",
        fix="The files do not belong together, or the program that saved them described its layers wrongly.",
    )


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"how the parts of tensor-parallel ranks join is not known: {what}",
        code="ckpt-foreign-layout",
        fix="Convert the checkpoint with the DeepSpeed that wrote it (ds_to_universal.py), and read the result.",
    )

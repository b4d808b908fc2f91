"""One step of a decoder in one native call: packed weights, tables, and the call. What is computed: `native/include/ds/decoder.h`.

A table is a row of 8-byte words, in the order of the C++ structure of the same name; floats among them are fp64. There is no
backend in torch here: the runner that uses this (ds-inference) is the definition, and runs where this does not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import _call, _native
from ds_ops.packed_weights import PackedWeight, ProductInputs, address, pack
from ds_ops.shm_collectives import Channel
from ds_ops.threads import kernel_threads

__all__ = [
    "Activation",
    "DecoderExperts",
    "DecoderLatent",
    "DecoderLayer",
    "DecoderProgram",
    "KeptLayer",
    "Normed",
    "PackedWeight",
    "ProductInputs",
    "Score",
    "TokenRun",
    "obstacle",
    "pack",
]

_STEP_WORDS = 32
_RANK_FAILED = 4


class Score(enum.IntEnum):
    """Of a router's logits: a softmax of all, a sigmoid of each, a softmax of the chosen ones."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_CHOSEN = 2


class Activation(enum.IntEnum):
    """Of a feed-forward part; the numbers are those of `native/include/ds/decoder.h`."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    QUICK_GELU = 4
    RELU_SQUARED = 5


_KEPT = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def obstacle() -> str:
    """Return why the native step is not available; an empty string if available."""
    return _native.load("_cpu").reason if _native.load("_cpu").module is None else ""


def _word(value: float) -> int:
    return int(np.float64(value).view(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A norm; weights are fp32. Without a weight it is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    layer: bool = False

    def words(self) -> tuple[int, ...]:
        """Return the fields of the native struct `Normed`."""
        return (address(self.weight), address(self.bias), _word(self.eps), _word(self.offset), int(self.layer))


_NO_NORM = Normed()
_NO_MATRIX = (0,) * 8


@dataclass(frozen=True, slots=True, eq=False)
class DecoderExperts:
    """A layer's router and experts: see `Experts` of `native/include/ds/decoder.h`.

    Attributes:
        router: [count (+ 1 for the gate of the layer's own part), hidden].
        up, down: Of every expert that is held here, gated.
        first: Number of the first of them.
        pair: A group's score is the sum of its best two, else its best.
        correction: fp32 [count], added to scores for choosing.
        clamp, alpha: clamp > 0: (up + 1) * gate * sigmoid(alpha * gate), both cut at the clamp before.
        own_gated: The layer's own part is multiplied by a sigmoid of the router's last output.
    """

    router: PackedWeight
    up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    count: int
    chosen: int
    first: int = 0
    groups: int = 1
    chosen_groups: int = 1
    pair: bool = False
    score: Score = Score.SOFTMAX
    normalized: bool = True
    scale: float = 1.0
    correction: Tensor | None = None
    clamp: float = 0.0
    alpha: float = 1.0
    own_gated: bool = False
    _tables: tuple[np.ndarray, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        tables = tuple(np.array([m.words() for m in part], dtype=np.int64) for part in (self.up, self.down))
        object.__setattr__(self, "_tables", tables)

    def words(self) -> np.ndarray:
        """Pack the fields of the native struct `Experts` into an array, which must outlive the step."""
        up, down = (t.ctypes.data if len(t) else 0 for t in self._tables)
        fields = [*self.router.words(), up, down, self.count, self.chosen, self.first, len(self.up), self.groups]
        fields += [self.chosen_groups, int(self.pair), int(self.score), int(self.normalized), _word(self.scale)]
        fields += [address(self.correction), _word(self.clamp), _word(self.alpha), int(self.own_gated)]
        return np.array(fields, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLatent:
    """How a layer's keys and values are compressed: see `LatentAttentionSpec` of `native/include/ds/decoder.h`.

    Attributes:
        norm: Of latents.
        key_up, value_up: Of every head, [rank, plain] and [value width, rank].
        query_norm, query_up: What makes queries of `small` numbers; None: the layer's first matrix makes them.
    """

    norm: Normed
    key_up: Sequence[PackedWeight]
    value_up: Sequence[PackedWeight]
    rank: int
    plain: int
    rotated: int
    value_width: int
    query_norm: Normed = _NO_NORM
    query_up: PackedWeight | None = None
    _tables: tuple[np.ndarray, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        tables = tuple(np.array([m.words() for m in part], dtype=np.int64) for part in (self.key_up, self.value_up))
        object.__setattr__(self, "_tables", tables)

    def words(self) -> np.ndarray:
        """Pack the fields of the native struct `LatentAttentionSpec` into an array, which must outlive the step."""
        up = self.query_up
        fields = [*self.query_norm.words(), *self.norm.words(), *(_NO_MATRIX if up is None else up.words())]
        fields += [t.ctypes.data for t in self._tables]
        fields += [self.rank, self.plain, self.rotated, 0 if up is None else up.inner, self.value_width]
        return np.array(fields, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A layer: see `Layer` of `native/include/ds/decoder.h` for what each is.

    Attributes:
        norms: Before and after attention, before and after the feed-forward part, of queries, of keys.
        matrices: qkv, out, up, down; without the last two there are only experts.
        experts: Beside or instead of the layer's own feed-forward part.
        latent: Then `width` is rank + rotated, `value_width` is rank, and `kv_heads` says in how many parts heads are dealt out.
        rope: (number of the tables, rotated features, whether pairs are neighbours); None: no rotation.
        whole, norm_each, norm_late: Norms of queries and keys: over all heads at once; every head has weights of its own; they come
            after the rotation.
        clip: Queries, keys and values are cut to [-clip, clip]; 0: not.
        residual: Outputs of both parts are multiplied by it.
    """

    matrices: tuple[PackedWeight, PackedWeight, PackedWeight | None, PackedWeight | None]
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    norms: tuple[Normed, ...] = (_NO_NORM,) * 6
    softcap: float = 0.0
    window: int = 0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    rope: tuple[int, int, bool] | None = None
    whole: bool = False
    parallel: bool = False
    after: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    norm_each: bool = False
    norm_late: bool = False
    clip: float = 0.0
    residual: float = 1.0
    experts: DecoderExperts | None = None
    latent: DecoderLatent | None = None

    def words(self) -> list[int]:
        """Return the fields of the native struct `Layer`, up to the tables of its experts, its latent and its cache."""
        fields = [word for norm in self.norms for word in norm.words()]
        fields += [word for matrix in self.matrices for word in (_NO_MATRIX if matrix is None else matrix.words())]
        rope, dim, pairs = self.rope or (-1, 0, False)
        fields += [self.heads, self.kv_heads, self.width, self.value_width, _word(self.scale), _word(self.softcap)]
        fields += [self.window, address(self.slopes), address(self.sinks), rope, dim, int(pairs), int(self.whole)]
        fields += [int(self.norm_each), int(self.norm_late), _word(self.clip), _word(self.residual)]
        return [*fields, int(self.parallel), int(self.after), int(self.activation), int(self.gated)]


@dataclass(frozen=True, slots=True, eq=False)
class KeptLayer:
    """A layer's cache: keys and values [blocks, size, heads, width], fp32, bf16, or int8 with scales fp32 [blocks, size, heads].

    Of a latent: keys [blocks, size, 1, rank + rotated], fp32 or bf16, and no values.
    """

    keys: Tensor
    values: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one sequence: rows [first, first + count) of the batch, at positions from `start` on."""

    first: int
    count: int
    start: int
    blocks: tuple[int, ...]


@dataclass(eq=False)
class DecoderProgram:
    """Layers and head, as tables; keeps what they point to alive.

    Args:
        hidden: Features of a row.
        layers, last, head: In order; the norm before the head may be none.
        ranks: Of those that hold parts of the layers, whose sums the step makes; None: this one holds them whole.
    Raises (every step):
        CommError: as `ranks` does.
    """

    hidden: int
    layers: Sequence[DecoderLayer]
    last: Normed
    head: PackedWeight
    ranks: Channel | None = None
    _table: np.ndarray = field(init=False)
    _parts: list[np.ndarray] = field(init=False)
    _scratch: Tensor = field(init=False)
    _loaded_layers: Sequence[KeptLayer] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._table = np.zeros((len(self.layers), _call.native().decoder_layer_words), dtype=np.int64)
        self._parts = []
        for row, layer in zip(self._table, self.layers, strict=True):
            words = layer.words()
            for part in (layer.experts, layer.latent):
                if part is not None:
                    self._parts.append(part.words())
                words.append(0 if part is None else self._parts[-1].ctypes.data)
            row[: len(words)] = words
        self._scratch = torch.empty(0, device="cpu")

    def step(
        self,
        x: Tensor,
        chunks: Sequence[TokenRun],
        outputs: Tensor,
        cache: Sequence[KeptLayer],
        turns: Tensor | None = None,
    ) -> Tensor:
        """Compute the rows of x, keep their keys and values, and return logits.

        Args:
            x: fp32 [T, hidden], embeddings; overwritten with the last layer's output.
            chunks: Cover all rows, in order.
            outputs: int64 [R]: rows whose logits are wanted.
            cache: One for each layer. Looked at when it comes for the first time: the same object is taken to be the same memory.
            turns: fp32 [2, ropes, T, .], cosines and sines; None: no rotation.
        Returns: fp32 [R, vocabulary].
        Raises:
            KernelError: "kernel-argument", "kernel-status".
        """
        rows = self._require(x, chunks, outputs, cache)
        if cache is not self._loaded_layers:
            self._table[:, -4:] = [
                [address(k.keys), address(k.values), address(k.key_scales), address(k.value_scales)] for k in cache
            ]
            self._loaded_layers = cache
        blocks = np.array([b for c in chunks for b in c.blocks], dtype=np.int64)
        ends = np.cumsum([len(c.blocks) for c in chunks])
        table = np.array(
            [
                (c.first, c.count, c.start, blocks.ctypes.data + 8 * (end - len(c.blocks)))
                for c, end in zip(chunks, ends, strict=True)
            ],
            dtype=np.int64,
        )
        logits = torch.empty(len(outputs), self.head.n, device="cpu")
        sines = (0, 0, 0) if turns is None else (address(turns), address(turns[1]), turns.shape[-1])
        words = [address(x), rows, self.hidden, self._table.ctypes.data, len(self.layers), *self.last.words()]
        words += [
            *self.head.words(),
            address(outputs),
            len(outputs),
            address(logits),
            table.ctypes.data,
            len(chunks),
            *sines,
        ]
        words += [cache[0].keys.shape[1], _KEPT[cache[0].keys.dtype], 0, 0]
        words += (0, 0) if self.ranks is None else self.ranks.sum_hook()
        step, module, threads = np.array(words, dtype=np.int64), _call.native(), kernel_threads()
        needed = module.decoder_scratch(step.ctypes.data, _STEP_WORDS, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.zeros(needed, device="cpu")
        step[-4:-2] = address(self._scratch), self._scratch.numel()
        status = module.decoder_step(step.ctypes.data, _STEP_WORDS, threads)
        if status == _RANK_FAILED and self.ranks is not None:
            self.ranks.check_sums()
        _call.finish("decoder_step", status)
        return logits[:, : self.head.outputs]

    def _require(self, x: Tensor, chunks: Sequence[TokenRun], outputs: Tensor, cache: Sequence[KeptLayer]) -> int:
        """Check that every address that the step reads or writes is inside its tensor."""
        _call.require("x", x, dtypes=(torch.float32,), numel=x.shape[0] * self.hidden)
        _call.require("outputs", outputs, dtypes=(torch.int64,))
        ends = [c.first + c.count for c in chunks]
        firsts = [0, *ends[:-1]]
        if (
            [c.first for c in chunks] != firsts
            or (ends[-1] if ends else 0) != x.shape[0]
            or len(cache) != len(self.layers)
        ):
            raise self._misfit(f"chunks end at {ends[-4:]} of {x.shape[0]} rows, {len(cache)} layers have a cache")
        wanted = outputs.tolist()
        if wanted and not 0 <= min(wanted) <= max(wanted) < x.shape[0]:
            raise self._misfit(f"outputs are not all below {x.shape[0]}")
        for layer, layer_cache in zip(self.layers, cache, strict=True) if cache is not self._loaded_layers else ():
            count, size, *rest = layer_cache.keys.shape
            heads = 1 if layer.latent else layer.kv_heads
            value_shape = None if layer_cache.values is None else list(layer_cache.values.shape)
            wanted_values = None if layer.latent else [count, size, heads, layer.value_width]
            fits = rest == [heads, layer.width] and value_shape == wanted_values and layer_cache.keys.dtype in _KEPT
            if not fits or (layer.latent and layer_cache.keys.dtype == torch.int8):
                raise self._misfit(f"keys {_call.describe(layer_cache.keys)}, values {value_shape}")
        count, size = cache[0].keys.shape[:2]
        for c in chunks:
            if c.count < 1 or c.start < 0 or len(c.blocks) * size < c.start + c.count:
                raise self._misfit(f"{c} in blocks of {size}")
            if min(c.blocks) < 0 or max(c.blocks) >= count:
                raise self._misfit(f"{c} in a cache of {count} blocks")
        return x.shape[0]

    @staticmethod
    def _misfit(description: str) -> KernelError:
        return _call.refuse(f"decoder step: {description}.", "Give chunks, outputs and caches of this batch.")

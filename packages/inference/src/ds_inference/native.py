"""A spec and its weights as a program of the native layer loop (`ds_ops.native_decoder`), where the loop has all that the spec asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_comm.shm.symmetric_arena import Arena
from ds_inference.packed_codes import PackedCodes
from ds_inference.paged_attention import BatchIndices, alibi_slopes
from ds_inference.quantize import Weight, dequantised
from ds_inference.rope import Rotation
from ds_inference.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mlp,
    Norm,
    RopeSpec,
)
from ds_ops.formats import INT4, INT8, QuantTensor
from ds_ops.native_decoder import (
    Activation,
    DecoderExperts,
    DecoderLatent,
    DecoderLayer,
    DecoderProgram,
    KeptLayer,
    Normed,
    PackedWeight,
    ProductInputs,
    Score,
    TokenRun,
    obstacle,
    pack,
)

__all__ = ["NativeDecoder", "TensorParallelShard", "native_obstacle"]

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
}
_NORMS = {
    "pre": "1.2.",
    "parallel": "1...",
    "parallel_norms": "1.2.",
    "sandwich": "1234",
    "post": ".1.2",
    "after": ".1.2",
}
"""By order of a layer: numbers of the norms before and after attention, before and after the feed-forward part."""
_MATRICES = ("attention.qkv", "attention.out", "feed.up", "feed.down")
_EXPERTS = ("feed.experts.up", "feed.experts.down")
_LATENT = ("attention.q", "attention.q_down", "attention.q_up", "attention.kv_down")
_SHARED = ("feed.shared.up", "feed.shared.down")
_SCORES = {"softmax": Score.SOFTMAX, "sigmoid": Score.SIGMOID, "softmax_chosen": Score.SOFTMAX_CHOSEN}


def native_obstacle(spec: DecoderSpec, weights: Mapping[str, Weight]) -> str:
    """Return why the native loop cannot run this spec; an empty string if the loop can."""
    embed = weights["embed.weight"]
    matrices = [w for role, w in weights.items() if role.endswith(_tails())]
    forms = {w.dtype if isinstance(w, Tensor) else w.spec.format for w in matrices}
    reasons = {
        f"the weights are on {embed.device if isinstance(embed, Tensor) else '?'}": not _on_cpu(embed),
        "experts beside attention": any(
            isinstance(y.feed, ExpertsSpec) and y.order.startswith("parallel") for y in spec.layers
        ),
        "ALiBi rounded to bf16": any(y.attention.alibi is not None and y.attention.alibi.rounded for y in spec.layers),
        "a projection before the head": "embed_out.weight" in weights,
        f"weights of {', '.join(sorted(map(str, forms)))}": not forms <= {torch.float32, torch.bfloat16, INT8, INT4},
        "norms over features that several ranks hold": any(
            y.attention.whole_norm is not None and y.attention.total_heads is not None for y in spec.layers
        ),
        "an activation": any(y.feed.activation not in _ACTIVATIONS for y in spec.layers),
    }
    return next((reason for reason, applies in reasons.items() if applies), "") or obstacle()


def _on_cpu(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.device.type == "cpu"


def _tails() -> tuple[str, ...]:
    return (*(f"{m}.weight" for m in (*_MATRICES, *_SHARED, *_LATENT)), *_EXPERTS, "head.weight")


@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """Of a rank that holds a part of each layer.

    Attributes:
        arena: Of the ranks that hold the others.
        words: (first, last) row of the head that it holds.
    """

    arena: Arena
    words: tuple[int, int]


class NativeDecoder:
    """Runs steps of one spec.

    Args:
        weights: Packed one by one; of which only the packed form is read leaves the table at once.
        shared: Of a part; its logits are those of its words.
        rounded: Codes are multiplied with inputs rounded to 8 bits. bf16 weights always are with inputs in bf16, as torch does it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, Weight],
        rotations: Mapping[RopeSpec, Rotation],
        *,
        rounded: bool,
        shared: TensorParallelShard | None = None,
    ) -> None:
        self._weights, self._rotations, self._rounded = weights, rotations, rounded
        self._ropes = list(rotations)
        self._cache: list[tuple[Tensor, ...]] = []
        self._kept_layers: list[KeptLayer] = []
        layers = [self._layer(f"layers.{i}", y, spec) for i, y in enumerate(spec.layers)]
        last = self._norm("norm", spec.norm) if spec.final_norm else Normed()
        if spec.tied and shared is not None:
            self._weights["head.weight"] = self._weights["embed.weight"][slice(*shared.words)]  # type: ignore[index]
        whole_tied = spec.tied and shared is None
        head = self._packed("embed" if whole_tied else "head", bias="head.bias")
        self._program = DecoderProgram(
            spec.hidden, layers, last, head, None if shared is None else shared.arena.channel
        )
        self._arena = None if shared is None else shared.arena
        del self._weights

    @staticmethod
    def packed_roles(spec: DecoderSpec) -> list[str]:
        """List the roles of which only the packed form is read."""
        each = (*(f"{m}.weight" for m in (*_MATRICES, *_SHARED, *_LATENT)), *_EXPERTS)
        return [f"layers.{i}.{role}" for i in range(len(spec.layers)) for role in each] + ["head.weight"]

    def step(self, x: Tensor, batch: BatchIndices, cache: list[tuple[Tensor, ...]]) -> Tensor:
        """Run the native layers: embeddings [T, hidden] to logits, fp32 [R, vocab]; writes the KV cache."""
        turns = None
        if self._ropes:
            tables = [self._rotations[rope].tables(batch.positions, torch.float32) for rope in self._ropes]
            most = max(cos.shape[-1] for cos, _ in tables)
            both = (torch.cat(kind, 1).transpose(0, 1) for kind in tables)  # [2, T, .]
            turns = torch.stack([F.pad(kind, (0, most - kind.shape[-1])) for kind in both], 1)
        if cache is not self._cache:
            self._cache, self._kept_layers = cache, [KeptLayer(*tensors) for tensors in cache]
        chunks = [TokenRun(*c) for c in batch.chunks]
        rows, outputs, cached = x.float().contiguous(), batch.outputs.long(), self._kept_layers
        if self._arena is None:
            return self._program.step(rows, chunks, outputs, cached, turns)
        # Sums over ranks wait inside the native loop, where nothing but the watchdog ends a wait for a rank that is stuck.
        return self._arena.observe(
            "all_reduce", "layers", lambda: self._program.step(rows, chunks, outputs, cached, turns)
        )

    # ---- packing

    def _float(self, role: str) -> Tensor | None:
        weight = self._weights.get(role)
        return weight.float().contiguous() if isinstance(weight, Tensor) else None

    def _norm(self, role: str, norm: Norm) -> Normed:
        weight = self._float(f"{role}.weight")
        return Normed(weight, self._float(f"{role}.bias"), norm.eps, norm.offset, norm.kind == "layer")

    def _packed(self, role: str, gated: bool = False, bias: str | None = None) -> PackedWeight:
        keep = role == "embed"
        weight = _as_rows(self._weights[f"{role}.weight"] if keep else self._weights.pop(f"{role}.weight"))
        return pack(weight, self._float(bias or f"{role}.bias"), gated=gated, inputs=self._inputs(weight))

    def _inputs(self, weight: Tensor | QuantTensor) -> ProductInputs:
        if isinstance(weight, QuantTensor):
            return ProductInputs.INT8 if self._rounded else ProductInputs.F32
        return ProductInputs.BF16 if weight.dtype == torch.bfloat16 else ProductInputs.F32

    def _grouped(self, role: str, gated: bool) -> list[PackedWeight]:
        """Pack the matrix of every expert of a role."""
        weight, bias = _as_rows(self._weights.pop(role)), self._float(f"{role}_bias")
        count = weight.shape[0]
        each = (_expert(weight, e) for e in range(count))
        inputs = self._inputs(weight)
        return [pack(w, None if bias is None else bias[e], gated=gated, inputs=inputs) for e, w in enumerate(each)]

    def _latent(self, at: str, spec: AttentionSpec, latent: LatentAttentionSpec) -> tuple[PackedWeight, DecoderLatent]:
        """Pack the matrices of latent attention (MLA): the projection of the layer's input, and the rest."""
        small = latent.q_lora_rank is not None
        names = (f"{at}.{'q_down' if small else 'q'}", f"{at}.kv_down")
        parts = [_as_rows(self._weights.pop(f"{name}.weight")) for name in names]
        biases = [self._float(f"{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            rows = [p.shape[0] for p in parts]
            bias = torch.cat(
                [torch.zeros(n, device="cpu") if b is None else b for b, n in zip(biases, rows, strict=True)]
            )
        both = _stacked(parts)
        first = pack(both, bias, inputs=self._inputs(both))
        up = dequantised(self._weights[f"{at}.kv_up.weight"])
        key_up, value_up = up.view(spec.heads, -1, latent.kv_lora_rank).split(
            [latent.qk_nope_head_dim, spec.value_width], 1
        )
        inputs = self._inputs(up)
        return first, DecoderLatent(
            self._norm(f"{at}.kv_down_norm", latent.norm),
            [pack(k.t().contiguous(), inputs=inputs) for k in key_up],
            [pack(v.contiguous(), inputs=inputs) for v in value_up],
            latent.kv_lora_rank,
            latent.qk_nope_head_dim,
            latent.qk_rope_head_dim,
            spec.value_width,
            self._norm(f"{at}.q_down_norm", latent.norm) if small else Normed(),
            self._packed(f"{at}.q_up") if small else None,
        )

    def _experts(self, at: str, spec: ExpertsSpec) -> DecoderExperts:
        router = dequantised(self._weights[f"{at}.router.weight"]).float().contiguous()
        bias, gate = self._float(f"{at}.router.bias"), self._float(f"{at}.shared_gate.weight")
        if gate is not None:
            router = torch.cat([router, gate])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(1)])
        return DecoderExperts(
            pack(router, bias),
            self._grouped(f"{at}.experts.up", gated=True),
            self._grouped(f"{at}.experts.down", gated=False),
            spec.count,
            spec.top_k,
            0 if spec.local_range is None else spec.local_range[0],
            spec.groups,
            spec.top_k_groups,
            spec.group_score == "pair",
            _SCORES[spec.score],
            spec.normalized,
            spec.scale,
            self._float(f"{at}.correction"),
            spec.clamp or 0.0,
            spec.alpha,
            gate is not None,
        )

    def _layer(self, at: str, layer: DecoderLayerSpec, spec: DecoderSpec) -> DecoderLayer:
        a, feed = layer.attention, layer.feed
        block_norm: Callable[[str], Normed] = lambda n: Normed() if n == "." else self._norm(f"{at}.norm{n}", spec.norm)  # noqa: E731
        inner = a.whole_norm or a.head_norm
        gated = isinstance(feed, ExpertsSpec) or feed.gated
        norms = [block_norm(n) for n in _NORMS[layer.order]]
        norms += [self._norm(f"{at}.attention.{p}_norm", inner) if inner else Normed() for p in "qk"]
        slopes = None
        if a.alibi is not None:
            all_heads = a.heads if a.total_heads is None else a.total_heads[0]
            slopes = (
                alibi_slopes(all_heads).float()[a.head_offset : a.head_offset + a.heads].contiguous() * a.alibi.scale
            )
        sinks = self._float(f"{at}.attention.sinks")
        if a.latent is None:
            latent, qkv, sizes = None, self._packed(f"{at}.attention.qkv"), (a.kv_heads, a.width, a.value_width)
        else:
            qkv, latent = self._latent(f"{at}.attention", a, a.latent)
            sizes = _parts(a.heads), a.latent.kv_lora_rank + a.latent.qk_rope_head_dim, a.latent.kv_lora_rank
        out = self._packed(f"{at}.attention.out")
        up = down = None
        if isinstance(feed, Mlp) or feed.shared:
            names = _MATRICES[2:] if isinstance(feed, Mlp) else _SHARED
            up, down = (self._packed(f"{at}.{m}", gated and m.endswith("up")) for m in names)
        return DecoderLayer(
            (qkv, out, up, down),
            a.heads,
            *sizes,
            a.scale,
            tuple(norms),
            a.softcap or 0.0,
            a.window or 0,
            slopes,
            sinks,
            None if a.rope is None else (self._ropes.index(a.rope), a.rope.dim, a.rope.interleaved),
            a.whole_norm is not None,
            layer.order.startswith("parallel"),
            layer.order == "after",
            _ACTIVATIONS[feed.activation],
            gated,
            norm_each=a.head_norm_each,
            norm_late=a.head_norm_late,
            clip=a.clip or 0.0,
            residual=layer.residual,
            experts=self._experts(f"{at}.feed", feed) if isinstance(feed, ExpertsSpec) else None,
            latent=latent,
        )


def _parts(heads: int) -> int:
    """Return the number of parts of `heads` that read the same key, of at most 8 heads each.

    Smaller parts give threads work to share.
    """
    return next(parts for parts in range(1, heads + 1) if heads % parts == 0 and heads // parts <= 8)


def _as_rows(weight: Weight) -> Tensor | QuantTensor:
    return weight.unpacked() if isinstance(weight, PackedCodes) else weight


def _stacked(parts: list[Tensor | QuantTensor]) -> Tensor | QuantTensor:
    """Concatenate the rows of weights; quantized weights remain codes where their formats agree."""
    codes = [p for p in parts if isinstance(p, QuantTensor)]
    if len(codes) == len(parts) and len({(c.spec, c.cols) for c in codes}) == 1:
        rows = sum(c.rows for c in codes)
        wire = torch.cat([c.wire for c in codes])
        return QuantTensor(wire, codes[0].spec, codes[0].cols, (rows, codes[0].cols), codes[0].dtype)
    return torch.cat([dequantised(p) for p in parts])


def _expert(weight: Tensor | QuantTensor, e: int) -> Tensor | QuantTensor:
    """Return the matrix of expert `e` from [experts, N, K]."""
    if isinstance(weight, Tensor):
        return weight[e]
    _, n, k = weight.shape
    return QuantTensor(weight.wire[e * n : (e + 1) * n], weight.spec, weight.cols, (n, k), weight.dtype)

"""What stands between the products of a decoder layer, each piece one call: residual sums with norms, heads into the cache, gates.

On a GPU each call is one Triton kernel, elsewhere plain torch, which is the reference; a `Backend` says why it cannot run. The values
are those of transformers' modules: what they round, is rounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_inference.paged_attention import keep
from ds_inference.rope import Rotation
from ds_inference.spec import AttentionSpec, Norm
from ds_ops.registry import Backend, Op, choose, reference_backend
from ds_ops.triton_kernels.kernel_arguments import GATES, WIDEST_NORM, HeadTraits, NormWeights
from ds_ops.triton_kernels.triton_support import triton_obstacle

__all__ = ["ACTIVATIONS", "Heads", "gate", "norm_weights", "normed", "residual_norm", "write_heads"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}


def normed(x: Tensor, norm: NormWeights) -> Tensor:
    """Compute a norm over the last dim of `x`, in plain torch."""
    weight, size = norm.weight, (x.shape[-1],)
    if norm.layer and weight.dim() == 1:
        return F.layer_norm(x, size, weight + norm.offset if norm.offset else weight, norm.bias, norm.eps)
    if norm.layer:
        return F.layer_norm(x, size, None, None, norm.eps) * weight
    if x.device.type != "cpu" and not norm.offset:  # rounded before the weight, as below, by one launch
        return weight * F.rms_norm(x, size, None, norm.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (wide * (norm.offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def norm_weights(weight: Tensor, bias: Tensor | None, norm: Norm) -> NormWeights:
    """Return a norm of the spec with its weights."""
    return NormWeights(weight, bias, norm.eps, norm.offset, norm.kind == "layer")


# ---- residual sums and norms


def residual_norm(
    x: Tensor, delta: Tensor | None, post: NormWeights | None, pre: NormWeights | None
) -> tuple[Tensor, Tensor]:
    """Compute x' = x + post(delta) and pre(x'), each [T, n]; without `delta` x' is x, without `pre` the second is x', too."""
    takes = all(n is None or (n.weight.dim() == 1 and n.weight.dtype == x.dtype) for n in (post, pre))
    op = choose(_RESIDUAL_NORM, x.device.type, x.dtype).backend
    run = op.run if takes and x.shape[-1] <= WIDEST_NORM else _residual_norm_torch
    total, y = run(x, delta, post, pre)
    return total, total if y is None else y


def _residual_norm_torch(
    x: Tensor, delta: Tensor | None, post: NormWeights | None, pre: NormWeights | None
) -> tuple[Tensor, Tensor | None]:
    if delta is not None:
        x = x + (delta if post is None else normed(delta, post))
    return x, None if pre is None else normed(x, pre)


def _residual_norm_triton(
    x: Tensor, delta: Tensor | None, post: NormWeights | None, pre: NormWeights | None
) -> tuple[Tensor, Tensor | None]:
    from ds_ops.triton_kernels import triton_norm

    return triton_norm.residual_norm(x.contiguous(), None if delta is None else delta.contiguous(), post, pre)


# ---- heads


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """How a layer's queries, keys and values are made of one product.

    Attributes:
        spec: Of the attention.
        rotation: With its tables of the batch's positions; None: nothing is rotated.
        norms: Of each query head and of each key head, or None.
        whole_norms: Norms of all query features and of all key features, or None.
    """

    spec: AttentionSpec
    rotation: Rotation | None
    tables: tuple[Tensor, Tensor] | None
    norms: tuple[NormWeights, NormWeights] | None
    whole_norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None

    @property
    def fusable(self) -> bool:
        """Whether one kernel does all of it: not where features of several heads meet, nor for norms of other kinds."""
        spec, norms = self.spec, self.norms or ()
        plain = all(not n.layer and n.bias is None and n.weight.dim() == 1 for n in norms)
        return spec.clip is None and self.whole_norms is None and plain and not spec.head_norm_late


def write_heads(qkv: Tensor, heads: Heads, slots: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
    """Make queries [T, heads, width] of qkv [T, .], and write keys and values to their slots of the KV cache.

    The order of rotated features within a head is the backend's own, the same for queries and keys.
    """
    run = choose(_WRITE_HEADS, qkv.device.type, qkv.dtype).backend.run if heads.fusable else _write_heads_torch
    q: Tensor = run(qkv, heads, slots, cache)
    return q


def _write_heads_triton(qkv: Tensor, heads: Heads, slots: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
    from ds_ops.triton_kernels.triton_rotary import rotary_write

    spec, norms = heads.spec, heads.norms
    rope = None if heads.rotation is None else heads.rotation.rope
    traits = HeadTraits(
        spec.heads,
        spec.kv_heads,
        0 if rope is None else rope.dim,
        rope is not None and rope.interleaved,
        None if norms is None else norms[0].weight,
        None if norms is None else norms[1].weight,
        1e-6 if norms is None else norms[0].eps,
        0.0 if norms is None else norms[0].offset,
    )
    return rotary_write(qkv.contiguous(), heads.tables, slots, cache, traits)


def _write_heads_torch(qkv: Tensor, heads: Heads, slots: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
    spec = heads.spec
    widths = [spec.heads * spec.width, spec.kv_heads * spec.width, spec.kv_heads * spec.value_width]
    if spec.clip is not None:
        qkv = qkv.clamp(-spec.clip, spec.clip)
    q, k, v = qkv.split(widths, dim=-1)
    if heads.whole_norms is not None:
        q, k = heads.whole_norms[0](q), heads.whole_norms[1](k)
    q, k, v = (t.unflatten(-1, (-1, w)) for t, w in ((q, spec.width), (k, spec.width), (v, spec.value_width)))
    if heads.norms is not None and not spec.head_norm_late:
        q, k = normed(q, heads.norms[0]), normed(k, heads.norms[1])
    if heads.rotation is not None and heads.tables is not None:
        q, k = heads.rotation.turn(q, heads.tables), heads.rotation.turn(k, heads.tables)
    if heads.norms is not None and spec.head_norm_late:
        q, k = normed(q, heads.norms[0]), normed(k, heads.norms[1])
    keys, values, *scales = cache
    keep(k, slots, keys, scales[0] if scales else None)
    keep(v, slots, values, scales[1] if scales else None)
    return q


# ---- gates


def gate(both: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up of [T, 2 n], gate first."""
    known = activation in GATES
    run = choose(_GATE, both.device.type, both.dtype).backend.run if known else _gate_torch
    y: Tensor = run(both, activation)
    return y


def _gate_torch(both: Tensor, activation: str) -> Tensor:
    left, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](left) * up


def _gate_triton(both: Tensor, activation: str) -> Tensor:
    from ds_ops.triton_kernels.triton_gate import gated_product

    return gated_product(both.contiguous(), activation)


_RESIDUAL_NORM = Op(
    "residual_norm",
    "a residual sum between two norms",
    (Backend("triton", _residual_norm_triton, triton_obstacle), reference_backend(_residual_norm_torch)),
)
_WRITE_HEADS = Op(
    "write_heads",
    "head norms, rotation and the write into the KV cache",
    (Backend("triton", _write_heads_triton, triton_obstacle), reference_backend(_write_heads_torch)),
)
_GATE = Op("gate", "act(gate) * up", (Backend("triton", _gate_triton, triton_obstacle), reference_backend(_gate_torch)))

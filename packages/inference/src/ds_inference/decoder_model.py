"""The runner: a `DecoderSpec` and its weights, one forward over a ragged batch. It knows no family and no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import ds_comm
from ds_comm.symmetric_arena import Arena, arena_refusal
from ds_config.errors import UnsupportedError
from ds_inference.adapters import Adapter
from ds_inference.cache import Cache
from ds_inference.cuda_graphs import CudaGraphRunner, Record, padded
from ds_inference.native import NativeDecoder, TensorParallelShard, native_obstacle
from ds_inference.paged_attention import BatchIndices, alibi_slopes, attend, keep
from ds_inference.quantize import Weight, grouped_linear, linear
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
from ds_inference.tensor_parallel import RankShard
from ds_ops.host_arena import trim
from ds_ops.moe_routing import permute, sort_slots, unpermute

__all__ = ["Cache", "Decoder", "Runner", "replay_obstacle"]

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
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


# What of a batch of one-token chunks is tensors.
_SINGLES = ("tokens", "positions", "slots", "outputs", "cu_seqlens_q", "seqlens_k", "block_table")


def replay_obstacle(spec: DecoderSpec, cut: bool) -> str:
    """Return why steps of this spec cannot be captured as CUDA graphs; an empty string if capture is possible."""
    if cut:
        return "ranks that hold it together meet in every layer"
    if any(isinstance(layer.feed, ExpertsSpec) for layer in spec.layers):
        return "the host is told which experts were chosen"
    return ""


class Runner(Protocol):
    """What runs a step: `Decoder`, or a module's own forward.

    Attributes:
        stateful: Layers have states: of a sequence only the whole can be kept, not a beginning.
    """

    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    obstacle: str
    adapters: dict[str, Adapter]
    stateful: bool

    def forward(self, batch: BatchIndices, cache: Cache) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a layer needs besides its input: the batch, its part of the cache, and the rotations of the batch's positions."""

    batch: BatchIndices
    cache: tuple[Tensor, ...]
    turns: Mapping[RopeSpec, tuple[Tensor, Tensor]]


class Decoder:
    """Runs batches.

    Args:
        spec: What it is made of.
        weights: Role -> tensor, or its codes; matrices are [out, in]. They are used, not copied.
        length: Of the longest sequence that is served; None: as long as the model knows.
        native: Weights are packed for the native layer loop where it can run the spec: changes of the tensors are not seen then.
        rounded: The native loop multiplies codes with inputs rounded to 8 bits.
        cut: Weights are this rank's part of each layer, the spec is this rank's; None: of one rank.
        group: The ranks that hold the other parts.
        record: How steps of one-token chunks are recorded, to be replayed (`replay`); None: they are not. Not with the native loop.
    Attributes:
        adapters: By name; those that a batch wears are added. Not with the native loop.
        obstacle: Why the native loop does not run; empty: it runs.
    """

    stateful = False

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        length: int | None = None,
        *,
        native: bool = False,
        rounded: bool = False,
        cut: RankShard | None = None,
        group: ds_comm.GroupLike = None,
        record: Record | None = None,
    ) -> None:
        self.spec, self.weights = spec, dict(weights)
        self._record: Record | None = None
        self._replayed: tuple[Cache, CudaGraphRunner] | None = None
        self.cut = cut
        self.group = ds_comm.self_group() if cut is None else ds_comm.as_group(group)
        self.adapters: dict[str, Adapter] = {}
        self._worn: tuple[tuple[Adapter, Tensor], ...] = ()
        # The same table, for the roles that are never quantised: who changes weights changes one table.
        self._floats = cast("dict[str, Tensor]", self.weights)
        self.device, self.dtype = self._floats["embed.weight"].device, self._floats["embed.weight"].dtype
        unknown = {f.activation for f in (y.feed for y in spec.layers)} - set(_ACTIVATIONS)
        if unknown:
            raise UnsupportedError(
                f"a {spec.family} model with activation {', '.join(sorted(unknown))}",
                code="inference-family",
                fix=f"Known are {', '.join(sorted(_ACTIVATIONS))}; load the model with transformers and pass the module.",
            )
        self._rotations = {
            y.attention.rope: Rotation(y.attention.rope, length or spec.max_seq_len, self.device)
            for y in spec.layers
            if y.attention.rope
        }
        kinds = {(_all_heads(y.attention), y.attention.alibi.rounded) for y in spec.layers if y.attention.alibi}
        self._slopes = {kind: alibi_slopes(*kind).to(self.device) for kind in kinds}
        if record is not None:
            if obstacle := replay_obstacle(spec, cut is not None):
                raise UnsupportedError(
                    f"CUDA graphs for a {spec.family} model: {obstacle}",
                    code="inference-cuda-graph",
                    fix="Leave graphs (enable_cuda_graph) out.",
                )
            self._record = record
        self.obstacle = "it was not asked for"
        if native:
            self.obstacle = native_obstacle(spec, self.weights) or (arena_refusal(self.group) if cut else "")
        self._native: NativeDecoder | None = None
        if not self.obstacle:
            for role in self.weights.keys() - set(NativeDecoder.packed_roles(spec)):
                left = self.weights[role]  # a piece of a file that is mapped would keep the whole in memory
                self.weights[role] = left.clone() if isinstance(left, Tensor) else left
            shared = None if cut is None else TensorParallelShard(Arena(self.group), cut.words())
            self._native = NativeDecoder(spec, self.weights, self._rotations, rounded=rounded, shared=shared)
            trim()

    @torch.inference_mode()
    def forward(self, batch: BatchIndices, cache: Cache) -> Tensor:
        """Compute the batch's tokens, write their keys and values, and return logits.

        Returns: fp32 [R, vocab], a row for each of `batch.outputs`.
        """
        if self._record is None or not batch.num_decodes or batch.max_seqlen_q > 1 or batch.worn:
            return self._forward(batch, cache)
        if self._replayed is None or self._replayed[0] is not cache:
            self._replayed = cache, CudaGraphRunner(partial(self._singles, cache), self._record)
        whole = padded(batch, cache.spare)
        logits: Tensor = self._replayed[1](*(getattr(whole, name) for name in _SINGLES))
        return logits[batch.outputs]

    def _singles(self, cache: Cache, *tensors: Tensor) -> Tensor:
        return self._forward(BatchIndices(*tensors, num_decodes=len(tensors[0]), max_seqlen_q=1), cache)

    def _forward(self, batch: BatchIndices, cache: Cache) -> Tensor:
        spec = self.spec
        x = F.embedding(batch.tokens, self._floats["embed.weight"])
        scale = torch.tensor(spec.embed_scale, dtype=x.dtype)  # rounded as the model was trained
        if self._native is not None and not spec.embed_norm and "embed_in.weight" not in self.weights:
            x = x.float()
        if spec.embed_scale != 1.0:
            x = x * scale
        if "embed_in.weight" in self.weights:
            x = self._linear("embed_in", x)
        if spec.positions is not None:
            x = x + F.embedding(batch.positions + spec.positions[1], self._floats["positions.weight"]).to(x.dtype)
        if spec.embed_norm:
            x = self._norm("embed_norm", x)
        if self._native is not None:
            logits = self._native.step(x, batch, cache.layers)
            return self._scaled(logits if self.cut is None else self._whole(logits))
        self._worn = tuple((self.adapters[name], rows) for name, rows in batch.worn)
        turns = {rope: kind.tables(batch.positions, x.dtype) for rope, kind in self._rotations.items()}
        for i, layer in enumerate(spec.layers):
            x = self._layer(f"layers.{i}", layer, x, _Step(batch, cache.layers[i], turns))
        return self.head(x[batch.outputs])

    def head(self, x: Tensor) -> Tensor:
        """Compute logits, fp32 [R, vocab], from hidden states [R, hidden]."""
        spec = self.spec
        if spec.final_norm:
            x = self._norm("norm", x)
        if "embed_out.weight" in self.weights:
            x = self._linear("embed_out", x)
        head = self.weights["embed.weight" if spec.tied else "head.weight"]
        if self.cut is None:
            return self._scaled(linear(x, head, self._floats.get("head.bias")).float())
        part = self._floats["embed.weight"][slice(*self.cut.words())] if spec.tied else head
        return self._scaled(self._whole(linear(x, part, self._floats.get("head.bias")).float()))

    def _whole(self, part: Tensor) -> Tensor:
        """Combine the logits of all ranks' vocabulary ranges into full logits, by an all-reduce."""
        logits = torch.zeros(len(part), self.spec.vocab, device=part.device)
        if self.cut is not None:
            logits[:, slice(*self.cut.words())] = part
        return self._summed(logits)

    def _summed(self, x: Tensor) -> Tensor:
        """Sum `x` over the tensor-parallel ranks in place (all-reduce); the result has the same bits on each rank."""
        if self.group.size > 1:
            x = x.contiguous()
            ds_comm.all_reduce(x, group=self.group, unit="inference").wait()
        return x

    def _scaled(self, logits: Tensor) -> Tensor:
        spec = self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits

    # ---- a layer

    def _layer(self, at: str, layer: DecoderLayerSpec, x: Tensor, step: _Step) -> Tensor:
        def a(y: Tensor) -> Tensor:
            out = self._summed(self._attention(f"{at}.attention", layer.attention, y, step))
            return out if layer.residual == 1.0 else out * layer.residual

        def m(y: Tensor) -> Tensor:
            out = self._summed(self._feed(f"{at}.feed", layer.feed, y))
            return out if layer.residual == 1.0 else out * layer.residual

        def n(number: int, y: Tensor) -> Tensor:
            return self._norm(f"{at}.norm{number}", y)

        if layer.order == "pre":
            x = x + a(n(1, x))
            return x + m(n(2, x))
        if layer.order == "parallel":
            y = n(1, x)
            return x + a(y) + m(y)
        if layer.order == "parallel_norms":
            return x + a(n(1, x)) + m(n(2, x))
        if layer.order == "sandwich":
            x = x + n(2, a(n(1, x)))
            return x + n(4, m(n(3, x)))
        if layer.order == "post":
            x = x + n(1, a(x))
            return x + n(2, m(x))
        x = n(1, x + a(x))
        return n(2, x + m(x))

    def _attention(self, at: str, spec: AttentionSpec, x: Tensor, step: _Step) -> Tensor:
        if spec.latent is not None:
            out = self._latent(at, spec, spec.latent, x, step)
        else:
            widths = [spec.heads * spec.width, spec.kv_heads * spec.width, spec.kv_heads * spec.value_width]
            qkv = self._linear(f"{at}.qkv", x)
            if spec.clip is not None:
                qkv = qkv.clamp(-spec.clip, spec.clip)
            q, k, v = qkv.split(widths, dim=-1)
            if spec.whole_norm is not None:
                heads, kv_heads = spec.total_heads or (spec.heads, spec.kv_heads)
                q = self._whole_normed(f"{at}.q_norm", q, spec.whole_norm, heads * spec.width)
                k = self._whole_normed(f"{at}.k_norm", k, spec.whole_norm, kv_heads * spec.width)
            q, k, v = (t.unflatten(-1, (-1, w)) for t, w in ((q, spec.width), (k, spec.width), (v, spec.value_width)))
            if not spec.head_norm_late:
                q, k = self._head_normed(f"{at}.q_norm", q, spec), self._head_normed(f"{at}.k_norm", k, spec)
            if spec.rope is not None:
                q, k = self._turned(spec.rope, q, k, step.turns[spec.rope])
            if spec.head_norm_late:
                q, k = self._head_normed(f"{at}.q_norm", q, spec), self._head_normed(f"{at}.k_norm", k, spec)
            keys, values, *scales = step.cache
            keep(k, step.batch.slots, keys, scales[0] if scales else None)
            keep(v, step.batch.slots, values, scales[1] if scales else None)
            slopes = None
            if spec.alibi:
                slopes = self._slopes[_all_heads(spec), spec.alibi.rounded][
                    spec.head_offset : spec.head_offset + spec.heads
                ]
            extra = (slopes, self._floats.get(f"{at}.sinks"))
            out = attend(q, step.cache, step.batch, spec, extra)
        return self._linear(f"{at}.out", out.flatten(1))

    def _turned(self, rope: RopeSpec, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        turn = self._rotations[rope].turn
        if q.device.type == "cpu":
            return turn(q, tables), turn(k, tables)
        # Half the launches, for one copy.
        return cast("tuple[Tensor, Tensor]", turn(torch.cat([q, k], 1), tables).split([q.shape[1], k.shape[1]], 1))

    def _latent(self, at: str, spec: AttentionSpec, latent: LatentAttentionSpec, x: Tensor, step: _Step) -> Tensor:
        # Keys are latent @ up_k; instead of making them, queries go to the latent's space: q @ up_k^T (DeepSeek-V2, 2.1.2), so
        # that all heads read the same `rank + rotated` numbers a token. Values likewise, after the weighted sum.
        if latent.q_lora_rank is None:
            q = self._linear(f"{at}.q", x)
        else:
            small = _normed(
                self._linear(f"{at}.q_down", x), self._floats[f"{at}.q_down_norm.weight"], None, latent.norm
            )
            q = self._linear(f"{at}.q_up", small)
        q = q.unflatten(-1, (spec.heads, spec.width))
        plain, turned = q.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
        kv, k_turned = self._linear(f"{at}.kv_down", x).split([latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1)
        kv = _normed(kv, self._floats[f"{at}.kv_down_norm.weight"], None, latent.norm)
        k_turned = k_turned[:, None]
        if spec.rope is not None:
            turn, tables = self._rotations[spec.rope].turn, step.turns[spec.rope]
            turned, k_turned = turn(turned, tables), turn(k_turned, tables)
        (keys,) = step.cache
        keys.flatten(0, 1)[step.batch.slots] = torch.cat([kv[:, None], k_turned], -1).to(keys.dtype)
        up = self._floats[f"{at}.kv_up.weight"].view(
            spec.heads, latent.qk_nope_head_dim + spec.value_width, latent.kv_lora_rank
        )
        up_k, up_v = up.split([latent.qk_nope_head_dim, spec.value_width], dim=1)
        inside = torch.einsum("thp,hpr->thr", plain, up_k)
        read = AttentionSpec(
            spec.heads,
            1,
            latent.kv_lora_rank + latent.qk_rope_head_dim,
            latent.kv_lora_rank,
            spec.scale,
            window=spec.window,
        )
        mixed = attend(torch.cat([inside, turned], -1), (keys, keys[..., : latent.kv_lora_rank]), step.batch, read)
        return torch.einsum("thr,hvr->thv", mixed, up_v)

    def _feed(self, at: str, spec: Mlp | ExpertsSpec, x: Tensor) -> Tensor:
        act = _ACTIVATIONS[spec.activation]
        if isinstance(spec, Mlp):
            return self._mlp(at, act, spec.gated, x)
        out = self._experts(at, spec, act, x)
        if spec.shared:
            more = self._mlp(f"{at}.shared", act, True, x)
            if spec.shared_gate:
                more = more * torch.sigmoid(self._linear(f"{at}.shared_gate", x))
            out = out + more
        return out

    def _mlp(self, at: str, act: Callable[[Tensor], Tensor], gated: bool, x: Tensor) -> Tensor:
        y = self._linear(f"{at}.up", x)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = act(gate) * up
        else:
            y = act(y)
        return self._linear(f"{at}.down", y)

    def _experts(self, at: str, spec: ExpertsSpec, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        router = self._floats[f"{at}.router.weight"]
        wide = spec.score == "sigmoid" or spec.groups > 1
        bias = self._floats.get(f"{at}.router.bias")
        logits = F.linear(x.float(), router.float()) if wide else F.linear(x, router, bias)
        share, chosen = route(logits, spec, self._floats.get(f"{at}.correction"))
        if spec.local_range is None:
            rows = sort_slots(chosen, spec.count)
        else:
            first, last = spec.local_range
            local_choices = (chosen >= first) & (chosen < last)
            rows = sort_slots((chosen - first).clamp(0, last - first - 1), last - first, keep=local_choices)
        sorted_x = permute(x, rows)
        y = self._of_experts(f"{at}.experts.up", sorted_x, rows.ends)
        gate, value = y.chunk(2, dim=-1)
        if spec.clamp is None:
            y = act(gate) * value
        else:
            gate, value = gate.clamp(max=spec.clamp), value.clamp(-spec.clamp, spec.clamp)
            y = (value + 1) * gate * torch.sigmoid(spec.alpha * gate)
        return unpermute(self._of_experts(f"{at}.experts.down", y, rows.ends), rows, share)

    def _of_experts(self, role: str, x: Tensor, ends: Tensor) -> Tensor:
        y = grouped_linear(x, self.weights[role], ends)
        bias = self._floats.get(f"{role}_bias")
        if bias is None:
            return y
        counts = ends.diff(prepend=ends.new_zeros(1))
        y[: int(ends[-1])] += bias.repeat_interleave(counts, 0)
        return y

    # ---- leaves

    def _linear(self, role: str, x: Tensor) -> Tensor:
        y = linear(x, self.weights[f"{role}.weight"], self._floats.get(f"{role}.bias"))
        for adapter, rows in self._worn:
            adapter.add(role, y, x, rows)
        return y

    def _whole_normed(self, role: str, x: Tensor, norm: Norm, features: int) -> Tensor:
        """Apply RMS norm over features that are sharded over the ranks."""
        weight = self._floats[f"{role}.weight"]
        if self.group.size == 1:
            return _normed(x, weight, None, norm)
        wide = x.float()
        mean = self._summed(wide.square().sum(-1, keepdim=True)) / features
        return weight * (wide * torch.rsqrt(mean + norm.eps)).to(x.dtype)

    def _head_normed(self, role: str, x: Tensor, spec: AttentionSpec) -> Tensor:
        """Normalize every head of x [T, heads, width] separately."""
        if spec.head_norm is None:
            return x
        weight, bias = self._floats[f"{role}.weight"], self._floats.get(f"{role}.bias")
        return _normed(x, weight.view(-1, x.shape[-1]) if spec.head_norm_each else weight, bias, spec.head_norm)

    def _norm(self, role: str, x: Tensor) -> Tensor:
        return _normed(x, self._floats[f"{role}.weight"], self._floats.get(f"{role}.bias"), self.spec.norm)


def _all_heads(attention: AttentionSpec) -> int:
    return attention.heads if attention.total_heads is None else attention.total_heads[0]


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    if norm.kind == "layer" and weight.dim() == 1:
        return F.layer_norm(x, (x.shape[-1],), weight + norm.offset if norm.offset else weight, bias, norm.eps)
    if norm.kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), None, None, norm.eps) * weight
    if x.device.type != "cpu" and not norm.offset:  # rounded before the weight, as below, by one launch
        return weight * F.rms_norm(x, (x.shape[-1],), None, norm.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (wide * (norm.offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def route(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Select experts from router logits [T, count]: (weights, experts), each [T, chosen], fp32 and int64."""
    if spec.score == "softmax_chosen":
        best, chosen = logits.float().topk(spec.top_k, dim=-1)
        return torch.softmax(best, -1), chosen
    scores = torch.sigmoid(logits.float()) if spec.score == "sigmoid" else torch.softmax(logits.float(), -1)
    by = scores if correction is None else scores + correction
    if spec.groups > 1:
        grouped = by.view(-1, spec.groups, spec.count // spec.groups)
        value = grouped.topk(2, -1)[0].sum(-1) if spec.group_score == "pair" else grouped.amax(-1)
        allowed = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(spec.top_k_groups, -1)[1], True)
        hidden = -torch.inf if spec.group_score == "pair" else 0.0
        by = grouped.masked_fill(~allowed[..., None], hidden).flatten(1)
    chosen = by.topk(spec.top_k, -1)[1]
    share = scores.gather(1, chosen)
    if spec.normalized:
        share = share / (share.sum(-1, keepdim=True) + (1e-20 if spec.score == "sigmoid" else 0.0))
    return share * spec.scale, chosen

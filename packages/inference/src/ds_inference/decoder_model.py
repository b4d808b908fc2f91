"""The runner: a `DecoderSpec` and its weights, one forward over a ragged batch. It knows no family and no request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import ds_comm
from ds_accel import streams
from ds_comm.shm.symmetric_arena import Arena, arena_refusal
from ds_config.errors import UnsupportedError
from ds_inference.adapters import Adapter
from ds_inference.cache import Cache
from ds_inference.cuda_graphs import DecodeGraphs, Record
from ds_inference.expert_routing import route
from ds_inference.fused_ops import ACTIVATIONS, Heads, gate, norm_weights, normed, residual_norm, write_heads
from ds_inference.native import NativeDecoder, TensorParallelShard, native_obstacle
from ds_inference.paged_attention import BatchIndices, alibi_slopes, attend, captures_in_place
from ds_inference.quantize import Weight, experts_ask_host, grouped_linear, linear
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
from ds_inference.tensor_parallel import (
    LikeliestTokens,
    RankShard,
    capture_obstacle,
    gather_likeliest,
    gather_logits,
)
from ds_ops.host_arena import trim
from ds_ops.moe_routing import permute, sort_slots, unpermute
from ds_ops.triton_kernels.kernel_arguments import NormWeights

__all__ = ["Cache", "Decoder", "Runner", "refuse_unknown", "replay_obstacle"]


def replay_obstacle(spec: DecoderSpec, weights: Mapping[str, Weight], group: ds_comm.Group) -> str:
    """Return why steps of this spec cannot be captured as CUDA graphs; an empty string if capture is possible.

    group: ranks that hold the layers together.
    """
    embedded = cast("Tensor", weights.get("embed.weight", torch.empty(0, device="cpu")))
    if reason := capture_obstacle(group, embedded.device):
        return reason
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.feed, ExpertsSpec):
            for part in ("up", "down"):
                if reason := experts_ask_host(weights[f"layers.{i}.feed.experts.{part}"], embedded.dtype):
                    return f"the host is told which experts were chosen ({reason})"
    return ""


_WIDEST = 2**16
"""Features up to which a rotation is tried, which makes a table of them: anyone may have written the configuration."""


def refuse_unknown(spec: DecoderSpec) -> None:
    """Raise UnsupportedError for parts of a spec that `Decoder` cannot compute ("inference-family", "rotary-scaling")."""
    unknown = {y.feed.activation for y in spec.layers} - set(ACTIVATIONS)
    if unknown:
        raise UnsupportedError(
            f"a {spec.family} model with activation {', '.join(sorted(unknown))}",
            code="inference-family",
            fix=f"Known are {', '.join(sorted(ACTIVATIONS))}; leave native, quantize, adapters and group out: it then runs its own forward.",
        )
    for rope in {y.attention.rope for y in spec.layers if y.attention.rope}:
        if rope.dim < 2 or rope.dim % 2:
            raise UnsupportedError(
                f"a {spec.family} model that turns {rope.dim} features of a head",
                code="inference-family",
                fix="Turn whole pairs; or leave native, quantize, adapters and group out: it then runs its own forward.",
            )
        if rope.dim <= _WIDEST:  # a wider one is that of no weights, whose shapes are looked at next
            Rotation(rope, spec.max_seq_len, torch.device("cpu"))


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

    def forward(self, batch: BatchIndices, cache: Cache) -> Tensor | LikeliestTokens: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a layer needs besides its input: the batch, its part of the cache, and the rotations of the batch's positions."""

    batch: BatchIndices
    cache: tuple[Tensor, ...]
    turns: Mapping[RopeSpec, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _ResidualStream:
    """The residual stream [T, hidden] between layers: a sum that the next norm's kernel computes along."""

    x: Tensor
    delta: Tensor | None = None
    post: NormWeights | None = None

    def normed(self, norm: NormWeights) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm."""
        return residual_norm(self.x, self.delta, self.post, norm)

    def total(self) -> Tensor:
        """Return the sum."""
        return residual_norm(self.x, self.delta, self.post, None)[0]

    def rows(self, at: Tensor) -> _ResidualStream:
        """Return the stream of some tokens."""
        return _ResidualStream(self.x[at], None if self.delta is None else self.delta[at], self.post)


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
        record: How `capture` records steps of few tokens; None: they are not. Not with the native loop.
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
        self._graphs: tuple[Cache, DecodeGraphs] | None = None
        self.cut = cut
        self.group = ds_comm.self_group() if cut is None else ds_comm.as_group(group)
        self.adapters: dict[str, Adapter] = {}
        self._worn: tuple[tuple[Adapter, Tensor], ...] = ()
        # The same table, for the roles that are never quantised: who changes weights changes one table.
        self._floats = cast("dict[str, Tensor]", self.weights)
        self.device, self.dtype = self._floats["embed.weight"].device, self._floats["embed.weight"].dtype
        self._rotations = {
            y.attention.rope: Rotation(y.attention.rope, length or spec.max_seq_len, self.device)
            for y in spec.layers
            if y.attention.rope
        }
        kinds = {(_all_heads(y.attention), y.attention.alibi.rounded) for y in spec.layers if y.attention.alibi}
        self._slopes = {kind: alibi_slopes(*kind).to(self.device) for kind in kinds}
        if record is not None:
            if obstacle := replay_obstacle(spec, self.weights, self.group):
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
    def forward(self, batch: BatchIndices, cache: Cache) -> Tensor | LikeliestTokens:
        """Compute the batch's tokens, write their keys and values, and return logits.

        Returns: fp32 [R, vocab], a row for each of `batch.outputs`; of ranks, the likeliest token of each row where `batch.likeliest`.
        """
        # Kernels of Triton go to the current device, which is another thread's own affair.
        with streams.on_device(self.device):
            if self._graphs is not None and self._graphs[0] is cache:
                logits = self._graphs[1].replay(batch)
                if logits is not None:
                    return self._of_all_ranks(logits, batch)
            return self._of_all_ranks(self._forward(batch, cache), batch)

    def _of_all_ranks(self, logits: Tensor, batch: BatchIndices) -> Tensor | LikeliestTokens:
        """Combine the logits of all ranks' vocabulary ranges. After a graph, not in it: one collective, whatever is wanted of them."""
        if self.cut is None:
            return logits
        if batch.likeliest:
            return gather_likeliest(logits, self.cut, self.group)
        return gather_logits(logits, self.spec.vocab, self.group)

    def capture(self, cache: Cache, rows: int, longest: int, tokens: int = 1) -> None:
        """Capture steps of few tokens over `cache` as graphs, up to `rows` sequences, with `longest` tokens in a sequence.

        tokens: that a sequence brings with its drafts, at most. On ranks, all of them capture alike: collectives are part of the graphs.

        Nothing where none are recorded (`record`), or those of this cache are. Costs the memory of the largest step.
        """
        if self._record is None or (self._graphs is not None and self._graphs[0] is cache):
            return
        in_place = captures_in_place(self.device.type, self.dtype)
        columns = min(-(-longest // cache.size), cache.spare // cache.size)
        width = self.spec.vocab if self.cut is None else len(range(*self.cut.words()))
        shape = rows, columns, width
        graphs = DecodeGraphs(
            partial(self._forward, cache=cache),
            self._record,
            shape,
            cache.spare,
            self.device,
            reads_in_place=in_place,
            tokens=tokens,
        )
        self._graphs = cache, graphs
        graphs.capture()

    def _forward(self, batch: BatchIndices, cache: Cache) -> Tensor:
        """Compute logits of this rank's vocabulary range, fp32 [R, range]; without other ranks [R, vocab]."""
        spec = self.spec
        x = F.embedding(batch.tokens, self._floats["embed.weight"])
        scale = torch.tensor(spec.embed_scale, dtype=x.dtype, device="cpu")  # rounded as the model was trained
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
            return self._scaled(self._native.step(x, batch, cache.layers))
        self._worn = tuple((self.adapters[name], rows) for name, rows in batch.worn)
        turns = {rope: kind.tables(batch.positions, x.dtype) for rope, kind in self._rotations.items()}
        stream = _ResidualStream(x)
        for i, layer in enumerate(spec.layers):
            stream = self._layer(f"layers.{i}", layer, stream, _Step(batch, cache.layers[i], turns))
        return self.head(stream.rows(batch.outputs).total())

    def head(self, x: Tensor) -> Tensor:
        """Compute logits, fp32 [R, vocab], of ranks those of this one's vocabulary range, from hidden states [R, hidden]."""
        spec = self.spec
        if spec.final_norm:
            x = self._norm("norm", x)
        if "embed_out.weight" in self.weights:
            x = self._linear("embed_out", x)
        head = self.weights["embed.weight" if spec.tied else "head.weight"]
        if self.cut is not None and spec.tied:
            head = self._floats["embed.weight"][slice(*self.cut.words())]
        return self._scaled(linear(x, head, self._floats.get("head.bias")).float())

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

    def _layer(self, at: str, layer: DecoderLayerSpec, stream: _ResidualStream, step: _Step) -> _ResidualStream:
        def attention(y: Tensor) -> Tensor:
            out = self._summed(self._attention(f"{at}.attention", layer.attention, y, step))
            return out if layer.residual == 1.0 else out * layer.residual

        def feed(y: Tensor) -> Tensor:
            out = self._summed(self._feed(f"{at}.feed", layer.feed, y))
            return out if layer.residual == 1.0 else out * layer.residual

        def norm(number: int) -> NormWeights:
            return self._norm_weights(f"{at}.norm{number}")

        if layer.order == "pre":
            x, y = stream.normed(norm(1))
            x, y = residual_norm(x, attention(y), None, norm(2))
            return _ResidualStream(x, feed(y))
        if layer.order == "parallel":
            x, y = stream.normed(norm(1))
            return _ResidualStream(x + attention(y), feed(y))
        if layer.order == "parallel_norms":
            x, y = stream.normed(norm(1))
            return _ResidualStream(x + attention(y), feed(normed(x, norm(2))))
        if layer.order == "sandwich":
            x, y = stream.normed(norm(1))
            x, y = residual_norm(x, attention(y), norm(2), norm(3))
            return _ResidualStream(x, feed(y), norm(4))
        x = stream.total()
        if layer.order == "post":
            x, _ = residual_norm(x, attention(x), norm(1), None)
            return _ResidualStream(x, feed(x), norm(2))
        _, x = residual_norm(x, attention(x), None, norm(1))
        return _ResidualStream(residual_norm(x, feed(x), None, norm(2))[1])

    def _attention(self, at: str, spec: AttentionSpec, x: Tensor, step: _Step) -> Tensor:
        if spec.latent is not None:
            out = self._latent(at, spec, spec.latent, x, step)
        else:
            q = write_heads(self._linear(f"{at}.qkv", x), self._heads(at, spec, step), step.batch.slots, step.cache)
            slopes = None
            if spec.alibi:
                slopes = self._slopes[_all_heads(spec), spec.alibi.rounded][
                    spec.head_offset : spec.head_offset + spec.heads
                ]
            extra = (slopes, self._floats.get(f"{at}.sinks"))
            out = attend(q, step.cache, step.batch, spec, extra)
        return self._linear(f"{at}.out", out.flatten(1))

    def _heads(self, at: str, spec: AttentionSpec, step: _Step) -> Heads:
        names, whole = (f"{at}.q_norm", f"{at}.k_norm"), None
        if spec.whole_norm is not None:
            counts = spec.total_heads or (spec.heads, spec.kv_heads)
            each = zip(names, counts, strict=True)
            q, k = (partial(self._whole_normed, n, spec.whole_norm, count * spec.width) for n, count in each)
            whole = q, k
        norms = None
        if spec.head_norm is not None:
            norms = self._head_norm(names[0], spec, spec.head_norm), self._head_norm(names[1], spec, spec.head_norm)
        if spec.rope is None:
            return Heads(spec, None, None, norms, whole)
        return Heads(spec, self._rotations[spec.rope], step.turns[spec.rope], norms, whole)

    def _latent(self, at: str, spec: AttentionSpec, latent: LatentAttentionSpec, x: Tensor, step: _Step) -> Tensor:
        # Keys are latent @ up_k; instead of making them, queries go to the latent's space: q @ up_k^T (DeepSeek-V2, 2.1.2), so
        # that all heads read the same `rank + rotated` numbers a token. Values likewise, after the weighted sum.
        if latent.q_lora_rank is None:
            q = self._linear(f"{at}.q", x)
        else:
            norm = norm_weights(self._floats[f"{at}.q_down_norm.weight"], None, latent.norm)
            _, small = residual_norm(self._linear(f"{at}.q_down", x), None, None, norm)
            q = self._linear(f"{at}.q_up", small)
        q = q.unflatten(-1, (spec.heads, spec.width))
        plain, turned = q.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
        kv, k_turned = self._linear(f"{at}.kv_down", x).split([latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1)
        kv = normed(kv, norm_weights(self._floats[f"{at}.kv_down_norm.weight"], None, latent.norm))
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
        if isinstance(spec, Mlp):
            return self._mlp(at, spec.activation, spec.gated, x)
        out = self._experts(at, spec, x)
        if spec.shared:
            more = self._mlp(f"{at}.shared", spec.activation, True, x)
            if spec.shared_gate:
                more = more * torch.sigmoid(self._linear(f"{at}.shared_gate", x))
            out = out + more
        return out

    def _mlp(self, at: str, activation: str, gated: bool, x: Tensor) -> Tensor:
        y = self._linear(f"{at}.up", x)
        y = gate(y, activation) if gated else ACTIVATIONS[activation](y)
        return self._linear(f"{at}.down", y)

    def _experts(self, at: str, spec: ExpertsSpec, x: Tensor) -> Tensor:
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
        if spec.clamp is None:
            y = gate(y, spec.activation)
        else:
            left, value = y.chunk(2, dim=-1)
            left, value = left.clamp(max=spec.clamp), value.clamp(-spec.clamp, spec.clamp)
            y = (value + 1) * left * torch.sigmoid(spec.alpha * left)
        return unpermute(self._of_experts(f"{at}.experts.down", y, rows.ends), rows, share)

    def _of_experts(self, role: str, x: Tensor, ends: Tensor) -> Tensor:
        y = grouped_linear(x, self.weights[role], ends)
        bias = self._floats.get(f"{role}_bias")
        if bias is None:
            return y
        # By the number of each row's expert, which the host is not told; rows past the last end belong to none.
        rows = torch.arange(len(y), dtype=ends.dtype, device=y.device)
        expert = torch.searchsorted(ends, rows, right=True)
        there = expert < len(ends)
        return y + torch.where(there[:, None], bias[expert.clamp(max=len(ends) - 1)], 0.0)

    # ---- leaves

    def _linear(self, role: str, x: Tensor) -> Tensor:
        y = linear(x, self.weights[f"{role}.weight"], self._floats.get(f"{role}.bias"))
        for adapter, rows in self._worn:
            adapter.add(role, y, x, rows)
        return y

    def _whole_normed(self, role: str, norm: Norm, features: int, x: Tensor) -> Tensor:
        """Apply RMS norm over features that are sharded over the ranks."""
        weight = self._floats[f"{role}.weight"]
        if self.group.size == 1:
            return normed(x, norm_weights(weight, None, norm))
        wide = x.float()
        mean = self._summed(wide.square().sum(-1, keepdim=True)) / features
        return weight * (wide * torch.rsqrt(mean + norm.eps)).to(x.dtype)

    def _head_norm(self, role: str, spec: AttentionSpec, norm: Norm) -> NormWeights:
        """Return the norm of every head, with weights of its own where heads have them."""
        weight, bias = self._floats[f"{role}.weight"], self._floats.get(f"{role}.bias")
        return norm_weights(weight.view(-1, spec.width) if spec.head_norm_each else weight, bias, norm)

    def _norm_weights(self, role: str) -> NormWeights:
        return norm_weights(self._floats[f"{role}.weight"], self._floats.get(f"{role}.bias"), self.spec.norm)

    def _norm(self, role: str, x: Tensor) -> Tensor:
        return residual_norm(x, None, None, self._norm_weights(role))[1]


def _all_heads(attention: AttentionSpec) -> int:
    return attention.heads if attention.total_heads is None else attention.total_heads[0]

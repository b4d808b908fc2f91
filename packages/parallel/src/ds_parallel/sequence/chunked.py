"""Attention over a sequence in chunks, whose queries, keys and values lie on the host between uses.

Yao et al., arXiv:2408.16978 (fully pipelined distributed transformer). A *chunk* is a stretch of the sequence. Forward makes the
queries, keys and values of one chunk at a time, sends them to the host, and lets the chunk's queries see the chunks before it, one
after the other, merged by their log-sum-exp (`ds_ops.partial_attention`). Backward walks the same pairs and adds up what each chunk's keys
and values get; then it makes every chunk's queries, keys and values again, this time with a graph, for the gradients of the input and
of the projection. The device holds the input, the output, and of the rest two chunks at a time: one that is used, one that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_accel import get_accelerator, streams
from ds_config.errors import PlanError
from ds_ops.partial_attention import View, merge_partial, partial_attention, partial_attention_grad

__all__ = ["Chunking", "HostChunks", "chunked_attention"]

Project = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a sequence is attended to.

    Attributes:
        chunks: Equal stretches of the input's first dim.
        causal: No query sees a later key.
        scale: Factor of scores; 1 / sqrt(head size) by default.
        on_host: False keeps all chunks on the device.
    """

    chunks: int
    causal: bool = True
    scale: float | None = None
    on_host: bool = True

    def sees(self, queries: int) -> range:
        """Return the chunks of keys to which a chunk of queries attends."""
        return range(queries + 1 if self.causal else self.chunks)

    def view(self, queries: int, keys: int) -> View:
        """Return the attention mask and scale of a pair of query chunk and key chunk."""
        return View(self.causal and queries == keys, None, self.scale)


def chunked_attention(x: Tensor, project: Project, params: Sequence[Tensor], how: Chunking) -> Tensor:
    """Compute self-attention of a sequence chunk by chunk.

    Args:
        x: [tokens, ...]; split along its first dim.
        project: `project(part, index)` returns queries [batch, length, heads, head size], and keys and values of as
        many
            heads or of a number that divides them. `length` is that of a chunk on all ranks that share the sequence, if
            `project` exchanges heads.
        params: What `project` reads besides `part` and that needs gradients.
    Returns: [batch, chunks x length, heads, head size].
    Raises:
        PlanError: the chunks do not divide the tokens ("sequence-chunks").
    Cost: the projection runs twice; chunks x (chunks + 1) / 2 fetches of a chunk of keys and values in forward and
    three
        times that in backward, each overlapped with the computation of the previous chunk.
    """
    if how.chunks < 1 or x.shape[0] % how.chunks:
        raise PlanError(
            f"{x.shape[0]} tokens in {how.chunks} chunks",
            code="sequence-chunks",
            fix="Use a number of chunks that divides the tokens of a rank.",
        )
    out: Tensor = _Chunked.apply(x, project, how, *params)
    return out


class HostChunks:
    """Tensors of chunks by their number; where the device has streams they lie in pinned host memory.

    Args:
        on_host: False keeps them where they are.
    """

    def __init__(self, on_host: bool) -> None:
        accelerator = get_accelerator()
        self._stream: Any = accelerator.new_stream() if on_host and not accelerator.facts.synchronous else None
        self._chunks: dict[int, tuple[Tensor, ...]] = {}

    def put(self, index: int, *tensors: Tensor) -> None:
        """Keep these under `index`, instead of what is there. The caller must not change them afterwards."""
        self._chunks[index] = tensors if self._stream is None else self._sent(tensors)

    def walk(self, indices: Sequence[int]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (index, its tensors on the device) in this order; prefetch the next chunk while the caller uses this."""
        coming = [self._fetch(index) for index in indices[:1]]
        for place, index in enumerate(indices):
            current = coming.pop()
            coming += [self._fetch(following) for following in indices[place + 1 : place + 2]]
            yield index, self._arrived(*current)

    def _sent(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        accelerator = get_accelerator()
        streams.wait_stream(self._stream, accelerator.current_stream())
        with accelerator.on_stream(self._stream):
            host_copies = []
            for tensor in tensors:
                there = streams.page_locked(tensor.shape, tensor.dtype)
                streams.copy_into(there, tensor)
                streams.record_use(tensor, self._stream)
                host_copies.append(there)
        return tuple(host_copies)

    def _fetch(self, index: int) -> tuple[tuple[Tensor, ...], Any]:
        tensors, accelerator = self._chunks[index], get_accelerator()
        if self._stream is None:
            return tensors, None
        with accelerator.on_stream(self._stream):
            device = accelerator.device()
            return tuple(streams.copy_to(t, device, fresh=True) for t in tensors), streams.record_event(device)

    def _arrived(self, tensors: tuple[Tensor, ...], event: Any) -> tuple[Tensor, ...]:
        if event is not None:
            stream = get_accelerator().current_stream()
            event.wait(stream)
            for tensor in tensors:
                streams.record_use(tensor, stream)
        return tensors


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, project: Project, how: Chunking, *params: Tensor) -> Tensor:
        with streams.on_device(x.device):  # its streams are those of what is computed; in backward autograd sees to it
            return _Chunked._forward(ctx, x, project, how, *params)

    @staticmethod
    def _forward(ctx: Any, x: Tensor, project: Project, how: Chunking, *params: Tensor) -> Tensor:
        queries, keys, results = (HostChunks(how.on_host) for _ in range(3))
        outputs = []
        if not how.causal:  # every chunk is seen by the first one
            for index, part in enumerate(x.chunk(how.chunks)):
                _, k, v = _heads(project(part, index))
                keys.put(index, k, v)
        for index, part in enumerate(x.chunk(how.chunks)):
            q, k, v = _heads(project(part, index))
            keys.put(index, k, v)
            wide = torch.promote_types(q.dtype, torch.float32)
            out = torch.zeros(q.shape, dtype=wide, device=q.device)
            lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
            for other, (k, v) in keys.walk(how.sees(index)):
                out, lse = merge_partial(out, lse, *partial_attention(q, k, v, how.view(index, other)))
            out = out.to(q.dtype)
            queries.put(index, q)
            results.put(index, out, lse)
            outputs.append(out)
        ctx.project, ctx.how, ctx.kept = project, how, (queries, keys, results)
        ctx.save_for_backward(x, *params)
        return torch.cat(outputs, 2).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        how: Chunking = ctx.how
        queries, keys, results = ctx.kept
        of_queries, of_keys = HostChunks(how.on_host), HostChunks(how.on_host)
        order = range(how.chunks)
        for index, (k, v) in keys.walk(order):
            of_keys.put(
                index, *(torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
            )
        douts = grads[0].transpose(1, 2).chunk(how.chunks, 2)
        for (index, (q,)), (_, (out, lse)) in zip(queries.walk(order), results.walk(order), strict=True):
            dq, dout = torch.zeros_like(q, dtype=lse.dtype), douts[index].contiguous()
            key_chunks = how.sees(index)
            for (other, (k, v)), (_, (dk, dv)) in zip(keys.walk(key_chunks), of_keys.walk(key_chunks), strict=True):
                more = partial_attention_grad(dout, (q, k, v), out, lse, how.view(index, other))
                dq += more[0]
                of_keys.put(other, dk + more[1], dv + more[2])
            of_queries.put(index, dq)
        parts, sums = [], [torch.zeros_like(param) for param in params]
        for (index, (dq,)), (_, (dk, dv)) in zip(of_queries.walk(order), of_keys.walk(order), strict=True):
            part = x.chunk(how.chunks)[index].detach().requires_grad_()
            with torch.enable_grad():
                projected = _heads(ctx.project(part, index))
            input_grads = torch.autograd.grad(
                projected,
                [part, *params],
                [g.to(t.dtype) for g, t in zip((dq, dk, dv), projected, strict=True)],
                allow_unused=True,
            )
            parts.append(torch.zeros_like(part) if input_grads[0] is None else input_grads[0])
            sums = [total if more is None else total + more for total, more in zip(sums, input_grads[1:], strict=True)]
        return torch.cat(parts), None, None, *sums


def _heads(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Transpose [batch, length, heads, head size] to the kernels' [batch, heads, length, head size]."""
    return [tensor.transpose(1, 2) for tensor in tensors]

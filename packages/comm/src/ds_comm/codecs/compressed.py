"""Collectives whose messages are quantized: the signatures of `collectives`, less exact, fewer bytes.

`Quantized` gathers, reduce-scatters and all-reduces numbers as small codes in groups that share a scale (`ds_ops.formats.QuantSpec`). Sent as
int8 in groups of 256, fp32 takes 0.254 of its bytes, bf16 0.508; int4 half of that. A gather quantizes once. A reduction
quantizes what a rank sends and adds in fp32 what it receives: one rounding per hop, and never a sum of codes.

Over a `Hierarchy` a reduction has two hops (qgZ of ZeRO++, Wang et al. 2023): sums of a node are quantized again and only
they cross nodes, so a rank sends 1/local of the bytes there. SUM is the sum and AVG the mean of all ranks, whatever the
shape of the hierarchy.

`ErrorFeedback` keeps what quantization lost and adds it to the next message of the same unit (LoCo, Xie et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ds_comm.collectives as collectives
from ds_comm.call import CollectiveCall
from ds_comm.codecs.hierarchy import Hierarchy
from ds_comm.collectives import ReduceOp
from ds_comm.groups import Group, GroupLike, as_group
from ds_comm.work import DONE, Chained, Work
from ds_config.errors import CommError
from ds_ops.formats import QuantSpec, QuantTensor, Swizzle
from ds_ops.quant import dequantize, quantize, quantize_with_feedback, reduce, reduce_quantized

__all__ = ["ErrorFeedback", "Quantized"]

_INT8 = QuantSpec()


class ErrorFeedback:
    """What quantization lost, by unit and hop, in fp32; to be added to the unit's next message.

    Args:
        decay: Share of the old error that stays when the new one comes in: e = decay e + (1 - decay) lost. Below 1.
        reset_after: Uses of one unit after which its error is forgotten; 0 for never.
    """

    def __init__(self, decay: float = 0.8, reset_after: int = 1024) -> None:
        if not 0 <= decay < 1 or reset_after < 0:
            raise CommError(
                f"feedback with decay {decay} and reset_after {reset_after}",
                code="comm-feedback",
                fix="Use 0 <= decay < 1, and a number of uses that is not negative.",
            )
        self.decay, self.reset_after = decay, reset_after
        self._errors: dict[tuple[str, int], Tensor] = {}
        self._uses: dict[tuple[str, int], int] = {}

    def error(self, unit: str, hop: int, like: Tensor) -> Tensor:
        """Return the error of a unit's message, to be changed in place; zeros at first and after a reset.

        The tensor is [numel of `like`], of its dtype.
        """
        if not unit:
            raise CommError(
                "a message without a unit cannot have feedback: errors are kept by unit",
                code="comm-feedback",
                fix="Pass unit=, a name that stands for the same tensor every time.",
            )
        key = unit, hop
        residual, uses = self._errors.get(key), self._uses.get(key, 0)
        if (
            residual is None
            or residual.numel() != like.numel()
            or residual.dtype != like.dtype
            or uses == self.reset_after > 0
        ):
            residual, uses = torch.zeros(like.numel(), dtype=like.dtype, device=like.device), 0
            self._errors[key] = residual
        self._uses[key] = uses + 1
        return residual

    def rescale(self, factor: float) -> None:
        """Multiply all errors by `factor` after the messages' scale (a loss scale) changed by that factor."""
        for error in self._errors.values():
            error.mul_(factor)

    def clear(self) -> None:
        """Forget all errors, for example after an overflow or a load."""
        self._errors.clear()
        self._uses.clear()

    @property
    def nbytes(self) -> int:
        """Memory of the errors."""
        return sum(error.nbytes for error in self._errors.values())


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized forms of three collectives, for tensors of fp32, bf16 and fp16. A group of one sends, and loses, nothing.

    Args:
        spec: How messages are quantized. Groups of elements do not cross the parts of ranks.
        hierarchy: Reduce inside nodes first; the group of every reduction is then `hierarchy.group`.
        feedback: Correct reductions by what the last ones lost. One object for each set of tensors.
    """

    spec: QuantSpec = _INT8
    hierarchy: Hierarchy | None = None
    feedback: ErrorFeedback | None = None

    def all_gather_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        unit: str = "",
    ) -> Work:
        """Gather quantized parts, as `ds_comm.all_gather_single`.

        Every rank gets the same bits, also for the part that it passed.

        Cost: the quantized part sent to each rank; one pass to quantize, one to dequantize.
        """
        call = CollectiveCall("all_gather_single", self._group(group), unit)
        call.check(output_tensor, input_tensor)
        call.check_parts("input_tensor", input_tensor.numel(), "output_tensor", output_tensor.numel())
        size, n = call.group.size, input_tensor.numel()
        if size == 1 or n == 0:
            return collectives.all_gather_single(output_tensor, input_tensor, call.group, async_op, unit=unit)
        quantized = quantize(input_tensor.view(1, n), self.spec)
        every = QuantTensor.empty(self.spec, size, n, like=output_tensor)
        work = collectives.all_gather_single(every.wire, quantized.wire, call.group, async_op, unit=unit)
        return _then(work, async_op, lambda: _keep(dequantize(every, out=output_tensor.view(size, n))))

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        op: Any = ReduceOp.SUM,
        group: GroupLike = None,
        async_op: bool = False,
        *,
        unit: str = "",
    ) -> Work:
        """Reduce and scatter quantized parts with SUM or AVG, as `ds_comm.reduce_scatter_single`.

        With a hierarchy, `wait()` makes the second hop: ranks wait for such operations in the same order.
        Cost: the quantized tensor sent once, or 1/local of the tensor across nodes and all of it inside.
        Raises:
            CommError: another op ("comm-quantized-op"), a group that is not the hierarchy's ("comm-hierarchy").
        """
        call = CollectiveCall("reduce_scatter_single", self._group(group), unit)
        call.check(output, input)
        call.check_parts("output", output.numel(), "input", input.numel())
        factor = _factor(call, op)
        if call.group.size == 1 or output.numel() == 0:
            return collectives.reduce_scatter_single(output, input, op, call.group, async_op, unit=unit)
        if self.hierarchy is None or 1 in (self.hierarchy.nodes, self.hierarchy.local):
            return self._in_one_hop(call, output, input, factor, async_op)
        return self._in_two_hops(call, output, input, factor, async_op)

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False, *, unit: str = ""
    ) -> Work:
        """Reduce quantized parts with SUM or AVG and gather the quantized results, as `ds_comm.all_reduce`.

        Every rank gets the same bits. `wait()` makes the gather: ranks wait for such operations in the same order. Feedback corrects
        the reduction; what the gather loses is not corrected.
        Cost: twice the quantized tensor sent (exact ring: twice the tensor), and a copy padded to a multiple of the ranks.
        Raises:
            CommError: another op ("comm-quantized-op"), a group that is not the hierarchy's ("comm-hierarchy").
        """
        call = CollectiveCall("all_reduce", self._group(group), unit)
        call.check(tensor)
        _factor(call, op)
        size, n = call.group.size, tensor.numel()
        if size == 1 or n == 0:
            return collectives.all_reduce(tensor, op, call.group, async_op, unit=unit)
        part = -(-n // size)
        padded = torch.zeros(size * part, dtype=tensor.dtype, device=tensor.device)
        padded[:n] = tensor.reshape(-1)
        reduced = torch.empty(part, dtype=tensor.dtype, device=tensor.device)
        work = self.reduce_scatter_single(reduced, padded, op, call.group, async_op, unit=unit)

        def gather() -> None:
            self.all_gather_single(padded, reduced, call.group, unit=unit)
            tensor.copy_(padded[:n].view(tensor.shape))

        return _then(work, async_op, gather, waits=True)

    def _group(self, group: GroupLike) -> Group:
        if self.hierarchy is None:
            return as_group(group)
        if group is not None and as_group(group).ranks != self.hierarchy.group.ranks:
            raise CommError(
                f"a reduction over {as_group(group)!r} with the hierarchy of {self.hierarchy.group!r}",
                code="comm-hierarchy",
                fix="Make one Quantized for each group.",
            )
        return self.hierarchy.group

    def _in_one_hop(self, call: CollectiveCall, output: Tensor, inp: Tensor, factor: float, async_op: bool) -> Work:
        size, n = call.group.size, output.numel()
        sent = self._quantized(inp, 0, call.unit, size)
        received = QuantTensor.empty(self.spec, size, n, like=output)
        work = collectives.all_to_all_single(
            received.wire, sent.wire, group=call.group, async_op=async_op, unit=call.unit
        )
        return _then(work, async_op, lambda: _keep(reduce(received, size, factor=factor, out=output.view(1, n))))

    def _in_two_hops(self, call: CollectiveCall, output: Tensor, inp: Tensor, factor: float, async_op: bool) -> Work:
        levels, n = self.hierarchy, output.numel()
        if levels is None:
            raise ValueError("two hops need a hierarchy")
        sent = self._swizzled(inp, call.unit, Swizzle(levels.nodes, levels.local))
        received = QuantTensor.empty(self.spec, sent.rows, n, like=output)

        def second_hop() -> None:
            of_node = self._summed(received, levels.local, call.unit)
            last = QuantTensor.empty(self.spec, levels.nodes, n, like=output)
            collectives.all_to_all_single(last.wire, of_node.wire, group=levels.across, unit=call.unit)
            reduce(last, levels.nodes, factor=factor, out=output.view(1, n))

        work = collectives.all_to_all_single(
            received.wire, sent.wire, group=levels.inside, async_op=async_op, unit=call.unit
        )
        return _then(work, async_op, second_hop, waits=True)

    def _quantized(self, x: Tensor, hop: int, unit: str, rows: int) -> QuantTensor:
        flat = x.view(rows, -1)
        if self.feedback is None:
            return quantize(flat, self.spec, rows=rows)
        return quantize_with_feedback(
            flat, self.feedback.error(unit, hop, x), self.spec, decay=self.feedback.decay, rows=rows
        )

    def _swizzled(self, x: Tensor, unit: str, swizzle: Swizzle) -> QuantTensor:
        """Quantize the rows of the first hop in the order in which both hops send them."""
        if self.feedback is None:
            return quantize(x.view(-1), self.spec, rows=swizzle)
        straight = self._quantized(x, 0, unit, swizzle.rows)
        wire = torch.empty_like(straight.wire)
        wire[torch.tensor(swizzle.order(), device=wire.device)] = straight.wire
        return replace(straight, wire=wire)

    def _summed(self, received: QuantTensor, sources: int, unit: str) -> QuantTensor:
        """Sum the received rows over a node and quantize the sums for the second hop."""
        if self.feedback is None:
            return reduce_quantized(received, sources)
        return self._quantized(reduce(received, sources), 1, unit, received.rows // sources)


def _then(work: Work, async_op: bool, then: Callable[[], None], waits: bool = False) -> Work:
    """`waits`: whether `then` communicates."""
    chained = Chained(work, then, waits)
    if async_op:
        return chained
    chained.wait()
    return DONE


def _keep(result: Tensor) -> None:
    """Do nothing: `result` was written into the caller's output."""


def _factor(call: CollectiveCall, op: Any) -> float:
    if op == ReduceOp.SUM:
        return 1.0
    if op == ReduceOp.AVG:
        return 1.0 / call.group.size
    raise CommError(
        f"{call}: quantized reductions are SUM and AVG, got {op}",
        code="comm-quantized-op",
        fix="Use the exact collective for other operations.",
    )

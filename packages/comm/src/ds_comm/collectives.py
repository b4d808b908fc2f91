"""The collectives. Signatures are torch.distributed's, and every one takes three things more.

- `group` is a `Group`, a torch ProcessGroup, or None for all ranks; in a group of one the same code runs without any
  process group.
- `unit=` names what is communicated (`"layers.7.mlp"`): it is what a hang report, a trace and the comms logger show.
- A `Work` is returned also when `async_op` is false (then complete), so a caller needs no branch.

Arguments are checked on this rank before anything is sent: sizes ("comm-size"), dtypes and contiguity ("comm-layout"),
ranks ("comm-rank"). That ranks agree with each other is compared off this path, by the recorder. Costs below are bytes
sent per rank for N ranks and a message of S bytes, on a backend that sends no byte twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.attendance import absent_ranks, record_arrival, wait_for_arrivals
from ds_comm.call import CollectiveCall
from ds_comm.groups import DEFAULT_TIMEOUT, GroupLike, as_group
from ds_comm.transports import Started, Transport
from ds_comm.watch.recorder import extend_timeout
from ds_comm.watch.verdict import rank_names
from ds_comm.work import Work
from ds_config.errors import CommError

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_pieces",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]

ReduceOp = dist.ReduceOp
_SUM = ReduceOp.SUM


def all_reduce(
    tensor: Tensor, op: Any = _SUM, group: GroupLike = None, async_op: bool = False, *, unit: str = ""
) -> Work:
    """Replace `tensor` by its reduction over the group. The same bits on every rank.

    Cost: 2 (N-1)/N S.
    """
    call = CollectiveCall("all_reduce", as_group(group), unit)
    call.check(tensor)
    return call.start(tensor, async_op, lambda to: to.all_reduce(tensor, op))


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = _SUM, group: GroupLike = None, async_op: bool = False, *, unit: str = ""
) -> Work:
    """Reduce several tensors of one dtype in place on all ranks, as one `all_reduce` message.

    Cost: a copy of the tensors in and out.
    """
    call = CollectiveCall("all_reduce_coalesced", as_group(group), unit)
    call.check(*tensors)
    flat, back = _fused(tensors)
    return call.start(flat, async_op, lambda to: to.all_reduce(flat, op), back)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Leave the reduction over the group in `tensor` of rank `dst`; elsewhere its content is undefined afterwards."""
    call = CollectiveCall("reduce", as_group(group), unit)
    root = call.root(dst, group_dst)
    call.check(tensor)
    return call.start(tensor, async_op, lambda to: to.reduce(tensor, root, op), peer=root)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  torch's name
    op: Any = _SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Reduce `input` over the group and leave this rank's 1/N of it in `output`.

    Args:
        output: n elements in any shape. May be `input`'s own part for this rank.
        input: N * n elements, contiguous, in rank order.
    Cost: (N-1)/N S. On gloo sums are made in rank order, in fp32 for fp16 and bf16; for two ranks they are the bits of
        an all_reduce.
    """
    call = CollectiveCall("reduce_scatter_single", as_group(group), unit)
    call.check(output, input)
    call.check_parts("output", output.numel(), "input", input.numel())
    call.copy_alone(output, input)
    return call.start(input, async_op, lambda to: to.reduce_scatter(output, input, op))


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = _SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Reduce every rank's `input_list[rank]` into `output`.

    Cost: a copy of the list into one message.
    """
    call = CollectiveCall("reduce_scatter", as_group(group), unit)
    call.check(output, *input_list)
    call.check_list("input_list", input_list, output.numel())
    flat, _ = _fused(input_list)
    call.copy_alone(output, flat)
    return call.start(flat, async_op, lambda to: to.reduce_scatter(output, flat, op))


def reduce_scatter_coalesced(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    op: Any = _SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """`reduce_scatter_single` of several pairs of one dtype as one message. Costs a copy of them in and out."""
    call = CollectiveCall("reduce_scatter_coalesced", as_group(group), unit)
    call.check(*outputs, *inputs)
    call.check_pairs("outputs", outputs, "inputs", inputs)
    flat_in = (
        torch.cat([whole.view(call.group.size, -1) for whole in inputs], dim=1)
        if inputs
        else torch.empty(0, device="cpu")
    )
    flat_out, back = _fused(outputs)
    call.copy_alone(flat_out, flat_in, back)
    return call.start(flat_in, async_op, lambda to: to.reduce_scatter(flat_out, flat_in, op), back)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: GroupLike = None, async_op: bool = False, *, unit: str = ""
) -> Work:
    """Put every rank's `input_tensor` into `output_tensor`, in rank order.

    Args:
        output_tensor: N * n elements in any shape, contiguous.
        input_tensor: n elements. May be `output_tensor`'s own part for this rank.
    Cost: (N-1)/N of the output's bytes.
    """
    call = CollectiveCall("all_gather_single", as_group(group), unit)
    call.check(output_tensor, input_tensor)
    call.check_parts("input_tensor", input_tensor.numel(), "output_tensor", output_tensor.numel())
    call.copy_alone(output_tensor, input_tensor)
    return call.start(input_tensor, async_op, lambda to: to.all_gather(output_tensor, input_tensor))


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: GroupLike = None, async_op: bool = False, *, unit: str = ""
) -> Work:
    """Gather rank r's `tensor` into `tensor_list[r]` on all ranks.

    Sizes may differ between ranks where the backend allows it (gloo does).
    """
    call = CollectiveCall("all_gather", as_group(group), unit)
    call.check(tensor, *tensor_list)
    call.check_list("tensor_list", tensor_list)
    call.check_parts(
        "tensor", tensor.numel(), f"tensor_list[{call.group.rank}]", tensor_list[call.group.rank].numel(), 1
    )
    call.copy_alone(tensor_list[0], tensor)
    return call.start(tensor, async_op, lambda to: to.all_gather_parts(tensor_list, tensor))


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Gather several pairs of tensors of one dtype as one `all_gather_single` message.

    Cost: a copy of the tensors in and out.
    """
    call = CollectiveCall("all_gather_coalesced", as_group(group), unit)
    call.check(*output_tensors, *input_tensors)
    call.check_pairs("input_tensors", input_tensors, "output_tensors", output_tensors)
    flat_in, _ = _fused(input_tensors)
    flat_out = flat_in.new_empty((call.group.size, flat_in.numel()))
    columns = flat_out.split([part.numel() for part in input_tensors], dim=1)

    def back() -> None:
        for whole, column in zip(output_tensors, columns, strict=True):
            whole.view(column.shape).copy_(column)

    call.copy_alone(flat_out, flat_in, back)
    return call.start(flat_in, async_op, lambda to: to.all_gather(flat_out, flat_in), back)


def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  torch's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Scatter the rows of `input` to the ranks in order and gather theirs into `output`, in rank order.

    Args:
        output_split_sizes: Rows (of dim 0) that come from each rank; equal parts when None or empty.
        input_split_sizes: Rows that go to each rank; equal parts when None or empty.
    Cost: (N-1)/N S for equal parts.
    """
    call = CollectiveCall("all_to_all_single", as_group(group), unit)
    call.check(output, input)
    receive = call.cut("output", _rows(output), output_split_sizes)
    send = call.cut("input", _rows(input), input_split_sizes)
    sent_numel, received_numel = input[: send[call.group.rank]].numel(), output[: receive[call.group.rank]].numel()
    call.check_parts("input part for itself", sent_numel, "output part", received_numel, 1)
    call.copy_alone(output, input)
    return call.start(input, async_op, lambda to: to.all_to_all_rows(output, input, receive, send))


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Send `input_tensor_list[r]` to rank r and receive `output_tensor_list[r]` from rank r, on all ranks.

    Sizes may differ from pair to pair. Tensors are contiguous; on shm they may be strided views, which are copied
    directly.
    """
    call = CollectiveCall("all_to_all", as_group(group), unit)
    first = next(iter((*output_tensor_list, *input_tensor_list)), torch.empty(0, device="cpu"))
    call.check(*output_tensor_list, *input_tensor_list, views=call.takes_views(first.device))
    call.check_list("output_tensor_list", output_tensor_list)
    call.check_list("input_tensor_list", input_tensor_list)
    inp, out = input_tensor_list[call.group.rank], output_tensor_list[call.group.rank]
    call.check_parts("input part for itself", inp.numel(), "output part", out.numel(), 1)
    call.copy_alone(out, inp)
    return call.start(inp, async_op, lambda to: to.all_to_all(output_tensor_list, input_tensor_list))


def all_to_all_pieces(
    outputs: Sequence[Sequence[Tensor]],
    inputs: Sequence[Sequence[Tensor]],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    unit: str = "",
) -> Work:
    """Send the tensors `inputs[r]` to each rank r, which receives them in order in its `outputs[this rank]`.

    Entries for the calling rank are ignored.

    Args:
        outputs: Contiguous tensors, as many and as large as the other rank sends. Sizes are not compared between ranks.
        inputs: Contiguous tensors at any addresses, which must not change before the end: this side copies nothing.
    Cost: the bytes sent; a message per tensor. Worth using from some 256 KiB a tensor on gloo; copy smaller tensors
    into one.
    """
    call = CollectiveCall("all_to_all_pieces", as_group(group), unit)
    call.check_count("outputs", outputs)
    call.check_count("inputs", inputs)
    others = [r for r in range(call.group.size) if r != call.group.rank]
    sent = [piece for r in others for piece in inputs[r]]
    call.check(*sent, *(piece for r in others for piece in outputs[r]))
    size = sum(piece.nbytes for piece in sent)
    largest = max(sent, key=Tensor.numel, default=torch.empty(0, device="cpu"))
    return call.start(largest, async_op, lambda to: to.all_to_all_pieces(outputs, inputs), nbytes=size)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Copy rank `src`'s `tensor` into everyone's. Cost: S received per rank."""
    call = CollectiveCall("broadcast", as_group(group), unit)
    root = call.root(src, group_src)
    call.check(tensor)
    return call.start(tensor, async_op, lambda to: to.broadcast(tensor, root), peer=root)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Gather rank r's `tensor` into `gather_list[r]` on rank `dst` (default 0).

    Other ranks pass no list.
    """
    call = CollectiveCall("gather", as_group(group), unit)
    root = call.root(dst, group_dst, default=0)
    call.check(tensor, *(gather_list or ()))
    parts = call.at_root("gather_list", gather_list, root, tensor.numel())
    if parts is not None:
        call.copy_alone(parts[0], tensor)
    return call.start(tensor, async_op, lambda to: to.gather(tensor, parts, root), peer=root)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> Work:
    """Rank r's `tensor` becomes `scatter_list[r]` of rank `src` (default 0). The others pass no list."""
    call = CollectiveCall("scatter", as_group(group), unit)
    root = call.root(src, group_src, default=0)
    call.check(tensor, *(scatter_list or ()))
    parts = call.at_root("scatter_list", scatter_list, root, tensor.numel())
    if parts is not None:
        call.copy_alone(tensor, parts[0])
    return call.start(tensor, async_op, lambda to: to.scatter(tensor, parts, root), peer=root)


def barrier(
    group: GroupLike = None, async_op: bool = False, device_ids: Sequence[int] | None = None, *, unit: str = ""
) -> Work:
    """Return when every rank of the group has called it. `device_ids` is torch's, for backends that need it."""
    call = CollectiveCall("barrier", as_group(group), unit)
    if device_ids is None:
        return call.start(None, async_op, lambda to: to.barrier())
    ids = list(device_ids)
    return call.start(None, async_op, lambda to: Started([dist.barrier(to.pg, async_op=True, device_ids=ids)]))


def monitored_barrier(
    group: GroupLike = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, *, unit: str = ""
) -> None:
    """Wait for all ranks; after `timeout` (default 10 minutes) raise an error that names the missing ranks of the world.

    Every rank that waits names all of them, in any group and on any backend, as far as the store of the process group is reached.
    Over shm the group is unusable afterwards.

    Args:
        wait_all_ranks: As torch's; all missing ranks are named in any case.
    Raises:
        CommError: a rank did not come in time ("comm-timeout").
    Cost: a barrier, and one message to the store.
    """
    group = as_group(group)
    if group.link is None:
        return
    limit = timeout or DEFAULT_TIMEOUT
    call = CollectiveCall("monitored_barrier", group, unit)
    del wait_all_ranks

    absent: list[int] = []

    def launch(to: Transport) -> Started:
        try:
            if not to.waits_by_store:
                return to.monitored_barrier(limit)
            wait_for_arrivals(group, limit)
        except RuntimeError:
            absent.extend(absent_ranks(group))  # at once: a rank may come while the failure is explained
            raise
        return Started(())

    try:
        record_arrival(group)
        with extend_timeout(limit.total_seconds()):  # it has a limit of its own
            call.start(None, False, launch)
    except RuntimeError as error:
        reason = (
            f"{rank_names(absent)} did not come within {limit.total_seconds():g} s"
            if absent
            else str(error).splitlines()[0]
        )
        raise CommError(
            f"monitored_barrier[{unit}] of group {group.name!r} ({rank_names(group.ranks)}) on rank {group.global_rank}: {reason}",
            code="comm-timeout",
            fix="Look at what the named ranks do; raise the timeout if they are only slow.",
        ) from error


# The names of torch up to 2.12.
reduce_scatter_tensor = reduce_scatter_single
all_gather_into_tensor = all_gather_single


def _rows(tensor: Tensor) -> int:
    if tensor.dim() == 0:
        raise CommError(
            "all_to_all_single of a tensor without dims", code="comm-size", fix="Pass tensors with rows: [n, ...]."
        )
    return tensor.shape[0]


def _fused(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Concatenate the elements of all tensors, and return with them a function that copies them back."""
    flat = torch.cat([tensor.view(-1) for tensor in tensors]) if tensors else torch.empty(0, device="cpu")

    def back() -> None:
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return flat, back

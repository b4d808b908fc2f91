"""Compressed gradients in torch's DistributedDataParallel: one function for our codes and torch's own hooks.

A hook gets a bucket of gradients and gives their mean. Ours starts the first half of a quantized all-reduce when a bucket is ready, beside the
backward, and ends all of them with the step's last bucket: the second half communicates, and does so in the order of the buckets on every rank.
"""

# No "from __future__ import annotations": torch compares the annotations of a hook with its classes.

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ds_comm.codecs.compressed import ErrorFeedback, Quantized
from ds_comm.collectives import ReduceOp
from ds_comm.groups import Group, as_group
from ds_comm.work import Work
from ds_config.errors import CommError
from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantSpec

__all__ = ["Compression", "compress_ddp"]

Compression = Literal["fp16", "bf16", "int8", "int4", "fp8"]
_SPECS = {"int8": QuantSpec(INT8), "int4": QuantSpec(INT4, 64), "fp8": QuantSpec(FP8_E4M3)}


def compress_ddp(model: DistributedDataParallel, method: Compression | Quantized | powerSGD_hook.PowerSGDState) -> None:
    """Compress the gradients that a DistributedDataParallel averages; call once, before the first backward.

    Args:
        method: "fp16" (torch's hook) or "bf16" (the same with other numbers; torch's needs NCCL): half the bytes. "int8", "int4" or "fp8": codes with error feedback, about a quarter or an eighth;
            or a `Quantized` with a format, hierarchy or feedback of its own. torch's `PowerSGDState`: its low-rank hook.
    Raises:
        CommError: another method ("comm-ddp-method").
    """
    if isinstance(method, powerSGD_hook.PowerSGDState):
        on_device = next(model.parameters()).device.type != "cpu"
        model.register_comm_hook(method, powerSGD_hook.powerSGD_hook if on_device else _powersgd_in_order)
    elif method in ("fp16", "bf16"):
        model.register_comm_hook(
            model.process_group, default_hooks.fp16_compress_hook if method == "fp16" else _bf16_hook
        )
    elif isinstance(method, Quantized) or method in _SPECS:
        codes = method if isinstance(method, Quantized) else Quantized(_SPECS[method], feedback=ErrorFeedback())
        model.register_comm_hook(_QuantizedBuckets(codes, as_group(model.process_group)), _quantized_hook)
    else:
        raise CommError(
            f"gradients compressed by {method!r}",
            code="comm-ddp-method",
            fix=f"Use fp16, bf16, {', '.join(_SPECS)}, a ds_comm.codecs.compressed.Quantized, or torch's PowerSGDState.",
        )


class _QuantizedBuckets:
    """The quantized all-reduces of one backward that are under way, in the order of buckets."""

    def __init__(self, codes: Quantized, group: Group) -> None:
        self._codes, self._group = codes, group
        self._pending: list[tuple[Work, Tensor, torch.futures.Future[torch.Tensor]]] = []

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._pending.clear()  # of a backward that an error ended
        buffer, future = bucket.buffer(), torch.futures.Future[torch.Tensor]()
        work = self._codes.all_reduce(
            buffer, ReduceOp.AVG, self._group, async_op=True, unit=f"ddp.bucket{bucket.index()}"
        )
        self._pending.append((work, buffer, future))
        if bucket.is_last():
            for started, reduced, result in self._pending:
                started.wait()
                result.set_result(reduced)
            self._pending.clear()
        return future


def _quantized_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = state.start(bucket)
    return future


def _powersgd_in_order(
    state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Run torch's hook to its end before the next bucket.

    It all-reduces from callbacks. Those of a device run in the order of its stream; those of gloo and shm run on several threads, and with
    several buckets the ranks' messages cross.
    """
    future: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def _bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bf16."""
    buffer = bucket.buffer()
    low = buffer.to(torch.bfloat16).div_(group.size())
    work: Any = dist.all_reduce(low, group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return future

# The overloads of torch's stub are for callers; a subclass has one signature for all of them.
# mypy: disable-error-code="override,assignment"
"""`single`: a torch process group of one rank, for torch's own functions: DDP, FSDP2, `torch.distributed`.

None means the world to torch, so a rank that shares something with nobody needs a group that says so. A group of NCCL would do,
but making one splits the world's communicator, which all ranks must call, and holds device memory for nothing; here a result is a
copy of the argument, on any device, in the caller's stream. Nothing is sent, no store is asked and no other rank takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.python_group import PythonProcessGroup
from ds_config.errors import CommError

__all__ = ["SINGLE", "SingleProcessGroup", "register"]

SINGLE = "single"


class _Done(dist.Work):
    """A call that has ended; on a device its result is ready in the stream that made it."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._result = list(result)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        devices = {tensor.device for tensor in self._result if tensor.device.type != "cpu"}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
        future.set_result(self._result)
        return future


class SingleProcessGroup(PythonProcessGroup):
    """torch's collectives among one rank.

    Args:
        store: Not used.
        rank: 0.
        size: 1.
        timeout: Not used.
    Raises:
        CommError: it was asked to connect several ranks ("comm-single").
    """

    backend = SINGLE

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if size != 1:
            raise CommError(
                f"the backend {SINGLE!r} was asked for a group of {size} ranks",
                code="comm-single",
                fix="Use it for groups of one rank; initialise a world with gloo, shm or a device's backend.",
            )
        super().__init__(0, 1)

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nothing waits."""

    # ---- collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return _Done(tensors)

    allreduce_coalesced = allreduce
    broadcast = allreduce
    reduce = allreduce

    def _allgather_base(self, output: Tensor, inp: Tensor, opts: Any = None) -> dist.Work:
        return _copy([output], [inp])

    all_gather_single = _allgather_base
    _reduce_scatter_base = _allgather_base
    reduce_scatter_single = _allgather_base

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return _copy([part for (part,) in outputs], inputs)

    gather = allgather

    def allgather_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        (of_rank,) = outputs
        return _copy(of_rank, inputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return _copy(outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = allgather_into_tensor_coalesced
    alltoall = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:
        return _copy(outputs, [part for (part,) in inputs])

    scatter = reduce_scatter

    def alltoall_base(
        self, output: Tensor, inp: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        return _copy([output], [inp])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Done([])

    def rendezvous_within(self, timeout: timedelta) -> None:
        """A barrier with a timeout: this rank has come."""

    # ---- point to point

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        raise _nobody("send")

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        raise _nobody("recv")

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        raise _nobody("recv")


def _nobody(op: str) -> CommError:
    return CommError(
        f"{op} in a group of one rank, which has no other",
        code="comm-rank",
        fix="Copy the tensor; a rank sends itself nothing.",
    )


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Done:
    with torch.no_grad():
        for out, inp in zip(outputs, inputs, strict=True):
            if out.numel() != inp.numel():
                raise CommError(
                    f"a collective among one rank has {inp.numel()} elements as its argument, its result {out.numel()}",
                    code="comm-size",
                    fix="Pass buffers of one size: the whole is this rank's part.",
                )
            if out.shape == inp.shape:
                out.copy_(inp)
            else:
                out.copy_(inp.reshape(out.shape))
    return _Done(outputs)


def register() -> None:
    """Make `"single"` a backend that torch.distributed knows. Idempotent; done on import."""
    if not hasattr(
        dist.Backend, SINGLE.upper()
    ):  # only for devices that have a backend: it must become the default of none
        dist.Backend.register_backend(SINGLE, SingleProcessGroup, devices=list(dist.Backend.default_device_backend_map))


register()

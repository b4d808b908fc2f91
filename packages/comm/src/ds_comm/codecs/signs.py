"""One bit per element: signs in blocks that share a magnitude, and the mean over ranks of what is sent so.

An element becomes the sign it has and its block's mean magnitude, the closest that two values per block can come to it.
What that loses is kept and added to the next message (error feedback: Seide et al. 2014, Karimireddy et al. 2019; blocks:
Zheng et al. 2019), on the way to the rank that adds and on the way back. Over many steps nothing is lost.

Wire of `block` elements: block / 8 bytes of signs, lowest bit first, and one fp32 magnitude: 1.016 bits an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_comm.collectives import all_gather_single, all_to_all_single
from ds_comm.groups import GroupLike, as_group
from ds_config.errors import CommError

__all__ = ["BLOCK", "SignErrors", "mean_of_signs", "pack_signs", "unpack_signs"]

BLOCK = 2048
_BLOCK_BYTES = BLOCK // 8 + 4


@dataclass(slots=True)
class SignErrors:
    """What is still owed to the mean of one tensor of `numel` elements; fp32.

    Attributes:
        worker: [numel padded to whole blocks per rank]: what this rank has not sent yet.
        server: [1/N of it]: what it has not told the others of its part of the mean.
    """

    numel: int
    worker: Tensor
    server: Tensor

    @classmethod
    def zeros(cls, numel: int, ranks: int, device: torch.device | str = "cpu") -> SignErrors:
        """Allocate zero errors for `numel` elements on `ranks` ranks.

        Memory: 4 (1 + 1/ranks) bytes an element.
        """
        padded = -(-max(numel, 1) // (ranks * BLOCK)) * ranks * BLOCK
        return cls(numel, torch.zeros(padded, device=device), torch.zeros(padded // ranks, device=device))

    def clear(self) -> None:
        """Forget it, when what the next messages mean is another thing."""
        self.worker.zero_()
        self.server.zero_()


def mean_of_signs(tensor: Tensor, errors: SignErrors, group: GroupLike = None, *, unit: str = "") -> None:
    """Replace `tensor` by the mean over the group, as signs tell it. The same bits on every rank.

    Args:
        tensor: [n], fp32, contiguous.
        errors: Of this tensor and group; changed.
    Cost: 1.016 bits an element sent to the ranks that add, and as much back; about ten passes over fp32 memory.
    Raises:
        CommError: dtype or length do not fit ("comm-layout", "comm-size").
    """
    group = as_group(group)
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise CommError(
            f"mean_of_signs[{unit}]: {tensor.dtype} with strides {tensor.stride()}",
            code="comm-layout",
            fix="Pass a contiguous fp32 tensor.",
        )
    if tensor.numel() != errors.numel or errors.worker.numel() != errors.server.numel() * group.size:
        raise CommError(
            f"mean_of_signs[{unit}]: {tensor.numel()} elements over {group.size} ranks with errors of {errors.numel} over "
            f"{errors.worker.numel() // errors.server.numel()}",
            code="comm-size",
            fix="Make SignErrors.zeros(tensor.numel(), group.size) for each tensor.",
        )
    if tensor.numel() == 0:
        return
    chunk = errors.server.numel()
    errors.worker[: tensor.numel()].add_(tensor.view(-1))
    sent = _compress(errors.worker, tensor.numel())
    received = torch.empty_like(sent)
    all_to_all_single(received, sent, group=group, unit=unit)
    for part in received.view(group.size, -1):  # in rank order
        errors.server.add_(unpack_signs(part.view(-1, _BLOCK_BYTES)).view(-1), alpha=1 / group.size)
    compressed = _compress(errors.server, min(max(tensor.numel() - group.rank * chunk, 0), chunk))
    every = compressed.new_empty((group.size, compressed.numel()))
    all_gather_single(every, compressed, group, unit=unit)
    tensor.view(-1).copy_(unpack_signs(every.view(-1, _BLOCK_BYTES)).view(-1)[: tensor.numel()])


def pack_signs(x: Tensor, counts: Tensor | None = None) -> Tensor:
    """Pack [blocks, BLOCK] fp32 into signs and a magnitude per block, uint8 [blocks, BLOCK / 8 + 4].

    counts: [blocks]: how many elements of each block are real; other elements are zeros and do not count in its mean.
    """
    magnitudes = x.abs().sum(1) / (BLOCK if counts is None else counts)
    bits = (x >= 0).view(torch.uint8).view(x.shape[0], BLOCK // 8, 8)
    wire = torch.empty((x.shape[0], _BLOCK_BYTES), dtype=torch.uint8, device=x.device)
    packed = bits[..., 0].clone()
    for place in range(1, 8):
        packed.bitwise_or_(bits[..., place] << place)
    wire[:, : BLOCK // 8] = packed
    wire[:, BLOCK // 8 :] = magnitudes.float().view(torch.uint8).view(-1, 4)
    return wire


def unpack_signs(wire: Tensor) -> Tensor:
    """Unpack uint8 [blocks, BLOCK / 8 + 4] to fp32 [blocks, BLOCK]: plus or minus the block's magnitude."""
    magnitudes = wire[:, BLOCK // 8 :].contiguous().view(torch.float32)
    signs = torch.nn.functional.embedding(wire[:, : BLOCK // 8].int(), _signs_on(wire.device))
    return signs.view(-1, BLOCK).mul_(magnitudes)


def _compress(error: Tensor, real: int) -> Tensor:
    """Compress `error` to packed signs, and leave in `error` the part that they do not represent.

    Elements from `real` on are padding.
    """
    error[real:].zero_()  # what signs of padding left there must stay out of magnitudes
    rows = error.view(-1, BLOCK)
    counts = (real - torch.arange(0, error.numel(), BLOCK, device=error.device)).clamp(1, BLOCK)
    wire = pack_signs(rows, counts)
    rows.sub_(unpack_signs(wire))
    error[real:].zero_()
    return wire.view(-1)


@cache
def _signs_on(device: torch.device) -> Tensor:
    # A copy from pageable memory waits for the device: one for each device, not for each message.
    return _SIGNS.to(device)


# The eight signs of a byte.
_SIGNS = (
    (torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu"))
    .bitwise_and_(1)
    .mul_(2)
    .sub_(1)
    .float()
)

"""Attention of a ragged batch by FlashInfer, where the package is installed (extra `flashinfer`) and is asked for or Triton does not run.

A wrapper plans once for a batch, on the host, and then runs in each layer; layers whose attention differs have wrappers of their own.
Blocks are its pages: the numbers of each sequence's blocks follow each other in `indices`, from `indptr[i]` on, and the last one holds
`last_page_len` tokens. It has no sinks, slopes of ours, or scales for each token and head; what it is not made for takes another backend.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_accel import streams
from ds_inference.spec import AttentionSpec
from ds_ops.registry import Unavailable

__all__ = ["FlashInferBatch", "flashinfer_attend", "flashinfer_obstacle", "flashinfer_reads"]

_WIDTHS = (64, 128, 256)
_WORKSPACE = 128 << 20


@dataclass(frozen=True, slots=True)
class FlashInferBatch:
    """Where the sequences of a batch are, as numbers of the host.

    Attributes:
        key: The batch itself: layers that show the same one share a plan.
        starts: First token of each sequence, and the number of tokens.
        lengths: Tokens of each sequence in the cache, those of the batch included.
        blocks: Of each sequence.
    """

    key: object
    starts: list[int]
    lengths: list[int]
    blocks: list[tuple[int, ...]]


def flashinfer_obstacle(device_type: str, dtype: torch.dtype) -> str:
    """Return why FlashInfer cannot run for tensors of this kind, an `Unavailable`; an empty string if it can."""
    if device_type != "cuda":
        return Unavailable("runs on cuda tensors only", elsewhere=True)
    if dtype not in (torch.bfloat16, torch.float16):
        return Unavailable(f"does not take {dtype}", fix="convert to torch.bfloat16")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return Unavailable("FlashInfer's kernels want compute capability 8.0")
    return _missing()


@functools.cache
def _missing() -> str:
    if importlib.util.find_spec("flashinfer") is None:
        return Unavailable(
            "the package flashinfer is not installed",
            fix='pip install "ds-inference[flashinfer]", and DS_OPS=flashinfer',
        )
    if not hasattr(_module(), "BatchPrefillWithPagedKVCacheWrapper"):
        return Unavailable(
            "this flashinfer has no attention over pages", fix="install flashinfer-python 0.2.3 or newer"
        )
    return ""


def _module() -> Any:
    import flashinfer

    return flashinfer


def flashinfer_reads(
    spec: AttentionSpec, cache: tuple[Tensor, ...], extra: tuple[Tensor | None, Tensor | None]
) -> bool:
    """Whether FlashInfer computes this attention over such a cache."""
    plain = len(cache) == 2 and all(t is None for t in extra)
    return plain and spec.width == spec.value_width and spec.width in _WIDTHS and cache[0].dtype == cache[1].dtype


def flashinfer_attend(q: Tensor, cache: tuple[Tensor, ...], batch: FlashInferBatch, spec: AttentionSpec) -> Tensor:
    """Compute the attention of each token over its sequence in the cache; valid on the current stream.

    Args:
        q: [T, heads, width].
        cache: Keys and values [blocks, size, kv heads, width].
    Returns: [T, heads, width].
    Cost: the first layer of a batch plans on the host, and copies block numbers to the device; each layer is one call.
    """
    wrapper = _plans.planned(q, cache, batch, spec)
    out: Tensor = wrapper.run(q, (cache[0], cache[1]))
    return out


class _Plans(threading.local):
    """Wrappers of this thread by device and attention, each with the batch for which it planned."""

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Tensor] = {}
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._keys: dict[tuple[Any, ...], object] = {}

    def planned(self, q: Tensor, cache: tuple[Tensor, ...], batch: FlashInferBatch, spec: AttentionSpec) -> Any:
        keys = cache[0]
        kind = (q.device, q.dtype, keys.dtype, keys.shape[1], spec.heads, spec.kv_heads, spec.width, spec.scale, spec.window, spec.softcap)  # fmt: skip
        if kind not in self._wrappers:
            workspace = self._workspaces.get(q.device)
            if workspace is None:
                workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device)
                self._workspaces[q.device] = workspace
            self._wrappers[kind] = _module().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        if self._keys.get(kind) is not batch.key:
            self._keys.pop(kind, None)
            self._plan(self._wrappers[kind], q, keys, batch, spec)
            self._keys[kind] = batch.key
        return self._wrappers[kind]

    @staticmethod
    def _plan(wrapper: Any, q: Tensor, keys: Tensor, batch: FlashInferBatch, spec: AttentionSpec) -> None:
        size, pages, indptr = keys.shape[1], list[int](), [0]
        for blocks, length in zip(batch.blocks, batch.lengths, strict=True):
            pages += blocks[: -(-length // size)]
            indptr.append(len(pages))
        last = [(length - 1) % size + 1 for length in batch.lengths]

        def host(numbers: list[int]) -> Tensor:  # it reads these on the host
            return torch.tensor(numbers, dtype=torch.int32, device="cpu")

        wrapper.plan(
            host(batch.starts),
            host(indptr),
            streams.copy_to(streams.pin(host(pages)), q.device),
            host(last),
            spec.heads,
            spec.kv_heads,
            spec.width,
            size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )


_plans = _Plans()

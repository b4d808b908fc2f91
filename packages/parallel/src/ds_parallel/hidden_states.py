"""Inputs of checkpointed layers go to the host between forward and backward, for models of transformers that checkpoint by themselves."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_config.errors import ConfigError, UnsupportedError
from ds_parallel.activation_store import ActivationPolicy, ActivationStore, Kept

__all__ = ["CheckpointActivationOffloadStats", "CheckpointHiddenStatesOffload"]


@dataclass(slots=True)
class CheckpointActivationOffloadStats:
    """What a context did."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@dataclass(slots=True, weakref_slot=True)
class _SavedHidden:
    value: Any  # the tensor; what the keeper made of it once it has left


_open: list[CheckpointHiddenStatesOffload] = []


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """Within it, marked tensors that autograd saves lie on the host. Checkpointed layers of transformers mark their first input.

    Args:
        min_offload_bytes: Smaller ones stay.
        keep_last_count: So many of the latest stay: backward begins with them.
        use_pin_memory, use_streams, max_fwd_stash_count, max_cpu_buffer_pool_count: Taken; copies go through the pinned memory and
            the stream of activation checkpointing, which need no numbers.

    Raises:
        ConfigError: a number below 0 ("activations-host").
    """

    def __init__(
        self, use_pin_memory: bool = True, use_streams: bool = True, min_offload_bytes: int = 1024, max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64, keep_last_count: int = 1,
    ) -> None:  # fmt: skip
        for name, value in {**locals()}.items():
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"{name} must be >= 0, got {value}", code="activations-host", fix="Use 0 or more.")
        del use_pin_memory, use_streams
        self.stats = CheckpointActivationOffloadStats()
        self._least, self._last = min_offload_bytes, keep_last_count
        self._keeper = ActivationStore(ActivationPolicy(host=True))
        self._marked: dict[int, Tensor] = {}
        self._latest: deque[weakref.ref[_SavedHidden]] = deque()
        super().__init__(self._pack, self._unpack)

    def mark(self, tensor: Tensor) -> None:
        """Mark a tensor for offload to the host when autograd saves the tensor."""
        self._marked[id(tensor)] = tensor
        self.stats.marked_tensors += 1

    def reset(self) -> None:
        """Begin anew."""
        self.stats = CheckpointActivationOffloadStats()
        self._marked.clear()
        self._latest.clear()

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]
        if self in _open:
            raise UnsupportedError(
                "CheckpointHiddenStatesOffload is not re-entrant",
                code="activations-host",
                fix="Make another one for the inner context.",
            )
        self.reset()
        super().__enter__()
        _open.append(self)
        _marking(True)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _open.remove(self)
        _marking(bool(_open))
        self._marked.clear()
        super().__exit__(*exc_info)

    def _pack(self, tensor: Tensor) -> Tensor | _SavedHidden:
        self.stats.saved_tensors_seen += 1
        if self._marked.pop(id(tensor), None) is None:
            return tensor
        there = self._keeper.accelerator
        stays = tensor.nbytes < self._least or not there.holds(tensor) or there.facts.torch_type == "cpu"
        if stays or not self._keeper.eligible(tensor):
            self.stats.skipped_marked_tensors += 1
            return tensor
        saved = _SavedHidden(tensor)
        self._latest.append(weakref.ref(saved))
        while len(self._latest) > self._last:
            oldest = self._latest.popleft()()
            if oldest is not None:
                self.stats.offloaded_tensors += 1
                self.stats.offloaded_bytes += oldest.value.nbytes
                oldest.value = self._keeper.pack(oldest.value, 0)
        return saved

    def _unpack(self, saved: Tensor | _SavedHidden) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not isinstance(saved.value, Kept):
            self.stats.kept_last_tensors += 1
            return saved.value
        back = self._keeper.unpack(saved.value)
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += back.nbytes
        return back


def _marking(on: bool) -> None:
    """Let the checkpointed layers of transformers mark their inputs, or not: `__call__` is theirs again when no context is open.

    They checkpoint within `__call__`, before any hook of a module runs.
    """
    layers = sys.modules.get("transformers.modeling_layers")
    if layers is None:
        return
    kind: Any = layers.GradientCheckpointingLayer
    ours = getattr(kind.__call__, "marks_inputs", None)
    if on and ours is None:
        kind.__call__ = _marked_call(kind.__call__, vars(kind).get("__call__"))
    elif not on and ours is not None:
        if ours[0] is None:
            del kind.__call__
        else:
            kind.__call__ = ours[0]


def _marked_call(plain: Any, defined: Any) -> Any:
    def call(layer: nn.Module, *args: Any, **options: Any) -> Any:
        marks = bool(_open and args and layer.training and getattr(layer, "gradient_checkpointing", False))
        if not (marks and isinstance(args[0], Tensor) and torch.is_grad_enabled()):
            return plain(layer, *args, **options)
        manager = _open[-1]
        manager.mark(args[0])
        try:
            return plain(layer, *args, **options)
        finally:
            manager._marked.pop(id(args[0]), None)

    call.marks_inputs = (defined,)  # type: ignore[attr-defined]
    return call

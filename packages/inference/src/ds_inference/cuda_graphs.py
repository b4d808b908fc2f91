"""A function of tensors that is recorded once for each set of shapes, then replayed: a device's work without the host's launches.

A step of decoding is some hundred small kernels; launching them takes the host ten times as long as a device takes to run them.
A CUDA graph is launched at once, but its addresses and shapes are fixed: inputs are copied to where the recording read them, and
batches are padded to few shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree

from ds_accel import streams
from ds_inference.paged_attention import BatchIndices

__all__ = ["CudaGraphRunner", "Record", "cuda_graph", "padded"]

_MOST = 64  # recordings of one function; other shapes run without one
_LEAST_BLOCKS = 4

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Runs a function once to record it; returns what runs it again, and what it returned, whose tensors a replay overwrites."""


def cuda_graph(device: torch.device) -> Record:
    """Return a recorder that captures calls on `device` as CUDA graphs, which share a memory pool.

    Captures on a side stream of `device`, whatever device is current; a replay's output is valid on the current stream of `device`.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with streams.on_device(device):
            current, side = streams.current_stream(device), streams.new_stream(device)
            streams.wait_stream(side, current)
            with streams.on_stream(side, device):  # kernels are chosen, and workspaces made, before the recording
                for _ in range(2):
                    call()
            streams.wait_stream(current, side)
            graph = torch.cuda.CUDAGraph()
            # torch's own stream for captures is made once, on the device that is current then. Other threads may ask events meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                out = call()
        return graph.replay, out

    return record


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    inputs: list[Tensor]
    replay: Callable[[], None]
    output: Any


class CudaGraphRunner:
    """Calls `function` by a replay; the first call with its shapes makes the recording.

    Arguments that are no tensors have to be hashable, else the call is made as it is. Results are copies; what in them is no
    tensor is that of the recording.

    Args:
        function: What it does depends on its arguments and on tensors that stay where they are; it asks the device for nothing.
    """

    def __init__(self, function: Callable[..., Any], record: Record) -> None:
        self._function, self._record = function, record
        self._recordings: dict[Hashable, _Recording] = {}

    def __len__(self) -> int:
        """Return the number of captured sets of shapes."""
        return len(self._recordings)

    @torch.inference_mode()
    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        leaves, tree = _pytree.tree_flatten((inputs, keywords))
        key = (repr(tree), *((tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        try:
            recording = self._recordings.get(key)
        except TypeError:  # an argument is not hashable
            return self._function(*inputs, **keywords)
        if recording is None:
            if len(self._recordings) >= _MOST:
                return self._function(*inputs, **keywords)
            recording = self._recordings[key] = self._recorded(leaves, tree)
        else:
            for place, tensor in zip(recording.inputs, tensors, strict=True):
                place.copy_(tensor)
        recording.replay()
        return _pytree.tree_map_only(Tensor, torch.clone, recording.output)

    def _recorded(self, leaves: list[Any], tree: Any) -> _Recording:
        places = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        inputs, keywords = _pytree.tree_unflatten(places, tree)
        replay, output = self._record(lambda: self._function(*inputs, **keywords))
        return _Recording([x for x in places if isinstance(x, Tensor)], replay, output)


def padded(batch: BatchIndices, spare: int) -> BatchIndices:
    """Pad a decode batch [D] and its block tables to powers of two, so that few shapes need a CUDA graph.

    Args:
        spare: The null slot, where rows of padding write their keys and values. They read block 0, and their output is
        not used.
    """
    rows = _power(batch.num_decodes)
    columns = max(_LEAST_BLOCKS, _power(batch.block_table.shape[1]))
    more = (0, rows - batch.num_decodes)
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=batch.tokens.device)
    return replace(
        batch,
        tokens=F.pad(batch.tokens, more),
        positions=F.pad(batch.positions, more),
        slots=F.pad(batch.slots, more, value=spare),
        outputs=numbers[:rows],
        cu_seqlens_q=numbers,
        seqlens_k=F.pad(batch.seqlens_k, more, value=1),
        block_table=F.pad(batch.block_table, (0, columns - batch.block_table.shape[1], *more)),
        num_decodes=rows,
        chunks=(),
    )


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

"""A function of tensors that is recorded once for each set of shapes, then replayed: a device's work without the host's launches.

A step of decoding is some hundred small kernels; launching them takes the host ten times as long as a device takes to run them.
A CUDA graph is launched at once, but its addresses and shapes are fixed: inputs are copied to where the recording read them, and
batches are padded to few numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ds_accel import streams
from ds_inference.paged_attention import BatchIndices

__all__ = ["CudaGraphRunner", "DecodeGraphs", "Record", "capture_sizes", "cuda_graph"]

_MOST = 64  # recordings of one function; other shapes run without one
_LEAST_BLOCKS = 4

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Runs a function once to record it; returns what runs it again, and what it returned, whose tensors a replay overwrites."""


def cuda_graph(device: torch.device) -> Record:
    """Return a recorder that captures calls on `device` as CUDA graphs, which share a memory pool.

    All are captured on one stream of the recorder's own, whatever device is current; a replay's output is valid on the current stream of
    `device`.
    """
    pool = torch.cuda.graph_pool_handle()
    with streams.on_device(device):
        side = streams.new_stream(device)

    def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with streams.on_device(device):
            current = streams.current_stream(device)
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


def capture_sizes(most: int) -> list[int]:
    """Return the numbers of rows that get a graph: 1, 2, 4, 8, then by 8 to 64, then by 16; the last is at least `most`."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (8 if sizes[-1] < 64 else 16))
    return [n for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] < most]


class DecodeGraphs:
    """Steps of one-token chunks as graphs, one for each number of rows; their inputs stay at one place, as large as the largest needs.

    Args:
        forward: Computes logits [R, vocab] of a batch; what it does depends on the batch and on tensors that stay where they are.
        record: Captures a call.
        shape: Most rows, most blocks of a sequence, and the vocabulary.
        spare: The null slot, where rows of padding write their keys and values.
        reads_in_place: Attention reads blocks where they are, so that the width of the table costs nothing; else it gathers whole rows of
            the table, and there is a graph for each power of two of blocks, too, captured when it is first used.
    """

    def __init__(
        self,
        forward: Callable[[BatchIndices], Tensor],
        record: Record,
        shape: tuple[int, int, int],
        spare: int,
        device: torch.device,
        *,
        reads_in_place: bool,
    ) -> None:
        (most, self._columns, vocab), self._spare = shape, spare
        self.sizes = capture_sizes(most)
        self._forward, self._record, self._whole = forward, record, reads_in_place
        rows = self.sizes[-1]
        self._rows = torch.zeros(4, rows, dtype=torch.int32, device=device)
        self._rows[2], self._rows[3] = spare, 1  # as rows of padding
        self._table = torch.zeros(rows, self._columns, dtype=torch.int32, device=device)
        self._numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty(rows, vocab, device=device)  # of all graphs: one of each would be a multiple of it
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first, whose memory the others share. Nothing where widths differ."""
        for rows in reversed(self.sizes if self._whole else ()):
            self._graph(rows, self._columns)

    @torch.inference_mode()
    def replay(self, batch: BatchIndices) -> Tensor | None:
        """Compute logits of the outputs of a batch; None where no graph serves it.

        Cost: four or five small copies beside the graph's launch, whatever the batch is.
        """
        count, width = batch.num_decodes, batch.block_table.shape[1]
        rows = next((n for n in self.sizes if n >= count), None)
        if not count or batch.max_seqlen_q > 1 or batch.worn or rows is None or width > self._columns:
            return None
        columns = self._columns if self._whole else min(self._columns, max(_LEAST_BLOCKS, _power(width)))
        places = [row[:count] for row in self._rows.unbind(0)]
        torch._foreach_copy_(places, [batch.tokens, batch.positions, batch.slots, batch.seqlens_k])
        self._table[:count, :width].copy_(batch.block_table)
        if count < rows:  # what they read stays valid: a block that is there, a position that was
            self._rows[2, count:rows].fill_(self._spare)
            self._rows[3, count:rows].fill_(1)
        self._graph(rows, columns)()
        return self._logits[:count].clone() if len(batch.outputs) == count else self._logits[batch.outputs]

    def _graph(self, rows: int, columns: int) -> Callable[[], None]:
        if (rows, columns) not in self._graphs:
            tokens, positions, slots, lengths = (row[:rows] for row in self._rows.unbind(0))
            numbers, table = self._numbers[: rows + 1], self._table[:rows, :columns]
            batch = BatchIndices(tokens, positions, slots, numbers[:rows], numbers, lengths, table, rows, 1)
            self._graphs[rows, columns], _ = self._record(lambda: self._logits[:rows].copy_(self._forward(batch)))
        return self._graphs[rows, columns]


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

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
from ds_config.errors import UnsupportedError
from ds_inference.paged_attention import BatchIndices

__all__ = ["CudaGraphRunner", "DecodeGraphs", "Record", "capture_sizes", "cuda_graph"]

_MOST = 64  # recordings of one function; other shapes run without one
_LEAST_BLOCKS = 4
_MOST_ROWS = 256
"""Of a step that is captured: of more, launches are a small part."""

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Runs a function once to record it; returns what runs it again, and what it returned, whose tensors a replay overwrites."""


def cuda_graph(device: torch.device) -> Record:
    """Return a recorder that captures calls on `device` as CUDA graphs, which share a memory pool.

    All are captured on one stream of the recorder's own, whatever device is current; a replay's output is valid on the current stream of
    `device`. What cannot be captured raises UnsupportedError ("inference-cuda-graph").
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
            try:
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    out = call()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise _not_captured(error) from error
        return graph.replay, out

    return record


def _not_captured(error: RuntimeError) -> UnsupportedError:
    """Build the error for a call that worked twice and cannot be captured. What ended the capture is the context of what torch says then."""
    first = error.__context__ or error
    return UnsupportedError(
        f"a call that runs cannot be captured as a CUDA graph: {str(first).splitlines()[0] if str(first) else type(first).__name__}",
        code="inference-cuda-graph",
        fix="Leave graphs out (cuda_graphs=False, enable_cuda_graph): something in the call waits for the device, reads from it, or copies to it"
        " from plain memory of the host.",
    )


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
    """Steps of few tokens for each sequence as graphs, one for each number of sequences; inputs stay at one place, as large as the largest needs.

    There are graphs for one token of each sequence, and, where drafts are tried, for `tokens` of each. A sequence that brings fewer is padded in
    front: what is padded stands for positions that are in the cache already, sees no more than these, and writes nowhere.

    Args:
        forward: Computes logits [R, width] of a batch; what it does depends on the batch and on tensors that stay where they are.
        record: Captures a call.
        shape: Most sequences, most blocks of a sequence, and the width of the logits.
        spare: The null slot, where rows of padding write their keys and values.
        reads_in_place: Attention reads blocks where they are, so that the width of the table costs nothing; else it gathers whole rows of
            the table, and there is a graph for each power of two of blocks, too, captured when it is first used.
        tokens: Of a sequence with all its drafts; 1: there are none.
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
        tokens: int = 1,
    ) -> None:
        (most, self._columns, width), self._spare = shape, spare
        self.sizes = {each: capture_sizes(max(1, min(most, _MOST_ROWS // each))) for each in {1, tokens}}
        self._forward, self._record, self._whole = forward, record, reads_in_place
        sequences, rows = self.sizes[1][-1], max(each * sizes[-1] for each, sizes in self.sizes.items())
        self._rows = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self._rows[2] = spare  # as rows of padding
        self._lengths = torch.ones(sequences, dtype=torch.int32, device=device)
        self._table = torch.zeros(sequences, self._columns, dtype=torch.int32, device=device)
        self._numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._starts = {each: self._numbers[: sizes[-1] + 1] * each for each, sizes in self.sizes.items()}
        self._logits = torch.empty(rows, width, device=device)  # of all graphs: one of each would be a multiple of it
        self._graphs: dict[tuple[int, int, int], Callable[[], None]] = {}

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first, whose memory the others share. Nothing where widths differ."""
        pairs = [(each, count) for each, sizes in self.sizes.items() for count in sizes]
        for each, count in sorted(pairs, key=lambda pair: -pair[0] * pair[1]) if self._whole else ():
            self._graph(each, count, self._columns)

    @torch.inference_mode()
    def replay(self, batch: BatchIndices) -> Tensor | None:
        """Compute logits of the outputs of a batch; None where no graph serves it.

        Cost: four or five small copies beside the graph's launch, whatever the batch is; with drafts some more.
        """
        (count, width), longest = batch.block_table.shape, batch.max_seqlen_q
        each = next((n for n in sorted(self.sizes) if n >= longest), None)
        if not count or batch.worn or each is None or width > self._columns:
            return None
        sequences = next((n for n in self.sizes[each] if n >= count), None)
        if sequences is None:
            return None
        columns = self._columns if self._whole else min(self._columns, max(_LEAST_BLOCKS, _power(width)))
        rows, outputs = self._rows[:, : each * sequences], batch.outputs
        if each == 1:
            torch._foreach_copy_(list(rows[:, :count].unbind(0)), [batch.tokens, batch.positions, batch.slots])
            rows[2, count:].fill_(self._spare)
        else:
            place = self._places(batch, each)
            rows[:2].zero_()
            rows[2].fill_(self._spare)
            rows[:, place] = torch.stack([batch.tokens, batch.positions, batch.slots])
            outputs = place[batch.outputs]
        self._lengths[:count].copy_(batch.seqlens_k)
        self._lengths[count:sequences].fill_(
            each
        )  # what they read is valid: a block that is there, positions that were
        self._table[:count, :width].copy_(batch.block_table)
        self._graph(each, sequences, columns)()
        return self._logits[:count].clone() if each == 1 and len(outputs) == count else self._logits[outputs]

    def _places(self, batch: BatchIndices, each: int) -> Tensor:
        """Compute the row of every token, int32 [T]: those of a sequence are the last of its `each` rows."""
        ends = batch.cu_seqlens_q[1:]
        token = torch.arange(len(batch.tokens), dtype=torch.int32, device=ends.device)
        sequence = torch.searchsorted(ends, token, right=True, out_int32=True)
        return (sequence + 1) * each - ends[sequence] + token

    def _graph(self, each: int, count: int, columns: int) -> Callable[[], None]:
        key = (each, count, columns)
        if key not in self._graphs:
            rows = each * count
            tokens, positions, slots = (row[:rows] for row in self._rows.unbind(0))
            starts, lengths, table = (
                self._starts[each][: count + 1],
                self._lengths[:count],
                self._table[:count, :columns],
            )
            batch = BatchIndices(
                tokens, positions, slots, self._numbers[:rows], starts, lengths, table, count if each == 1 else 0, each
            )
            self._graphs[key], _ = self._record(lambda: self._logits[:rows].copy_(self._forward(batch)))
        return self._graphs[key]


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

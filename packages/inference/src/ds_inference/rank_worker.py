"""Ranks that generate together: sums of what each computes, and one that leads while the others follow.

Two ways to drive them. All ranks call `generate` with the same requests: the scheduler, the sums and the draws are the same
everywhere, so nothing else is said. Or one rank has the requests (a server): it says each step to the others before it computes it.

    engine = load(folder, group=ds_comm.world_group())
    if rank == 0:
        with leading(engine): ...        # submit, step, serve
    else:
        follow(engine)                   # returns when the leader is done
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

import ds_comm
from ds_comm.metadata import metadata_device
from ds_inference.llm_engine import LLMEngine
from ds_inference.paged_attention import make_batch
from ds_inference.scheduler import ScheduledChunk, SchedulerOutput

__all__ = ["PlanDecoder", "PlanEncoder", "follow", "leading"]

_LONG = 10.0 * 365 * 86400


@contextmanager
def leading(engine: LLMEngine) -> Iterator[None]:
    """Broadcast every step of `engine` inside the context to the other ranks of its group, which `follow`.

    Other ranks wait for this rank as long as no step is due; if this rank ends, they end with an error that says so. If one of them is stuck,
    this rank's wait for it ends at the watchdog's deadline, and the job with it.
    """
    group = engine.decoder.group

    encoder = PlanEncoder()
    engine.before_step = lambda plan: _send(encoder.encode(plan), group)
    try:
        with ds_comm.extend_timeout(_LONG, own_waits=False):
            yield
        _send(None, group)
    finally:
        engine.before_step = None


def follow(engine: LLMEngine) -> None:
    """Compute what the first rank of the group says, until it says no more."""
    group, decoder = engine.decoder.group, PlanDecoder()
    while (words := _receive(group)) is not None:
        plan = decoder.decode(words)
        batch, _ = make_batch(plan.chunks, engine.cache.size, engine.decoder.device)
        engine.cache.copy(plan.copies)
        engine.decoder.forward(replace(batch, likeliest=plan.likeliest), engine.cache)


# ---- a plan as integers
#
# [chunks, copies, whether only the likeliest tokens are wanted], then for each chunk [request, start, outputs, tokens, blocks that are as in the last step, further blocks], then all
# tokens, all further blocks, and all copies. A request that generates adds seven integers, and one more where it begins a block.


class PlanEncoder:
    """Writes plans as integers, each beside the one before it: blocks that the followers know are not sent again."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, ...]] = {}

    def encode(self, plan: SchedulerOutput) -> list[int]:
        """Return the integers of a plan."""
        heads, tokens, blocks = list[int](), list[int](), list[int]()
        for chunk in plan.chunks:
            known = self._blocks.get(chunk.request, ())
            same = len(known) if known == chunk.blocks[: len(known)] else 0
            request = chunk.request & _LARGEST
            heads += (request, chunk.start, chunk.outputs, len(chunk.tokens), same, len(chunk.blocks) - same)
            tokens += chunk.tokens
            blocks += chunk.blocks[same:]
        self._blocks = {chunk.request: chunk.blocks for chunk in plan.chunks}
        return [
            len(plan.chunks),
            len(plan.copies),
            int(plan.likeliest),
            *heads,
            *tokens,
            *blocks,
            *(n for pair in plan.copies for n in pair),
        ]


class PlanDecoder:
    """Reads what a `PlanEncoder` wrote, plan after plan."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, ...]] = {}

    def decode(self, words: list[int]) -> SchedulerOutput:
        """Return the plan of some integers."""
        count, copies, likeliest = words[:_FIRST]
        at = _FIRST + _HEAD * count
        heads = [words[place : place + _HEAD] for place in range(_FIRST, at, _HEAD)]
        further = at + sum(head[3] for head in heads)
        chunks = []
        for request, start, outputs, length, same, more in heads:
            blocks = (*self._blocks.get(request, ())[:same], *words[further : further + more])
            chunks.append(ScheduledChunk(request, tuple(words[at : at + length]), start, blocks, outputs))
            at, further = at + length, further + more
        self._blocks = {chunk.request: chunk.blocks for chunk in chunks}
        pairs = words[further : further + 2 * copies]
        return SchedulerOutput(
            tuple(chunks), tuple(zip(pairs[::2], pairs[1::2], strict=True)), likeliest=bool(likeliest)
        )


_FIRST = 3
_HEAD = 6
_LARGEST = 0x7FFFFFFF
_WORDS = 2048
"""Integers of the first broadcast of a step; a prompt may need a second one."""


def _send(words: list[int] | None, group: ds_comm.Group) -> None:
    """Broadcast a plan, or None as the end: int32, [how many, words ...]."""
    message = [-1] if words is None else [len(words), *words]
    message += [0] * (_WORDS - len(message))
    whole = torch.tensor(message, dtype=torch.int32, device="cpu").to(metadata_device(group))
    for part in whole.split([_WORDS, len(message) - _WORDS]) if len(message) > _WORDS else (whole,):
        ds_comm.broadcast(part, group_src=0, group=group, unit="step")


def _receive(group: ds_comm.Group) -> list[int] | None:
    device = metadata_device(group)
    first = torch.empty(_WORDS, dtype=torch.int32, device=device)
    ds_comm.broadcast(first, group_src=0, group=group, unit="step")
    count, *words = first.tolist()
    if count < 0:
        return None
    if count > len(words):
        rest = torch.empty(count - len(words), dtype=torch.int32, device=device)
        ds_comm.broadcast(rest, group_src=0, group=group, unit="step")
        words += rest.tolist()
    return words[:count]

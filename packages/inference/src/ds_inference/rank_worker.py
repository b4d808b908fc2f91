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
from typing import Any

import ds_comm
from ds_inference.llm_engine import LLMEngine
from ds_inference.paged_attention import make_batch
from ds_inference.scheduler import ScheduledChunk, SchedulerOutput

__all__ = ["follow", "leading"]

_LONG = 10.0 * 365 * 86400


@contextmanager
def leading(engine: LLMEngine) -> Iterator[None]:
    """Broadcast every step of `engine` inside the context to the other ranks of its group, which `follow`.

    Other ranks wait for this rank as long as no step is due; if this rank ends, they end with an error that says so. If one of them is stuck,
    this rank's wait for it ends at the watchdog's deadline, and the job with it.
    """
    group = engine.decoder.group

    def tell(plan: SchedulerOutput) -> None:
        ds_comm.broadcast_json(_said(plan), group, unit="step")

    engine.before_step = tell
    try:
        with ds_comm.extend_timeout(_LONG, own_waits=False):
            yield
        ds_comm.broadcast_json(None, group, unit="step")
    finally:
        engine.before_step = None


def follow(engine: LLMEngine) -> None:
    """Compute what the first rank of the group says, until it says no more."""
    group = engine.decoder.group
    while (message := ds_comm.broadcast_json(None, group, unit="step")) is not None:
        plan = _heard(message)
        batch, _ = make_batch(plan.chunks, engine.cache.size, engine.decoder.device)
        engine.cache.copy(plan.copies)
        engine.decoder.forward(batch, engine.cache)


def _said(plan: SchedulerOutput) -> dict[str, Any]:
    chunks = [[c.request, list(c.tokens), c.start, list(c.blocks), c.outputs] for c in plan.chunks]
    return {"chunks": chunks, "copies": [list(pair) for pair in plan.copies]}


def _heard(message: dict[str, Any]) -> SchedulerOutput:
    chunks = [
        ScheduledChunk(request, tuple(tokens), start, tuple(blocks), outputs)
        for request, tokens, start, blocks, outputs in message["chunks"]
    ]
    return SchedulerOutput(tuple(chunks), tuple((a, b) for a, b in message["copies"]))

"""One thread that owns the engine. Coroutines hand it requests and get their events; nothing else touches the engine.

A request's events come in order through a queue of its own. A coroutine that is cancelled (its client went away) cancels its request,
whose blocks are free before the next step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_inference.engine import Event, Generator
from ds_inference.sampling import Sampling

__all__ = ["Load", "Worker"]

Sink = Callable[[Event | BaseException], None]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is.

    Attributes:
        requests: Not over yet.
        free, blocks: Of the cache.
        steps, tokens: Computed since the start; tokens that were answered.
    """

    requests: int
    free: int
    blocks: int
    steps: int
    tokens: int


class Worker:
    """Runs an engine until `close`."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._steps = self._tokens = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ds-serve", daemon=True)
        self._thread.start()

    async def answer(self, prompt: Sequence[int], how: Sampling, adapter: str | None = None) -> AsyncIterator[Event]:
        """Events of all samples of one prompt, until each is over.

        Raises:
            PlanError: the engine refused the request.
            RuntimeError: the engine failed; every request gets the same.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | BaseException]()
        identities: list[int] = []

        def sink(event: Event | BaseException) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def begin() -> None:
            try:
                identities.extend(self._engine.submit(prompt, how, adapter=adapter))
            except Exception as error:
                sink(error)
                return
            self._sinks.update(dict.fromkeys(identities, sink))

        self._order(begin)
        left = how.samples
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.reason is not None
                yield event
        finally:
            if left and self.failure is None:
                self._orders.put(lambda: self._drop(identities))

    @property
    def load(self) -> Load:
        """As of now; read by any thread."""
        pool = self._engine.scheduler.pool
        return Load(len(self._engine.scheduler.requests), pool.free, pool.count, self._steps, self._tokens)

    @property
    def adapters(self) -> list[str]:
        """Names that requests may ask for, besides the model's own."""
        return sorted(self._engine.decoder.adapters)

    def close(self) -> None:
        """End the thread; requests that are under way get an error."""
        self._orders.put(None)
        self._thread.join()

    def _order(self, what: Callable[[], None]) -> None:
        if self.failure is not None:
            raise RuntimeError("the engine has failed") from self.failure
        self._orders.put(what)

    def _drop(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._engine.cancel(identity)
            self._sinks.pop(identity, None)

    def _run(self) -> None:
        reason: BaseException = RuntimeError("the server is shutting down")
        try:
            while self._take():
                if not self._engine.idle:
                    self._deliver(self._engine.step())
        except BaseException as error:
            self.failure, reason = error, RuntimeError(f"the engine failed: {error}")
        for sink in {id(s): s for s in self._sinks.values()}.values():
            sink(reason)

    def _take(self) -> bool:
        """Do what was ordered; wait for an order when there is nothing else. False at the end."""
        wait = self._engine.idle
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _deliver(self, events: Sequence[Any]) -> None:
        self._steps += 1
        self._tokens += len(events)
        for event in events:
            sink = self._sinks.get(event.request)
            if sink is not None:
                sink(event)
                if event.reason is not None:
                    del self._sinks[event.request]

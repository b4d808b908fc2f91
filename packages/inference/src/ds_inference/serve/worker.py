"""One thread that owns the engine. Coroutines hand it requests and get their events; nothing else touches the engine.

A request's events come in order through a queue of its own. A coroutine that is cancelled (its client went away) cancels its request,
whose blocks are free before the next step. What one request makes fail in a step ends that request; where the engine itself ends, everybody
who waits is told, also those whose order nobody has taken yet.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ds_config.errors import DsError
from ds_inference.llm_engine import LLMEngine, TokenOutput
from ds_inference.sampling import SamplingParams

__all__ = ["EngineLoad", "Worker"]

Sink = Callable[[TokenOutput | BaseException], None]


@dataclass(frozen=True, slots=True)
class _Order:
    """What the thread shall do, and who is told if it ends before."""

    act: Callable[[], None]
    refuse: Sink | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
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
    """Runs an engine until `close`.

    Args:
        on_end: Called by the thread when the engine has failed, after all who wait were told.
    """

    def __init__(self, engine: LLMEngine, on_end: Callable[[], None] | None = None) -> None:
        self._engine, self._on_end = engine, on_end
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._steps = self._tokens = 0
        self._gate = threading.Lock()  # between who puts an order and the end, after which nobody takes one
        self._ended: RuntimeError | None = None
        self.failure: BaseException | None = None
        engine.on_failure = self._refuse
        self._thread = threading.Thread(target=self._run, name="ds-serve", daemon=True)
        self._thread.start()

    async def answer(
        self, prompt: Sequence[int], how: SamplingParams, adapter: str | None = None
    ) -> AsyncIterator[TokenOutput]:
        """Events of all samples of one prompt, until each is over.

        Raises:
            PlanError: the engine refused the request.
            RuntimeError: the request failed; or the engine did, and every request gets the same.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TokenOutput | BaseException]()
        identities: list[int] = []

        def sink(event: TokenOutput | BaseException) -> None:
            with suppress(RuntimeError):  # the loop of who waited is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        def begin() -> None:
            try:
                identities.extend(self._engine.submit(prompt, how, adapter=adapter))
            except Exception as error:
                sink(error)
                return
            self._sinks.update(dict.fromkeys(identities, sink))

        self._order(_Order(begin, sink))
        left = how.n
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.reason is not None
                yield event
        finally:
            if left and self._ended is None:
                self._orders.put(_Order(lambda: self._drop(identities)))

    def check(self, prompt: Sequence[int], how: SamplingParams, adapter: str | None = None) -> None:
        """Refuse what the engine would refuse, before it is ordered. Any thread may ask.

        Raises:
            PlanError: see `LLMEngine.check`.
        """
        self._engine.check(prompt, how, adapter)

    @property
    def load(self) -> EngineLoad:
        """As of now; read by any thread."""
        pool = self._engine.scheduler.pool
        return EngineLoad(len(self._engine.scheduler.requests), pool.num_free, pool.count, self._steps, self._tokens)

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together: by the model, the scheduler, and the cache."""
        scheduler = self._engine.scheduler
        return min(scheduler.budget.max_model_len, scheduler.pool.count * scheduler.pool.size)

    @property
    def vocab(self) -> tuple[int, tuple[int, ...]]:
        """Number of the model's tokens, and those that end an answer."""
        return self._engine.decoder.spec.vocab, tuple(self._engine.decoder.spec.eos_ids)

    @property
    def adapters(self) -> list[str]:
        """Names that requests may ask for, besides the model's own."""
        return sorted(self._engine.decoder.adapters)

    def close(self) -> None:
        """End the thread; requests that are under way get an error."""
        self._orders.put(None)
        self._thread.join()

    def _order(self, order: _Order) -> None:
        with self._gate:
            if self._ended is not None:
                raise RuntimeError(str(self._ended)) from self.failure
            self._orders.put(order)

    def _drop(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._engine.cancel(identity)
            self._sinks.pop(identity, None)

    def _refuse(self, identity: int, error: Exception) -> None:
        """Tell a request that it failed."""
        if (sink := self._sinks.pop(identity, None)) is not None:
            sink(error if isinstance(error, DsError) else RuntimeError(f"{type(error).__name__}: {error}"))

    def _run(self) -> None:
        reason = RuntimeError("the server is shutting down")
        try:
            while self._take():
                if not self._engine.idle:
                    self._deliver(self._engine.step())
        except BaseException as error:
            self.failure, reason = error, RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
        with self._gate:
            self._ended = reason
        sinks = list(self._sinks.values())
        while not self._orders.empty():
            if (order := self._orders.get()) is not None and order.refuse is not None:
                sinks.append(order.refuse)
        for sink in {id(s): s for s in sinks}.values():
            sink(reason)
        if self.failure is not None and self._on_end is not None:
            self._on_end()

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
            order.act()
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

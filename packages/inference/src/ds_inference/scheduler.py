"""Which tokens of which requests are computed in the next step: integers in, integers out; no tensor, no model.

There is no phase of prompts and no phase of generation. A request has tokens that are *known* (the prompt, and what was
sampled) and tokens that are *computed* (their keys and values are in the cache). A step computes a *chunk* of some requests:
the next of their known tokens. The chunk that reaches the last known token gives a distribution, from which one more token
becomes known. A running request that generates needs one token a step; a new one needs its prompt, which is cut to what the
step's budget leaves (Holmes et al. 2024, "DeepSpeed-FastGen", section 3.2; Agrawal et al. 2024, "Sarathi-Serve").

Rules, in the order of `Scheduler.schedule`:

    1. requests that generate, the most urgent first: their one token, and drafts that a speculation proposes
    2. requests whose prompt is under way: as much of it as the budget allows
    3. waiting requests, the most urgent first, as long as the cache has free blocks for all their known tokens

The order is (priority, arrival). Where blocks run out, the *last* running request in that order gives its blocks back and waits
again with all its tokens known: what it had computed is computed again. The first is never pushed out for another, and any request
fits the cache alone (else it is refused at once), so the first always goes on: no deadlock. A request that waits is not overtaken
by a later one of its priority.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Final

from ds_config.errors import PlanError
from ds_inference.blocks import BlockPool, block_hashes
from ds_inference.requests import Request, RequestState, ScheduledChunk, SchedulerConfig, SchedulerOutput, StepOutcome

__all__ = [
    "PENDING",
    "Request",
    "RequestState",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StepOutcome",
]

PENDING: Final = -1
"""In the place of a token whose value only the device knows."""


class Scheduler:
    """Requests, blocks, and the next step. `schedule` and `update` (or `abandon`) alternate; `add`, `fork` and `cancel` come between them.

    Args:
        pool: The cache's blocks; only the scheduler takes any.
        budget: Of a step.
        share: Whether blocks with equal content are shared between requests. Without, a fork computes all its tokens.
    """

    def __init__(self, pool: BlockPool, config: SchedulerConfig, *, enable_prefix_caching: bool = True) -> None:
        self.pool, self.budget, self.share = pool, config, enable_prefix_caching
        self.requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._copies: list[tuple[int, int]] = []
        self._gone: list[int] = []
        self._planned: tuple[ScheduledChunk, ...] | None = None
        self._assumed: tuple[ScheduledChunk, ...] | None = None
        self._arrivals = 0

    # ---- requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PlanError: it has no token, its identity is taken, or it can never fit ("inference-request", "inference-too-long").
        """
        if not request.tokens or request.limit < 1 or request.request_id in self.requests:
            raise PlanError(
                f"request {request.request_id}: {len(request.tokens)} tokens, limit {request.limit}"
                + (", and one of that identity is under way" if request.request_id in self.requests else ""),
                code="inference-request",
                fix="Give it a prompt of at least one token, a limit of at least 1, and an identity of its own.",
            )
        self.check(request.num_prompt_tokens, request.limit)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request.state = RequestState.WAITING
        self.requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=lambda r: r.rank)

    def check(self, prompt: int, limit: int) -> None:
        """Refuse a prompt of so many tokens, with up to `limit` of answer, that can never fit. Any thread may ask.

        Raises:
            PlanError: a sequence or the cache is too small for it ("inference-too-long").
        """
        most = prompt + limit
        if most > self.budget.max_model_len or self.pool.num_blocks_for(most) > self.pool.count:
            raise PlanError(
                f"a request may grow to {most} tokens ({prompt} of prompt and {limit} more); a sequence may have "
                f"{self.budget.max_model_len}, the cache holds {self.pool.count * self.pool.size}",
                code="inference-too-long",
                fix="Shorten the prompt, lower the limit, or make the cache larger.",
            )

    def fork(self, parent: Request, identity: int) -> Request:
        """Add a request with the parent's tokens, which then continues independently.

        The request shares the parent's computed blocks if prefix caching is on.
        Call between steps. Costs a copy of a block in the next step, if the parent's last block is not full.
        """
        child = Request(identity, list(parent.tokens), parent.limit, parent.priority, parent.salt)
        child.num_prompt_tokens = (
            parent.num_prompt_tokens
        )  # before it is checked: tokens of the answer count against the limit
        self.add(child)
        full, rest = divmod(parent.num_computed_tokens, self.pool.size)
        if not self.share or parent.state is not RequestState.RUNNING or len(self._running) >= self.budget.max_num_seqs:
            return child
        tail_blocks = self.pool.allocate(1 if rest else 0)
        if tail_blocks is None:
            return child
        self.pool.add_refs(parent.blocks[:full])
        if rest:
            self._copies.append((parent.blocks[full], tail_blocks[0]))
        child.blocks = [*parent.blocks[:full], *tail_blocks]
        child.num_computed_tokens, child.block_hashes, child.num_hashed_blocks = (
            parent.num_computed_tokens,
            parent.block_hashes[:full],  # the parent's next block begins with its own token
            parent.num_hashed_blocks,
        )
        self._waiting.remove(child)
        self._start(child)
        return child

    def cancel(self, identity: int) -> bool:
        """End a request at once; False if there is none of that identity. Also while a step that computes it is under way."""
        request = self.requests.get(identity)
        if request is None:
            return False
        self._end(request, RequestState.CANCELLED)
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.requests

    # ---- a step

    def schedule(self, drafts: Mapping[int, Sequence[int]] | None = None) -> SchedulerOutput:
        """Plan the next step: chunks of requests, and block copies. Not empty unless `idle`.

        Args:
            drafts: Draft tokens of requests that generate, by identity. They are computed together with the newest
            token as far as
                budget and blocks allow.
        """
        if self._planned is not None:
            raise PlanError(
                "a step was planned and its outcome is not known yet",
                code="inference-call-order",
                fix="Call update() with the outcomes of the step.",
            )
        left, chunks = self.budget.max_num_batched_tokens, list[ScheduledChunk]()
        settled: set[int] = set()  # have their chunk, so they keep their blocks in this step
        generating = [r for r in self._running if r.generates and not r.complete]
        waiting_turns = len(generating)
        for request in generating:
            waiting_turns -= 1
            if request.state is not RequestState.RUNNING:  # was pushed out meanwhile
                continue
            wanted = (drafts or {}).get(request.request_id, ())
            room = min(left - 1 - waiting_turns, request.limit - len(request.sampled) - 1)
            guess = tuple(wanted[: max(0, min(room, self._draft_room(request)))])
            if self._make_room(request, 1 + len(guess), settled):
                settled.add(request.request_id)
                chunks.append(self._chunk(request, 1, guess))
                left -= 1 + len(guess)
        blocked = False
        for request in [r for r in self._running if not r.generates]:
            if left < 1:
                break
            if request.state is not RequestState.RUNNING or request.request_id in settled:
                continue
            while self._reach(request) < 1 and (later := self._later(request, settled)) is not None:
                self._preempt(later)
            count = min(self._portion(request, left), self._reach(request))
            if count < 1:  # those that generate hold what it needs; a new request does not overtake it
                blocked = True
                continue
            self._make_room(request, count, settled)
            settled.add(request.request_id)
            chunks.append(self._chunk(request, count))
            left -= count
        while self._waiting and left > 0 and not blocked and len(self._running) < self.budget.max_num_seqs:
            request = self._waiting[0]
            if not self._admit(request):
                break
            count = self._portion(request, left)
            self._make_room(request, count, settled)
            settled.add(request.request_id)
            chunks.append(self._chunk(request, count))
            left -= count
        copies, gone, self._copies, self._gone = tuple(self._copies), tuple(self._gone), [], []
        self._planned = tuple(chunks)
        return SchedulerOutput(self._planned, copies, gone)

    def update(self, outcomes: Mapping[int, StepOutcome]) -> list[Request]:
        """Record the outcomes of the computed step, by request, and return the requests that ended.

        Raises:
            PlanError: no step is in progress, or an outcome is missing ("inference-call-order").
        """
        planned = self._planned if self._assumed is None else self._assumed
        missing = [
            c.request for c in planned or () if c.outputs and c.request in self.requests and c.request not in outcomes
        ]
        if planned is None or missing:
            raise PlanError(
                f"update() without {'a step' if planned is None else f'outcomes of requests {missing}'}",
                code="inference-call-order",
                fix="Call schedule(), compute the step, then update() with a StepOutcome for every chunk that has outputs.",
            )
        if self._assumed is None:
            self._planned = None
        self._assumed = None
        over = []
        for chunk in planned:
            request = self.requests.get(chunk.request)
            if request is None or request.state is not RequestState.RUNNING:  # was cancelled during the step
                continue
            tokens = outcomes[chunk.request].tokens if chunk.outputs else ()
            if request.num_pending:  # the chunk is counted already
                self._forget_pending(request)
            else:
                request.num_computed_tokens += len(chunk.tokens) - max(0, chunk.outputs - 1) + max(0, len(tokens) - 1)
            request.tokens += tokens[: request.limit - len(request.sampled)]
            self._cache_full_blocks(request)
            if chunk.outputs and (outcomes[chunk.request].finished or request.complete):
                self._end(request, RequestState.FINISHED)
                over.append(request)
        return over

    def assume(self) -> bool:
        """Take the planned step as computed, with one token for each chunk whose value is not known; then the next may be planned.

        The outcome of the assumed step comes with the next `update`, that of the next step with the one after it.

        Returns: False, and nothing has changed, where the next step may need more than one token of each running request: one is
            within its prompt, has drafts, or would have to be preempted, or all have as many tokens as they may have.
        """
        chunks = {c.request: c for c in self._planned or ()}
        if self._assumed is not None or not chunks or self._copies:
            return False
        needed = 0
        going = False
        for request in self._running:
            chunk = chunks.get(request.request_id)
            if chunk is None or chunk.outputs != 1:
                return False
            after = request.num_computed_tokens + len(chunk.tokens) + 1
            if len(request.tokens) + 1 - request.num_prompt_tokens < request.limit:
                needed += max(0, self.pool.num_blocks_for(after) - len(request.blocks))
                going = True
        if not going or needed > self.pool.num_free:
            return False
        for request in self._running:
            request.num_computed_tokens += len(chunks[request.request_id].tokens)
            request.tokens.append(PENDING)
            request.num_pending = 1
        self._assumed, self._planned = self._planned, None
        return True

    def discard(self) -> None:
        """Take the planned step back where nothing that it computes is used: it is planned again. An assumed one stays."""
        self._planned = None

    def abandon(self) -> None:
        """Take the planned steps back, of which nobody knows what was computed: running requests compute their tokens again."""
        self._planned = self._assumed = None
        for request in list(self._running):  # also those without a chunk: a copy of a block may not have been made
            self._preempt(request)

    def clear_prefix_cache(self) -> None:
        """Drop all cached results after a change of weights; running requests recompute their tokens."""
        for request in list(self._running):
            self._preempt(request)
            request.num_preemptions -= 1
        self.pool.clear_hashes()
        for request in self._waiting:
            request.block_hashes = []

    # ---- how

    def _chunk(self, request: Request, count: int, guess: tuple[int, ...] = ()) -> ScheduledChunk:
        start = request.num_computed_tokens
        tokens = (*request.tokens[start : start + count], *guess)
        last = start + count == len(request.tokens)
        used = self.pool.num_blocks_for(start + len(tokens))
        return ScheduledChunk(
            request.request_id, tokens, start, tuple(request.blocks[:used]), 1 + len(guess) if last else 0
        )

    def _portion(self, request: Request, left: int) -> int:
        return min(len(request.tokens) - request.num_computed_tokens, left, self.budget.max_prefill_chunk or left)

    def _reach(self, request: Request) -> int:
        """Return the tokens that the request can compute without preempting another request."""
        return (len(request.blocks) + self.pool.num_free) * self.pool.size - request.num_computed_tokens

    def _later(self, request: Request, settled: set[int]) -> Request | None:
        """Return the last running request in order that may be preempted for `request`; None without any."""
        others = (r for r in reversed(self._running) if r.request_id not in settled and r.rank > request.rank)
        return next(others, None)

    def _draft_room(self, request: Request) -> int:
        """Return the number of drafts that fit without preempting another request."""
        return self._reach(request) - 1

    def _make_room(self, request: Request, count: int, settled: set[int]) -> bool:
        """Blocks for `count` more tokens; the last requests in order give theirs. False if it was the last itself."""
        missing = self.pool.num_blocks_for(request.num_computed_tokens + count) - len(request.blocks)
        while missing > self.pool.num_free:
            victim = next(r for r in reversed(self._running) if r.request_id not in settled)
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(max(0, missing)) or []
        return True

    def _admit(self, request: Request) -> bool:
        """Start a waiting request if the cache has free blocks for its known tokens."""
        prints = self._block_hashes(request) if self.share else []
        # The newest token is always computed: its distribution is wanted.
        request.blocks = self.pool.find_cached(prints[: (len(request.tokens) - 1) // self.pool.size])
        promised = sum(max(0, self.pool.num_blocks_for(len(r.tokens)) - len(r.blocks)) for r in self._running)
        if (
            self._running
            and self.pool.num_blocks_for(len(request.tokens) + 1) - len(request.blocks) > self.pool.num_free - promised
        ):
            self.pool.release(reversed(request.blocks))
            request.blocks = []
            return False
        request.num_computed_tokens = request.num_cached_tokens = len(request.blocks) * self.pool.size
        request.num_hashed_blocks = len(request.blocks)
        self._waiting.pop(0)
        self._start(request)
        return True

    def _start(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        bisect.insort(self._running, request, key=lambda r: r.rank)

    def _preempt(self, request: Request) -> None:
        self._forget_pending(request)
        self._release(request)
        request.num_preemptions += 1
        request.state, request.num_computed_tokens, request.num_hashed_blocks = RequestState.WAITING, 0, 0
        bisect.insort(self._waiting, request, key=lambda r: r.rank)

    @staticmethod
    def _forget_pending(request: Request) -> None:
        del request.tokens[len(request.tokens) - request.num_pending :]
        request.num_pending = 0

    def _release(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._copies = [(a, b) for a, b in self._copies if b not in request.blocks]
            self.pool.release(reversed(request.blocks))
            self._gone += request.blocks[:1]
            request.blocks = []

    def _end(self, request: Request, state: RequestState) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        self._release(request)
        request.state = state
        del self.requests[request.request_id]

    def _block_hashes(self, request: Request) -> list[bytes]:
        size = self.pool.size
        full = len(request.tokens) // size
        if len(request.block_hashes) < full:
            done = len(request.block_hashes)
            before = request.block_hashes[-1] if done else request.salt
            request.block_hashes += block_hashes(request.tokens[done * size : full * size], size, before)
        return request.block_hashes

    def _cache_full_blocks(self, request: Request) -> None:
        if not self.share:
            return
        full = request.num_computed_tokens // self.pool.size
        if full > request.num_hashed_blocks:
            prints = self._block_hashes(request)
            for i in range(request.num_hashed_blocks, full):
                self.pool.register_hash(request.blocks[i], prints[i])
            request.num_hashed_blocks = full

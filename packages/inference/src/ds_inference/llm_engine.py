"""Generation: requests in, tokens out. It holds a scheduler, a runner and a cache, and calls them; each decides nothing of the others'.

engine = load("folder")                          # or load(module)
answers = engine.generate(prompts, Sampling(max_new_tokens=32))

engine.submit(prompt, sampling) -> identity      # the same, step by step
for event in engine.step(): ...
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

import ds_comm
from ds_accel import streams
from ds_config.errors import PlanError, UnsupportedError
from ds_inference.answers import RequestOutput, Tokenizer, TokenOutput, ends_with_stop
from ds_inference.batched_sampling import SampledToken
from ds_inference.blocks import BlockPool
from ds_inference.decoder_model import Cache, Decoder, Runner
from ds_inference.flights import ComputedPart, PendingTokens, RowGroup, StepFlight, feed_tokens, point_to_rows
from ds_inference.paged_attention import make_batch
from ds_inference.recovery import compute_apart
from ds_inference.sampling import SamplingParams, derive_seed, draw_seed, prompt_lookup, separate
from ds_inference.scheduler import Request, ScheduledChunk, Scheduler, SchedulerConfig, SchedulerOutput, StepOutcome

__all__ = ["LLMEngine", "RequestOutput", "TokenOutput", "Tokenizer"]


@dataclass(slots=True, eq=False)
class _Ask:
    """A request, how it is sampled, and where its text is."""

    request: Request
    how: SamplingParams
    copies: dict[int, SamplingParams] = field(
        default_factory=dict
    )  # further samples, which begin when the prompt is computed


class LLMEngine:
    """Generates. Made by `load`.

    What raises in a step because of one request ends that request: `on_failure` is told, or, where nobody listens, the step raises it
    after the others' part is done. Only where nothing can be computed at all does the step's own error come out. On several ranks, which
    compute together, the first error of a forward comes out.

    Args:
        decoder: Runs batches.
        blocks: Of the cache; `size` tokens each.
        budget: Of a step.
        enable_prefix_caching: Whether equal beginnings are computed once; None: where the decoder has no states.
        speculate: Tokens that are guessed from earlier occurrences of the last ones in the same sequence; the answer is the same.
        cache_dtype: Of keys and values; int8 and float8_e4m3fn have a scale for each token and head. None: that of the weights.
        lookahead: Whether a step is launched before the tokens of the last one are known to the host, where it does not depend on them:
            not with drafts, penalties or structured answers, nor on several ranks. The answers are the same. None: on a device.
    Raises:
        UnsupportedError: beginnings or drafts of a decoder with states, or a dtype of keys that it does not keep ("inference-states").
    """

    def __init__(
        self,
        decoder: Runner,
        *,
        blocks: int,
        size: int = 16,
        budget: SchedulerConfig | None = None,
        enable_prefix_caching: bool | None = None,
        num_speculative_tokens: int = 0,
        tokenizer: Tokenizer | None = None,
        cache_dtype: torch.dtype | None = None,
        lookahead: bool | None = None,
    ) -> None:
        if operator.index(num_speculative_tokens) < 0:
            raise PlanError(
                f"num_speculative_tokens={num_speculative_tokens!r}",
                code="inference-budget",
                fix="Give the number of tokens to guess; 0 guesses none.",
            )
        self.decoder: Any = decoder
        self.lookahead = (decoder.device.type != "cpu" if lookahead is None else lookahead) and not decoder.stateful
        self.tokenizer, self.speculate = tokenizer, num_speculative_tokens
        budget = budget or SchedulerConfig()
        if decoder.stateful:
            _check_states(decoder, enable_prefix_caching, num_speculative_tokens, cache_dtype)
        self.scheduler = Scheduler(
            BlockPool(blocks, size),
            replace(budget, max_model_len=min(budget.max_model_len, decoder.spec.max_seq_len)),
            enable_prefix_caching=not decoder.stateful if enable_prefix_caching is None else enable_prefix_caching,
        )
        if cache_dtype == torch.float8_e4m3fn and isinstance(decoder, Decoder) and not decoder.obstacle:
            raise UnsupportedError(
                "a cache of fp8 for the native loop", code="inference-cache-dtype", fix="Use int8, or native=False."
            )
        self.cache = Cache(decoder.spec, blocks, size, cache_dtype or decoder.dtype, decoder.device)
        self._capture()
        self.before_step: Callable[[SchedulerOutput], None] | None = None
        self.on_failure: Callable[[int, Exception], None] | None = None
        self.version = 0
        self._asks: dict[int, _Ask] = {}
        self._late: list[TokenOutput] = []  # of a step that raised what one request did
        self._flight: StepFlight | None = (
            None  # the next step, which was launched before the tokens of the last were known
        )
        self._next = 0

    # ---- step by step

    def submit(
        self,
        prompt: str | Sequence[int],
        how: SamplingParams | None = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> list[int]:
        """Queue a prompt. Returns one identity for every sample.

        Args:
            adapter: Name of the one that answers (`load(..., adapters=)`); None: the model itself.
        Raises:
            PlanError: see `check`.
        """
        how = how or SamplingParams()
        tokens = self._tokens(prompt)
        self.check(tokens, how, adapter)
        (how,) = self._seeded([how])
        identities = tuple(range(self._next, self._next + how.n))
        salt = b"" if adapter is None else adapter.encode()
        request = Request(identities[0], tokens, how.max_new_tokens, priority, salt)
        self.scheduler.add(request)
        self._next += how.n
        copies = {identity: _sample(how, number) for number, identity in enumerate(identities)}
        self._asks[identities[0]] = _Ask(request, copies.pop(identities[0]), copies)
        return list(identities)

    def check(self, prompt: Sequence[int], how: SamplingParams, adapter: str | None = None) -> None:
        """Refuse what no step could compute, before anything is queued. Changes nothing; any thread may ask.

        Raises:
            PlanError: the prompt is empty or too long for the model or the cache ("inference-request", "inference-too-long"); it, a bias
                or a stop token is of no token that the model has, or more log-probabilities are asked for than it has tokens
                ("inference-request"); there is no such adapter ("inference-adapter"), or no tokenizer for stop strings
                ("inference-tokenizer").
        """
        vocab = self.decoder.spec.vocab
        for what, tokens in (
            ("a prompt", prompt),
            ("logit_bias", how.logit_bias),
            ("stop_token_ids", how.stop_token_ids),
        ):
            foreign = [t for t in tokens if not 0 <= t < vocab]
            if foreign:
                raise PlanError(
                    f"tokens {foreign[:4]} in {what} for a model of {vocab} tokens",
                    code="inference-request",
                    fix="Use the model's own tokenizer.",
                )
        if not prompt or (how.logprobs or 0) > vocab:
            raise PlanError(
                f"a prompt of {len(prompt)} tokens, {how.logprobs or 0} log-probabilities of a model of {vocab} tokens",
                code="inference-request",
                fix=f"Give at least one token, and ask for at most {vocab} log-probabilities.",
            )
        if adapter is not None and adapter not in self.decoder.adapters:
            raise PlanError(
                f"there is no adapter {adapter!r}; there are {sorted(self.decoder.adapters)}",
                code="inference-adapter",
                fix="Name one that was given to load(..., adapters=).",
            )
        if how.stop and self.tokenizer is None:
            raise PlanError(
                "stop strings, and no tokenizer",
                code="inference-tokenizer",
                fix="Use stop_token_ids, or pass a tokenizer.",
            )
        self.scheduler.check(len(prompt), how.max_new_tokens)

    def cancel(self, identity: int) -> bool:
        """End a request; False if it is over already. Other samples of its prompt go on."""
        ask = self._asks.pop(identity, None)
        if ask is None:
            return any(other.copies.pop(identity, None) is not None for other in self._asks.values())
        self.scheduler.cancel(identity)
        if ask.copies:  # one of those that were to begin with this one's prompt computes it
            old, first = ask.request, min(ask.copies)
            heir = Request(first, list(old.tokens[: old.num_prompt_tokens]), old.limit, old.priority, old.salt)
            self.scheduler.add(heir)
            self._asks[first] = _Ask(heir, ask.copies.pop(first), ask.copies)
        return True

    def step(self) -> list[TokenOutput]:
        """Compute one step. Empty when prompts are still under way; see `idle`.

        Raises:
            Exception: that of one request, if nobody listens to `on_failure`. The request is over; events of the others come with the
                next step. Any other error: nothing could be computed.
        """
        with streams.on_device(self.decoder.device):  # whichever thread calls: a new one begins with device 0
            return self._step()

    def _step(self) -> list[TokenOutput]:
        try:
            flight = self._under_way() or self._launch(
                self.scheduler.schedule(self._drafts() if self.speculate else None)
            )
            self._flight = self._launch_ahead(flight)
            events, failures = self._commit(flight)
        except BaseException:
            self._flight = None
            self.scheduler.abandon()
            raise
        events, self._late = [*self._late, *events], []
        if failures and self.on_failure is None:
            self._late = events
            raise next(iter(failures.values()))
        for identity, error in failures.items():
            if self.on_failure is not None:
                self.on_failure(identity, error)
        return events

    def _under_way(self) -> StepFlight | None:
        """Return the step that was launched ahead, unless nobody waits for it any more."""
        flight, self._flight = self._flight, None
        if flight is None or any(c.request in self.scheduler.requests for c in flight.plan.chunks):
            return flight
        self.scheduler.discard()
        return None

    def _launch(self, plan: SchedulerOutput) -> StepFlight:
        """Compute a planned step, as far as that is possible."""
        self.cache.states.forget(plan.finished)
        if not plan.chunks:
            return StepFlight(plan, [], [], {})
        plan = replace(plan, likeliest=self._wants_likeliest(plan))
        if self.before_step is not None:
            self.before_step(plan)
        self.cache.copy(plan.copies)
        if self._together:
            parts, lost = [self._forward(plan.chunks, False, likeliest=plan.likeliest)], dict[int, Exception]()
        else:
            parts, lost = compute_apart(plan.chunks, self._forward, self._probe)
        failures = {each: e for i, e in lost.items() if (a := self._asks.get(i)) for each in (i, *a.copies)}
        return StepFlight(plan, parts, [self._sample(part) for part in parts], failures)

    def _wants_likeliest(self, plan: SchedulerOutput) -> bool:
        """Whether ranks that hold parts of the vocabulary need not send logits: every row takes the likeliest token."""
        if not isinstance(self.decoder, Decoder) or self.decoder.cut is None:
            return False
        asks = [ask for c in plan.chunks if c.outputs and (ask := self._asks.get(c.request))]
        return all(how.likeliest for ask in asks for how in (ask.how, *ask.copies.values()))

    def _launch_ahead(self, flight: StepFlight) -> StepFlight | None:
        """Launch the step after `flight`, whose tokens are not known yet; None where it depends on them."""
        asks = [ask for c in flight.plan.chunks if c.outputs and (ask := self._asks.get(c.request))]
        if not self._looks_ahead(flight, asks) or not self.scheduler.assume():
            return None
        plan = self.scheduler.schedule()
        (pending,) = flight.pending
        try:
            self.cache.states.forget(plan.finished)
            self.cache.copy(plan.copies)
            part = self._forward(point_to_rows(plan.chunks, pending.row_of()), False, pending.tokens)
            return StepFlight(plan, [part], [self._sample(part)], {})
        except Exception:  # it is computed again when its tokens are known, where each request's fault is its own
            self.scheduler.discard()
            return None

    def _looks_ahead(self, flight: StepFlight, asks: Sequence[_Ask]) -> bool:
        alone = not self._together and self.before_step is None and not self.speculate
        whole = len(flight.parts) == 1 and not flight.failures and not flight.pending[0].failures
        return self.lookahead and alone and whole and all(not a.copies and a.how.forgets_answer for a in asks)

    def _sample(self, part: ComputedPart) -> PendingTokens:
        """Choose the tokens of a part's rows: of its requests, and of samples that begin with them."""
        groups: list[RowGroup] = []
        row = 0
        for chunk in part.order:
            first, row = row, row + chunk.outputs
            ask = self._asks.get(chunk.request)
            if ask is not None and chunk.outputs:
                drafts = chunk.tokens[len(chunk.tokens) - chunk.outputs + 1 :]
                groups.append(RowGroup(ask.request, ask.how, first, drafts))
                copies = ((ask.request.renamed(identity), how) for identity, how in ask.copies.items())
                groups += [RowGroup(request, how, first) for request, how in copies]
        return PendingTokens(part.logits, groups)

    def _commit(self, flight: StepFlight) -> tuple[list[TokenOutput], dict[int, Exception]]:
        """Wait for the tokens of a step; return its events, and the requests that failed, which are over."""
        chosen: dict[int, list[TokenOutput]] = {}
        children: dict[int, _Ask] = {}
        asks = [ask for c in flight.plan.chunks if c.outputs and (ask := self._asks.get(c.request))]
        parents = {identity: ask for ask in asks for identity in ask.copies}

        def accept(group: RowGroup, token: SampledToken) -> bool:
            identity = group.request.request_id
            ask = self._asks.get(identity)
            if identity not in parents and (ask is None or ask.request is not group.request):
                return False  # was cancelled during the step
            before = chosen.setdefault(identity, [])
            answer = [*group.request.sampled_known, *(e.token for e in before), token.token]
            event = self._event(group, token, answer)
            before.append(event)
            if identity in parents:
                children[identity] = _Ask(group.request, group.how)
            return event.reason is None

        failures = dict(flight.failures)
        for pending in flight.pending:
            pending.read(accept)
            failures |= pending.failures
        for identity in failures:
            self._asks.pop(identity, None)
            self.scheduler.cancel(identity)
            chosen.pop(identity, None)
        outcomes = {
            i: StepOutcome(tuple(e.token for e in group), group[-1].reason is not None)
            for i, group in chosen.items()
            if i not in parents
        }
        for request in self.scheduler.update(outcomes):
            self._asks.pop(request.request_id, None)
        for identity, parent in parents.items():
            parent.copies = {}
            if identity in chosen:
                self._begin(parent, children[identity], chosen[identity][0])
        return [event for group in chosen.values() for event in group], failures

    def _forward(
        self, chunks: Sequence[ScheduledChunk], again: bool, before: Tensor | None = None, *, likeliest: bool = False
    ) -> ComputedPart:
        """Compute some of a step's chunks.

        again: some were tried before. States may have gone on then, so that those of sequences are computed from their beginning.
        before: tokens of the step before, which the chunks point to.
        likeliest: see `SchedulerOutput`.
        """
        if again and self.decoder.stateful:
            chunks = [self._from_beginning(chunk) for chunk in chunks]
        batch, order = make_batch(chunks, self.cache.size, self.decoder.device)
        if self.decoder.adapters:
            batch = replace(batch, worn=self._worn(order))
        if before is not None:
            batch = feed_tokens(batch, before)
        if likeliest:
            batch = replace(batch, likeliest=True)
        return ComputedPart(order, self.decoder.forward(batch, self.cache))

    def _from_beginning(self, chunk: ScheduledChunk) -> ScheduledChunk:
        before = self.scheduler.requests[chunk.request].tokens[: chunk.start]
        return replace(chunk, tokens=(*before, *chunk.tokens), start=0)

    def _probe(self) -> None:
        """Compute one token in the spare block, of one of two tokens: a model that can do neither is broken."""
        spare = self.scheduler.pool.count
        for token in (0, self.decoder.spec.vocab - 1):
            batch, _ = make_batch([ScheduledChunk(-1, (token,), 0, (spare,), 1)], self.cache.size, self.decoder.device)
            try:
                self.decoder.forward(batch, self.cache).argmax(-1).tolist()
            except Exception:
                if token:
                    raise
            else:
                break
            finally:
                self.cache.states.forget([spare])

    @property
    def _together(self) -> bool:
        """Whether ranks compute each forward together: then none of them may repeat one."""
        group = getattr(self.decoder, "group", None)
        if group is None:  # a module that runs its own forward may be sharded
            return (
                torch.distributed.is_available()
                and torch.distributed.is_initialized()
                and torch.distributed.get_world_size() > 1
            )
        return bool(group.size > 1)

    def _worn(self, order: Sequence[ScheduledChunk]) -> tuple[tuple[str, Tensor], ...]:
        """List the tokens of a batch that use each LoRA adapter."""
        rows: dict[str, list[int]] = {}
        first = 0
        for chunk in order:
            if name := self.scheduler.requests[chunk.request].salt.decode():
                rows.setdefault(name, []).extend(range(first, first + len(chunk.tokens)))
            first += len(chunk.tokens)
        device = self.decoder.device
        return tuple((n, streams.copy_to(torch.tensor(at, device="cpu"), device)) for n, at in rows.items())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self.scheduler.idle and not self._late

    # ---- at once

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        how: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts; with several samples a prompt, those follow each other.

        Equal prompts are drawn for apart from each other, with a seed and without; with one, the call repeats.

        Args:
            adapters: Who answers each prompt; None: the model itself, all of them.
        Raises:
            Exception: what one request raised. Then nothing of this call goes on.
        """
        hows = [how or SamplingParams()] * len(prompts) if how is None or isinstance(how, SamplingParams) else list(how)
        hows = self._seeded(hows)
        answers: dict[int, RequestOutput] = {}
        others: list[TokenOutput] = []  # of requests that were submitted before: they come with the next step
        try:
            for prompt, one, adapter in zip(prompts, hows, adapters or [None] * len(prompts), strict=True):
                for identity in self.submit(prompt, one, adapter=adapter):
                    answers[identity] = RequestOutput(tuple(self._tokens(prompt)))
            for event in self._stream_of(answers, others):
                answer = answers[event.request]
                answer.tokens.append(event.token)
                answer.versions.append(event.version)
                if event.logprob is not None:
                    answer.logprobs.append(event.logprob)
                    answer.tops.append(event.top or {})
                answer.reason = event.reason or answer.reason
        except BaseException:  # the caller gets no answer: nothing of this call goes on
            for identity in answers:
                self.cancel(identity)
            self._late = [event for event in self._late if event.request not in answers]
            raise
        finally:
            self._late = [*others, *self._late]
        if self.tokenizer is not None:
            stops = [one.stop for one in hows for _ in range(one.n)]
            for answer, stop in zip(answers.values(), stops, strict=True):
                answer.text = _cut(self.tokenizer.decode(answer.tokens), stop)
        return list(answers.values())

    def stream(self) -> Iterator[TokenOutput]:
        """Yield token outputs until all requests are finished."""
        while not self.idle:
            yield from self.step()

    def _stream_of(self, answers: Mapping[int, object], others: list[TokenOutput]) -> Iterator[TokenOutput]:
        """Yield token outputs of `answers` until none of these is under way; collect those of other requests in `others`."""
        while self._late or any(i in self._asks or any(i in a.copies for a in self._asks.values()) for i in answers):
            for event in self.step():
                if event.request in answers:
                    yield event
                else:
                    others.append(event)

    def weights_changed(self, version: int) -> None:
        """Drop all cached results of the old weights; running requests recompute their tokens."""
        if self._flight is not None:
            self._flight = None
            self.scheduler.discard()
        self.version = version
        self.scheduler.clear_prefix_cache()
        self._capture()

    # ---- how

    def _capture(self) -> None:
        """Let the decoder capture its steps over this cache, unless it has; a change of weights may have brought another decoder."""
        if isinstance(self.decoder, Decoder):
            limits = self.scheduler.budget
            self.decoder.capture(self.cache, limits.max_num_seqs, limits.max_model_len, 1 + self.speculate)

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise PlanError(
                    f"a prompt that is no text and no tokens: {error}",
                    code="inference-request",
                    fix="Give a string, or a sequence of whole numbers.",
                ) from error
        if self.tokenizer is None:
            raise PlanError(
                "a prompt of text, and no tokenizer",
                code="inference-tokenizer",
                fix="Pass tokens, or load(..., tokenizer=...).",
            )
        return list(self.tokenizer.encode(prompt))

    def _event(self, group: RowGroup, sampled: SampledToken, answer: list[int]) -> TokenOutput:
        how, identity, token = group.how, group.request.request_id, sampled.token
        ends = how.stop_token_ids if how.ignore_eos else (*self.decoder.spec.eos_ids, *how.stop_token_ids)
        reason: Literal["stop", "length"] | None = None
        if token in ends or (how.stop and self._says_stop(answer, how.stop)):
            reason = "stop"
        elif len(answer) >= how.max_new_tokens:
            reason = "length"
        return TokenOutput(identity, token, sampled.logprob, sampled.top, reason, self.version)

    def _says_stop(self, answer: Sequence[int], stops: tuple[str, ...]) -> bool:
        if self.tokenizer is None:  # such a request is refused: see `check`
            return False
        return ends_with_stop(self.tokenizer, answer, stops)

    def _begin(self, parent: _Ask, child: _Ask, first: TokenOutput) -> None:
        """Let a sample go on by itself, after its first token."""
        if first.reason is None:
            identity, prompt = child.request.request_id, parent.request.num_prompt_tokens
            child.request = self.scheduler.fork(parent.request, identity)
            child.request.tokens[prompt:] = [first.token]
            self._asks[identity] = child

    def _seeded(self, hows: Sequence[SamplingParams]) -> list[SamplingParams]:
        """Every request of a call with a seed of its own, which is the same on ranks that draw for the same requests."""
        fresh = [draw_seed() for _ in hows]
        group = getattr(self.decoder, "group", None)
        draws = any(not how.greedy and how.seed is None for how in hows)
        if draws and group is not None and group.size > 1 and self.before_step is None:
            fresh = ds_comm.broadcast_json(fresh, group, unit="seeds")
        return separate(hows, fresh)

    def _drafts(self) -> dict[int, Sequence[int]]:
        """Guess tokens of requests that generate; not where samples begin with the next token, and with that alone."""
        asks = {i: a.request for i, a in self._asks.items() if a.request.generates and not a.copies}
        return {i: prompt_lookup(request.tokens, self.speculate) for i, request in asks.items()}


def _check_states(decoder: Runner, share: bool | None, speculate: int, cache_dtype: torch.dtype | None) -> None:
    """Raise UnsupportedError for options that a decoder with recurrent states does not support.

    A state is of all its tokens: it cannot be shared for a prefix, nor restored to before tokens that were rejected.
    """
    options = {
        "enable_prefix_caching=True": bool(share),
        f"num_speculative_tokens={speculate}": speculate > 0,
        f"cache_dtype={cache_dtype}": cache_dtype is not None and not decoder.spec.layers,
    }
    wrong = [words for words, true in options.items() if true]
    if wrong:
        raise UnsupportedError(
            f"{', '.join(wrong)} for a {decoder.spec.family} model, whose layers keep states"
            + ("" if decoder.spec.layers else " and no keys"),
            code="inference-states",
            fix="Leave it out: sequences are then computed whole, token after token.",
        )


def _sample(how: SamplingParams, number: int) -> SamplingParams:
    """Of several samples, one."""
    seed = draw_seed() if how.seed is None else how.seed
    return replace(how, seed=derive_seed(seed, "sample", number), n=1)


def _cut(text: str, stops: tuple[str, ...]) -> str:
    at = min((position for stop in stops if (position := text.find(stop)) >= 0), default=len(text))
    return text[:at]

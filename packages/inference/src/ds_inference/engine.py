"""Generation: requests in, tokens out. It holds a scheduler, a runner and a cache, and calls them; each decides nothing of the others'.

engine = load("folder")                          # or load(module)
answers = engine.generate(prompts, Sampling(max_new_tokens=32))

engine.submit(prompt, sampling) -> identity      # the same, step by step
for event in engine.step(): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ds_config.errors import PlanError, UnsupportedError
from ds_inference.attention import make_batch
from ds_inference.blocks import BlockPool
from ds_inference.model import Cache, Runner
from ds_inference.sampling import Sampling, draw, shaped
from ds_inference.scheduler import Budget, Chunk, Outcome, Request, Scheduler, StepPlan

__all__ = ["Answer", "Event", "Generator", "Tokenizer"]


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit, and `tokenizers.Tokenizer` by a thin wrapper."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One token of one request.

    Attributes:
        request: Identity.
        token: That was chosen.
        logprob: Its log-probability, where it was asked for.
        top: The likeliest tokens and their log-probabilities.
        reason: Why the request is over with it: `"stop"` or `"length"`; None: it goes on.
        version: Of the weights that made it.
    """

    request: int
    token: int
    logprob: float | None = None
    top: Mapping[int, float] | None = None
    reason: Literal["stop", "length"] | None = None
    version: int = 0


@dataclass(slots=True)
class Answer:
    """The result of one request.

    Attributes:
        prompt, tokens: In, and out; a stop string's tokens are out, too.
        text: Decoded and cut at a stop string, where there is a tokenizer.
        reason: `"stop"` or `"length"`.
        logprobs: Of the tokens, where asked for.
        versions: Of the weights, for every token.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    reason: Literal["stop", "length"] = "length"
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[int, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Ask:
    """A request, how it is sampled, and where its text is."""

    request: Request
    how: Sampling
    copies: tuple[int, ...] = ()  # identities of further samples, which begin when the prompt is computed


class Generator:
    """Generates. Made by `load`.

    Args:
        decoder: Runs batches.
        blocks: Of the cache; `size` tokens each.
        budget: Of a step.
        share: Whether equal beginnings are computed once; None: where the decoder has no states.
        speculate: Tokens that are guessed from earlier occurrences of the last ones in the same sequence; the answer is the same.
        cache_dtype: Of keys and values; int8 has a scale for each token and head. None: that of the weights.
    Raises:
        UnsupportedError: beginnings or drafts of a decoder with states, or a dtype of keys that it does not keep ("inference-states").
    """

    def __init__(
        self,
        decoder: Runner,
        *,
        blocks: int,
        size: int = 16,
        budget: Budget | None = None,
        share: bool | None = None,
        speculate: int = 0,
        tokenizer: Tokenizer | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder: Any = decoder
        self.tokenizer, self.speculate = tokenizer, speculate
        budget = budget or Budget()
        if decoder.stateful:
            _check_states(decoder, share, speculate, cache_dtype)
        self.scheduler = Scheduler(
            BlockPool(blocks, size),
            replace(budget, length=min(budget.length, decoder.spec.longest)),
            share=not decoder.stateful if share is None else share,
        )
        self.cache = Cache(decoder.spec, blocks, size, cache_dtype or decoder.dtype, decoder.device)
        self.before_step: Callable[[StepPlan], None] | None = None
        self.version = 0
        self._asks: dict[int, _Ask] = {}
        self._next = 0

    # ---- step by step

    def submit(
        self, prompt: str | Sequence[int], how: Sampling | None = None, *, priority: int = 0, adapter: str | None = None
    ) -> list[int]:
        """Queue a prompt. Returns one identity for every sample.

        Args:
            adapter: Name of the one that answers (`load(..., adapters=)`); None: the model itself.
        Raises:
            PlanError: it is empty, too long for the model or the cache, or has a token that the model does not have.
        """
        how = how or Sampling()
        tokens = self._tokens(prompt)
        foreign = [t for t in tokens if not 0 <= t < self.decoder.spec.vocab]
        if foreign:
            raise PlanError(
                f"tokens {foreign[:4]} in a prompt for a model of {self.decoder.spec.vocab} tokens",
                code="inference-request",
                fix="Use the model's own tokenizer.",
            )
        if adapter is not None and adapter not in self.decoder.adapters:
            raise PlanError(
                f"there is no adapter {adapter!r}; there are {sorted(self.decoder.adapters)}",
                code="inference-adapter",
                fix="Name one that was given to load(..., adapters=).",
            )
        identities = tuple(range(self._next, self._next + how.samples))
        salt = b"" if adapter is None else adapter.encode()
        request = Request(identities[0], tokens, how.max_new_tokens, priority, salt)
        self.scheduler.add(request)
        self._next += how.samples
        self._asks[identities[0]] = _Ask(request, how, identities[1:])
        return list(identities)

    def cancel(self, identity: int) -> bool:
        """End a request; False if it is over already."""
        ask = self._asks.pop(identity, None)
        return ask is not None and self.scheduler.cancel(identity)

    def step(self) -> list[Event]:
        """Compute one step. Empty when prompts are still under way; see `idle`."""
        plan = self.scheduler.plan(self._drafts() if self.speculate else None)
        if not plan.chunks:
            self.cache.states.forget(plan.gone)
            self.scheduler.commit({})
            return []
        if self.before_step is not None:
            self.before_step(plan)
        batch, order = make_batch(plan.chunks, self.cache.size, self.decoder.device)
        if self.decoder.adapters:
            batch = replace(batch, worn=self._worn(order))
        self.cache.copy(plan.copies)
        self.cache.states.forget(plan.gone)
        logits = self.decoder.forward(batch, self.cache)
        likeliest = logits.argmax(-1).tolist() if len(logits) else []  # of all rows at once
        events, outcomes, row = [], {}, 0
        for chunk in order:
            if chunk.outputs and (ask := self._asks.get(chunk.request)) is not None:
                drafts = chunk.tokens[len(chunk.tokens) - chunk.outputs + 1 :]
                rows = slice(row, row + chunk.outputs)
                found = self._choose(ask, logits[rows], drafts, likeliest[rows])
                outcomes[chunk.request] = Outcome(tuple(e.token for e in found), found[-1].reason is not None)
                events += found
            row += chunk.outputs
        children = self._fork(order, logits, events)
        for request in self.scheduler.commit(outcomes):
            self._asks.pop(request.identity, None)
        self._begin(children)
        return events

    def _worn(self, order: Sequence[Chunk]) -> tuple[tuple[str, Tensor], ...]:
        """Which tokens of a batch wear which adapter."""
        rows: dict[str, list[int]] = {}
        first = 0
        for chunk in order:
            if name := self.scheduler.requests[chunk.request].salt.decode():
                rows.setdefault(name, []).extend(range(first, first + len(chunk.tokens)))
            first += len(chunk.tokens)
        return tuple((name, torch.tensor(found, device=self.decoder.device)) for name, found in rows.items())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self.scheduler.idle

    # ---- at once

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        how: Sampling | Sequence[Sampling] | None = None,
        *,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Answer]:
        """Answers in the order of the prompts; with several samples a prompt, those follow each other.

        adapters: who answers each prompt; None: the model itself, all of them.
        """
        hows = [how] * len(prompts) if how is None or isinstance(how, Sampling) else list(how)
        answers: dict[int, Answer] = {}
        for prompt, one, adapter in zip(prompts, hows, adapters or [None] * len(prompts), strict=True):
            for identity in self.submit(prompt, one, adapter=adapter):
                answers[identity] = Answer(tuple(self._tokens(prompt)))
        for event in self.stream():
            answer = answers[event.request]
            answer.tokens.append(event.token)
            answer.versions.append(event.version)
            if event.logprob is not None:
                answer.logprobs.append(event.logprob)
                answer.tops.append(event.top or {})
            answer.reason = event.reason or answer.reason
        if self.tokenizer is not None:
            stops = [one.stop if one else () for one in hows for _ in range(one.samples if one else 1)]
            for answer, stop in zip(answers.values(), stops, strict=True):
                answer.text = _cut(self.tokenizer.decode(answer.tokens), stop)
        return list(answers.values())

    def stream(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    def weights_changed(self, version: int) -> None:
        """Nothing that the old weights computed is used any more; running requests compute their tokens anew."""
        self.version = version
        self.scheduler.forget()

    # ---- how

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise PlanError(
                "a prompt of text, and no tokenizer",
                code="inference-tokenizer",
                fix="Pass tokens, or load(..., tokenizer=...).",
            )
        return list(self.tokenizer.encode(prompt))

    def _choose(self, ask: _Ask, logits: Tensor, drafts: Sequence[int], likeliest: Sequence[int] = ()) -> list[Event]:
        """The tokens that a request's rows give: the drafts as long as they are what would have been chosen, and one more.

        likeliest: of each row as it is, where that is known already.
        """
        request, how, found = ask.request, ask.how, []
        answer = list(request.sampled)
        for i in range(len(logits)):
            if likeliest and how.greedy and how.plain:
                token = likeliest[i]
            else:
                row = shaped(logits[i], how, request.tokens[: request.prompt], answer)
                token = draw(row, how, request.prompt + len(answer))
            answer.append(token)
            found.append(self._event(ask, token, logits[i], answer))
            if found[-1].reason or i == len(drafts) or token != drafts[i]:
                break
        return found

    def _event(self, ask: _Ask, token: int, logits: Tensor, answer: list[int]) -> Event:
        how, identity = ask.how, ask.request.identity
        ends = how.stop_tokens if how.ignore_end else (*self.decoder.spec.ends, *how.stop_tokens)
        reason: Literal["stop", "length"] | None = None
        if token in ends or (how.stop and self._says_stop(answer, how.stop)):
            reason = "stop"
        elif len(answer) >= how.max_new_tokens:
            reason = "length"
        if how.logprobs is None:
            return Event(identity, token, reason=reason, version=self.version)
        logs = torch.log_softmax(logits, -1)
        values, at = logs.topk(how.logprobs)
        top = dict(zip(at.tolist(), values.tolist(), strict=True))
        return Event(identity, token, float(logs[token]), top, reason, self.version)

    def _says_stop(self, answer: Sequence[int], stops: tuple[str, ...]) -> bool:
        if self.tokenizer is None:
            raise PlanError(
                "stop strings, and no tokenizer",
                code="inference-tokenizer",
                fix="Use stop_tokens, or pass a tokenizer.",
            )
        # A stop string may begin in any earlier token; the last ones, as many as it has characters, hold it.
        text = self.tokenizer.decode(answer[-(max(map(len, stops)) + 4) :])
        return any(stop in text for stop in stops)

    def _fork(self, order: Sequence[Any], logits: Tensor, events: list[Event]) -> list[tuple[_Ask, int, Event]]:
        """First tokens of further samples of prompts that this step ended."""
        found, row = [], 0
        for chunk in order:
            ask = self._asks.get(chunk.request)
            if chunk.outputs and ask is not None and ask.copies:
                for number, identity in enumerate(ask.copies, 1):
                    how = replace(ask.how, seed=ask.how.seed + number, samples=1)
                    child = _Ask(_renamed(ask.request, identity), how)
                    first = self._choose(child, logits[row : row + 1], ())[0]
                    events.append(first)
                    if first.reason is None:
                        found.append((ask, identity, first))
                    self._asks[identity] = child
                    if first.reason is not None:
                        del self._asks[identity]
                ask.copies = ()
            row += chunk.outputs
        return found

    def _begin(self, children: list[tuple[_Ask, int, Event]]) -> None:
        for parent, identity, first in children:
            own = parent.request
            request = self.scheduler.fork(own, identity)
            request.tokens[own.prompt :] = [first.token]
            self._asks[identity].request = request

    def _drafts(self) -> dict[int, Sequence[int]]:
        return {i: _guess(a.request.tokens, self.speculate) for i, a in self._asks.items() if a.request.generates}


def _check_states(decoder: Runner, share: bool | None, speculate: int, cache_dtype: torch.dtype | None) -> None:
    """What a decoder with states cannot do.

    A state is of all its tokens: it is neither that of their beginning, nor what it was before tokens that are taken back.
    """
    asked = {
        "share=True": bool(share),
        f"speculate={speculate}": speculate > 0,
        f"cache_dtype={cache_dtype}": cache_dtype is not None and not decoder.spec.layers,
    }
    wrong = [words for words, true in asked.items() if true]
    if wrong:
        raise UnsupportedError(
            f"{', '.join(wrong)} for a {decoder.spec.family} model, whose layers keep states"
            + ("" if decoder.spec.layers else " and no keys"),
            code="inference-states",
            fix="Leave it out: sequences are then computed whole, token after token.",
        )


def _renamed(request: Request, identity: int) -> Request:
    """A request with the same tokens under another identity, not known to any scheduler."""
    made = Request(identity, list(request.tokens), request.limit, request.priority, request.salt)
    made.prompt = request.prompt
    return made


def _guess(tokens: Sequence[int], count: int, longest: int = 3, back: int = 512) -> Sequence[int]:
    """What followed the last time the last tokens stood in the sequence (prompt lookup; Saxena 2023)."""
    first = max(0, len(tokens) - back)
    for width in range(min(longest, len(tokens) - 1), 0, -1):
        tail = tuple(tokens[-width:])
        for start in range(len(tokens) - width - 1, first - 1, -1):
            if tuple(tokens[start : start + width]) == tail:
                return tokens[start + width : start + width + count]
    return ()


def _cut(text: str, stops: tuple[str, ...]) -> str:
    at = min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))
    return text[:at]

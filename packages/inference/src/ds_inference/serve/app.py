"""The HTTP face: completions, chat, embeddings, models, health, metrics. What is computed is the worker's business."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ds_config.errors import DsError, PlanError
from ds_config.option_checks import check_options
from ds_inference.embedding import Embedder
from ds_inference.llm_engine import TokenOutput
from ds_inference.sampling import SamplingParams, separate
from ds_inference.serve.access import AccessControl
from ds_inference.serve.body import BodyLimit, Message, Receive, Scope, Send
from ds_inference.serve.choices import ChoiceText, make_choice
from ds_inference.serve.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from ds_inference.serve.vectors import embeddings_body
from ds_inference.serve.worker import Worker
from ds_inference.structured import JsonGrammars
from ds_inference.text import HfTokenizer

__all__ = ["ServerLimits", "ServerOptions", "make_app"]


_PROBLEMS = 20  # of a body that are named; a list of wrong numbers has one for each


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server takes on.

    Attributes:
        requests: Under way at a time, each prompt of a request counted; further ones get 429. A request with more prompts than that is
            taken where nothing else is under way, and computes so many of them at a time.
        answer: Tokens of an answer that names no number, as far as the prompt leaves room.
        longest: Tokens of prompt and answer together; the model and the cache may have room for fewer.
        body: Bytes of a request.
        stall: Seconds that a client may take to send the next piece of a body, or to take the next piece of a stream.
    """

    requests: int = 256
    answer: int = 256
    longest: int = 4096
    body: int = 4 << 20
    stall: float = 30.0

    def __post_init__(self) -> None:
        check_options(self, requests=">= 1", answer=">= 1", longest=">= 1", body=">= 1", stall="> 0")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Who may ask, and what else is served.

    Attributes:
        api_key: What requests have to send; empty: nothing.
        hosts: Names in `Host` that are served; empty: all.
        embedder: Answers `/v1/embeddings`; None: nobody does.
        embedder_name: The model's name in such requests.
    """

    api_key: str = ""
    hosts: tuple[str, ...] = ()
    embedder: Embedder | None = None
    embedder_name: str = ""


@dataclass(slots=True)
class _Metrics:
    """What Prometheus reads."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.requests = Counter("ds_requests", "Requests by outcome", ["outcome"], registry=self.registry)
        self.tokens = Counter("ds_tokens", "Tokens by kind", ["kind"], registry=self.registry)
        self.first = Histogram("ds_first_token_seconds", "Time to the first token", registry=self.registry)
        self.whole = Histogram("ds_request_seconds", "Time of a request", registry=self.registry)
        self.running = Gauge("ds_running_requests", "Requests that are not over", registry=self.registry)
        self.free = Gauge("ds_free_blocks", "Blocks of the cache that can be taken", registry=self.registry)

    requests: Counter = field(init=False)
    tokens: Counter = field(init=False)
    first: Histogram = field(init=False)
    whole: Histogram = field(init=False)
    running: Gauge = field(init=False)
    free: Gauge = field(init=False)


@dataclass(slots=True)
class _ParsedRequest:
    """One request in the form that both kinds share."""

    prompts: list[list[int]]
    hows: list[SamplingParams]
    stream: bool
    usage: bool
    chat: bool
    adapter: str | None = None

    @property
    def n(self) -> int:
        """Samples of each prompt."""
        return self.hows[0].n if self.hows else 1


def make_app(
    worker: Worker,
    tokenizer: HfTokenizer,
    name: str,
    limits: ServerLimits | None = None,
    options: ServerOptions | None = None,
) -> FastAPI:
    """Build the application, which closes the worker on shutdown after pending requests are answered."""
    return _Server(worker, tokenizer, name, limits or ServerLimits(), options or ServerOptions()).app


class _Server:
    def __init__(
        self, worker: Worker, tokenizer: HfTokenizer, name: str, limits: ServerLimits, options: ServerOptions
    ) -> None:
        self._worker, self._tokenizer, self._name, self._limits = worker, tokenizer, name, limits
        self._options = options
        self._longest = min(limits.longest, worker.max_model_len)
        self._metrics, self._busy, self._closing = _Metrics(), 0, False
        self._numbers = itertools.count()
        self._embedding = asyncio.Semaphore(1)  # one at a time has all cores, and threads are left that read prompts
        self._begun = int(time.time())
        self.app = FastAPI(title="ds serve", lifespan=self._lifespan)
        self.app.exception_handler(RequestValidationError)(self._malformed)
        for status in (400, 404, 405):
            self.app.exception_handler(status)(self._not_served)
        self.app.exception_handler(Exception)(self._unforeseen)
        self.app.add_middleware(BodyLimit, most=limits.body, stall=limits.stall, refuse=self._error)
        self.app.add_middleware(AccessControl, api_key=options.api_key, hosts=options.hosts, refuse=self._error)
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/models/{name:path}", response_model=None)(self.model)
        self.app.post("/v1/embeddings", response_model=None)(self.embed)
        self.app.post("/v1/completions", response_model=None)(self.complete)
        self.app.post("/v1/chat/completions", response_model=None)(self.chat)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        self._closing = True
        while self._busy:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._worker.close)

    # ---- what is asked

    async def health(self) -> Response:
        failed = self._worker.failure is not None
        status = "failed" if failed else "closing" if self._closing else "ok"
        return JSONResponse({"status": status}, 503 if failed or self._closing else 200)

    async def metrics(self) -> Response:
        load = self._worker.load
        self._metrics.running.set(load.requests)
        self._metrics.free.set(load.free)
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described(name) for name in self._names]}

    async def model(self, name: str) -> Response:
        if name not in self._names:
            return self._no_model(name)
        return JSONResponse(self._described(name))

    @property
    def _names(self) -> tuple[str, ...]:
        embedder = (self._options.embedder_name,) if self._options.embedder is not None else ()
        return (self._name, *self._worker.adapters, *embedder)

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._begun, "owned_by": "ds-inference"}

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        return await self._serve(body, request, lambda: self._completion(body), len(body.prompts()))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._serve(body, request, lambda: self._conversation(body), 1)

    async def embed(self, body: EmbeddingRequest) -> Response:
        embedder, name = self._options.embedder, self._options.embedder_name
        if embedder is None:
            return self._error(404, "this server has no model for embeddings: start it with --embedder FOLDER")
        if body.model and body.model != name:
            return self._no_model(body.model)
        try:
            tokens = await asyncio.to_thread(lambda: [embedder.tokens(one) for one in body.inputs()])
            if not tokens:
                return self._error(400, "no input; at least 1 is needed")
            async with self._embedding:
                vectors = await asyncio.to_thread(embedder.embed, tokens)
        except Exception as error:  # of a tokenizer that does not take what the client sent, too
            return self._error(400, str(error))
        return JSONResponse(embeddings_body(body, vectors, name, sum(map(len, tokens))))

    def _completion(self, body: CompletionRequest) -> _ParsedRequest:
        prompts = [self._tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompts()]
        return self._parsed(body, prompts, body.logprobs)

    def _conversation(self, body: ChatRequest) -> _ParsedRequest:
        body.check()
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        template = self._tokenizer.template
        prompt = self._tokenizer.chat([message.plain(template) for message in body.messages])
        return self._parsed(body, [prompt], (body.top_logprobs or 0) if body.logprobs else None)

    def _parsed(
        self, body: CompletionRequest | ChatRequest, prompts: list[list[int]], logprobs: int | None
    ) -> _ParsedRequest:
        schema = body.answer_schema()
        hows = []
        for prompt in prompts:
            room = max(1, min(self._limits.answer, self._longest - len(prompt)))
            how = body.sampling(room, logprobs)
            hows.append(how if schema is None else replace(how, allowed_tokens=self._grammars.follow(schema)))
        usage, chat = body.stream_options.include_usage, isinstance(body, ChatRequest)
        return _ParsedRequest(prompts, separate(hows), body.stream, usage, chat, self._adapter(body))

    @cached_property
    def _grammars(self) -> JsonGrammars:
        vocab, ends = self._worker.vocab
        return JsonGrammars(self._tokenizer.inner, vocab, ends)

    def _adapter(self, body: CompletionRequest | ChatRequest) -> str | None:
        return body.model if body.model in self._worker.adapters and body.model != self._name else None

    # ---- how it is answered

    async def _serve(self, body: Any, request: Request, read: Callable[[], _ParsedRequest], prompts: int) -> Response:
        if body.model and body.model not in (self._name, *self._worker.adapters):
            return self._no_model(body.model)
        if self._closing or self._worker.failure is not None:
            return self._error(503, "the server is shutting down" if self._closing else "the engine has failed")
        places = min(max(1, prompts), self._limits.requests)
        if self._busy + places > self._limits.requests:
            return self._error(
                429, f"{self._busy} of {self._limits.requests} places are taken and {places} asked for; try again later"
            )
        self._busy += places
        answer: Response | None = None
        try:
            completion = await asyncio.to_thread(read)  # a long prompt is tokenised for seconds
            self._check(completion)
            if completion.stream:
                answer = _Stream(self._streamed(completion), self._limits.stall, lambda: self._release(places))
            else:
                return await self._until_gone(request, self._whole(completion))
        except DsError as error:
            return self._error(400, str(error))
        except Exception as error:  # a tokenizer or a chat template that does not take what the client sent
            return self._error(400, f"the request cannot be read: {type(error).__name__}: {error}")
        finally:
            if answer is None:
                self._release(places)
        return answer

    def _no_model(self, name: str) -> Response:
        known = ", ".join(map(repr, self._names))
        return self._error(404, f"there is no model {name[:200]!r}; this server has {known}")

    def _release(self, places: int) -> None:
        self._busy -= places

    def _check(self, completion: _ParsedRequest) -> None:
        if not completion.prompts:
            raise PlanError("no prompt; at least 1 is needed", code="inference-request", fix="Send one.")
        for prompt, how in zip(completion.prompts, completion.hows, strict=True):
            if not prompt or len(prompt) + how.max_new_tokens > self._longest:
                raise PlanError(
                    f"a prompt of {len(prompt)} tokens and an answer of up to {how.max_new_tokens}; "
                    f"at least 1 and together at most {self._longest} are taken",
                    code="inference-too-long",
                    fix="Shorten the prompt or ask for fewer tokens.",
                )
            self._worker.check(prompt, how, completion.adapter)

    async def _until_gone(self, request: Request, work: Awaitable[Response]) -> Response:
        """Await the answer, or cancel the work as soon as the client has closed the connection."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            if not task.done() and await request.is_disconnected():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self._metrics.requests.labels("cancelled").inc()
                return Response(status_code=499)
        return task.result()

    async def _whole(self, completion: _ParsedRequest) -> Response:
        texts = self._texts(completion)
        choices = [make_choice(completion.chat, index) for index in range(len(texts))]
        begin, count = time.perf_counter(), 0
        try:
            async for index, event in self._events(completion):
                count += 1
                if count == 1:
                    self._metrics.first.observe(time.perf_counter() - begin)
                texts[index].add(choices[index], event)
        except DsError as error:
            self._metrics.requests.labels("refused").inc()
            return self._error(400, str(error))
        except Exception as error:
            self._metrics.requests.labels("failed").inc()
            return self._error(500, str(error))
        self._done(begin, completion, count)
        body = {**self._head(completion), "choices": choices, "usage": _usage(completion, count)}
        return JSONResponse(body)

    async def _streamed(self, completion: _ParsedRequest) -> AsyncIterator[str]:
        head, begin, count = self._head(completion, part=True), time.perf_counter(), 0
        texts = self._texts(completion)
        try:
            async for index, event in self._events(completion):
                count += 1
                if count == 1:
                    self._metrics.first.observe(time.perf_counter() - begin)
                choice = make_choice(completion.chat, index, part=True, first=not texts[index].begun)
                text = texts[index].add(choice, event)
                if text or event.reason or event.logprob is not None:
                    texts[index].begun = True
                    yield _line({**head, "choices": [choice]})
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.requests.labels("cancelled").inc()
            raise
        except Exception as error:
            refused = isinstance(error, DsError)
            self._metrics.requests.labels("refused" if refused else "failed").inc()
            yield _line(_error_body(str(error), "invalid_request_error" if refused else "server_error"))
            return
        self._done(begin, completion, count)
        if completion.usage:
            yield _line({**head, "choices": [], "usage": _usage(completion, count)})
        yield "data: [DONE]\n\n"

    def _texts(self, completion: _ParsedRequest) -> list[ChoiceText]:
        hows = [how for how in completion.hows for _ in range(how.n)]
        return [ChoiceText(self._tokenizer, how.stop, completion.chat) for how in hows]

    async def _events(self, completion: _ParsedRequest) -> AsyncIterator[tuple[int, TokenOutput]]:
        """Yield the events of all prompts, which are computed together, each with the index of its choice."""
        events: asyncio.Queue[tuple[int, TokenOutput] | BaseException | None] = asyncio.Queue()
        places = asyncio.Semaphore(self._limits.requests)

        async def answer(number: int) -> None:
            identities: dict[int, int] = {}
            try:
                async with places:
                    prompt, how = completion.prompts[number], completion.hows[number]
                    async for event in self._worker.answer(prompt, how, completion.adapter):
                        sample = identities.setdefault(event.request, len(identities))
                        events.put_nowait((number * how.n + sample, event))
            except Exception as error:
                events.put_nowait(error)
            else:
                events.put_nowait(None)

        left = len(completion.prompts)
        tasks = [asyncio.ensure_future(answer(number)) for number in range(left)]
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, begin: float, completion: _ParsedRequest, count: int) -> None:
        self._metrics.requests.labels("answered").inc()
        self._metrics.whole.observe(time.perf_counter() - begin)
        self._metrics.tokens.labels("prompt").inc(sum(map(len, completion.prompts)))
        self._metrics.tokens.labels("answer").inc(count)

    def _head(self, completion: _ParsedRequest, part: bool = False) -> dict[str, Any]:
        chat = completion.chat
        kind = ("chat.completion.chunk" if part else "chat.completion") if chat else "text_completion"
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{next(self._numbers)}"
        return {"id": identity, "object": kind, "created": int(time.time()), "model": completion.adapter or self._name}

    async def _malformed(self, request: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        message = "; ".join(f"{_place(p['loc'])}: {p['msg']}" for p in problems[:_PROBLEMS])
        if len(problems) > _PROBLEMS:
            message += f"; and {len(problems) - _PROBLEMS} more"
        if "json" not in (kind := request.headers.get("content-type", "")):
            message += f"; it was sent as {kind[:100]!r}: send Content-Type: application/json"
        return self._error(400, message or str(error))

    async def _unforeseen(self, request: Request, error: Exception) -> Response:
        del request
        return self._error(500, f"{type(error).__name__}: {error}")

    async def _not_served(self, request: Request, error: Exception) -> Response:
        del request
        return self._error(getattr(error, "status_code", 500), str(getattr(error, "detail", error)))

    def _error(self, status: int, message: str) -> Response:
        self._metrics.requests.labels("refused").inc()
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse(_error_body(message, kind), status)


class _StalledError(Exception):
    """A client does not take what it is sent."""


class _Stream(StreamingResponse):
    """A stream of events, after which something is released, also if the client has gone before the first or stops reading."""

    def __init__(self, lines: AsyncIterator[str], stall: float, release: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._stall, self._release = stall, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall):
                    await send(message)
            except TimeoutError as error:
                raise _StalledError from error

        try:
            await super().__call__(scope, receive, send_in_time)
        except _StalledError:
            pass  # the server closes the connection of an answer that is not complete
        finally:
            self._release()


def _place(loc: Sequence[int | str]) -> str:
    """Return the place of a problem as fields and numbers, without pydantic's names of the kinds that it tried there."""
    if len(loc) == 2 and isinstance(loc[1], int):
        return f"character {loc[1]} of the body"
    return ".".join(str(part) for part in loc[1:] if isinstance(part, int) or part.isidentifier()) or "the body"


def _error_body(message: str, kind: str) -> dict[str, Any]:
    """An error in the protocol's form; what cannot be encoded (half a surrogate that the client sent) is escaped."""
    text = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _usage(completion: _ParsedRequest, count: int) -> dict[str, int]:
    prompt = sum(map(len, completion.prompts))
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

"""The HTTP face: completions, chat, models, health, metrics. What is computed is the worker's business."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ds_config.errors import DsError, PlanError
from ds_inference.llm_engine import TokenOutput
from ds_inference.sampling import SamplingParams, separate
from ds_inference.serve.body import BodyLimit, Receive, Scope, Send
from ds_inference.serve.protocol import ChatRequest, CompletionRequest
from ds_inference.serve.worker import Worker
from ds_inference.text import HfTokenizer, TextStream

__all__ = ["ServerLimits", "make_app"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server takes on.

    Attributes:
        requests: Under way at a time; further ones get 429.
        answer: Tokens of an answer that names no number.
        longest: Tokens of prompt and answer together.
        body: Bytes of a request.
    """

    requests: int = 256
    answer: int = 256
    longest: int = 4096
    body: int = 4 << 20


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
    how: SamplingParams
    stream: bool
    usage: bool
    chat: bool
    adapter: str | None = None

    def each(self) -> list[tuple[list[int], SamplingParams]]:
        """The prompts, each with a stream of its own."""
        return list(zip(self.prompts, separate([self.how] * len(self.prompts)), strict=True))


def make_app(worker: Worker, tokenizer: HfTokenizer, name: str, limits: ServerLimits | None = None) -> FastAPI:
    """Build the application, which closes the worker on shutdown after pending requests are answered."""
    return _Server(worker, tokenizer, name, limits or ServerLimits()).app


class _Server:
    def __init__(self, worker: Worker, tokenizer: HfTokenizer, name: str, limits: ServerLimits) -> None:
        self._worker, self._tokenizer, self._name, self._limits = worker, tokenizer, name, limits
        self._metrics, self._busy, self._closing = _Metrics(), 0, False
        self._numbers = itertools.count()
        self._begun = int(time.time())
        self.app = FastAPI(title="ds serve", lifespan=self._lifespan)
        self.app.exception_handler(RequestValidationError)(self._malformed)
        for status in (400, 404, 405):
            self.app.exception_handler(status)(self._not_served)
        refused = JSONResponse(_told(f"a request may have {limits.body} bytes", "invalid_request_error"), 413)
        self.app.add_middleware(BodyLimit, most=limits.body, refused=refused)
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)
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
        one = {"object": "model", "created": self._begun, "owned_by": "ds-inference"}
        return {"object": "list", "data": [{"id": name, **one} for name in (self._name, *self._worker.adapters)]}

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        return await self._serve(body, request, lambda: self._completion(body))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._serve(body, request, lambda: self._conversation(body))

    def _completion(self, body: CompletionRequest) -> _ParsedRequest:
        prompts = [self._tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompts()]
        how = body.sampling(self._limits.answer, body.logprobs)
        return _ParsedRequest(prompts, how, body.stream, _wants_usage(body), chat=False, adapter=self._adapter(body))

    def _conversation(self, body: ChatRequest) -> _ParsedRequest:
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._tokenizer.chat([message.plain() for message in body.messages])
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        how = body.sampling(self._limits.answer, logprobs)
        return _ParsedRequest([prompt], how, body.stream, _wants_usage(body), chat=True, adapter=self._adapter(body))

    def _adapter(self, body: CompletionRequest | ChatRequest) -> str | None:
        return body.model if body.model in self._worker.adapters and body.model != self._name else None

    # ---- how it is answered

    async def _serve(self, body: Any, request: Request, read: Callable[[], _ParsedRequest]) -> Response:
        if body.model and body.model not in (self._name, *self._worker.adapters):
            known = ", ".join(repr(name) for name in (self._name, *self._worker.adapters))
            return self._error(404, f"there is no model {body.model!r}; this server has {known}")
        if self._closing or self._worker.failure is not None:
            return self._error(503, "the server is shutting down" if self._closing else "the engine has failed")
        if self._busy >= self._limits.requests:
            return self._error(429, f"{self._busy} requests are under way, the most this server takes; try again later")
        self._busy += 1
        answer: Response | None = None
        try:
            completion = await asyncio.to_thread(read)  # a long prompt is tokenised for seconds
            self._check(completion)
            if completion.stream:
                answer = _Stream(self._streamed(completion), self._release)
            else:
                return await self._until_gone(request, self._whole(completion))
        except DsError as error:
            return self._error(400, str(error))
        except Exception as error:  # a tokenizer or a chat template that does not take what the client sent
            return self._error(400, f"the request cannot be read: {type(error).__name__}: {error}")
        finally:
            if answer is None:
                self._release()
        return answer

    def _release(self) -> None:
        self._busy -= 1

    def _check(self, completion: _ParsedRequest) -> None:
        for prompt in completion.prompts or [[]]:
            if not prompt or len(prompt) + completion.how.max_new_tokens > self._limits.longest:
                raise PlanError(
                    f"a prompt of {len(prompt)} tokens and an answer of up to {completion.how.max_new_tokens}; "
                    f"at least 1 and together at most {self._limits.longest} are taken",
                    code="inference-too-long",
                    fix="Shorten the prompt or ask for fewer tokens.",
                )
            self._worker.check(prompt, completion.how, completion.adapter)

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
        choices: list[dict[str, Any]] = []
        begin, count = time.perf_counter(), 0
        try:
            for tokens, how in completion.each():
                texts, ids = self._texts(completion), dict[int, int]()
                prompt_choices = [_choice(completion.chat, len(choices) + i) for i in range(completion.how.n)]
                async for event in self._worker.answer(tokens, how, completion.adapter):
                    number = ids.setdefault(event.request, len(ids))
                    count += 1
                    if count == 1:
                        self._metrics.first.observe(time.perf_counter() - begin)
                    _say(
                        prompt_choices[number],
                        completion.chat,
                        self._piece(texts[number], event),
                        event,
                        self._tokenizer,
                    )
                choices += prompt_choices
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
        try:
            for place, (tokens, how) in enumerate(completion.each()):
                texts, ids = self._texts(completion), dict[int, int]()
                async for event in self._worker.answer(tokens, how, completion.adapter):
                    number = ids.setdefault(event.request, len(ids))
                    count += 1
                    if count == 1:
                        self._metrics.first.observe(time.perf_counter() - begin)
                    text = self._piece(texts[number], event)
                    if text or event.reason or event.logprob is not None:
                        choice = _choice(completion.chat, place * completion.how.n + number, part=True)
                        _say(choice, completion.chat, text, event, self._tokenizer)
                        yield _line({**head, "choices": [choice]})
        except Exception as error:
            mine = not isinstance(error, DsError)
            self._metrics.requests.labels("failed" if mine else "refused").inc()
            yield _line(_told(str(error), "server_error" if mine else "invalid_request_error"))
            return
        self._done(begin, completion, count)
        if completion.usage:
            yield _line({**head, "choices": [], "usage": _usage(completion, count)})
        yield "data: [DONE]\n\n"

    def _texts(self, completion: _ParsedRequest) -> list[TextStream]:
        return [TextStream(self._tokenizer, completion.how.stop) for _ in range(completion.how.n)]

    @staticmethod
    def _piece(text: TextStream, event: TokenOutput) -> str:
        new_text = text.push(event.token)
        return new_text + text.finish() if event.reason is not None else new_text

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
        del request
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        message = "; ".join(f"{'.'.join(map(str, p['loc'][1:]))}: {p['msg']}" for p in problems)
        return self._error(400, message or str(error))

    async def _not_served(self, request: Request, error: Exception) -> Response:
        del request
        return self._error(getattr(error, "status_code", 500), str(getattr(error, "detail", error)))

    def _error(self, status: int, message: str) -> Response:
        self._metrics.requests.labels("refused").inc()
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse(_told(message, kind), status)


class _Stream(StreamingResponse):
    """A stream of events, after which something is released, also if the client has gone before the first."""

    def __init__(self, lines: AsyncIterator[str], release: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


def _wants_usage(body: CompletionRequest | ChatRequest) -> bool:
    return bool((body.stream_options or {}).get("include_usage"))


def _told(message: str, kind: str) -> dict[str, Any]:
    """An error in the protocol's form; what cannot be encoded (half a surrogate that the client sent) is escaped."""
    text = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _usage(completion: _ParsedRequest, count: int) -> dict[str, int]:
    prompt = sum(map(len, completion.prompts))
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _choice(chat: bool, index: int, part: bool = False) -> dict[str, Any]:
    inner: dict[str, Any] = {"role": "assistant", "content": ""}
    content = {"delta" if part else "message": inner} if chat else {"text": ""}
    return {"index": index, **content, "logprobs": None, "finish_reason": None}


def _say(choice: dict[str, Any], chat: bool, text: str, event: TokenOutput, tokenizer: HfTokenizer) -> None:
    """Add a piece of an answer to a choice."""
    if chat:
        choice["delta" if "delta" in choice else "message"]["content"] += text
    else:
        choice["text"] += text
    choice["finish_reason"] = event.reason
    if event.logprob is None:
        return
    top = event.top or {}
    token = tokenizer.decode([event.token])
    if chat:
        others = [{"token": tokenizer.decode([t]), "logprob": p, "bytes": None} for t, p in top.items()]
        entry = {"token": token, "logprob": event.logprob, "bytes": None, "top_logprobs": others}
        choice["logprobs"] = {"content": [*((choice["logprobs"] or {}).get("content") or []), entry]}
        return
    logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    logprobs["tokens"].append(token)
    logprobs["token_logprobs"].append(event.logprob)
    logprobs["top_logprobs"].append({tokenizer.decode([t]): p for t, p in top.items()})
    choice["logprobs"] = logprobs

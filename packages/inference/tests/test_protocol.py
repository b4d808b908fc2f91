"""OpenAI's protocol, judged by its client's types: what is accepted acts, what is refused is named, and every error has one form."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
from ds_config.errors import UnsupportedError  # noqa: E402
from ds_inference import SamplingParams, load  # noqa: E402
from ds_inference.embedding import load_embedder  # noqa: E402
from ds_inference.serve.app import ServerLimits, ServerOptions  # noqa: E402
from ds_inference.structured import JsonGrammars  # noqa: E402
from ds_inference.text import read_tokenizer  # noqa: E402

_where = importlib.util.spec_from_file_location("inference_serve", Path(__file__).with_name("test_serve.py"))
assert _where is not None
assert _where.loader is not None
serving_tests: Any = importlib.util.module_from_spec(_where)
_where.loader.exec_module(serving_tests)
Server, said, folder, openai = serving_tests.Server, serving_tests.said, serving_tests.folder, serving_tests.openai
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(folder):
    serving = Server(folder, ServerLimits(requests=40, answer=256, longest=300))
    yield serving
    serving.stop()
    assert serving.engine.scheduler.pool.num_free == serving.engine.scheduler.pool.count


@pytest.fixture
def client(server, openai):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asked:
        yield asked


def chat(server, **body):
    return httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": USER, "max_tokens": 4, **body}, timeout=200
    )


REFUSED = [
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "'input_audio'"),
    ({"messages": [{"role": "user", "content": [{"text": "no type"}]}]}, "parts of type None"),
    ({"messages": [{"role": "user", "content": "a", "name": "ann"}]}, "with name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "with tool_calls"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "with tool_call_id"),
    ({"messages": [{"role": "user", "content": None}]}, "without content"),
    ({"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "messages.0.colour"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "1 tools"),
    ({"tool_choice": "required"}, "tool_choice 'required'"),
    ({"tools": [], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 3}, "without logprobs"),
    ({"response_format": {"type": "json_schema"}}, "no schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}}, "JSON schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "JSON schema"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"temperature": True}, "temperature: Value error, should be a number, not 'True'"),
    ({"n": True}, "n: "),
    ({"seed": False}, "seed: "),
    ({"top_p": "0.5"}, "top_p: "),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs: "),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_is_refused_by_name(server, body, words, stream):
    answer = chat(server, **body, stream=stream)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


ACCEPTED = [
    {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "safety_identifier": "s"},
    {"response_format": {"type": "text"}},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "none"},
    {"modalities": ["text"], "prompt_cache_key": "k", "logprobs": False},
    dict.fromkeys(
        [
            "n",
            "temperature",
            "top_p",
            "stream",
            "stop",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "response_format",
            "max_completion_tokens",
            "user",
        ]
    ),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]},
    {"messages": [{**USER[0], "name": None, "tool_calls": None}]},
]


@pytest.mark.parametrize("body", ACCEPTED)
def test_what_cannot_change_the_answer_is_accepted(server, body):
    fixed = {"seed": 7} if "seed" not in body else {}
    plain = chat(server, seed=7).json()["choices"][0]["message"]["content"]
    answer = chat(server, **{**fixed, **body})
    assert answer.status_code == 200, answer.text
    if fixed:
        assert answer.json()["choices"][0]["message"]["content"] == plain


def test_a_template_that_reads_names_gets_them(folder):
    serving = Server(folder, ServerLimits())
    serving.tokenizer.inner.chat_template = "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
    try:
        body = {"messages": [{**USER[0], "name": "ann"}], "max_tokens": 9, "temperature": 0}
        answer = chat(serving, **body).json()["choices"][0]["message"]["content"]
    finally:
        serving.stop()
    assert answer == said(folder, "ann: hello", 9)


def test_models_are_retrieved(client, openai):
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("other/one")


@pytest.mark.parametrize("length", [260, 299, 40])
def test_an_answer_without_a_limit_gets_what_is_left(server, length):
    body = {"prompt": [5] * length, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200).json()
    assert answer["usage"]["completion_tokens"] == min(256, 300 - length)


@pytest.mark.parametrize("prompt", ["hello", "日本語 🙂🙂"])
def test_logprobs_put_the_answer_together(server, client, prompt):
    how = {"max_tokens": 30, "temperature": 1.9, "seed": 3, "extra_body": {"ignore_eos": True}}
    found = client.completions.create(model="tiny", prompt=prompt, logprobs=5, **how).choices[0]
    tokens, offsets = found.logprobs.tokens, found.logprobs.text_offset
    assert len(tokens) == len(offsets) == len(found.logprobs.top_logprobs) == 30
    assert all(len(top) >= 5 for top in found.logprobs.top_logprobs)
    assert all(
        top[token] == p
        for token, top, p in zip(tokens, found.logprobs.top_logprobs, found.logprobs.token_logprobs, strict=True)
    )
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or "\ufffd" in found.text or found.text[offset:].startswith(token)
    talk = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], logprobs=True, top_logprobs=5, **how
    ).choices[0]
    content = b"".join(bytes(entry.bytes) for entry in talk.logprobs.content)
    assert content.decode(errors="replace") == talk.message.content
    assert all(len(entry.top_logprobs) == 5 for entry in talk.logprobs.content)


def test_only_the_first_part_names_the_role(server, client):
    stream = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8, n=2, stream=True)
    roles = Counter(c.index for part in stream for c in part.choices if c.delta.role)
    assert roles == {0: 1, 1: 1}


def test_prompts_of_one_request_are_computed_together(server, folder):
    prompts = [f"prompt {i}" for i in range(8)]
    before = server.engine.scheduler._arrivals
    steps = []
    step = server.engine.step

    def slow_step():
        time.sleep(0.05)  # a prompt has 8 steps: the last one comes while the first is under way, however fast they are
        steps.append(len(server.engine.scheduler.requests))
        return step()

    server.engine.step = slow_step
    try:
        body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200).json()["choices"]
    finally:
        server.engine.step = step
    assert max(steps) == 8
    assert server.engine.scheduler._arrivals == before + 8
    assert [c["text"] for c in found] == [said(folder, p, 8, ignore_eos=True) for p in prompts]


def test_each_prompt_counts_as_a_request(folder):
    serving = Server(folder, ServerLimits(requests=4))
    step = serving.engine.step

    def slow_step(*arguments, **options):
        time.sleep(0.02)  # the first request is under way when the second one comes, however fast the machine is
        return step(*arguments, **options)

    serving.engine.step = slow_step
    try:

        async def both():
            async with httpx.AsyncClient(base_url=serving.url, timeout=200) as http:
                long = {"prompt": ["a"] * 3, "max_tokens": 200, "ignore_eos": True}
                first = asyncio.ensure_future(http.post("/v1/completions", json=long))
                await asyncio.sleep(0.3)
                second = await http.post("/v1/completions", json={"prompt": ["a"] * 2, "max_tokens": 1})
                third = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
                return [(await first).status_code, second.status_code, third.status_code]

        assert asyncio.run(both()) == [200, 429, 200]
        many = {"prompt": ["a"] * 9, "max_tokens": 1}
        assert len(httpx.post(f"{serving.url}/v1/completions", json=many, timeout=200).json()["choices"]) == 9
    finally:
        serving.stop()


def test_a_key_and_a_host_are_asked_for(folder, openai):
    serving = Server(folder, ServerLimits(), ServerOptions("sesame", ("localhost", "127.0.0.1")))
    try:
        with httpx.Client(base_url=serving.url, timeout=200) as http:
            assert http.get("/health").status_code == 200
            for path in ("/v1/models", "/docs", "/openapi.json", "/metrics", "/nothing"):
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
                    answer = http.get(path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["type"] == "invalid_request_error"
            headers = {"authorization": "Bearer sesame"}
            assert http.get("/v1/models", headers=headers).status_code == 200
            for host, status in (("evil.example", 403), ("127.0.0.1:1", 200), ("LOCALHOST", 200), ("[::1]:80", 403)):
                assert http.get("/v1/models", headers={**headers, "host": host}).status_code == status, host
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="sesame", max_retries=0) as asked:
            assert asked.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2
        other = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="open", max_retries=0)
        with other as asked, pytest.raises(openai.AuthenticationError):
            asked.models.list()
    finally:
        serving.stop()


# ---- JSON

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(client, stream, seed):
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    how = {"max_tokens": 200, "temperature": 1.5, "seed": seed, "response_format": form}
    if stream:
        parts = list(client.chat.completions.create(model="tiny", messages=USER, stream=True, **how))
        text = "".join(c.delta.content or "" for part in parts for c in part.choices)
        assert parts[-1].choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
        return
    answer = client.chat.completions.create(model="tiny", messages=USER, n=3, **how)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_json_mode_gives_an_object(server):
    pytest.importorskip("llguidance")
    body = {"response_format": {"type": "json_object"}, "max_tokens": 200, "logit_bias": {}, "seed": 1}
    for stop in range(4):
        choice = chat(server, **{**body, "seed": stop}).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["message"]["content"].lstrip().startswith("{")


def test_a_grammar_that_grows_too_large_is_no_short_answer(server):
    """The matcher ended the answer after its first brace, as if it were whole."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = chat(server, max_tokens=40, response_format=form)
    assert answer.status_code == 400
    assert "items" in answer.json()["error"]["message"]
    parts = chat(server, max_tokens=40, response_format=form, stream=True).text
    assert '"error"' in parts
    assert "[DONE]" not in parts
    assert chat(server, max_tokens=1).status_code == 200


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"ds-inference\[structured\]") as caught:
        JsonGrammars(read_tokenizer(folder).inner, 400, (0,))
    assert caught.value.code == "inference-structured"


def test_a_grammar_needs_an_end_token(folder):
    pytest.importorskip("llguidance")
    with pytest.raises(UnsupportedError, match="no end token"):
        JsonGrammars(read_tokenizer(folder).inner, 400, ())


def test_offline_and_with_drafts(folder):
    """The callback is the engine's own: `generate` takes it, with drafts too, and samples share it."""
    pytest.importorskip("llguidance")
    tokenizer = read_tokenizer(folder)
    grammars = JsonGrammars(tokenizer.inner, 400, (0,))
    how = SamplingParams(200, temperature=1.0, seed=2, n=3, allowed_tokens=grammars.follow(SCHEMA))
    plain = load(folder, tokenizer=tokenizer).generate(["hello"] * 2, how)
    drafted = load(folder, tokenizer=tokenizer, num_speculative_tokens=3).generate(["hello"] * 2, how)
    assert [a.tokens for a in plain] == [a.tokens for a in drafted]
    for answer in plain:
        assert json.loads(answer.text).keys() == {"name", "age"}


# ---- embeddings


@pytest.fixture(scope="module")
def embedding_server(folder):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=400
    )
    embedder = load_embedder(transformers.BertModel(config).eval(), tokenizer=read_tokenizer(folder))
    serving = Server(folder, ServerLimits(), ServerOptions(embedder=embedder, embedder_name="vectors"))
    yield serving, embedder
    serving.stop()


@pytest.mark.parametrize("inputs", ["hello", ["hello", "def test"], [5, 6, 7], [[5], [6, 7]]])
def test_embeddings_are_the_embedders(embedding_server, inputs, openai):
    serving, embedder = embedding_server
    several = inputs if isinstance(inputs, list) and not isinstance(inputs[0], int) else [inputs]
    wanted = embedder.embed(several)
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as asked:
        for form in ("float", openai.NOT_GIVEN):  # the client itself asks for base64
            found = asked.embeddings.create(model="vectors", input=inputs, encoding_format=form)
            assert torch.allclose(torch.tensor([one.embedding for one in found.data]), wanted, atol=1e-6)
        assert found.usage.prompt_tokens == sum(len(embedder.tokens(one)) for one in several)
        short = asked.embeddings.create(model="vectors", input=inputs, dimensions=8, encoding_format="float")
        assert len(short.data[0].embedding) == 8
        assert abs(torch.tensor(short.data[0].embedding).norm() - 1) < 1e-5
        assert "vectors" in [m.id for m in asked.models.list()]
    raw = httpx.post(
        f"{serving.url}/v1/embeddings", json={"input": inputs, "encoding_format": "base64"}, timeout=200
    ).json()["data"][0]["embedding"]
    assert struct.unpack("<32f", base64.b64decode(raw)) == pytest.approx(wanted[0].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "body", [{"input": ""}, {"input": []}, {"input": [[]]}, {"input": [10**6]}, {}, {"input": "\ud800"}]
)
def test_embeddings_of_nothing_are_refused(embedding_server, body):
    content = json.dumps(body)
    url = f"{embedding_server[0].url}/v1/embeddings"
    answer = httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=200)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_server_without_an_embedder_says_so(client, openai):
    with pytest.raises(openai.NotFoundError, match="--embedder"):
        client.embeddings.create(model="tiny", input="a")


# ---- a soak


def soak(server, folder, requests: int, seed: int) -> Counter[str]:
    """Mixed requests with drawn faults, many at a time: each gets its own answer, and nothing is left behind."""
    rng = random.Random(seed)
    wanted = {p: said(folder, p, 6, ignore_eos=True) for p in ("hello", "def", "a b c")}
    good = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    faults = [body for body, _ in REFUSED] + [
        {"max_tokens": 0},
        {"logit_bias": {"9999": 1}},
        {"stop": ["x"] * 17},
        {"n": -1},
    ]

    async def one(http) -> str:
        kind = rng.choice(
            ["good"] * 6 + ["stream", "samples", "list", "json", "fault", "fault", "garbage", "leave", "draw"]
        )
        prompt = rng.choice(list(wanted))
        body = {**good, "prompt": prompt}
        if kind == "fault":
            answer = await http.post("/v1/chat/completions", json={"messages": USER, **rng.choice(faults)})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
        elif kind == "garbage":
            answer = await http.post("/v1/completions", content=rng.randbytes(rng.randint(0, 200)))
            assert answer.status_code == 400
        elif kind == "leave":
            work = asyncio.ensure_future(http.post("/v1/completions", json={**body, "max_tokens": 200, "n": 2}))
            await asyncio.sleep(rng.random() * 0.05)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        elif kind == "stream":
            answer = await http.post("/v1/completions", json={**body, "stream": True})
            lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            if answer.status_code != 429:
                assert "".join(c["text"] for line in lines for c in line["choices"]) == wanted[prompt]
        else:
            more = {"samples": {"n": 3}, "list": {"prompt": list(wanted)}, "draw": {"temperature": 1.5, "logprobs": 3}}
            if kind == "json":
                more["json"] = {"response_format": {"type": "json_object"}, "ignore_eos": False}
            answer = await http.post("/v1/completions", json={**body, **more.get(kind, {})})
            if answer.status_code == 429:
                return "busy"
            assert answer.status_code == 200, answer.text
            texts = [c["text"] for c in answer.json()["choices"]]
            if kind in ("good", "samples"):
                assert set(texts) == {wanted[prompt]}
            elif kind == "list":
                assert texts == list(wanted.values())
        return kind

    async def all_of() -> Counter[str]:
        left, outcomes = iter(range(requests)), Counter()
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

            async def ask() -> None:
                for _ in left:
                    outcomes[await one(http)] += 1

            await asyncio.gather(*(ask() for _ in range(20)))
        return outcomes

    outcomes = asyncio.run(all_of())
    end = time.monotonic() + 150
    while not server.engine.idle and time.monotonic() < end:
        time.sleep(0.05)
    assert server.engine.idle
    assert server.engine.scheduler.pool.num_free == server.engine.scheduler.pool.count
    assert httpx.get(f"{server.url}/health", timeout=200).json() == {"status": "ok"}
    return outcomes


def test_a_soak_of_mixed_requests(server, folder):
    pytest.importorskip("llguidance")
    assert sum(soak(server, folder, 200, 1).values()) == 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_soak_of_ten_thousand_mixed_requests(server, folder):
    pytest.importorskip("llguidance")
    assert sum(soak(server, folder, 10_000, 2).values()) == 10_000

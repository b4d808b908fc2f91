"""The server, asked by OpenAI's own client over loopback."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
import uvicorn  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from ds_inference import SamplingParams, SchedulerConfig, load  # noqa: E402
from ds_inference.cli_generate import main as generate_main  # noqa: E402
from ds_inference.cli_generate import register  # noqa: E402
from ds_inference.serve.app import ServerLimits, ServerOptions, make_app  # noqa: E402
from ds_inference.serve.worker import Worker  # noqa: E402
from ds_inference.text import TextStream, read_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def openai():
    """The client library: it takes a second to import, and only tests that run need it."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a byte-level tokenizer trained on this file."""
    where = tmp_path_factory.mktemp("tiny")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    inner.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    fast.save_pretrained(where)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(fast),
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.4)
    model.save_pretrained(where)
    return where


class Server:
    def __init__(self, folder: Path, limits: ServerLimits, served: ServerOptions | None = None, **options) -> None:
        tokenizer = read_tokenizer(folder)
        self.engine = load(folder, cache_tokens=2048, budget=SchedulerConfig(64, 32), tokenizer=tokenizer, **options)
        self.tokenizer = read_tokenizer(folder)
        self.app = make_app(Worker(self.engine), self.tokenizer, "tiny", limits, served)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="error", timeout_keep_alive=75)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def server(folder):
    made = Server(folder, ServerLimits(requests=40, answer=16, longest=300))
    yield made
    made.stop()
    assert made.engine.scheduler.pool.num_free == made.engine.scheduler.pool.count


@pytest.fixture
def client(server, openai):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(folder, prompt: str, count: int, **how) -> str:
    engine = load(folder, tokenizer=read_tokenizer(folder))
    return engine.generate([prompt], SamplingParams(count, **how))[0].text


def test_completions_are_the_engines(client, folder):
    found = client.completions.create(model="tiny", prompt="def test", max_tokens=12, temperature=0)
    assert found.choices[0].text == said(folder, "def test", 12)
    assert found.usage.completion_tokens == 12
    assert found.choices[0].finish_reason == "length"


def test_streams_say_the_same(client, folder):
    parts = client.completions.create(
        model="tiny", prompt="import", max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = [], None
    for part in parts:
        texts += [choice.text for choice in part.choices]
        usage = part.usage or usage
    assert "".join(texts) == said(folder, "import", 20)
    assert usage.completion_tokens == 20


def test_chat_uses_the_template(client, folder):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, temperature=0, logprobs=True, top_logprobs=3
    )
    assert found.choices[0].message.content == said(folder, "[system] be brief\n[user] hello\n[assistant]", 9)
    assert len(found.choices[0].logprobs.content) == 9
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 3


def test_samples_seeds_and_several_prompts(client, folder):
    found = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, n=2, seed=3, temperature=0.9)
    assert [c.index for c in found.choices] == [0, 1, 2, 3]
    texts = [c.text for c in found.choices]
    engine = load(folder, tokenizer=read_tokenizer(folder))
    wanted = engine.generate(["a", "b"], SamplingParams(5, temperature=0.9, seed=3, n=2))
    assert texts == [answer.text for answer in wanted]


def test_a_stop_string_is_not_said(client, folder):
    free = said(folder, "x", 20)
    stop = free[6:9]
    found = client.completions.create(model="tiny", prompt="x", max_tokens=20, temperature=0, stop=stop)
    assert found.choices[0].text == free[: free.index(stop)]
    parts = client.completions.create(model="tiny", prompt="x", max_tokens=20, temperature=0, stop=stop, stream=True)
    assert "".join(c.text for p in parts for c in p.choices) == free[: free.index(stop)]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "temperatur": 1}, "temperatur"),
        ({"prompt": []}, "at least 1"),
        ({"prompt": "a", "max_tokens": 10_000}, "10000"),
        ({"prompt": [70000]}, "70000"),
        ({"max_tokens": 4}, "prompt"),
        ({"prompt": "a", "logit_bias": {"400": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"3": math.nan}}, "logit_bias"),
        ({"prompt": [[1], [2], [400]]}, "400"),
        ({"prompt": "a", "temperature": math.nan}, "temperature"),
        ({"prompt": "a", "top_p": math.nan}, "top_p"),
        ({"prompt": "a", "repetition_penalty": math.inf}, "repetition_penalty"),
        ({"prompt": "a", "presence_penalty": math.nan}, "presence_penalty"),
        ({"prompt": "a", "n": 0}, "n:"),
        ({"prompt": "a", "n": 33}, "n:"),
        ({"prompt": "a", "n": 32, "max_tokens": 300}, "together at most 300"),
        ({"prompt": "a", "seed": 10**30}, "seed"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop": "x" * 1001}, "stop"),
        ({"prompt": "a\ud800"}, "character 1 of the text is half"),
        ({"prompt": "a", "\ud800": 1}, "unicode"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_say_what_is_wrong(server, body, word, stream):
    """Before anything is computed, and before a stream begins; and the next one is answered."""
    with httpx.Client(base_url=server.url, timeout=200) as http:
        content = json.dumps({**body, "stream": stream})  # httpx itself sends neither NaN nor halves of surrogates
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_several_samples_of_the_longest_answer(server):
    """Prompt and answer fill what the server takes, and what a sequence may have."""
    for length in (100, 200):
        body = {"prompt": [5] * length, "max_tokens": 300 - length, "n": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3 * (300 - length)


def test_bodies_are_bounded_and_every_error_is_the_protocols(server):
    with httpx.Client(base_url=server.url, timeout=200) as http:
        large = json.dumps({"prompt": "a" * (5 << 20)})
        pieces = (large[i : i + 65536].encode() for i in range(0, len(large), 65536))
        for content in (large, pieces):  # of a length that is said, and not
            answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert "4194304 bytes" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", content=b"\xff{").json()["error"]["type"] == "invalid_request_error"
        for content, kind, words in (
            (b'{"prompt": "a"', "application/json", "character 14 of the body"),
            (b"[]", "application/json", "the body: "),
            (b"", "application/json", "the body: "),
            (b'{"prompt": "a"}', "text/plain", "send Content-Type: application/json"),
            (json.dumps({"prompt": ["a"] * 3000}), "application/json", "and 2982 more"),
        ):
            refused = http.post("/v1/completions", content=content, headers={"content-type": kind})
            assert refused.status_code == 400
            assert words in (said := refused.json()["error"]["message"])
            assert "functools" not in said
        assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/v1/completions").json()["error"]["message"] == "Method Not Allowed"
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_others_are_answered_while_a_long_prompt_is_read(folder):
    server = Server(folder, ServerLimits())
    plain, begun, go = server.tokenizer.encode, threading.Event(), threading.Event()

    def encode(text):
        if text == "long":
            begun.set()
            go.wait(20)
        return plain(text)

    server.tokenizer.encode = encode
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "long"}, timeout=200))
    )
    thread.start()
    try:
        assert begun.wait(20)
        assert httpx.get(f"{server.url}/health", timeout=200).status_code == 200
        assert (
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=200).status_code
            == 200
        )
        assert not answers
    finally:
        go.set()
        thread.join(60)
        server.stop()
    assert answers[0].status_code == 200


def test_streams_whose_clients_leave_hold_no_place(folder):
    server = Server(folder, ServerLimits(requests=4))
    body = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
    end, status = time.monotonic() + 150, 429
    while status == 429 and time.monotonic() < end:
        time.sleep(0.1)
        done = [
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=200)
            for _ in range(4)
        ]
        status = max(answer.status_code for answer in done)
    assert status == 200
    server.stop()
    assert server.engine.scheduler.pool.num_free == server.engine.scheduler.pool.count


def test_a_stream_that_is_left_is_counted(server):
    def cancelled() -> list[str]:
        return [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if '="cancelled"' in line][-1:]

    before, end = cancelled(), time.monotonic() + 60
    body = {"prompt": "a", "max_tokens": 250, "stream": True, "ignore_eos": True}
    while cancelled() == before and time.monotonic() < end:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    assert cancelled() != before


def test_clients_that_stall_hold_no_place(folder):
    """One stops in the middle of its body, one stops reading its stream; the place of this one was taken until it left."""
    server = Server(folder, ServerLimits(requests=4, stall=0.2))
    body = json.dumps({"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "asgi": {}}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    sent = []

    async def ask(part, more):
        messages = [{"type": "http.request", "body": part, "more_body": more}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)
            if message.get("body", b"").startswith(b"data"):
                await asyncio.Event().wait()

        await asyncio.wait_for(server.app(dict(scope), receive, send), 30)

    asyncio.run(ask(body[:9], True))
    assert sent[0]["status"] == 408
    asyncio.run(ask(body, False))
    whole = {"prompt": ["a"] * 4, "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=whole, timeout=200).status_code == 200
    server.stop()
    assert server.engine.scheduler.pool.num_free == server.engine.scheduler.pool.count


@pytest.mark.parametrize("way", ["equal prompts", "samples", "requests"])
def test_draws_of_a_server_follow_the_distribution(server, folder, way):
    """400 of them, by text: tokens that are read alike count together."""
    tokenizer = read_tokenizer(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        shares = torch.softmax(model(torch.tensor([tokenizer.encode("hello")])).logits[0, -1], -1).tolist()
    wanted = Counter()
    for token, share in enumerate(shares):
        wanted[tokenizer.decode([token])] += 400 * share
    drawn = Counter()
    asked = {"equal prompts": (1, ["hello"] * 400, 1), "samples": (20, "hello", 20), "requests": (400, "hello", 1)}
    requests, prompt, samples = asked[way]
    with httpx.Client(base_url=server.url, timeout=200) as http:
        for _ in range(requests):
            body = {"prompt": prompt, "n": samples, "max_tokens": 1, "temperature": 1}
            drawn.update(c["text"] for c in http.post("/v1/completions", json=body).json()["choices"])
    assert sum(drawn.values()) == 400
    bins = [[t] for t, n in wanted.items() if n >= 5] + [[t for t, n in wanted.items() if n < 5]]
    chi = sum((sum(drawn[t] for t in b) - (w := sum(wanted[t] for t in b))) ** 2 / w for b in bins)
    assert torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(chi / 2)) > 1e-6, (drawn, wanted)


def test_a_seed_makes_a_list_of_equal_prompts_repeat(server):
    body = {"prompt": ["a"] * 4, "n": 2, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    said = [
        [c["text"] for c in httpx.post(f"{server.url}/v1/completions", json=body, timeout=200).json()["choices"]]
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) == 8
    body["stream"] = True
    parts = Counter()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=200) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                parts[choice["index"]] = (parts[choice["index"]] or "") + choice["text"]
    assert [parts[i] for i in range(8)] == said[0]


def test_a_template_that_refuses_is_the_clients_error(folder):
    server = Server(folder, ServerLimits())
    try:
        inner = server.tokenizer.inner
        inner.chat_template = "{{ raise_exception('only users may speak') }}"
        with httpx.Client(base_url=server.url, timeout=200) as http:
            for stream in (False, True):
                body = {"messages": [{"role": "system", "content": "a"}], "stream": stream}
                answer = http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400
                assert "only users may speak" in answer.json()["error"]["message"]
    finally:
        server.stop()


def test_a_request_that_raises_in_a_step_ends_alone(folder):
    server = Server(folder, ServerLimits())
    plain = server.engine.decoder.forward

    def forward(batch, cache):
        if 399 in batch.tokens.tolist():
            raise IndexError("index out of range in self")
        return plain(batch, cache)

    server.engine.decoder.forward = forward
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}

    async def all_of():
        async with httpx.AsyncClient(base_url=server.url, timeout=200) as http:
            prompts = [[5, 399] if i % 3 == 1 else "hello" for i in range(12)]
            asked = [
                http.post("/v1/completions", json={**body, "prompt": p, "stream": i > 8}) for i, p in enumerate(prompts)
            ]
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_of())
    wanted = (
        load(folder, tokenizer=read_tokenizer(folder)).generate(["hello"], SamplingParams(20, ignore_eos=True))[0].text
    )
    for i, answer in enumerate(answers):
        if i % 3 == 1:
            assert "index out of range" in answer.text
            assert i > 8 or answer.status_code == 500
        elif i <= 8:
            assert answer.json()["choices"][0]["text"] == wanted
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
    assert httpx.get(f"{server.url}/health", timeout=200).json() == {"status": "ok"}
    server.stop()
    assert server.engine.scheduler.pool.num_free == server.engine.scheduler.pool.count


def test_a_long_stop_string_costs_no_more_than_the_text(folder):
    begin = time.process_time()
    stream = TextStream(read_tokenizer(folder), ["x" * 3_000_000])
    for token in read_tokenizer(folder).encode("some words " * 20):
        stream.push(token)
    assert time.process_time() - begin < 5


def test_serve_ends_with_the_error_of_an_engine_that_fails(folder, monkeypatch):
    """A supervisor then starts it again."""
    import argparse

    from ds_inference import cli_serve, model_loader

    engine = load(folder, tokenizer=read_tokenizer(folder))
    engine.decoder.forward = None
    monkeypatch.setattr(model_loader, "load", lambda *args, **more: engine)
    parser = argparse.ArgumentParser()
    cli_serve.register(parser)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ended = []

    def run():
        try:
            cli_serve.main(parser.parse_args([str(folder), "--port", str(port)]))
        except TypeError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + 150
    while time.monotonic() < end:
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}, timeout=200)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    assert answer.status_code == 500
    thread.join(30)
    assert len(ended) == 1


def test_an_adapter_is_a_model(folder, tmp_path, openai):
    """Two models of one server in the same batch: the folder's, and the same with an adapter."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    down, up = 0.5 * torch.randn(2, 32), 0.5 * torch.randn(32, 2)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    save_file({f"{name}A.weight": down, f"{name}B.weight": up}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 8}')
    made = Server(folder, ServerLimits(requests=40, answer=16, longest=300), adapters={"poet": tmp_path})
    try:
        with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as asked:
            assert [m.id for m in asked.models.list()] == ["tiny", "poet"]
            texts = {}
            for model in ("tiny", "poet"):
                answer = asked.completions.create(model=model, prompt="def test", max_tokens=12, temperature=0)
                assert answer.model == model
                texts[model] = answer.choices[0].text
    finally:
        made.stop()
    engine = load(folder, tokenizer=read_tokenizer(folder), adapters={"poet": tmp_path})
    (wanted,) = engine.generate(["def test"], SamplingParams(12), adapters=["poet"])
    assert texts == {"tiny": said(folder, "def test", 12), "poet": wanted.text}
    assert texts["tiny"] != texts["poet"]


def test_another_model_is_not_found(client, openai):
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="other", prompt="a")


def test_health_models_and_metrics(server, client):
    assert httpx.get(f"{server.url}/health", timeout=200).json() == {"status": "ok"}
    assert [m.id for m in client.models.list()] == ["tiny"]
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics", timeout=200).text
    assert 'ds_requests_total{outcome="answered"}' in text
    assert "ds_first_token_seconds_bucket" in text


def crowd(server, folder, clients: int, seconds: float) -> list[float]:
    """Clients that ask again and again, 5 % of it cancelled and 5 % malformed: right answers, nothing left behind; seconds of answers."""
    rng = random.Random(1)
    engine = load(folder, tokenizer=read_tokenizer(folder))
    prompts = ["".join(rng.choice("abcdef ") for _ in range(rng.randint(1, 40))) for _ in range(12)]
    answers = engine.generate(prompts, SamplingParams(8, ignore_eos=True))
    wanted = {p: a.text for p, a in zip(prompts, answers, strict=True)}
    times: list[float] = []
    outcomes: list[str] = []

    async def one(http, i: int) -> str:
        prompt = prompts[i % len(prompts)]
        if i % 20 == 3:
            answer = await http.post("/v1/completions", json={"prompt": prompt, "n": "many"})
            assert answer.status_code == 400
            return "malformed"
        body = {"prompt": prompt, "max_tokens": 200 if i % 20 == 7 else 8, "temperature": 0, "ignore_eos": True}
        begin = time.monotonic()
        work = asyncio.ensure_future(http.post("/v1/completions", json=body))
        if i % 20 == 7:
            await asyncio.sleep(0.05)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return "cancelled"
        answer = await work
        if answer.status_code == 429:
            await asyncio.sleep(0.05)
            return "busy"
        assert answer.json()["choices"][0]["text"] == wanted[prompt]
        times.append(time.monotonic() - begin)
        return "answered"

    async def client(http, number: int, end: float) -> None:
        i = number
        while True:
            outcomes.append(await one(http, i))
            i += clients + 1  # another kind of request every time
            if time.monotonic() > end:
                return

    async def all_of() -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=200) as http:
            end = time.monotonic() + seconds
            await asyncio.gather(*(client(http, i, end) for i in range(clients)))

    asyncio.run(all_of())
    assert outcomes.count("answered") > len(outcomes) // 2
    assert {"malformed", "cancelled"} <= set(outcomes)
    end = time.monotonic() + 150
    while not server.engine.idle and time.monotonic() < end:
        time.sleep(0.05)
    assert server.engine.scheduler.pool.num_free == server.engine.scheduler.pool.count
    return sorted(times)


def test_a_crowd_gets_right_answers_and_leaves_nothing(server, folder):
    crowd(server, folder, 40, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_clients_for_two_minutes(folder):
    server = Server(folder, ServerLimits(requests=200, longest=300))
    times = crowd(server, folder, 200, 120.0)
    server.stop()
    at = {p: times[int(len(times) * p / 100)] for p in (50, 99)}
    print(
        f"{len(times)} right answers; seconds: median {at[50]:.2f}, 99th percentile {at[99]:.2f}, most {times[-1]:.2f}"
    )


def test_an_engine_that_fails_tells_everybody(folder):
    server = Server(folder, ServerLimits())
    server.engine.decoder.forward = None  # type: ignore[assignment,method-assign]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=200)
    assert answer.status_code == 500
    assert "the engine failed" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health", timeout=200).status_code == 503
    server.stop()


# ---- text and terminal


@pytest.mark.parametrize("text", ["plain words", "naïve café – 日本語 🙂🙂 end", "a b  c\n\n d"])
def test_pieces_add_up_to_the_text(folder, text):
    tokenizer = read_tokenizer(folder)
    stream = TextStream(tokenizer)
    tokens = tokenizer.encode(text * 5)
    pieces = [stream.push(t) for t in tokens]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text * 5


def test_a_chat_in_the_terminal(folder, capsys, monkeypatch):
    import argparse

    from ds_inference import cli_chat

    parser = argparse.ArgumentParser()
    cli_chat.register(parser)
    lines = iter(["hello", "", "/new", "hello", "/end"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert cli_chat.main(parser.parse_args([str(folder), "--max-tokens", "7", "--system", "be brief"])) == 0
    wanted = said(folder, "[system] be brief\n[user] hello\n[assistant]", 7)
    assert capsys.readouterr().out == f"{wanted}\n{wanted}\n"


def test_generate_in_the_terminal(folder, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    register(parser)
    assert generate_main(parser.parse_args([str(folder), "def", "--max-tokens", "7"])) == 0
    assert capsys.readouterr().out == said(folder, "def", 7) + "\n"
    assert generate_main(parser.parse_args([str(folder), "def", "--max-tokens", "7", "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["reason"]) == (said(folder, "def", 7), "length")
    assert told["tokens"] == 7
    few = ["--max-tokens", "7", "--quantize", "int8", "--cache-dtype", "int8"]
    assert generate_main(parser.parse_args([str(folder), "def", *few])) == 0
    assert len(capsys.readouterr().out) > 1

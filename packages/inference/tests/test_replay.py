"""Steps that are recorded and replayed give the tokens of steps that are run; with CUDA graphs under `nox -s gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from ds_comm import self_group
from ds_config.errors import UnsupportedError
from ds_inference import SamplingParams, SchedulerConfig, decoder_model, init_inference, load, quantize
from ds_inference.cuda_graphs import CudaGraphRunner, DecodeGraphs, capture_sizes, cuda_graph
from ds_inference.decoder_model import replay_obstacle
from ds_inference.paged_attention import BatchIndices, make_batch
from ds_inference.requests import ScheduledChunk
from ds_ops.quant_linear import quantize_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PROMPTS = [[5, 9, 2], [7] * 40, [1], [3, 4], [8] * 17]
HOWS = [
    SamplingParams(max_new_tokens=n, temperature=t, seed=3) for n, t in ((6, 0), (30, 0), (12, 0.8), (3, 0), (20, 0))
]


def rerun(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """As a graph: the places of inputs and results are fixed, and what was done is done again."""
    out = call()
    for tensor in tensors_of(out):
        tensor.zero_()

    def replay() -> None:
        for place, new in zip(tensors_of(out), tensors_of(call()), strict=True):
            place.copy_(new)

    return replay, out


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return str(request.param)


class CpuRecorder:
    """Records on the CPU: a replay computes again, from inputs and into outputs that stay at their places."""

    def __init__(self) -> None:
        self.captures: list[int] = []
        self.replays: list[int] = []

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, out = rerun(call)
        rows = len(out)
        self.captures.append(rows)

        def play() -> None:
            self.replays.append(rows)
            replay()

        return play, out


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mixtral"])
@pytest.mark.parametrize("in_place", [True, False])
def test_replays_give_the_same_tokens(name: str, in_place: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each number of rows a graph, captured at load; where blocks are gathered, with each power of two of blocks, too."""
    monkeypatch.setattr(decoder_model, "captures_in_place", lambda *_: in_place)
    model = tiny(name).to(DEVICE)
    expected = [a.tokens for a in load(model, cuda_graphs=False, native=False).generate(PROMPTS, HOWS)]
    engine = load(model, cuda_graphs=False, native=False, budget=SchedulerConfig(64, 20))
    engine.decoder._record = recorder = CpuRecorder()
    engine.decoder.capture(engine.cache, 20, 128)
    assert recorder.captures == ([24, 16, 8, 4, 2, 1] if in_place else [])
    assert [a.tokens for a in engine.generate(PROMPTS, HOWS)] == expected
    assert len(recorder.captures) <= (6 if in_place else 8)
    assert set(recorder.replays) == {1, 2, 4, 8}
    _, graphs = engine.decoder._graphs
    assert len(graphs) == len(recorder.captures)


def test_another_decoder_is_captured_with_the_weights_that_it_brings(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a step of training: the generator keeps its cache, and takes the decoder of new weights."""
    monkeypatch.setattr(decoder_model, "captures_in_place", lambda *_: True)
    engine, other = (load(tiny(name), native=False, cuda_graphs=False) for name in ("llama", "llama tied"))
    wanted = other.generate(PROMPTS, HOWS)
    other.decoder._record = recorder = CpuRecorder()
    engine.decoder = other.decoder
    for version in (1, 2):
        engine.weights_changed(version)
    assert len(recorder.captures) == 11  # up to 64 rows, once
    assert [a.tokens for a in engine.generate(PROMPTS, HOWS)] == [a.tokens for a in wanted]
    assert recorder.replays


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mixtral", "gpt-oss"])
@pytest.mark.parametrize("in_place", [True, False])
def test_steps_with_drafts_are_replayed(name: str, in_place: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows for each sequence, whatever drafts it has: the tokens of steps that are run, and of those without drafts."""
    monkeypatch.setattr(decoder_model, "captures_in_place", lambda *_: in_place)
    model, prompts = tiny(name).to(DEVICE), [[5, 9, 2] * 3, [7] * 20, [1], [3, 4] * 8]
    hows = [SamplingParams(max_new_tokens=n, temperature=t, seed=3) for n, t in ((12, 0), (25, 0), (9, 0.8), (1, 0))]
    options: dict[str, Any] = {"cuda_graphs": False, "native": False, "budget": SchedulerConfig(64, 6)}
    expected = [a.tokens for a in load(model, **options).generate(prompts, hows)]
    engine = load(model, num_speculative_tokens=3, **options)
    engine.decoder._record = recorder = CpuRecorder()
    engine._capture()
    assert recorder.captures == ([32, 16, 8, 8, 4, 4, 2, 1] if in_place else [])
    run = engine.decoder._forward
    eager: list[int] = []
    engine.decoder._forward = lambda batch, cache: (eager.append(batch.max_seqlen_q), run(batch, cache))[1]
    assert [a.tokens for a in engine.generate(prompts, hows)] == expected
    assert {n for n in recorder.replays if n > 4} >= {16}
    assert all(longest > 4 for longest in eager), "a step of few tokens was not replayed"
    assert any(longest > 4 for longest in eager)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bloom", "mistral windowed", "qwen3"])
def test_graphs_of_a_device_give_the_same_tokens(name: str, tiny: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    model = tiny(name).cuda()
    expected = [a.tokens for a in load(model, cuda_graphs=False).generate(PROMPTS, HOWS)]
    engine = load(model)
    assert len(engine.decoder._graphs[1]) >= 4
    assert [a.tokens for a in engine.generate(PROMPTS, HOWS)] == expected


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (9, [1, 2, 4, 8, 16]), (64, [1, 2, 4, 8, *range(16, 65, 8)])],
)
def test_numbers_of_rows_that_get_a_graph(most: int, sizes: list[int]) -> None:
    assert capture_sizes(most) == sizes
    assert capture_sizes(100)[-4:] == [64, 80, 96, 112]


def test_rows_of_padding_write_nowhere_and_results_are_copies() -> None:
    """After a step of many rows comes one of few: the slots of the others are the null slot again."""
    seen = []

    def forward(batch: BatchIndices) -> Tensor:
        seen.append((batch.slots.tolist(), batch.seqlens_k.tolist(), batch.block_table.tolist()))
        return batch.tokens[:, None].float() * torch.ones(5)

    graphs = DecodeGraphs(forward, rerun, (4, 3, 5), 99, torch.device("cpu"), reads_in_place=True)
    graphs.capture()

    def step(rows: list[int]) -> Tensor:
        batch, _ = make_batch([ScheduledChunk(n, (n,), 5, (n, n), 1) for n in rows], 4, torch.device("cpu"))
        logits = graphs.replay(batch)
        assert logits is not None
        return logits[:, 0]

    assert {each: sizes[-1] for each, sizes in graphs.sizes.items()} == {1: 4}
    first = step([7, 8, 9, 10])
    assert step([3, 2, 1]).tolist() == [3, 2, 1]
    assert first.tolist() == [7, 8, 9, 10]
    slots, lengths, tables = seen[-1]
    assert slots == [3 * 4 + 1, 2 * 4 + 1, 1 * 4 + 1, 99]
    assert lengths == [6, 6, 6, 1]
    assert [table[:2] for table in tables[:3]] == [[3, 3], [2, 2], [1, 1]]
    drafts = DecodeGraphs(forward, rerun, (4, 3, 5), 99, torch.device("cpu"), reads_in_place=True, tokens=3)
    chunks = [
        ScheduledChunk(0, (20,), 5, (2, 3), 1),
        ScheduledChunk(1, (31, 32), 4, (1, 1), 2),
        ScheduledChunk(2, (41, 42, 43), 0, (4,), 1),
    ]
    batch, order = make_batch(chunks, 4, torch.device("cpu"))
    logits = drafts.replay(batch)
    assert logits is not None
    assert [c.request for c in order] == [0, 1, 2]
    assert logits[:, 0].tolist() == [20, 31, 32, 43]
    slots, lengths, tables = seen[-1]
    assert slots == [99, 99, 3 * 4 + 1, 99, 1 * 4, 1 * 4 + 1, 4 * 4, 4 * 4 + 1, 4 * 4 + 2, 99, 99, 99]
    assert (lengths, [table[:2] for table in tables[:3]]) == ([6, 6, 3, 3], [[2, 3], [1, 1], [4, 0]])
    for chunks in ([ScheduledChunk(0, (1, 2), 0, (0,), 1)], [ScheduledChunk(i, (1,), 0, (i,), 1) for i in range(5)]):
        assert graphs.replay(make_batch(chunks, 4, torch.device("cpu"))[0]) is None


def test_captures_are_on_one_stream_of_their_own_under_the_device_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda_graph` without a device: what it asks torch for, in order. Captures of a model on cuda:1 were on cuda:0."""
    log: list[str] = []

    class Stream:
        count = 0

        def __init__(self) -> None:
            Stream.count += 1
            self.name = f"side {Stream.count}"

        def wait_stream(self, other: Any) -> None:
            log.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def entered(text: str) -> Iterator[None]:
        log.append(text)
        yield
        log.append(f"end of {text}")

    current = Stream()
    current.name = "current"
    fake = {
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "current_stream": lambda device=None: current,
        "stream": lambda stream: entered(f"on {stream.name}"),
        "device": lambda device: entered(f"on {device}"),
        "CUDAGraph": Graph,
        "graph": lambda graph, pool, stream, capture_error_mode: entered(
            f"capture {pool} {stream.name} {capture_error_mode}"
        ),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    record = cuda_graph(torch.device("cuda", 1))
    log.clear()
    for _ in range(2):
        replay, out = record(lambda: log.append("call") or "logits")
    replay()
    assert out == "logits"
    one = [
        "on cuda:1", "side 2 waits for current", "on side 2", "call", "call", "end of on side 2", "current waits for side 2",
        "capture pool side 2 thread_local", "call", "end of capture pool side 2 thread_local", "end of on cuda:1",
    ]  # fmt: skip
    assert log == [*one, *one, "replay"]


def test_a_capture_that_fails_says_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error is that of the capture's end, which tells nothing of the model."""

    @contextmanager
    def capture(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    ended = []
    fake = {"graph_pool_handle": lambda: "pool", "Stream": Stream, "CUDAGraph": object, "graph": capture,
            "current_stream": lambda device=None: Stream(), "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext()}  # fmt: skip
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def call(error: Exception) -> None:
        ended.append(0)
        if len(ended) % 3 == 0:
            raise error

    record, said = cuda_graph(torch.device("cuda", 0)), "CUDA error: operation not permitted"
    with pytest.raises(UnsupportedError, match=f"cannot be captured as a CUDA graph: {said}") as caught:
        record(lambda: call(RuntimeError(f"{said} when stream is capturing\nmore")))
    assert caught.value.code == "inference-cuda-graph"
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    with pytest.raises(torch.OutOfMemoryError):
        record(lambda: call(torch.OutOfMemoryError("full")))


def test_a_recording_is_for_shapes_and_its_results_are_copies(device: str) -> None:
    recorded = CudaGraphRunner(
        lambda x, scale=1.0: {"twice": x * 2 * scale, "what": "it"},
        rerun if device == "cpu" else cuda_graph(torch.device(device)),
    )
    first = recorded(torch.ones(3, device=device))
    second = recorded(torch.full((3,), 2.0, device=device))
    assert (first["twice"].tolist(), second["twice"].tolist(), first["what"]) == ([2.0] * 3, [4.0] * 3, "it")
    assert len(recorded) == 1
    assert recorded(torch.ones(2, device=device), scale=3.0)["twice"].tolist() == [6.0] * 2
    assert len(recorded) == 2


def test_what_cannot_be_recorded_is_said(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="not on a CUDA device") as error:
        load(tiny("llama"), cuda_graphs=True)
    assert error.value.code == "inference-cuda-graph"
    spec, shapes = load(tiny("mixtral")).decoder.spec, {"up": (4, 96, 32), "down": (4, 32, 48)}
    weights = {f"layers.{i}.feed.experts.{part}": torch.zeros(shape) for i in (0, 1) for part, shape in shapes.items()}
    assert "the host is told which experts were chosen" in replay_obstacle(spec, weights, self_group())
    monkeypatch.setattr(quantize, "why_host_is_told", lambda w: "" if w.dtype == torch.bfloat16 else "fp32")
    assert not replay_obstacle(spec, {role: w.bfloat16() for role, w in weights.items()}, self_group())
    part = {role: w.bfloat16() if role.endswith("up") else w for role, w in weights.items()}
    assert replay_obstacle(spec, part, self_group()).endswith("(fp32)")
    codes = {role: quantize_weight(w) for role, w in weights.items()}
    assert replay_obstacle(spec, codes, self_group()).endswith("(experts of int8)")


@pytest.mark.gpu
def test_init_inference_replays_the_modules_forward(tiny: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    model = tiny("llama").cuda()
    ids = torch.tensor([[5, 9, 2, 4], [1, 1, 7, 8]], device="cuda")
    engine = init_inference(model, dtype=torch.float32, enable_cuda_graph=True)
    for step in range(3):
        with torch.no_grad():
            expected = model(ids + step, use_cache=False).logits
        assert torch.equal(engine(ids + step, use_cache=False).logits, expected)
    ours = init_inference(model, dtype=torch.float32, enable_cuda_graph=True, replace_with_kernel_inject=True)
    want = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, max_new_tokens=8, do_sample=False), want)

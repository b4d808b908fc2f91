"""Steps that are recorded and replayed give the tokens of steps that are run; with CUDA graphs under `nox -s gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from ds_config.errors import UnsupportedError
from ds_inference import SamplingParams, init_inference, load
from ds_inference.cuda_graphs import CudaGraphRunner, cuda_graph
from ds_inference.decoder_model import replay_obstacle

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


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bloom", "mistral windowed", "qwen3"])
def test_replays_give_the_same_tokens(name: str, device: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name).to(device)
    expected = [a.tokens for a in load(model, cuda_graphs=False).generate(PROMPTS, HOWS)]
    engine = load(model)
    if device == "cpu":
        engine.decoder._record = rerun
    assert [a.tokens for a in engine.generate(PROMPTS, HOWS)] == expected
    _, recorded = engine.decoder._replayed
    assert 2 <= len(recorded) <= 12  # not one for each number of requests and blocks


def test_a_recording_is_for_shapes_and_its_results_are_copies(device: str) -> None:
    recorded = CudaGraphRunner(
        lambda x, scale=1.0: {"twice": x * 2 * scale, "what": "it"}, rerun if device == "cpu" else cuda_graph()
    )
    first = recorded(torch.ones(3, device=device))
    second = recorded(torch.full((3,), 2.0, device=device))
    assert (first["twice"].tolist(), second["twice"].tolist(), first["what"]) == ([2.0] * 3, [4.0] * 3, "it")
    assert len(recorded) == 1
    assert recorded(torch.ones(2, device=device), scale=3.0)["twice"].tolist() == [6.0] * 2
    assert len(recorded) == 2


def test_what_cannot_be_recorded_is_said(tiny: Any) -> None:
    with pytest.raises(UnsupportedError, match="not on a CUDA device") as error:
        load(tiny("llama"), cuda_graphs=True)
    assert error.value.code == "inference-cuda-graph"
    engine = load(tiny("mixtral"))
    assert replay_obstacle(engine.decoder.spec, cut=False) == "the host is told which experts were chosen"
    assert replay_obstacle(load(tiny("llama")).decoder.spec, cut=True)


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

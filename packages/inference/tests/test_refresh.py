"""New values are written where a runner's weights are: the same tokens as those of a runner that is read anew, and nothing else moves."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_config.errors import CheckpointError, UnsupportedError
from ds_inference import QuantizationOptions, SamplingParams, load
from ds_inference.model_loader import refresh_weights
from ds_inference.quantize import dequantised
from ds_ops.formats import QuantTensor

HOW = SamplingParams(6)


def other(model: Any) -> Any:
    """The same model with other weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model


def place(weight: Tensor | QuantTensor) -> int:
    return (weight.wire if isinstance(weight, QuantTensor) else weight).data_ptr()


@pytest.mark.parametrize(
    "name", ["llama", "llama tied", "gpt2", "bloom", "mixtral", "deepseek-v3", "gpt-oss", "gemma2"]
)
@pytest.mark.parametrize(
    "quantize", [None, QuantizationOptions("int8", 8), QuantizationOptions("int4", 16, symmetric=False)]
)
def test_the_tokens_of_a_runner_that_is_read_anew(
    name: str, quantize: QuantizationOptions | None, tiny: Any, prompts_of: Any
) -> None:
    first = tiny(name)
    second, prompts = other(first), prompts_of([1, 12, 5])
    weights = {n: t.clone() for n, t in first.state_dict().items()}
    engine = load(first, weights=weights, quantize=quantize, native=False)
    before = [a.tokens for a in engine.generate(prompts, HOW)]
    places = {role: place(weight) for role, weight in engine.decoder.weights.items()}
    refresh_weights(engine.decoder, second, second.state_dict())
    engine.weights_changed(1)
    fresh = load(second, quantize=quantize, native=False)
    assert {role: place(weight) for role, weight in engine.decoder.weights.items()} == places
    for role, weight in fresh.decoder.weights.items():
        assert torch.equal(dequantised(engine.decoder.weights[role]), dequantised(weight)), role
    wanted = [a.tokens for a in fresh.generate(prompts, HOW)]
    assert [a.tokens for a in engine.generate(prompts, HOW)] == wanted != before


class Watched(Mapping[str, Tensor]):
    """Hands out copies, and knows how many bytes of these were alive at most."""

    def __init__(self, inner: Mapping[str, Tensor]) -> None:
        self._inner, self._alive = inner, weakref.WeakSet[Tensor]()
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._inner[name].clone()
        self._alive.add(tensor)
        self.most = max(self.most, sum(t.nbytes for t in self._alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


def test_tensors_of_one_role_are_there_at_a_time(tiny: Any) -> None:
    model = tiny("llama")
    engine, weights = load(model, weights=Watched(model.state_dict()), native=False), Watched(model.state_dict())
    refresh_weights(engine.decoder, model, weights)
    largest = max(w.nbytes for w in engine.decoder.weights.values())
    assert 0 < weights.most <= largest


def test_what_cannot_be_refreshed_is_said(tiny: Any) -> None:
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="native loop has packed") as error:
        refresh_weights(load(model, native=True).decoder, model, model.state_dict())
    assert error.value.code == "inference-native"
    weights = {name: t for name, t in model.state_dict().items() if "q_proj" not in name}
    with pytest.raises(CheckpointError, match="q_proj"):
        refresh_weights(load(model, weights=dict(model.state_dict()), native=False).decoder, model, weights)


def test_a_module_of_no_declared_family(tiny: Any, prompts_of: Any) -> None:
    first = tiny("llama")
    second, prompts = other(first), prompts_of([1, 12])
    engine = load(copy.deepcopy(first), use_module_forward=True)
    refresh_weights(engine.decoder, second, second.state_dict())
    engine.weights_changed(1)
    wanted = [a.tokens for a in load(second).generate(prompts, HOW)]
    assert [a.tokens for a in engine.generate(prompts, HOW)] == wanted

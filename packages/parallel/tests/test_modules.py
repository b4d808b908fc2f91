"""Modules chosen by name: which, what changes about them, what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_config.errors import PlanError
from ds_parallel import ActivationCheckpointing, checkpoint_modules, match_modules

NAMES = ["embed", "layers", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.10", "head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["layers.*"], ["layers.0", "layers.1", "layers.10"]),
        (["layers.?"], ["layers.0", "layers.1"]),
        (["**.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
        (["layers.**"], ["layers", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.10"]),
        (["head", "embed"], ["embed", "head"]),
        (["layers.[01]"], ["layers.0", "layers.1"]),
    ],
)
def test_patterns(patterns: list[str], expected: list[str]) -> None:
    assert list(match_modules(NAMES, patterns)) == expected


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'layer\.0'") as caught:
        match_modules(NAMES, ["head", "layer.0"])
    assert caught.value.code == "activations-modules"
    assert "layers.0" in caught.value.fix


def test_only_the_forward_changes(stack: Any) -> None:
    model, policy = stack(), ActivationCheckpointing()
    kind, state = type(model.layers[0]), list(model.state_dict())
    heard: list[str] = []
    model.layers[0].register_forward_pre_hook(lambda *_: heard.append("pre"))
    done = checkpoint_modules(model, ["layers.0", "layers.2"], policy)
    assert done.names == ("layers.0", "layers.2")
    assert isinstance(model.layers[0], kind)
    assert type(model.layers[0]).__name__ == kind.__name__
    assert type(model.layers[1]) is kind
    assert list(model.state_dict()) == state
    assert type(model.layers[0]) is type(model.layers[2])
    model(torch.ones(2, 8)).backward()
    assert policy.calls == 2
    assert heard == ["pre"]
    checkpoint_modules(model, ["layers.0"], ActivationCheckpointing())  # again: stays as it is
    done.remove()
    assert {type(layer) for layer in model.layers} == {kind}


def test_a_compiled_model_is_checkpointed_too(stack: Any) -> None:
    """Traced by torch's compiler, and run as it is: compiling kernels would take half a minute."""
    model, x = stack(depth=2), torch.ones(2, 8)
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_modules(model, ["layers.*"], ActivationCheckpointing())
    torch.compile(model, backend="eager")(x).backward()
    torch.compiler.reset()
    for expected, param in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected)


def test_a_forward_on_the_instance_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x
    with pytest.raises(PlanError) as caught:
        checkpoint_modules(model, ["0"])
    assert caught.value.code == "activations-forward"

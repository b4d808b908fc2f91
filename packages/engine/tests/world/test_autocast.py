"""Under autocast gradients of some modules travel in few bits, those of others as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
from ds_config.errors import ConfigError
from ds_testing import world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.Linear(40, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def configuration(stage: int, **autocast: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", **autocast},
    }


def mean_gradients() -> dict[str, Tensor]:
    """What two ranks with these inputs have together, in fp32."""
    net = Net()
    for rank in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(inputs(rank))
        (loss / 2).backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def inputs(rank: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_gradients_of_named_modules_travel_in_its_format(stage: int) -> None:
    before, wanted = dict(Net().named_parameters()), mean_gradients()
    engine, *_ = ds_engine.initialize(
        model=Net(), config=configuration(stage, lower_precision_safe_modules=["torch.nn.Linear"])
    )
    assert "4 parameters gradients travel in bfloat16" in str(engine.plan)
    engine.backward(engine(inputs(torch.distributed.get_rank())))
    engine.step()
    for name, value in engine.full_state_dict().items():
        moved = before[name] - value
        close = torch.allclose(moved, wanted[name], rtol=1e-6, atol=1e-7)
        assert close is name.startswith("layers.1."), f"{name}: {(moved - wanted[name]).abs().max()}"
        torch.testing.assert_close(moved, wanted[name], rtol=1e-2, atol=1e-4)
    engine.close()


def test_a_class_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'torch.nn.Linea' cannot be imported") as raised:
        ds_engine.initialize(model=Net(), config=configuration(1, lower_precision_safe_modules=["torch.nn.Linea"]))
    assert raised.value.code == "precision-modules"

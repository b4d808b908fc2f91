"""Training with fused kernels at all stages: the weights of the plain model; `close` gives the model back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_engine
from ds_testing import world

transformers = pytest.importorskip("transformers")


def trained(kernels: str, stage: int, mode: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=stage % 2 == 1,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    if mode == "checkpointed":
        model.gradient_checkpointing_enable()
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                "kernels": kernels, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}  # fmt: skip
    engine, *_ = ds_engine.initialize(model=model, config=settings)
    assert ("fused kernels" in str(engine.plan)) == (kernels == "auto")
    if mode == "compiled":
        engine.compile(backend="aot_eager")
    generator, losses = torch.Generator().manual_seed(engine.mesh.rank), []
    for _ in range(2):
        ids = torch.randint(0, 96, (2, 8), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    state = engine.full_state_dict()
    engine.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    return losses, state


@world(2)
@pytest.mark.parametrize(
    ("stage", "mode"),
    [(0, "eager"), (1, "checkpointed"), (2, "eager"), (3, "eager"), (3, "checkpointed"),
     pytest.param(3, "compiled", marks=pytest.mark.slow)],
)  # fmt: skip
def test_weights_are_those_of_the_plain_model(stage: int, mode: str) -> None:
    losses, plain = trained("off", stage, mode)
    fused_losses, fused = trained("auto", stage, mode)
    assert fused_losses == pytest.approx(losses, rel=1e-5)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6)

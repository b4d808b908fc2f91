"""`engine.sparse_gradients_enabled()` and `sparse_tensor_module_names` tell what happens."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from torch import nn

from ds_testing import world
from ds_zero.runtime.reduce_strategies import EmbeddingRowReducer


@pytest.mark.parametrize("asked", [False, True])
@world(1)
def test_sparse_gradients_enabled_is_what_was_asked(asked):
    model = nn.Embedding(50, 4, sparse=True)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sparse_gradients": asked}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    before = model.weight.detach().clone()
    engine.backward(engine(torch.tensor([3, 7])).sum())
    engine.step()
    assert engine.sparse_gradients_enabled() is asked
    assert engine.sparse_tensor_module_names == ({"weight"} if asked else set())
    assert isinstance(engine.sharding.units[0].gradients.way, EmbeddingRowReducer) == asked
    changed = (model.weight != before).any(1).nonzero().view(-1).tolist()
    assert changed == [3, 7]
    engine.destroy()

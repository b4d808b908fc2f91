"""Tensor and sequence parallelism under upstream's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_config.errors import PlanError, UnsupportedError, set_place
from ds_testing import world


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(model_type="phi3", to_dict=lambda: {})
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Mlp()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x.square().mean()


CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@world(2)
def test_tp_model_init_and_whole_parameters() -> None:
    alone = Model()
    model = deepspeed.tp_model_init(Model(), tp_size=2, dtype=torch.float32)
    with pytest.raises(PlanError, match="autotp_size = 4"):
        deepspeed.initialize(model=model, config=CONFIG | {"tensor_parallel": {"autotp_size": 4}})
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(engine(x), alone(x))
    down = model.layers[0]["mlp"].down_proj.weight
    assert down.shape == (8, 6)
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    with GatherReplacedLayerParams([down], model, enabled=True):
        assert torch.equal(down, alone.layers[0]["mlp"].down_proj.weight)
    assert down.shape == (8, 6)
    engine.close()
    with pytest.raises(UnsupportedError, match="tp_group"):
        deepspeed.tp_model_init(Model(), 2, torch.float32, tp_group=object())
    set_place("")


@world(2)
def test_sequences_over_ranks() -> None:
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    assert groups._get_sequence_parallel_world_size() == 1
    initialize_sequence_parallel(2)
    try:
        group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
        assert (groups._get_sequence_parallel_world_size(), groups._get_data_parallel_world_size()) == (2, 1)
        ids = torch.arange(4).view(1, 4) + 10 * rank
        adapter = UlyssesSPDataLoaderAdapter(
            [{"input_ids": ids, "labels": ids}], sp_rank=rank, sp_group=group, sp_world_size=2, device="cpu"
        )
        first, second = adapter
        assert first["shift_labels"].tolist() == [[[1, 2], [3, -100]][rank]]
        assert second["input_ids"].tolist() == [[[10, 11], [12, 13]][rank]]
        with pytest.raises(PlanError, match="sp_rank = 7"):
            UlyssesSPDataLoaderAdapter([], 7, group, 2, "cpu")
    finally:
        from deepspeed._ours.groups import share_sequences

        share_sequences(None)
    set_place("")


def test_tiles() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP

    torch.manual_seed(0)
    mlp, x = Mlp(), torch.randn(1, 7, 8, requires_grad=True)
    found = TiledMLP.apply(lambda module, part: module(part), mlp, x, 3, list(mlp.parameters()))
    torch.testing.assert_close(found, mlp(x))
    head, labels = nn.Linear(8, 5), torch.tensor([[0, 1, -100, 4, -100, -100, 2]])

    def loss(module: Any, part: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(module(part).flatten(0, -2), wanted.flatten())

    whole = loss(head, x, labels)
    tiles = TiledFusedLogitsLoss.apply(loss, head, x, labels, None, 4, None, "mean")
    torch.testing.assert_close(tiles, whole)
    for a, b in zip(
        torch.autograd.grad(tiles * 3, [x, *head.parameters()]),
        torch.autograd.grad(whole * 3, [x, *head.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    summed = SequenceTiledCompute.apply(lambda x, y: (x * y).sum(), 7, 2, ["x"], ["y"], "x", None, 1, "sum", x, 2.0)
    torch.testing.assert_close(summed, (x * 2).sum())

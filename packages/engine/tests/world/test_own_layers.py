"""A model whose layers are tensor parallel by themselves, as Megatron's: told by marks on parameters, and by an mpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ds_engine
from ds_comm.differentiable import copy, reduce
from ds_testing import world


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Own(nn.Module):
    """`Whole` over the ranks of `group`: `up` by its outputs, `down` by its inputs."""

    def __init__(self, group, *, dims: bool = True) -> None:
        super().__init__()
        whole = Whole()
        self.group = group
        self.norm = whole.norm
        part = slice(group.rank * 4, group.rank * 4 + 4) if group.size == 2 else slice(None)
        self.up, self.down = nn.Linear(6, 8 // group.size), nn.Linear(8 // group.size, 6, bias=False)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        with torch.no_grad():
            for mine, theirs, dim in (
                (self.up.weight, whole.up.weight[part], 0),
                (self.up.bias, whole.up.bias[part], 0),
                (self.down.weight, whole.down.weight[:, part], 1),
            ):
                mine.copy_(theirs)
                mine.tensor_model_parallel = True
                if dims:
                    mine.partition_dim = dim

    def forward(self, x):
        x = copy(self.norm(x), self.group, unit="x")
        return reduce(self.down(torch.tanh(self.up(x))), self.group, unit="y") + self.bias


def config(stage: int, **more):
    return {
        "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }  # fmt: skip


def rows(step: int, rank: int):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def alone(steps: int, ranks: int):
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(rows(step, rank)).square().mean() / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return model, norms


def mpu(tensor: int, data: int):
    return SimpleNamespace(
        get_model_parallel_world_size=lambda: tensor, get_data_parallel_world_size=lambda: data,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(4)
def test_it_trains_as_the_whole_model_does(stage, tmp_path) -> None:
    groups = ds_engine.initialize(model=nn.Linear(1, 1), config=config(0), mpu=mpu(2, 2))[0].mesh
    model = Own(groups["tensor"])
    engine, *_ = ds_engine.initialize(model=model, config=config(stage), mpu=mpu(2, 2))
    whole, norms = alone(3, 2)
    for step in range(3):
        engine.backward(engine(rows(step, engine.mesh["data"].rank)).square().mean())
        engine.step()
        assert engine.optimizer.last.norm == pytest.approx(norms[step], rel=1e-5)
    part = slice(groups["tensor"].rank * 4, groups["tensor"].rank * 4 + 4)
    wanted = {
        "norm.weight": whole.norm.weight, "up.weight": whole.up.weight[part], "up.bias": whole.up.bias[part],
        "down.weight": whole.down.weight[:, part], "bias": whole.down.bias,
    }  # fmt: skip
    with ds_engine_whole(engine):
        for name, value in wanted.items():
            torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(tmp_path), "t")
    again, *_ = ds_engine.initialize(model=Own(groups["tensor"], dims=True), config=config(3 - stage), mpu=mpu(2, 2))
    again.load_checkpoint(str(tmp_path), "t")
    with ds_engine_whole(again):
        torch.testing.assert_close(again.module.up.weight, whole.up.weight[part], rtol=1e-5, atol=1e-6)
    again.close()
    engine.close()


def ds_engine_whole(engine):
    import ds_zero

    return ds_zero.GatheredParameters(engine.module)


@world(2)
def test_parts_without_a_dimension_are_kept_by_rank(tmp_path) -> None:
    section = {"tensor_parallel": {"autotp_size": 2, "megatron_layers": True}}
    groups = ds_engine.initialize(model=nn.Linear(1, 1), config=config(0, **section))[0].mesh
    engine, *_ = ds_engine.initialize(model=Own(groups["tensor"], dims=False), config=config(2, **section))
    engine.backward(engine(rows(0, 0)).square().mean())
    engine.step()
    engine.save_checkpoint(str(tmp_path), "t")
    kept = engine.module.down.weight.detach().clone()
    again, *_ = ds_engine.initialize(model=Own(groups["tensor"], dims=False), config=config(1, **section))
    assert not torch.equal(again.module.down.weight, kept)
    again.load_checkpoint(str(tmp_path), "t")
    assert torch.equal(again.module.down.weight, kept)
    assert "the model's own layers, over 2 ranks" in str(again.plan)
    again.close()
    engine.close()

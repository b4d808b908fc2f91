"""Ranks read their parts of the same batches, chosen by each for itself; a checkpoint goes on with them on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import ds_comm
import ds_engine
from ds_data import Curriculum, RankSlice, convert_to_random_ltd, write_items
from ds_data.config import DataEfficiencyConfig
from ds_data.curriculum import make_metrics
from ds_testing import world


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(index)), torch.tensor(float(index))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.ids: list[int] = []

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.ids += index.int().tolist()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def section(folder: Path) -> dict[str, Any]:
    if dist.get_rank() == 0:
        write_items(folder / "samples", [range(8 * i, 8 * i + 8) for i in range(5)], "int32")
        write_items(folder / "values", [[i] for i in range(5)], "int32")
    ds_comm.barrier()
    metric = {
        "index_to_sample_path": str(folder / "samples"), "index_to_metric_path": str(folder / "values"),
        "clustering_type": "schedule_based", "min_difficulty": 0, "max_difficulty": 4,
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
    }  # fmt: skip
    return {"data_sampling": {"curriculum_learning": {
        "enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": {"rarity": metric}}}}  # fmt: skip


def start(told: dict[str, Any], stage: int, model: nn.Module | None = None) -> ds_engine.Engine:
    config = {
        "train_batch_size": 12, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}, "data_efficiency": told,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    return ds_engine.initialize(model=model or Model(), config=config, training_data=Rows())[0]


def seen(engine: ds_engine.Engine, steps: int) -> list[list[int]]:
    """Samples of each step, over all ranks."""
    found = []
    for _ in range(steps):
        engine.module.ids.clear()  # type: ignore[union-attr, operator]
        engine.train_batch()
        found.append(sorted(i for own in ds_comm.all_gather_json(engine.module.ids) for i in own))
    return found


@pytest.mark.parametrize("stages", [(1, 3), (3, 2)])
@world(2)
def test_two_ranks_read_what_one_would(tmp_path: Path, stages: tuple[int, int]) -> None:
    told = section(tmp_path)
    config = DataEfficiencyConfig.model_validate(told)
    assert config.curriculum is not None
    one = Curriculum(40, make_metrics(config.curriculum, 40), config.seed)
    expected = [sorted(one.draw(12).tolist()) for _ in range(7)]
    first = start(told, stages[0])
    assert seen(first, 4) == expected[:4]
    first.save_checkpoint(str(tmp_path / "save"))
    second = start(told, stages[1])
    second.load_checkpoint(str(tmp_path / "save"))
    assert seen(second, 3) == expected[4:]
    rows = one.rows(RankSlice(0, 1, 12), 12, one.consumed)
    assert len(next(rows).samples) == 12
    assert len(list((tmp_path / "clusters").glob("*.idx"))) == 4


@world(2)
def test_random_ltd_is_the_same_at_every_stage() -> None:
    ltd = {
        "enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 2, "random_ltd_layer_id": [0, 2],
        "random_ltd_schedule": {"min_value": 2, "max_value": 6, "schedule_config": {"require_steps": 6, "seq_per_step": 2}},
    }  # fmt: skip
    runs = []
    for stage in range(4):
        engine = start({"data_routing": {"random_ltd": ltd}}, stage, convert_to_random_ltd(Model(), nn.Linear))
        torch.manual_seed(dist.get_rank())
        runs.append([engine.train_batch().loss for _ in range(6)])
        engine.close()
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-6)

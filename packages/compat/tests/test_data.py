"""Curricula, random-LTD and token files by upstream's names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    make_builder,
    make_dataset,
)
from deepspeed.runtime.data_pipeline.data_sampling.utils import find_fit_int_dtype, split_index
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)
from torch import Tensor, nn

from ds_config.errors import ConfigError

LINE = {"total_curriculum_step": 8, "difficulty_step": 2}
ONE = {"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear", "schedule_config": LINE}


def told(**metric: Any) -> dict[str, Any]:
    metrics = {
        "dummy": {
            "index_to_sample_path": "dummy",
            "index_to_metric_path": "dummy",
            "clustering_type": "single_cluster",
            **ONE,
            **metric,
        }
    }
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    return {
        "enabled": True,
        "seed": 1234,
        "data_sampling": {"enabled": True, "num_epochs": 4, "curriculum_learning": curriculum},
    }


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> Any:
        return torch.full((4,), float(at)), torch.tensor(at)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def start(section: dict[str, Any], model: nn.Module | None = None, **options: Any) -> Any:
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "data_efficiency": section}
    return deepspeed.initialize(config=config, model=model or Net(), **options)[0]


def test_a_schedule_goes_through_its_steps():
    scheduler = CurriculumScheduler(ONE)
    assert [scheduler.update_difficulty(step) for step in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    scheduler.set_current_difficulty(4)
    other = CurriculumScheduler(ONE)
    other.set_state(scheduler.get_state())
    assert other.get_current_difficulty() == 4
    assert other.get_difficulty(8) == 10
    custom = CurriculumScheduler({**ONE, "schedule_type": "custom"})
    custom.set_custom_get_difficulty(lambda step: step)
    assert custom.update_difficulty(7) == 7
    with pytest.raises(AssertionError, match="schedule_type"):
        CurriculumScheduler({"min_difficulty": 1, "max_difficulty": 2})


def test_a_loop_over_a_curriculum():
    seen: list[dict[str, Any]] = []
    engine = start(told(), training_data=Data())
    engine.set_data_post_process_func(lambda data, state: (seen.append(state), data)[1])
    for number, batch in enumerate(engine.training_dataloader):
        engine.backward(engine(*batch))
        engine.step()
        if number == 9:
            break
    assert [state["current_difficulties"]["dummy"] for state in seen] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    assert engine.curriculum_learning_enabled()
    assert engine.data_efficiency_enabled()
    engine = start(told(schedule_type="custom", schedule_config={}), training_data=Data())
    engine.set_custom_curriculum_learning_schedule({"dummy": lambda step: 3})
    next(iter(engine.training_dataloader))
    assert engine.training_dataloader.curriculum.difficulties == {"dummy": 3}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_gives_each_rank_its_part_and_goes_on(ranks: int) -> None:
    def made(rank: int, size: int) -> Any:
        return DeepSpeedDataSampler(told(), 20, 4 // size, rank, size, None, 2, rank)

    one = list(made(0, 1))
    assert len(made(0, 1)) == 80
    assert len(one) == 20
    assert {i for row in one for i in row} == set(range(20))
    rows = [list(made(rank, ranks)) for rank in range(ranks)]
    assert [[i for own in rows for i in own[at]] for at in range(20)] == one
    sampler = made(0, ranks)
    stream = iter(sampler)
    head = [next(stream) for _ in range(7)]
    other = made(0, ranks)
    other.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
    assert head + list(other) == rows[0]
    assert sampler.state_dict()["consumed_samples"] == 28
    with pytest.raises(ConfigError, match="another library"):
        other.load_state_dict({"consumed_samples": 3})


def test_without_a_curriculum_a_sampler_draws_all(tmp_path: Path) -> None:
    sampler = DeepSpeedDataSampler({"data_sampling": {"num_epochs": 2}}, 6, 2, 0, 1, None, 1, 0)
    assert sorted(i for row in sampler for i in row) == sorted([*range(6), *range(6)])


def test_layers_that_are_routed():
    ltd = {
        "enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1],
        "random_ltd_schedule": {
            "min_value": 2, "max_value": 4, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 4, "seq_per_step": 2},
        },
    }  # fmt: skip
    model = convert_to_random_ltd(Net(), nn.Linear)
    engine = start({"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}, model)
    engine.random_ltd_initialize()
    for step in range(6):
        assert engine.random_ltd_scheduler.get_current_seq() == (2 if step < 4 else 4)
        engine.backward(engine(torch.randn(1, 4, 4), None))
        engine.step()
    assert engine.random_ltd_enabled()
    config = {**ltd, "global_batch_size": 2}
    alone = RandomLTDScheduler(config)
    assert alone.get_total_layer_tokens(6) == 2 * sum(kept + 4 * 2 for kept in (2, 2, 2, 2, 4, 4))
    assert alone.state_dict() == {
        "consumed_layer_tokens": 128, "current_steps": 5, "current_value": 4, "min_value": 2, "max_value": 4,
    }  # fmt: skip
    again = RandomLTDScheduler(config)
    again.load_state_dict(alone.state_dict())
    assert again.get_current_seq() == 4
    again.reset_to_init()
    assert (again.get_current_seq(), again.state_dict()["consumed_layer_tokens"]) == (2, 0)
    with pytest.raises(AssertionError, match="random_ltd"):
        start({}).random_ltd_initialize()


def test_layers_are_converted_when_the_engine_runs() -> None:
    """Megatron-DeepSpeed and DeepSpeedExamples convert the engine's layers, and read the schedule's state."""
    ltd = {
        "enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1],
        "random_ltd_schedule": {
            "min_value": 2, "max_value": 4, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 4, "seq_per_step": 2},
        },
    }  # fmt: skip
    engine = start({"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}, Net())
    with pytest.raises(ConfigError, match="0 layers that can be routed"):
        engine.random_ltd_initialize()
    engine.backward(engine(torch.randn(1, 4, 4), None))
    engine.step()
    assert convert_to_random_ltd(engine, nn.Linear) is engine
    lengths = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: lengths.append(module.random_ltd_router is not None))
        for layer in engine.module.modules()
        if isinstance(layer, RandomLayerTokenDrop)
    ]
    engine.backward(engine(torch.randn(1, 4, 4), None))
    engine.step()
    assert sum(lengths) == 1 < len(hooks)
    scheduler = engine.random_ltd_scheduler
    assert (scheduler.get_random_ltd_layer_num(), scheduler.model_layer_num) == (1, 3)
    assert scheduler.state["consumed_layer_tokens"] == scheduler.state_dict()["consumed_layer_tokens"] > 0
    scheduler.set_current_seq(4)
    assert engine.random_ltd_scheduler.get_current_seq() == 4
    assert save_without_random_ltd(engine).keys() == Net().state_dict().keys()


def test_token_files_are_built_and_read(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens")
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=torch.int32)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_items([torch.tensor([4]), np.array([5, 6])])
    builder.end_document()
    with pytest.raises(ConfigError, match="one name"):
        builder.finalize(str(tmp_path / "other.idx"))
    builder.finalize(f"{path}.idx")
    assert MMapIndexedDataset.exists(path)
    data = pickle.loads(pickle.dumps(MMapIndexedDataset(path, skip_warmup=True)))
    assert [item.tolist() for item in data] == [[1, 2, 3], [4], [5, 6]]
    assert (data.doc_idx.tolist(), data.size(2), data.get(0, 1, 1).tolist()) == ([0, 3], 2, [2])
    more = make_builder(str(tmp_path / "more.bin"), "mmap", vocab_size=100)
    more.add_item([7])
    more.end_document()
    more.merge_file_(path)
    more.finalize(str(tmp_path / "more.idx"))
    merged = make_dataset(str(tmp_path / "more"), "infer")
    assert merged is not None
    assert [item.tolist() for item in merged] == [[7], [1, 2, 3], [4], [5, 6]]
    assert merged.dtype == np.uint16
    assert make_dataset("nowhere", "mmap") is None
    assert find_fit_int_dtype(-1, 200) is np.int16
    assert split_index(0, 10, 3) == [(0, 3), (3, 6), (6, 10)]


def test_batches_by_tokens_of_an_engine(tmp_path: Path) -> None:
    class Words(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, at: int) -> Tensor:
            return torch.ones(1 + at % 4)

    section = {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 6, "metrics_path": str(tmp_path)}}}
    engine = start(section)
    with pytest.raises(ConfigError, match="there is no"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(Words(), engine)
    loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        Words(),
        engine,
        batch_seqlens_fn=lambda batch: torch.tensor([len(sample) for sample in batch]),
        dataloader_collate_fn=list,
    )
    engine.training_dataloader, engine.lr_scheduler = loader, scheduler
    for number, batch in enumerate(loader):
        assert sum(map(len, batch)) <= 12
        engine.backward(engine(torch.randn(len(batch), 4), None))
        assert engine.get_lr() == pytest.approx([1e-3 * scheduler.batch_sizes[number] / 2])
        engine.step()
    analyzer = DataAnalyzer(Words(), metric_names=["n"], metric_functions=[lambda b: torch.tensor([len(b)])],
                            metric_types=["accumulate_value_over_samples"], collate_fn=list, save_path=str(tmp_path))  # fmt: skip
    analyzer.run_map_reduce()
    assert MMapIndexedDataset(str(tmp_path / "n" / "n_metric_value"))[0].tolist() == [12]


def test_every_pass_over_training_data_has_upstreams_order(tmp_path):
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    net, rows = nn.Linear(1, 1), [torch.tensor([float(i)]) for i in range(7)]
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config, training_data=rows
    )
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist()
    passes = [[batch.flatten().tolist() for batch in loader] for _ in range(2)]
    assert passes == [[order[:2], order[2:4], order[4:6], order[6:]]] * 2
    assert loader is engine.training_dataloader
    assert len(loader) == 4
    kept = engine.deepspeed_io(rows, batch_size=3, route="eval")
    assert [batch.flatten().tolist() for batch in kept] == [[0, 1, 2], [3, 4, 5], [6]]
    engine.save_checkpoint(str(tmp_path), tag="here")  # without the place in the data, which this loader does not know
    assert engine.load_checkpoint(str(tmp_path))[0]
    engine.destroy()

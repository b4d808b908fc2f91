"""`data_efficiency` in a run: samples by a curriculum, tokens by random-LTD, and both after a checkpoint."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ds_engine
import ds_monitor
from ds_comm import MeshSpec
from ds_config.errors import CheckpointError, ConfigError, PlanError, UnsupportedError
from ds_data import convert_to_random_ltd, pack_by_seqlens, write_items
from ds_engine import Engine, shapes_of
from ds_engine.loader import CurriculumLoader
from ds_engine.transforms import TransformInput
from ds_engine.transforms.token_routing import Routing
from ds_monitor import MemorySink, metric_names

LENGTH, WIDTH = 8, 4


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is as hard as i // 4, and says which it is."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(LENGTH, WIDTH, generator=generator), torch.tensor(float(index))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.shape[1])
        return hidden + self.lin(hidden).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.ids: list[list[int]] = []

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.ids.append(index.int().tolist())
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def metrics(folder: Path, **change: Any) -> dict[str, Any]:
    write_items(folder / "samples", [range(4 * i, 4 * i + 4) for i in range(6)], "int32")
    write_items(folder / "values", [[i] for i in range(6)], "int32")
    rarity = {
        "index_to_sample_path": str(folder / "samples"), "index_to_metric_path": str(folder / "values"),
        "clustering_type": "schedule_based", "min_difficulty": 0, "max_difficulty": 5,
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1}, **change,
    }  # fmt: skip
    return {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": {"rarity": rarity}}


ROUTED: dict[str, Any] = {
    "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1], "enabled": True,
    "random_ltd_schedule": {"min_value": 2, "max_value": 8, "schedule_config": {"require_steps": 6, "seq_per_step": 2}},
}  # fmt: skip


def config(
    sampling: dict[str, Any] | None = None, routing: dict[str, Any] | None = None, **change: Any
) -> dict[str, Any]:
    sections = {} if sampling is None else {"data_sampling": sampling}
    sections |= {} if routing is None else {"data_routing": {"random_ltd": routing}}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    return {
        **batch,
        "optimizer": {"type": "Adam"},
        "data_efficiency": {"enabled": True, "seed": 7, **sections},
        **change,
    }


def start(told: dict[str, Any], model: nn.Module | None = None) -> Engine:
    return ds_engine.initialize(model=model or Model(), config=told, training_data=Rows())[0]


def seen(engine: Engine, steps: int) -> list[list[int]]:
    """Samples of each step."""
    engine.module.ids.clear()  # type: ignore[union-attr, operator]
    for _ in range(steps):
        engine.train_batch()
    ids = [i for row in engine.module.ids for i in row]  # type: ignore[union-attr]
    return [sorted(ids[at : at + 8]) for at in range(0, len(ids), 8)]


def test_samples_get_harder_with_the_steps(tmp_path: Path) -> None:
    engine = start(config({"curriculum_learning": metrics(tmp_path)}))
    assert isinstance(engine.training_dataloader, CurriculumLoader)
    told: list[Any] = []
    engine.training_dataloader.post_process = lambda batch, state: (told.append(state), batch)[1]
    for step, ids in enumerate(seen(engine, 7), 1):
        assert max(ids) // 4 <= min(step, 5)
    assert [state["current_difficulties"]["rarity"] for state in told[::4]] == [1, 2, 3, 4, 5, 5, 5]
    assert told[-1]["consumed_samples"] == 56
    assert sorted(path.name for path in (tmp_path / "clusters").glob("*.bin")) == [
        f"cluster_rarity{i}.bin" for i in range(1, 6)
    ]


@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize("micro", [1, 2, 8])
def test_a_run_that_is_resumed_reads_what_it_would_have_read(tmp_path: Path, stop: int, micro: int) -> None:
    told = config({"curriculum_learning": metrics(tmp_path)})
    whole = seen(start(told), stop + 4)
    first = start(told)
    head = seen(first, stop)
    first.save_checkpoint(str(tmp_path / "save"))
    second = start({**told, "train_micro_batch_size_per_gpu": micro})
    second.load_checkpoint(str(tmp_path / "save"))
    assert head + seen(second, 4) == whole


def test_a_checkpoint_in_the_middle_of_a_step_and_of_a_loop(tmp_path: Path) -> None:
    told = config({"curriculum_learning": metrics(tmp_path), "num_workers": 1})
    whole = seen(start(told), 4)
    first = start(told)
    assert first.training_dataloader is not None
    for number, batch in enumerate(first.training_dataloader):
        first.backward(first(*batch))
        first.step()
        if number == 9:  # two of four microbatches of the third step
            first.save_checkpoint(str(tmp_path / "save"))
            break
    second = start(told)
    second.load_checkpoint(str(tmp_path / "save"))
    assert seen(second, 2) == whole[2:]


def test_a_larger_batch_goes_on_with_the_same_curriculum(tmp_path: Path) -> None:
    engine = start(config({"curriculum_learning": metrics(tmp_path)}))
    assert isinstance(engine.training_dataloader, CurriculumLoader)
    seen(engine, 2)
    engine.set_train_batch_size(16)
    engine.train_batch()
    assert engine.training_dataloader.curriculum.difficulties == {"rarity": 3}
    assert engine.training_dataloader.consumed == 32


def test_the_data_end_after_their_epochs(tmp_path: Path) -> None:
    for sampling in ({"num_epochs": 2}, {"num_epochs": 2, "curriculum_learning": metrics(tmp_path)}):
        engine = start(config(sampling))
        assert len(seen(engine, 6)) == 6
        with pytest.raises(StopIteration):
            engine.train_batch()
        assert list(engine.training_dataloader or "none") == []


def test_a_curriculum_does_not_go_on_from_a_run_without_one(tmp_path: Path) -> None:
    plain = start(config())
    seen(plain, 1)
    plain.save_checkpoint(str(tmp_path / "save"))
    engine = start(config({"curriculum_learning": metrics(tmp_path)}))
    with pytest.raises(CheckpointError, match="without a curriculum"):
        engine.load_checkpoint(str(tmp_path / "save"))


def test_the_seed_is_that_of_the_order(tmp_path: Path) -> None:
    told = config({"curriculum_learning": metrics(tmp_path)})
    other = config({"curriculum_learning": metrics(tmp_path)})
    other["data_efficiency"]["seed"] = 8
    assert seen(start(told), 3) != seen(start(other), 3)
    assert seen(start({**config(), "data_efficiency": {"seed": 8}}), 2) != seen(start(config()), 2)


def test_bad_metrics_leave_the_model_alone(tmp_path: Path) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="no index_to_metric_path"):
        start(config({"curriculum_learning": metrics(tmp_path, index_to_metric_path=None)}), model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


# ---- dynamic batching


def batching(folder: Path, lengths: list[int], **change: Any) -> dict[str, Any]:
    write_items(folder / "seqlen" / "seqlen_sample_to_metric", [[n] for n in lengths], "int32")
    return {"dynamic_batching": {"enabled": True, "metrics_path": str(folder), "max_tokens": 12, **change}}


def test_microbatches_by_tokens_and_rates_that_follow(tmp_path: Path) -> None:
    lengths = [1 + i % 6 for i in range(24)]
    told = config(batching(tmp_path, lengths), train_batch_size=2, train_micro_batch_size_per_gpu=1)
    packing = pack_by_seqlens(lengths, 12, per_batch=2)
    engine = start(told)
    model = engine.module
    for step in range(8):
        at = step % len(packing.sizes)
        result = engine.train_batch()
        ids = model.ids[-2:]  # type: ignore[union-attr, index]
        assert [tuple(row) for row in ids] == list(packing.microbatches[2 * at : 2 * at + 2])
        assert sum(lengths[i] for i in ids[0]) <= 12
        assert result.samples == packing.sizes[at]
        assert result.lr == pytest.approx((1e-3 * packing.sizes[at] / 2,))
    engine.save_checkpoint(str(tmp_path / "save"))
    other = start(told)
    other.load_checkpoint(str(tmp_path / "save"))
    assert engine.train_batch().lr == other.train_batch().lr
    assert other.module.ids[-2:] == model.ids[-2:]  # type: ignore[union-attr, index]
    assert other.global_samples == engine.global_samples


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_tokens": None}, "no max_tokens"),
        ({"metrics_path": None}, "no metrics_path"),
        ({"max_tokens": 1, "min_batch_size": 2}, "fill not one batch"),
    ],
)
def test_batches_that_cannot_be_made(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        start(config(batching(tmp_path, [2] * 24, **change)))


def test_its_batch_stays(tmp_path: Path) -> None:
    engine = start(config(batching(tmp_path, [2] * 24), train_batch_size=2, train_micro_batch_size_per_gpu=1))
    with pytest.raises(ConfigError, match="put together for another one"):
        engine.set_train_batch_size(4)


def test_a_loader_of_the_callers_in_its_place() -> None:
    engine = start(config())
    engine.training_dataloader = DataLoader(Rows(), 2)
    assert seen(engine, 3) == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    engine.training_dataloader = None
    with pytest.raises(PlanError, match="no data"):
        engine.train_batch()


# ---- random-LTD


def test_routed_layers_see_more_with_every_update(tmp_path: Path) -> None:
    model = convert_to_random_ltd(Model(), Block)
    engine = start(config(routing=ROUTED), model)
    assert "1 of 3 layers see 2 tokens" in str(engine.plan)
    seen(engine, 8)
    kept = [2, 2, 4, 4, 6, 6, 8, 8]  # 2 + t, down to a multiple of 2
    assert engine.module.layers[1].seen == [k for k in kept for _ in range(4)]  # type: ignore[union-attr, index]
    assert set(engine.module.layers[0].seen) == {LENGTH}  # type: ignore[union-attr, index]
    engine.save_checkpoint(str(tmp_path))
    other = start(config(routing=ROUTED), convert_to_random_ltd(Model(), Block))
    other.load_checkpoint(str(tmp_path))
    seen(other, 1)
    assert other.module.layers[1].seen == [8] * 4  # type: ignore[union-attr, index]


def test_it_is_the_plain_loop() -> None:
    told = config(routing=ROUTED, train_micro_batch_size_per_gpu=8, gradient_clipping=0)
    engine = start(told, convert_to_random_ltd(Model(), Block))
    plain = Model()
    optimizer = torch.optim.Adam(plain.parameters())
    torch.manual_seed(3)
    for batch in islice(engine.training_dataloader.forever(), 4):  # type: ignore[union-attr]
        state = torch.get_rng_state()
        engine.backward(engine(*batch))
        engine.step()
        torch.set_rng_state(state)
        x, kept = batch[0], min(8, 2 + engine.global_steps - 1 - (engine.global_steps - 1) % 2)
        x = plain.layers[0](x)
        if kept < LENGTH:
            places = torch.rand(8, LENGTH).argsort(1)[:, :kept].sort(1).values
            rows = torch.arange(8)[:, None]
            x = x.index_put((rows, places), plain.layers[1](x[rows, places]))
        else:
            x = plain.layers[1](x)
        loss = plain.layers[2](x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_with_checkpointed_layers_it_is_the_same_run() -> None:
    def run(**change: Any) -> dict[str, Tensor]:
        engine = start(config(routing=ROUTED, **change), convert_to_random_ltd(Model(), Block))
        torch.manual_seed(1)
        seen(engine, 3)
        return engine.full_state_dict()

    plain = run()
    for name, value in run(activation_checkpointing={"modules": ["layers.*"]}).items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=0)


def test_without_converted_layers_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="0 layers that can be routed"):
        start(config(routing=ROUTED))
    with pytest.raises(ConfigError, match="random_ltd has no 'total_layer_num'"):
        start(config(routing={**ROUTED, "total_layer_num": None}), convert_to_random_ltd(Model(), Block))


@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipe"])
def test_with_layers_or_sequences_that_are_cut_it_is_an_error(axis: str) -> None:
    asked = TransformInput(ds_engine.load_config(config(routing=ROUTED)), shapes_of(Model()), MeshSpec(**{axis: 2}))
    with pytest.raises(UnsupportedError, match=f"{axis}.*other tokens"):
        Routing().decide(asked)


# ---- waiting


class Slow(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        threading.Event().wait(0.005)
        return super().__getitem__(index)


def test_time_that_a_step_waits_for_data_is_told() -> None:
    """Eight samples of 5 ms."""
    sink = MemorySink()
    ds_monitor.attach([sink])
    engine = ds_engine.initialize(model=Model(), config=config(), training_data=Slow())[0]
    try:
        assert engine.train_batch().waited_s >= 0.04
        assert engine.train_batch(iter([Rows()[i] for i in range(4)])).waited_s < 0.04
        assert engine.train_batch(DataLoader(Slow(), 2)).waited_s >= 0.04
        for batch in islice(engine.training_dataloader.forever(), 4):  # type: ignore[union-attr]
            engine.backward(engine(*batch))
            result = engine.step()
        assert result.waited_s >= 0.04
    finally:
        engine.close()
        ds_monitor.detach([sink])
    told = [record.value for record in sink.named(metric_names.DATA_WAIT)]
    assert len(told) == 4
    assert told[0] >= 40

"""On several ranks the engine gives the numbers of one process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import ds_comm
import ds_engine
import ds_engine.transforms as ds_engine_transforms
from ds_config.errors import PlanError
from ds_engine import Engine, SumLoss
from ds_testing import world
from ds_zero import NodeTopology

SAMPLES, WIDTH = 40, 6


class Model(nn.Module):
    """Masked regression: mean loss, or a sum over what the mask keeps."""

    def __init__(self, summed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.summed = nn.Linear(WIDTH, 16), nn.Linear(16, 1), summed

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Any:
        errors = (self.second(torch.tanh(self.first(x))) - y).square().squeeze(-1)
        return SumLoss((errors * keep).sum(), keep.sum()) if self.summed else errors.mean()


class Data(Dataset[tuple[Tensor, ...]]):
    """Samples (x, y, keep); most of them are masked out, unevenly."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True).cos()
        self.keep = (torch.rand(SAMPLES, generator=generator) < 0.3).float()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.x[index], self.y[index], self.keep[index]


def configured(stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 12}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    } | changes


def start(config: dict[str, Any], summed: bool = False) -> Engine:
    return ds_engine.initialize(model=Model(summed), config=config, training_data=Data())[0]


def reference(steps: int, summed: bool) -> tuple[list[float], dict[str, Tensor]]:
    """One process, the whole train batch at once, in double precision where sums are long."""
    model, data = Model(summed), Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    from ds_data import SampleStream
    from ds_engine.lr_schedules import LRScheduler, WarmupDecayLR

    scheduler = LRScheduler(WarmupDecayLR(warmup_num_steps=3, total_num_steps=12), optimizer)
    stream, losses = SampleStream(SAMPLES), []
    for step in range(steps):
        ids = [stream.sample(12 * step + i) for i in range(12)]
        output = model(data.x[ids], data.y[ids], data.keep[ids])
        loss = output.total / output.count if summed else output
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def check(engine: Engine, losses: list[float], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert losses == pytest.approx(expected[0], rel=1e-5)
    engine.close()
    for name, p in engine.module.named_parameters():
        torch.testing.assert_close(p.detach(), expected[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("summed", [False, True])
@world(2)
def test_two_ranks_are_one_process(stage: int, summed: bool) -> None:
    engine = start(configured(stage), summed)
    assert engine.plan.batch.accumulation == 3
    check(engine, [engine.train_batch().loss for _ in range(8)], reference(8, summed))


@world(3)
def test_three_ranks_are_one_process() -> None:
    engine = start(configured(2), summed=True)
    assert engine.plan.batch.accumulation == 2
    check(engine, [engine.train_batch().loss for _ in range(6)], reference(6, True))


@pytest.mark.parametrize("two_steps", [False, True])
@world(4)
def test_gathers_by_way_of_nodes_change_no_number(two_steps: bool) -> None:
    nodes = {"zero_hpz_partition_size": 2, "mics_hierarchical_params_gather": two_steps}
    zero = configured(3)["zero_optimization"] | nodes
    engine = start(configured(train_micro_batch_size_per_gpu=1, zero_optimization=zero))
    assert engine.optimizer is not None
    group_set = engine.optimizer.sharding.units[0].groups
    route = group_set.route
    assert route is not None
    assert group_set.nodes == NodeTopology(2, two_steps, secondary_partition=True)
    assert (route.inside.size, route.across.size) == (2, 2)
    check(engine, [engine.train_batch().loss for _ in range(5)], reference(5, False))


@pytest.mark.parametrize("stage", [0, 2, 3])
@world(2)
def test_the_three_calls_are_the_whole_step(stage: int) -> None:
    engine = start(configured(stage))
    losses: list[float] = []
    assert engine.training_dataloader is not None
    while len(losses) < 5:
        for batch in engine.training_dataloader:
            engine.backward(engine(*batch))
            result = engine.step()
            if result.applied:
                losses.append(result.loss)
            if len(losses) == 5:
                break
    check(engine, losses, reference(5, False))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_no_sync_at_every_stage(stage: int) -> None:
    engine = start(configured(stage))
    assert engine.training_dataloader is not None
    stream, losses = engine.training_dataloader.forever(), []
    for _ in range(4):
        for last in (False, False, True):
            if last:
                engine.backward(engine(*next(stream)))
            else:
                with engine.no_sync():
                    engine.backward(engine(*next(stream)))
            result = engine.step()
        losses.append(result.loss)
    check(engine, losses, reference(4, False))


@world(2)
def test_results_are_the_same_on_every_rank() -> None:
    engine = start(configured(1))
    result = engine.train_batch()
    mine = torch.tensor([result.loss, result.norm or 0.0, *result.lr], dtype=torch.float64)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)
    valid = engine.deepspeed_io(Data(), route="eval")
    assert engine.eval_batch(iter(valid), 5) > 0
    engine.close()


@world(2)
def test_summed_gradients_are_twice_the_mean() -> None:
    moved = []
    for op in ("mean", "sum"):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = start(configured(2, optimizer=sgd, scheduler=None, gradient_clipping=0, gradient_allreduce_op=op))
        before = engine.module.first.weight.detach().clone()
        engine.train_batch()
        moved.append(engine.module.first.weight.detach() - before)
        engine.close()
    torch.testing.assert_close(moved[1], 2 * moved[0])


@pytest.mark.parametrize("stage", [0, 2])
@world(2)
def test_gradients_travel_in_the_format_that_was_asked_for(stage: int) -> None:
    ends = []
    for travel in (None, "bf16"):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = start(configured(stage, optimizer=sgd, scheduler=None, communication_data_type=travel))
        engine.train_batch()
        engine.close()
        ends.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
    assert not torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (0, 1)])
@world(2)
def test_a_run_goes_on_on_one_rank(tmp_path: Path, before: int, after: int) -> None:
    engine = start(configured(before))
    for _ in range(3):
        engine.train_batch()
    path = engine.save_checkpoint(tmp_path, client_state={"k": [1, 2]})
    engine.close()
    same = start(configured(after))
    assert same.load_checkpoint(tmp_path) == (path, {"k": [1, 2]})
    check(same, [same.train_batch().loss for _ in range(4)], (reference(7, False)[0][3:], reference(7, False)[1]))


@world(1)
@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the three tests below, which run on different numbers of ranks."""
    return tmp_path_factory.mktemp("shared")


def _goes_on(path: Path, engine: Engine, ranks: int) -> None:
    assert engine.mesh["world"].size == ranks
    assert engine.load_checkpoint(path)[0] is not None
    losses = [engine.train_batch().loss for _ in range(4)]
    assert losses == pytest.approx(reference(7, False)[0][3:], rel=1e-5)
    engine.close()


@world(2)
def test_two_ranks_save(shared: Path) -> None:
    engine = start(configured(3))
    assert engine.mesh["world"].size == 2
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(shared)
    engine.close()


def test_then_one_goes_on(shared: Path) -> None:
    _goes_on(shared, start(configured(1, train_micro_batch_size_per_gpu=4)), 1)


@world(4)
def test_then_four_go_on(shared: Path) -> None:
    _goes_on(shared, start(configured(2, train_micro_batch_size_per_gpu=3)), 4)


class Counted(nn.Module):
    """Mean squared error of one linear layer, or its sum with the number of rows."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.summed = nn.Linear(WIDTH, 1), summed

    def forward(self, x: Tensor) -> Any:
        errors = self.layer(x).square()
        return SumLoss(errors.sum(), len(x)) if self.summed else errors.mean()


MICROBATCHES = {0: (3, 1, 4, 1, 5), 1: (2, 6, 2)}  # rows of each, by rank


def microbatches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(rows, WIDTH, generator=generator) for rows in MICROBATCHES[rank]]


@pytest.mark.parametrize(("policy", "summed", "steps"), [("stop", False, 1), ("fill", False, 3), ("fill", True, 3)])
@world(2)
def test_data_that_end_on_one_rank_first(policy: Any, summed: bool, steps: int) -> None:
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0, "scheduler": None}
    config = configured(2, train_batch_size=4, train_micro_batch_size_per_gpu=1, **settings)
    engine = ds_engine.initialize(model=Counted(summed), config=config)[0]
    batches = ds_engine.even_batches(microbatches(dist.get_rank()), engine.mesh["data"], policy, together=2)
    losses = [engine.train_batch(batches).loss for _ in range(steps)]
    with pytest.raises(StopIteration):
        engine.train_batch(batches)

    alone, expected = Counted(summed), []
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        found = [alone(x) for rank in range(2) for x in microbatches(rank)[2 * step : 2 * step + 2]]
        loss = sum(f.total for f in found) / sum(f.count for f in found) if summed else torch.stack(found).mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        expected.append(float(loss))
    check(engine, losses, (expected, dict(alone.named_parameters())))


@world(2)
def test_data_that_end_on_one_rank_are_an_error_on_both() -> None:
    group = ds_comm.world_group()
    with pytest.raises(PlanError, match=r"rank 1 ended.*\[1, 0\]") as caught:
        list(ds_engine.even_batches(range(3 - group.rank), group, "error"))
    assert caught.value.code == "data-uneven"
    with pytest.raises(PlanError, match=r"\[1, -1\]") as caught:
        list(ds_engine.even_batches(range(1 - group.rank), group, "fill"))
    assert caught.value.code == "data-none"
    assert list(ds_engine.even_batches(range(5), group, "error", together=2)) == [0, 1, 2, 3]


SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 0.7},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.03, "cycle_first_step_size": 3, "decay_step_size": 2, "decay_lr_rate": 0.3},
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 7},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 7},
}  # fmt: skip


def check_rates() -> None:
    for name, params in SCHEDULES.items():
        engine = start(configured(1, scheduler={"type": name, "params": params}, train_micro_batch_size_per_gpu=3))
        schedule = engine.plan.config.scheduler.params  # type: ignore[union-attr]
        assert [engine.train_batch().lr for _ in range(7)] == [(schedule.lr(t, 0.02),) for t in range(-1, 6)], name
        engine.close()


@world(1)
def test_rates_are_the_formulas_on_one_rank() -> None:
    check_rates()


@world(2)
def test_rates_are_the_formulas_on_two_ranks() -> None:
    check_rates()


@world(4)
def test_rates_are_the_formulas_on_four_ranks() -> None:
    check_rates()


@world(4)
def test_a_default_run_says_nothing(tmp_path: Path) -> None:
    """100 steps on 4 ranks: not a byte on stdout and stderr; with INFO switched on at most 20 lines, all of rank 0."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    root, out = logging.getLogger(), tmp_path / f"said-{dist.get_rank()}"
    kept = [os.dup(1), os.dup(2)]
    before = root.level
    with out.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            quiet = start(configured(2, train_batch_size=16, train_micro_batch_size_per_gpu=4))
            for _ in range(50):
                quiet.train_batch()
            root.addHandler(handler)
            root.setLevel(logging.INFO)
            for _ in range(50):
                quiet.train_batch()
            quiet.save_checkpoint(tmp_path / "ckpt")
            quiet.close()
        finally:
            root.setLevel(before)
            root.removeHandler(handler)
            for number, fd in zip((1, 2), kept, strict=True):
                os.dup2(fd, number)
                os.close(fd)
    assert out.read_bytes() == b""
    assert len(lines) <= (20 if dist.get_rank() == 0 else 0), lines


@world(2)
def test_the_world_is_that_of_the_launch_whenever_the_configuration_is_read() -> None:
    config = ds_engine.load_config(configured())
    assert "world" not in config.model_dump_json()
    plan = ds_engine.make_plan(config, ds_engine.shapes_of(Model()), 2)
    engine = start(configured())
    assert engine.plan.batch == plan.batch
    assert engine.plan.mesh == plan.mesh
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_predivided_and_unmanaged_steps_are_the_same_numbers(stage: int) -> None:
    plain, scaled = start(configured(stage)), start(configured(stage, prescale_gradients=True))
    loose = start(configured(stage, managed_gradient_accumulation=False))
    for _ in range(3):
        plain.train_batch()
        assert scaled.train_batch().loss == pytest.approx(plain.last.loss)  # type: ignore[union-attr]
        data = loose.training_dataloader.forever()
        for _ in range(3):
            loose.backward(loose(*next(data)))
        assert loose.step().samples == 12
    for engine in (plain, scaled, loose):
        engine.close()
    for one, two, three in zip(*(e.module.parameters() for e in (plain, scaled, loose)), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_whole_values_and_state_away_on_two_ranks(stage: int) -> None:
    engine, other = start(configured(stage)), start(configured(stage))
    for one in (engine, other):
        one.train_batch()
    engine.suspend()
    engine.resume()
    for one in (engine, other):
        one.train_batch()
    state, expected = engine.full_state_dict(), other.full_state_dict()
    assert list(state) == (list(Model().state_dict()) if dist.get_rank() == 0 else [])
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    other.load_full_state_dict({name: torch.zeros_like(value) for name, value in Model().state_dict().items()})
    assert all(not value.any() for value in other.full_state_dict().values())
    assert other.load_full_state_dict(state) == ([], [])  # which the first rank has
    assert all(torch.equal(value, state[name]) for name, value in other.full_state_dict().items())
    engine.close()
    other.close()


class Sequences(ds_engine_transforms.Transform[bool, None]):
    """A degree of sequence parallelism that changes nothing: each rank brings its own part of a sequence."""

    name, axes = "sequence parallel", ("sequence",)

    def decide(self, asked: ds_engine_transforms.TransformInput) -> bool:
        return True

    def apply(self, what: bool, site: ds_engine_transforms.BuildContext) -> None:
        if os.environ.get("DS_TEST_BREAKS") == str(site.mesh.rank):
            raise RuntimeError("only here")

    def undo(self, made: None) -> None:
        return


def _with_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [transform for transform in ds_engine_transforms.TRANSFORMS if transform.name != Sequences.name]
    for place in ("ds_engine.planner.TRANSFORMS", "ds_engine.builder.TRANSFORMS"):
        monkeypatch.setattr(place, (Sequences(), *others))


@pytest.mark.parametrize("stage", [0, 3])
@world(2)
def test_losses_and_gradients_are_averaged_over_data_and_sequence(stage: int) -> None:
    data, rank = Data(), dist.get_rank()

    def trained(sequence: int, summed: bool) -> tuple[list[float], list[Tensor], Any]:
        with pytest.MonkeyPatch.context() as patch:
            _with_sequences(patch)
            settings = configured(stage, sequence_parallel_size=sequence, train_batch_size=4 // sequence * 2)
            engine, *_ = ds_engine.initialize(model=Model(summed), config=settings)
        assert engine.mesh["data"].size == 2 // sequence
        assert engine.plan.batch.accumulation == 2
        rows = [
            slice(8 * step + 4 * rank + 2 * m, 8 * step + 4 * rank + 2 * m + 2) for step in range(2) for m in range(2)
        ]
        batches = iter([(data.x[r], data.y[r], data.keep[r]) for r in rows])
        losses = [engine.train_batch(batches).loss for _ in range(2)]
        samples = engine.global_samples
        engine.close()
        return losses, [p.detach().clone() for p in engine.module.parameters()], samples

    for summed in (False, True):
        one, two = trained(1, summed), trained(2, summed)
        assert one[0] == two[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
        assert (one[2], two[2]) == (16, 8)


@world(2)
def test_a_failure_of_one_rank_leaves_the_model_alone_on_all() -> None:
    rank, model = dist.get_rank(), Model()
    before = [(id(p), type(p), p.detach().clone()) for p in model.parameters()]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        if rank == 1:
            raise RuntimeError("only here")
        return torch.optim.SGD(params, lr=0.1)

    def data() -> Any:
        return Data() if rank == 0 else iter([1])

    settings = configured(3, optimizer=None, scheduler=None)
    for arguments, broken in (({"optimizer": optimizer}, ""), ({"training_data": data()}, ""), ({}, "1")):
        with pytest.MonkeyPatch.context() as patch:
            _with_sequences(patch)
            patch.setenv("DS_TEST_BREAKS", broken)
            with pytest.raises(Exception, match=r"only here|no len") as caught:
                ds_engine.initialize(model=model, config=settings, **arguments)
        assert isinstance(caught.value, PlanError) == (rank == 0)
        assert rank == 1 or str(caught.value).count("rank 1 failed") == 1
    after = [(id(p), type(p), p.detach()) for p in model.parameters()]
    assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))
    engine, *_ = ds_engine.initialize(model=model, config=configured(3), training_data=Data())
    assert engine.train_batch().applied
    engine.close()


class Means(nn.Module):
    """Running means of different sizes, which differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line = nn.Linear(WIDTH, 1)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return self.line(x).square().mean()


@world(3)
def test_saved_buffers_are_all_of_one_rank(tmp_path: Path) -> None:
    settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds_engine.initialize(model=Means(), config=settings)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.train_batch(iter([x]))
    own = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    firsts = {name: buffer.clone() for name, buffer in own.items()}
    for buffer in firsts.values():
        dist.broadcast(buffer, 0)
    if dist.get_rank():
        assert not torch.equal(own["norms.0.running_mean"], firsts["norms.0.running_mean"])
    engine.save_checkpoint(tmp_path, tag="means")
    engine.load_checkpoint(tmp_path, tag="means")
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, firsts[name]), name
    engine.close()

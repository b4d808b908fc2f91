"""On one process the engine is the plain loop, whichever way it is called."""

import copy
import gc
import json
import pickle
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
import ds_monitor
from ds_config.errors import ConfigError, DsError, PlanError, UnsupportedError
from ds_engine import Engine, SumLoss
from ds_monitor import MemorySink, metric_names

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Make = Callable[[], nn.Module]
Settings = Callable[..., dict[str, Any]]


def batches(rows: Any, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    for start in cycle(range(0, len(rows), size)):
        yield rows.x[start : start + size], rows.y[start : start + size]


def start(model: nn.Module, config: dict[str, Any], **more: Any) -> Engine:
    return ds_engine.initialize(model=model, config=config, **more)[0]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(model: nn.Module, rows: Any, steps: int, clip: float = 1.0) -> list[float]:
    """The loop that everyone knows: two microbatches of four a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    data, losses = batches(rows), []
    for _ in range(steps):
        total = 0.0
        for _ in range(2):
            loss = model(*next(data)) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def close_to(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_loops_are_the_plain_loop(make_model: Make, config: Settings, rows: Any, stage: int) -> None:
    expected = make_model()
    expected_losses = plain(expected, rows, 5)
    by_three, by_batch = make_model(), make_model()
    three = start(by_three, config(zero_optimization={"stage": stage}))
    data = batches(rows)
    losses = []
    for _ in range(5):
        applied = []
        for _ in range(2):
            assert three.is_gradient_accumulation_boundary() == (len(applied) == 1)
            loss = three(*next(data))
            assert torch.equal(three.backward(loss), loss.detach() / 2)
            applied.append(three.step().applied)
        assert applied == [False, True]
        assert three.was_step_applied()
        losses.append(three.last.loss)  # type: ignore[union-attr]
    whole = start(by_batch, config(zero_optimization={"stage": stage}))
    data = batches(rows)
    assert [whole.train_batch(data).loss for _ in range(5)] == losses
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    three.close()
    whole.close()
    assert close_to(values(by_three), values(expected))
    assert all(torch.equal(a, b) for a, b in zip(by_three.parameters(), by_batch.parameters(), strict=True))


def test_counters_and_results(make_model: Make, config: Settings, rows: Any) -> None:
    engine = start(make_model(), config(), training_data=rows)
    assert engine.last is None
    assert engine.get_global_grad_norm() is None
    for expected in (1, 2, 3):
        result = engine.train_batch()
        assert (result.step, result.samples, result.skipped, result.scale) == (expected, 8, False, 1.0)
    assert result.lr == (0.01,)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps) == (3, 24, 6, 0)
    assert engine.get_global_grad_norm() == result.norm
    assert result.norm is not None
    assert result.norm > 0
    engine.close()


def test_no_sync_accumulates_and_step_reduces(make_model: Make, config: Settings, rows: Any) -> None:
    single = config(gradient_accumulation_steps=1, train_batch_size=4, zero_optimization={"stage": 2})
    model = make_model()
    engine = start(model, single)
    data = batches(rows)
    with engine.no_sync():
        engine.backward(engine(*next(data)))
    engine.backward(engine(*next(data)))
    assert engine.step().applied
    engine.close()
    expected = make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.0)
    data = batches(rows)
    for _ in range(2):  # a sum over both, as in DDP
        expected(*next(data)).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    optimizer.step()
    assert close_to(values(model), values(expected))


class Tokens(nn.Module):
    """Sum of squared errors over the samples that a mask keeps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> SumLoss:
        errors = (self.inner.predict(x) - y).square().squeeze(1)  # type: ignore[operator]
        return SumLoss((errors * keep).sum(), keep.sum())


def test_sum_losses_weigh_every_token_the_same(make_model: Make, config: Settings, rows: Any) -> None:
    keep = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
    model = Tokens(make_model())
    engine = start(model, config(gradient_clipping=0))
    data = iter([(rows.x[i : i + 4], rows.y[i : i + 4], keep[i : i + 4]) for i in (0, 4)])
    result = engine.train_batch(data)
    engine.close()
    expected = make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.0)
    loss = (expected.predict(rows.x[:5]) - rows.y[:5]).square().mean()  # type: ignore[operator]
    loss.backward()
    optimizer.step()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert close_to(values(model.inner), values(expected))


def test_a_batch_without_tokens_changes_nothing_but_is_a_step(make_model: Make, config: Settings, rows: Any) -> None:
    engine = start(Tokens(make_model()), config(optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    before = values(engine.module)
    data = iter([(rows.x[:4], rows.y[:4], torch.zeros(4))] * 2)
    result = engine.train_batch(data)
    assert result.loss == 0.0
    assert close_to(values(engine.module), before)
    engine.close()


def test_evaluation_changes_nothing(make_model: Make, config: Settings, rows: Any) -> None:
    model = nn.Sequential(make_model())
    model.forward = lambda x, y: model[0](x, y) + float(model.training)  # type: ignore[method-assign]
    engine = start(model, config())
    before = values(model)
    loss = engine.eval_batch(batches(rows), num_micro_batches=3)
    expected = torch.stack([model[0](rows.x[i : i + 4], rows.y[i : i + 4]) for i in (0, 4, 8)]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in values(model).items())
    engine.close()


def test_batches_may_be_dicts_and_single_tensors(config: Settings) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"loss": (x @ self.weight).mean() * scale}

    engine = start(Named(), config(gradient_clipping=0))
    by_name = engine.train_batch(iter([{"x": torch.ones(4, 3), "scale": 2.0}] * 2))
    assert by_name.loss == 6.0
    assert engine.train_batch(iter([torch.ones(4, 3)] * 2)).loss < 3.0
    engine.close()


def test_the_scheduler_follows_the_steps(make_model: Make, config: Settings, rows: Any) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = start(make_model(), config(scheduler=scheduler), training_data=rows)
    seen = [engine.train_batch().lr[0] for _ in range(6)]
    assert seen == [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01]
    assert engine.get_lr() == [0.01]
    engine.close()


def test_torch_schedulers_and_callables(make_model: Make, config: Settings, rows: Any) -> None:
    step_lr = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    by_name = start(make_model(), config(scheduler=step_lr), training_data=rows)
    by_callable = start(
        make_model(),
        config(),
        training_data=rows,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    for engine in (by_name, by_callable):
        assert [engine.train_batch().lr[0] for _ in range(3)] == [0.01, 0.005, 0.0025]
    assert close_to(values(by_name.module), values(by_callable.module))
    by_name.close()
    by_callable.close()


def test_a_scheduler_of_samples_gets_the_batch(make_model: Make, config: Settings, rows: Any) -> None:
    """As Megatron's `step(increment)`, where nobody gives the number: `train_batch` cannot. A metric is not made up."""
    seen: list[int] = []

    class Samples:
        def step(self, increment: int) -> None:
            seen.append(increment)

    engine = start(make_model(), config(), training_data=rows, lr_scheduler=Samples())
    engine.train_batch()
    assert seen == [engine.plan.batch.train]
    engine.close()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    engine = start(
        make_model(), config(optimizer=None), training_data=rows, optimizer=torch.optim.SGD, lr_scheduler=plateau
    )
    with pytest.raises(TypeError, match="metrics"):
        engine.train_batch()
    engine.close()


def test_groups_without_parameters_are_dropped(make_model: Make, config: Settings) -> None:
    """As DeepSpeed drops them: values of a schedule by group are of those that train, unless a scheduler has counted them all."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.5], "warmup_num_steps": 2}}
    for client in (False, True):
        model = make_model()
        groups = [{"params": []}, {"params": list(model.parameters())}, {"params": []}]
        given = {"optimizer": torch.optim.SGD(groups)} if client else {"model_parameters": groups}
        optimizer = {"optimizer": None} if client else {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.5}}}
        engine = start(model, config(**optimizer, **({"scheduler": schedule} if client else {})), **given)
        assert [len(group["params"]) > 0 for group in engine.optimizer.param_groups] == [True] * (1 if client else 2)  # type: ignore[union-attr]
        engine.close()
    inner = torch.optim.SGD([{"params": []}, {"params": list((model := make_model()).parameters())}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    engine = start(model, config(optimizer=None), optimizer=inner, lr_scheduler=scheduler)
    assert engine.get_mom() == [0, 0]
    engine.close()


def test_a_client_optimizer_keeps_its_groups(make_model: Make, config: Settings, rows: Any) -> None:
    model = make_model()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.0},  # type: ignore[union-attr]
        {"params": list(model.second.parameters()), "lr": 0.1},  # type: ignore[union-attr]
    ]
    engine = start(model, config(optimizer=None), optimizer=torch.optim.SGD(groups), training_data=rows)
    before = values(model)
    assert engine.train_batch().lr == (0.0, 0.1)
    after = values(model)
    assert [torch.equal(before[name], after[name]) for name in before] == [True, True, False, False]
    engine.optimizer.param_groups[1]["lr"] = 0.0  # type: ignore[union-attr]
    engine.train_batch()
    assert torch.equal(values(model)["second.weight"], after["second.weight"])
    engine.close()


def test_clipping_is_on_by_default_and_zero_is_off(make_model: Make, config: Settings, rows: Any) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    moved = []
    for changes in ({}, {"gradient_clipping": 0.01}, {"gradient_clipping": 0}):
        engine = start(make_model(), config(optimizer=sgd, **changes))
        before = values(engine.module)
        engine.train_batch(iter([(rows.x[:4] * 100, rows.y[:4] * 100)] * 2))
        after = values(engine.module)
        moved.append(sum(float((after[n] - before[n]).square().sum()) for n in before) ** 0.5)
        engine.close()
    assert moved[0] == pytest.approx(1.0, rel=1e-3)
    assert moved[1] == pytest.approx(0.01, rel=1e-3)
    assert moved[2] > 10


def test_fp16_skips_and_lowers_the_scale(make_model: Make, config: Settings, rows: Any) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine = start(make_model(), config(fp16=fp16, scheduler=scheduler))
    before = values(engine.module)
    huge = (torch.full((4, 6), 6e4, dtype=torch.float16), torch.full((4, 1), -6e4, dtype=torch.float16))
    result = engine.train_batch(iter([huge] * 2))
    assert (result.skipped, result.applied, result.scale, engine.skipped_steps) == (True, False, 16.0, 1)
    assert all(torch.equal(before[name], value) for name, value in values(engine.module).items())
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": -1}
    fine = (rows.x[:4].half(), rows.y[:4].half())
    result = engine.train_batch(iter([fine] * 2))
    assert (result.applied, result.scale) == (True, 8.0)
    engine.close()


def test_bf16_trains_on_fp32_masters(make_model: Make, config: Settings, rows: Any) -> None:
    engine = start(make_model(), config(bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 1e-4}}))
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    first = [shard.data.clone() for shard in engine.sharding.param_shards()]
    for _ in range(3):
        engine.train_batch(iter([(rows.x[:4].bfloat16(), rows.y[:4].bfloat16())] * 2))
    last = engine.sharding.param_shards()
    assert all(shard.data.dtype == torch.float32 for shard in last)
    assert any(not torch.equal(a, b.data) for a, b in zip(first, last, strict=True))  # too small a change for bf16
    engine.close()


def test_the_monitor_hears_of_every_step(make_model: Make, config: Settings, rows: Any, tmp_path: Path) -> None:
    sink = MemorySink()
    ds_monitor.configure([sink])
    monitored = config(
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}, wall_clock_breakdown=True
    )
    engine = start(make_model(), monitored, training_data=rows)
    losses = [engine.train_batch().loss for _ in range(4)]
    assert [record.value for record in sink.named("Train/Samples/train_loss")] == losses
    assert [record.samples for record in sink.named("Train/Samples/lr")] == [8, 16, 24, 32]
    assert len(sink.named("engine/forward")) == 8
    assert len(sink.named("Train/Samples/elapsed_time_ms_forward")) == 4
    assert sink.named("Train/samples_per_s")
    engine.close()
    assert not sink.closed  # the engine takes away its own sinks only
    assert len(list((tmp_path / "job").glob("*train_loss*.csv"))) == 1
    ds_monitor.shutdown()


def test_engines_of_a_process_have_metrics_of_their_own(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    """A generator and its critic: one wrote into the other's files, at the steps of whichever had been stepped last."""
    engines = []
    for name, lr in (("actor", 0.1), ("critic", 0.2), ("reward", 0.3)):
        sections = {"optimizer": {"type": "SGD", "params": {"lr": lr}}}
        if name != "reward":
            sections["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": name}
        engines.append(start(make_model(), config(**sections), training_data=rows))
    for steps in ((0, 1, 2), (0, 1, 2), (0, 2)):
        for which in steps:
            engines[which].train_batch()
    for engine in engines:
        engine.close()
    rates = {name: (tmp_path / name / "Train_Samples_lr.csv").read_text().split() for name in ("actor", "critic")}
    assert rates == {"actor": ["step,lr", "8,0.1", "16,0.1", "24,0.1"], "critic": ["step,lr", "8,0.2", "16,0.2"]}


def test_metrics_of_a_run_reach_a_sink_of_the_configuration(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    asked = {"sink": "jsonl", "ranks": "all", "options": {"path": str(path), "kinds": ["gauge", "counter"]}}
    monitored = config(monitor={"sinks": [asked], "peak_tflops": 1e-3}, gradient_clipping=1.0)
    engine = start(make_model(), monitored, training_data=rows)
    for _ in range(4):
        engine.train_batch()
    counted = engine._telemetry.counter
    engine.close()
    told: dict[str, list[float]] = {}
    for row in map(json.loads, path.with_name("a.rank0.jsonl").read_text().splitlines()):
        told.setdefault(row["name"], []).append(row["value"])
    once_a_step = (metric_names.LOSS, metric_names.LR, metric_names.GRAD_NORM)
    assert {name: len(told[name]) for name in once_a_step} == dict.fromkeys(once_a_step, 4)
    assert told[metric_names.MEMORY][0] > 0
    assert told[metric_names.COMM_SHARE] == [0.0] * len(told[metric_names.STEP_TIME])  # one rank
    assert counted is not None
    needed = 3 * counted.modules[0].flops * 2  # microbatches
    assert told[metric_names.MFU][0] == pytest.approx(needed / (told[metric_names.STEP_TIME][0] / 1e3) / 1e9)


def test_what_the_engine_does_not_know_is_the_model(make_model: Make, config: Settings) -> None:
    engine = start(make_model(), config())
    assert engine.predict(torch.zeros(1, 6)).shape == (1, 1)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    engine.eval()
    assert not engine.module.training
    engine.close()


def test_without_an_optimizer_it_evaluates(make_model: Make, config: Settings, rows: Any) -> None:
    engine, optimizer, loader, scheduler = ds_engine.initialize(model=make_model(), config=config(optimizer=None))
    assert (optimizer, loader, scheduler) == (None, None, None)
    assert engine.eval_batch(batches(rows)) > 0
    for call in (engine.step, engine.get_lr, engine.train_batch, lambda: engine.backward(torch.zeros(()))):
        with pytest.raises(PlanError) as caught:
            call()  # type: ignore[operator]
        assert caught.value.code == "engine-no-optimizer"
    engine.close()


def test_mistakes_are_errors(make_model: Make, config: Settings, rows: Any) -> None:
    engine = start(make_model(), config())
    with pytest.raises(PlanError) as no_data:
        engine.train_batch()
    assert no_data.value.code == "data-missing"
    engine.backward(engine(rows.x[:4], rows.y[:4]))
    engine.step()
    with pytest.raises(PlanError) as order:
        engine.train_batch(batches(rows))
    assert order.value.code == "engine-call-order"
    assert "1 of 2 microbatches" in order.value.message
    with pytest.raises(UnsupportedError):
        engine.deepspeed_io(rows, route="sideways")
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        ({"model": None}, PlanError, "engine-no-model"),
        ({"model": "gpt"}, PlanError, "engine-no-model"),
        ({"mpu": object()}, PlanError, "mesh-mpu"),
        ({"mesh_param": (1, 2)}, PlanError, "mesh-size"),
        ({"config": None}, ConfigError, "config-source"),
        ({"optimizer": "adam"}, PlanError, "engine-optimizer"),
        ({"optimizer": lambda params: "adam"}, PlanError, "engine-optimizer"),
        ({"lr_scheduler": lambda optimizer: "cosine"}, PlanError, "engine-optimizer"),
        ({"model_parameters": []}, PlanError, "engine-optimizer"),
        ({"training_data": iter([1])}, UnsupportedError, "data-iterable"),
    ],
)
def test_bad_arguments_of_initialize(
    make_model: Make, config: Settings, arguments: dict[str, Any], kind: type[DsError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        ds_engine.initialize(**({"model": make_model(), "config": config()} | arguments))
    assert caught.value.code == code


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_listed_twice_is_refused(make_model: Make, config: Settings) -> None:
    """torch would step it twice, and warns that it will refuse it one day."""
    model = make_model()
    params = [*model.parameters()]
    with pytest.raises(PlanError, match=f"lists {len(params) + 1} parameters, {len(params)} of which"):
        ds_engine.initialize(model=model, config=config(), model_parameters=[*params, params[0]])


def test_two_engines_in_one_process_feed_one_loss(make_model: Make, config: Settings, rows: Any) -> None:
    single = config(gradient_accumulation_steps=1, train_batch_size=4, gradient_clipping=0)
    first, second = make_model(), make_model()
    engines = [start(first, single), start(second, single)]
    loss = engines[0](rows.x[:4], rows.y[:4]) + 2 * engines[1](rows.x[:4], rows.y[:4])
    assert engines[0].optimizer is not None
    engines[0].optimizer.scale(loss).backward()
    for engine in engines:
        assert engine.step().applied
        engine.close()
    expected = [make_model(), make_model()]
    for weight, model in zip((1, 2), expected, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        (weight * model(rows.x[:4], rows.y[:4])).backward()
        optimizer.step()
    assert close_to(values(first), values(expected[0]))
    assert close_to(values(second), values(expected[1]))


def test_summed_gradients(make_model: Make, config: Settings, rows: Any) -> None:
    one = config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0)
    models = [make_model(), make_model()]
    for model, op in zip(models, ("mean", "sum"), strict=True):
        engine = start(model, one | {"gradient_allreduce_op": op})
        engine.train_batch(batches(rows))
        engine.close()
    assert close_to(values(models[0]), values(models[1]))  # one rank: the same


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_none_after_backward(make_model: Make, config: Settings, rows: Any, stage: int) -> None:
    """Not the stand-ins of a plain `ds_zero.shard` loop: clients ask whether there is a gradient, and go on."""
    model = make_model()
    engine, data = start(model, config(zero_optimization={"stage": stage})), batches(rows)
    for _ in range(4):
        engine.backward(engine(*next(data)))
        assert all(p.grad is None for p in model.parameters())
        engine.step()
    engine.close()


def test_close_gives_the_model_back(make_model: Make, config: Settings, rows: Any) -> None:
    model = make_model()
    engine = start(model, config(zero_optimization={"stage": 3}))
    engine.train_batch(batches(rows))
    engine.close()
    twin = copy.deepcopy(model)
    assert close_to(values(twin), values(model))
    model(rows.x[:4], rows.y[:4]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_inputs_are_cast_and_operations_under_autocast(make_model: Make, config: Settings, rows: Any) -> None:
    seen: list[torch.dtype] = []

    class Watching(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("table", torch.ones(6))
            self.register_buffer("index", torch.arange(6))

        def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
            assert ids.dtype == torch.int64
            seen.append(self.inner.first(x).dtype)  # type: ignore[union-attr,operator]
            return self.inner(x, y)

    batch = (rows.x[:4], rows.y[:4], torch.arange(4))
    for changes, expected in (
        ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, torch.bfloat16),
        ({"data_types": {"buffer_dtype": "bf16"}}, torch.float32),
    ):
        engine = start(Watching(make_model()), config(**changes))
        engine.train_batch(iter([batch] * 2))
        assert set(seen) == {expected}
        seen.clear()
        buffers = {name: b.dtype for name, b in engine.module.named_buffers()}
        wanted = torch.bfloat16 if "data_types" in changes else torch.float32
        assert buffers == {"table": wanted, "index": torch.int64}
        engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("section", "cast"), [("bf16", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_parameters_of_few_bits_under_autocast_are_those_of_torch(
    make_model: Make, config: Settings, rows: Any, section: str, cast: str, stage: int
) -> None:
    """As DeepSpeed, the engine casts the parameters by one section, and operations by the other."""
    low, operations = DTYPES[section], DTYPES[cast]
    master = make_model()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1)
    copy_of_it = copy.deepcopy(master).to(low)
    changes = {section: {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": cast}}
    changes |= {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
    }
    if "fp16" in (section, cast):
        changes["fp16"] = changes.get("fp16", {}) | {"initial_scale_power": 0}
    engine = start(make_model(), config(**changes, zero_optimization={"stage": stage}))
    assert (engine.plan.precision.scale is not None) == ("fp16" in (section, cast))
    data = batches(rows, 8)
    for _ in range(3):
        x, y = next(data)
        x, y = x.to(low), y.to(low)
        with torch.autocast("cpu", operations):
            expected = copy_of_it(x, y)
        expected.backward()
        for wide, narrow in zip(master.parameters(), copy_of_it.parameters(), strict=True):
            wide.grad, narrow.grad = narrow.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(master.parameters(), copy_of_it.parameters(), strict=True):
                narrow.copy_(wide)
        loss = engine(x, y)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        engine.step()
    engine.close()


class Routed(nn.Module):
    """A router's bias beside another buffer, with the lists of a transformers model."""

    def __init__(self, strict: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._keep_in_fp32_modules_strict, self._keep_in_fp32_modules = strict, plain
        self.layer = nn.Linear(2, 2)
        self.layer.register_buffer("score_bias", torch.ones(2, dtype=torch.bfloat16))
        self.layer.register_buffer("table", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().square().mean()


@pytest.mark.parametrize(
    ("low", "lists", "keep", "wide"),
    [
        ("bf16", (("score_bias",), ("table",)), "auto", {"score_bias"}),
        ("fp16", (("score_bias",), ("table",)), "auto", {"score_bias", "table"}),
        ("bf16", (("score_bias",), ()), [], set()),
        ("bf16", ((), ()), ["layer.*bias"], {"score_bias"}),
        ("bf16", ((), ()), ["score_bias", "tab"], {"score_bias", "table"}),
    ],
)
def test_buffers_that_stay_fp32(
    config: Settings, low: str, lists: tuple[tuple[str, ...], ...], keep: Any, wide: set[str]
) -> None:
    narrow = torch.bfloat16 if low == "bf16" else torch.float16
    types = {"keep_in_fp32_modules": keep, "buffer_dtype": low}
    engine = start(Routed(*lists), config(data_types=types, **{low: {"enabled": True}}))
    found = {name: buffer.dtype for name, buffer in engine.module.layer.named_buffers()}
    assert found == {name: torch.float32 if name in wide else narrow for name in ("score_bias", "table")}
    engine.close()


def test_the_collector_of_python_is_off_while_an_engine_wants_it(make_model: Make, config: Settings) -> None:
    assert gc.isenabled()
    engines = [start(make_model(), config(disable_python_gc=True)) for _ in range(2)]
    assert not gc.isenabled()
    engines[0].close()
    engines[0].close()
    assert not gc.isenabled()
    engines[1].close()
    assert gc.isenabled()
    engine = start(make_model(), config())
    assert gc.isenabled()
    gc.disable()
    try:
        start(make_model(), config(disable_python_gc=True)).close()
        assert not gc.isenabled()
    finally:
        gc.enable()
    engine.close()


def test_low_precision_masters_and_states(make_model: Make, config: Settings, rows: Any) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = start(make_model(), config(bf16=bf16, zero_optimization={"stage": 1}))
    engine.train_batch(iter([(rows.x[:4].bfloat16(), rows.y[:4].bfloat16())] * 2))
    assert engine.optimizer is not None
    assert {shard.data.dtype for shard in engine.optimizer.shards()} == {torch.bfloat16}
    engine.close()


def test_sanity_checks_are_the_strict_mode(make_model: Make, config: Settings) -> None:
    engine = start(make_model(), config(zero_optimization={"enable_sanity_checks": True, "overlap_comm": False}))
    assert (engine.sharding.options.strict, engine.sharding.options.overlap) == (True, False)
    engine.close()


def test_nothing_but_the_plan_is_asked() -> None:
    """A decision that is taken while training is one that no plan shows."""
    folder = Path(ds_engine.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in (folder / "engine.py", folder / "builder.py", folder / "step_telemetry.py")
        for line in path.read_text().splitlines()
        if "plan.config" in line or ".config." in line
    ]
    allowed = ("model_dump", "make_sinks", "make_engine", "make_near")
    assert [line for line in found if not any(word in line for word in allowed)] == []


class Normed(nn.Module):
    """A model with running means, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.trained, self.frozen = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.frozen.eval()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.frozen(self.trained(self.first(x)))) - y).square().mean()


def test_evaluation_leaves_every_module_in_the_mode_it_was_in(config: Settings, rows: Any) -> None:
    engine = start(Normed(), config())
    before = {name: module.training for name, module in engine.module.named_modules()}
    assert before["frozen"] is False
    assert before["trained"] is True
    seen: list[bool] = []
    engine.module.trained.register_forward_hook(lambda module, *_: seen.append(module.training))
    engine.eval_batch(iter([(rows.x[:4], rows.y[:4])]), num_micro_batches=1)
    assert seen == [False]
    assert {name: module.training for name, module in engine.module.named_modules()} == before


def test_a_loader_that_is_lent_goes_on_where_it_was(make_model: Make, config: Settings, rows: Any) -> None:
    batches = [(rows.x[i : i + 4], rows.y[i : i + 4]) for i in range(0, 12, 4)]  # three; a step takes two
    lent, plain = start(make_model(), config()), start(make_model(), config())
    order = cycle(batches)
    for _ in range(4):
        assert lent.train_batch(batches).loss == plain.train_batch(order).loss
    other = [batches[0]] * 2
    assert lent.train_batch(other).loss == plain.train_batch(iter(other)).loss
    with pytest.raises(StopIteration):
        lent.train_batch([])


class PerTensor(torch.optim.Optimizer):
    """A client's own: the step of each tensor is as long as the tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] * param.norm() / (param.grad.norm() + 1e-6)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_per_tensor_optimizer_of_the_client_is_laid_out_whole(
    make_model: Make, config: Settings, rows: Any, stage: int
) -> None:
    engine = start(
        make_model(),
        config(optimizer=None, gradient_clipping=0, zero_optimization={"stage": stage}),
        optimizer=PerTensor,
    )
    twin = make_model()
    own = PerTensor(twin.parameters())
    for step in range(2):
        both = [(rows.x[i : i + 4], rows.y[i : i + 4]) for i in (8 * step, 8 * step + 4)]
        engine.train_batch(iter(both))
        own.zero_grad()
        sum(twin(*batch) / 2 for batch in both).backward()
        own.step()
    engine.close()
    for one, other in zip(engine.module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_whose_model_was_given_back_trains_and_saves_nothing(
    make_model: Make, config: Settings, rows: Any, stage: int, tmp_path: Path
) -> None:
    model, data = make_model(), batches(rows)
    older = start(model, config(zero_optimization={"stage": stage}))
    newer = start(model, config(zero_optimization={"stage": stage}))
    newer.train_batch(data)
    after = values(model)
    calls: list[Callable[[], Any]] = [
        lambda: older.backward(older(*next(data))),
        lambda: older.train_batch(data),
        lambda: older.save_checkpoint(tmp_path),
    ]
    for engine in (older, newer):
        engine.close()
        for call in calls:
            with pytest.raises(PlanError, match="given back") as caught:
                call()
            assert caught.value.code == "zero-closed"
    assert close_to(values(model), after)
    assert not list(tmp_path.iterdir())


def test_an_engine_is_not_copied_and_backward_wants_a_tensor(make_model: Make, config: Settings) -> None:
    engine = start(make_model(), config())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="copy or a pickle of a"):
            copied(engine)
    for loss in (1.0, {"loss": torch.zeros(())}, (torch.zeros(()),), None):
        with pytest.raises(PlanError, match=f"called with a {type(loss).__name__}"):
            engine.backward(loss)  # type: ignore[arg-type]
    engine.close()

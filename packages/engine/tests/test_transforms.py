"""Transforms: decided in the plan, applied in order, undone when anything fails; degrees and programs that they attach to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import ds_engine
from ds_config.errors import DsError, PlanError, UnsupportedError
from ds_engine import Shapes, load_config, make_plan, shapes_of
from ds_engine.builder import InitArgs, build
from ds_engine.parallel_degrees import with_degrees
from ds_engine.transforms import TRANSFORMS, BuildContext, Transform, TransformInput, decide_all
from ds_pipe import gpipe, mark_reduce

Make = Callable[[], nn.Module]
Settings = Callable[..., dict[str, Any]]


class Doubling(Transform[int, nn.Module]):
    """A toy capability: parameters are doubled, and halved again."""

    name = "doubling"
    axes: ClassVar[tuple[str, ...]] = ("tensor", "sequence", "expert", "pipe")
    log: ClassVar[list[str]] = []

    def decide(self, asked: TransformInput) -> int:
        return len(asked.shapes.params)

    def plan_rows(self, what: int) -> Mapping[str, str]:
        return {"doubled": f"{what} parameters"}

    def shapes(self, what: int, shapes: Shapes) -> Shapes:
        return replace(shapes, params=shapes.params[:-1])

    def apply(self, what: int, site: BuildContext) -> nn.Module:
        self.log.append("apply")
        with torch.no_grad():
            for param in site.model.parameters():
                param.mul_(2)
        return site.model

    def undo(self, made: nn.Module) -> None:
        self.log.append("undo")
        with torch.no_grad():
            for param in made.parameters():
                param.div_(2)


class Failing(Transform[bool, None]):
    name = "failing"

    def decide(self, asked: TransformInput) -> bool:
        return True

    def apply(self, what: bool, site: BuildContext) -> None:
        raise PlanError("it does not fit", code="plan-rules", fix="Leave it out.")

    def undo(self, made: None) -> None:
        raise AssertionError("what was not applied is not undone")


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put other transforms on the list."""

    def put(*transforms: Transform[Any, Any]) -> None:
        Doubling.log.clear()
        for place in ("ds_engine.planner.TRANSFORMS", "ds_engine.builder.TRANSFORMS"):
            monkeypatch.setattr(place, transforms)

    return put


def state_of(model: nn.Module) -> list[Any]:
    """All that `initialize` could change."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = sum(len(h) for key, h in vars(module).items() if key.endswith("_hooks") and isinstance(h, dict))
        found.append((name, type(module), hooks, sorted(vars(module))))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        marks = sorted(key for key in vars(tensor) if key.startswith("_ds"))
        found.append(
            (name, type(tensor), tensor.dtype, tensor.device, tensor.detach().clone().tolist(), id(tensor), marks)
        )
    return found


def test_the_list_has_the_order_of_the_contract() -> None:
    order = [
        "pipeline stages",
        "tensor parallel",
        "layers of the model's own",
        "expert parallel",
        "sequence parallel",
        "sparse attention",
        "quantized weights",
        "compression",
        "kernels",
        "random-LTD",
        "activation checkpointing",
        "ZeRO",
    ]
    names = [transform.name for transform in TRANSFORMS]
    assert names == [name for name in order if name in names]
    assert names[-1] == "ZeRO"


def test_the_plan_names_what_will_be_done_and_prints_its_rows(make_model: Make, config: Settings, listed: Any) -> None:
    listed(Doubling(), *TRANSFORMS)
    plan = make_plan(load_config(config()), shapes_of(make_model()), 1)
    assert [change.name for change in plan.transforms] == ["doubling", "activation checkpointing", "ZeRO"]
    assert plan.rows()["transforms"] == "doubling -> activation checkpointing -> ZeRO"
    assert plan.rows()["doubled"] == "4 parameters"


def test_a_transform_sees_the_shapes_that_the_one_before_left(make_model: Make, config: Settings) -> None:
    asked = TransformInput(
        load_config(config()), shapes_of(make_model()), make_plan(load_config(config()), Shapes((), ()), 1).mesh
    )
    changes, left = decide_all((Doubling(), Doubling()), asked)
    assert [change.what for change in changes] == [4, 3]
    assert len(left.params) == 2


def test_what_was_applied_is_undone_when_a_later_one_fails(make_model: Make, config: Settings, listed: Any) -> None:
    listed(Doubling(), Failing(), *TRANSFORMS)
    model = make_model()
    before = state_of(model)
    with pytest.raises(PlanError, match="it does not fit"):
        ds_engine.initialize(model=model, config=config())
    assert Doubling.log == ["apply", "undo"]
    assert state_of(model) == before


def test_a_failure_after_zero_gives_the_model_back_whole(make_model: Make, config: Settings, listed: Any) -> None:
    listed(*TRANSFORMS, Failing())
    model = make_model()
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PlanError, match="it does not fit"):
        ds_engine.initialize(model=model, config=config(zero_optimization={"stage": 3}))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
    listed(*TRANSFORMS)
    engine, *_ = ds_engine.initialize(model=model, config=config(zero_optimization={"stage": 3}))
    engine.close()


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([])


def _raise(*_: Any) -> Any:
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("settings", "arguments", "kind"),
    [
        ({}, {"training_data": Endless()}, UnsupportedError),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2, 0.3], "cycle_max_lr": [1, 1, 1]}}},
            {},
            DsError,
        ),
        ({"wandb": {"enabled": True}}, {}, DsError),
        ({"comet": {"enabled": True}}, {}, DsError),
        ({}, {"optimizer": _raise}, ValueError),
        ({}, {"lr_scheduler": _raise}, ValueError),
        ({"scheduler": {"type": "MultiStepLR", "params": {"milestones": 3}}}, {}, Exception),
    ],
    ids=["iterable", "schedule-length", "wandb", "comet", "optimizer", "scheduler", "torch-scheduler"],
)
def test_initialize_that_fails_leaves_the_model_alone(
    make_model: Make,
    config: Settings,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    kind: type[Exception],
) -> None:
    for missing in ("wandb", "comet_ml"):
        monkeypatch.setitem(sys.modules, missing, None)
    model = make_model()
    model.register_buffer("kept", torch.ones(2))
    before = state_of(model)
    asked = config(zero_optimization={"stage": 3}, bf16={"enabled": True}, **settings)
    with pytest.raises(kind):
        ds_engine.initialize(model=model, config=asked, **arguments)
    assert state_of(model) == before
    engine, *_ = ds_engine.initialize(model=model, config=config())
    engine.close()


def test_the_model_is_given_back_by_close(make_model: Make, config: Settings, listed: Any) -> None:
    listed(Doubling(), *TRANSFORMS)
    model = make_model()
    before = state_of(model)
    engine, *_ = ds_engine.initialize(model=model, config=config(activation_checkpointing={"modules": ["first"]}))
    assert state_of(model) != before
    engine.close()
    assert state_of(model) == before
    assert Doubling.log == ["apply", "undo"]


# ---- degrees


def test_degrees_come_from_the_configuration_and_the_batch_uses_what_is_left(config: Settings, listed: Any) -> None:
    listed(Doubling(), *TRANSFORMS)
    asked = load_config(config(sequence_parallel_size=2, train_batch_size=16, gradient_accumulation_steps=2))
    plan = make_plan(asked, Shapes((), (), 2), 16)
    assert (plan.mesh.pipe, plan.mesh.sequence, plan.mesh.tensor, plan.mesh.data) == (2, 2, 1, 4)
    assert (plan.batch.ranks, plan.batch.micro) == (4, 2)
    assert "16 ranks: pipe 2 x data 4 x sequence 2" in str(plan)
    assert str(plan.program).splitlines()[1].startswith("1RECV_F0 1F0 1B0")
    with pytest.raises(PlanError, match="mesh degrees do not multiply"):
        make_plan(asked, Shapes((), (), 3), 16)
    with pytest.raises(PlanError, match="data_parallel_size = 8, where 16 ranks / pipe 2 / sequence 2 leave 4"):
        make_plan(asked.model_copy(update={"data_parallel_size": 8}), Shapes((), (), 2), 16)


class Mpu:
    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            setattr(self, f"get_{axis}_parallel_world_size", lambda size=size: size)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mesh_param": (8, 1)}, "data_parallel_size = 8, where 1 ranks leave 1"),
        ({"mesh_param": (1, 2)}, "sequence 2 = 2, world size 1"),
        ({"mesh_param": (1, 0)}, r"mesh_param = \(1, 0\)"),
        ({"mesh_param": (1,)}, r"mesh_param = \(1,\)"),
        ({"mpu": object()}, "says no degree"),
        ({"mpu": Mpu(model=2, data=1)}, "tensor 2 = 2, world size 1"),
    ],
)
def test_degrees_beside_the_configuration_are_checked(
    make_model: Make, config: Settings, arguments: Any, said: str
) -> None:
    with pytest.raises(DsError, match=said):
        ds_engine.initialize(model=make_model(), config=config(), **arguments)


def test_degrees_in_two_places_must_agree(config: Settings) -> None:
    both = load_config(config(sequence_parallel_size=2, data_parallel_size=4))
    assert with_degrees(both, (4, 2)).data_parallel_size == 4
    with pytest.raises(PlanError, match="sequence_parallel_size = 2"):
        with_degrees(both, (4, 1))
    assert with_degrees(both, None, Mpu(sequence=2, data=4, tensor_model=1)) is both


def test_an_mpu_of_the_same_degrees_is_taken(make_model: Make, config: Settings) -> None:
    engine, *_ = ds_engine.initialize(model=make_model(), config=config(), mesh_param=(1, 1), mpu=Mpu(model=1, data=1))
    assert engine.plan.config.data_parallel_size == 1
    engine.close()


# ---- programs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_forwards_may_be_open(make_model: Make, config: Settings, rows: Any, stage: int) -> None:
    """All forwards, then all backwards: the same parameters as in turn."""

    def trained(open_passes: bool) -> list[torch.Tensor]:
        model = make_model()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        plan = make_plan(load_config(config(zero_optimization=zero)), shapes_of(model), 1)
        if open_passes:
            program = mark_reduce(gpipe(1, plan.batch.accumulation), every_backward=plan.residency.shard_grads)
            plan = replace(plan, program=program)
        engine = build(plan, model, InitArgs(data=rows))
        losses = [engine.train_batch().loss for _ in range(3)]
        engine.close()
        return [torch.tensor(losses), *(p.detach() for p in model.parameters())]

    for one, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(one, other)


class Reversed:
    """An executor of its own: the microbatches of a step from the last to the first."""

    def train(self, actions: Any, data: Any, passes: Any) -> None:
        backwards = [a for a in actions if a.op.name == "BACKWARD"]
        batches = [next(data) for _ in backwards]
        for action, batch in zip(backwards, reversed(batches), strict=True):
            loss = passes.call(batch)
            with passes.backward(action):
                passes.start(loss).backward()

    def evaluate(self, count: int, data: Any, passes: Any) -> Any:
        return (passes.call(next(data)) * 10 for _ in range(count))


def test_an_executor_sits_at_its_seat(make_model: Make, config: Settings, rows: Any, listed: Any) -> None:
    class Pipelines(Transform[bool, None]):
        name = "microbatches reversed"

        def decide(self, asked: TransformInput) -> bool:
            return True

        def apply(self, what: bool, site: BuildContext) -> None:
            site.executor = Reversed()

        def undo(self, made: None) -> None:
            pass

    def made() -> Any:
        engine, *_ = ds_engine.initialize(model=make_model(), config=config(), training_data=rows)
        return engine

    plain = made()
    batch = (rows.x[:4], rows.y[:4])
    listed(Pipelines(), *TRANSFORMS)
    other = made()
    assert other.eval_batch(iter([batch] * 2)) == pytest.approx(10 * plain.eval_batch(iter([batch] * 2)))
    assert other.train_batch().loss == pytest.approx(plain.train_batch().loss)
    for one, two in zip(plain.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_step_whose_data_ends_is_forgotten(make_model: Make, config: Settings, rows: Any) -> None:
    """The next step is the mean of its own microbatches; StopIteration after one of two is the caller's to see."""
    batches = [(rows.x[i : i + 4], rows.y[i : i + 4]) for i in range(0, 20, 4)]
    for stage in (0, 2):
        engines = []
        for data in ([batches[:2], batches[3:]], [batches[:3], batches[3:]]):
            engine, *_ = ds_engine.initialize(model=make_model(), config=config(zero_optimization={"stage": stage}))
            engines.append(engine)
            for epoch in data:
                loader = iter(epoch)
                for _ in range(2):
                    try:
                        engine.train_batch(loader)
                    except StopIteration:
                        break
        one, two = engines
        assert one.counters == two.counters
        assert one.last.loss == two.last.loss
        for a, b in zip(one.module.parameters(), two.module.parameters(), strict=True):
            assert torch.equal(a, b)

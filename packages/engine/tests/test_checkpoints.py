"""A run that is stopped and resumed is the run that was not: parameters, rates, samples, random numbers."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ckpt
import ds_engine
import ds_zero
from ds_config.errors import CheckpointError, PlanError, UnsupportedError
from ds_engine import Engine

Make = Callable[[], nn.Module]
Settings = Callable[..., dict[str, Any]]


class Noisy(nn.Module):
    """Draws from torch's and Python's generators, has a buffer that moves and one that is not saved."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(self.drop(x) + random.gauss(0, 0.1), y)


def start(model: nn.Module, config: dict[str, Any], rows: Any) -> Engine:
    return ds_engine.initialize(model=model, config=config, training_data=rows)[0]


def settings(config: Settings, **changes: Any) -> dict[str, Any]:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20}}
    return config(scheduler=scheduler, **changes)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_seven_and_thirteen_steps_are_twenty(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, stage: int
) -> None:
    asked = settings(config, zero_optimization={"stage": stage})
    random.seed(1)
    straight = start(Noisy(make_model()), asked, rows)
    seen = [straight.train_batch() for _ in range(20)]
    straight.close()

    random.seed(1)
    first = start(Noisy(make_model()), asked, rows)
    head = [first.train_batch() for _ in range(7)]
    first.save_checkpoint(tmp_path, client_state={"note": "half way"})
    first.close()
    torch.manual_seed(999)
    random.seed(999)
    second = start(Noisy(make_model()), asked, rows)
    path, client = second.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step7")
    assert client == {"note": "half way"}
    assert (second.global_steps, second.global_samples, second.micro_steps) == (7, 56, 14)
    tail = [second.train_batch() for _ in range(13)]
    second.close()
    for result, expected in zip(head + tail, seen, strict=True):
        assert (result.step, result.lr, result.loss, result.norm) == (
            expected.step,
            expected.lr,
            expected.loss,
            expected.norm,
        )
    for (name, a), (_, b) in zip(second.module.state_dict().items(), straight.module.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("node_lost", [False, True])
def test_a_run_goes_on_from_the_copies_on_its_nodes_or_from_what_was_drained(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, node_lost: bool
) -> None:
    """Steps 2 and 4 and so on are on the node, step 4 and the last one in the store: either is the run that was not stopped."""
    near = {"folder": str(tmp_path / "node"), "root": str(tmp_path / "far"), "every": 2, "persist_every": 4}
    saving = {"incremental": True, "keep": 1}
    asked = settings(config, zero_optimization={"stage": 2}, checkpoint={"local": near, "saving": saving})
    random.seed(1)
    first = start(Noisy(make_model()), asked, rows)
    seen = [first.train_batch() for _ in range(9)]
    first.close()
    weights = {name: p.detach().clone() for name, p in first.module.state_dict().items()}
    assert ds_ckpt.list_tags(tmp_path / "far") == ["step-8"]
    if node_lost:
        shutil.rmtree(tmp_path / "node")
    else:
        shutil.rmtree(tmp_path / "far")
    torch.manual_seed(999)
    random.seed(999)
    second = start(Noisy(make_model()), asked, rows)
    path, _ = second.load_checkpoint(tmp_path / "far")
    assert path == (str(tmp_path / "far" / "step-8") if node_lost else "the nodes' copy of step 8")
    assert second.global_steps == 8
    assert second.train_batch().loss == seen[8].loss
    assert all(torch.equal(value, weights[name]) for name, value in second.module.state_dict().items())
    second.close()


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 0)])
def test_another_stage_goes_on(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, before: int, after: int
) -> None:
    first = start(make_model(), settings(config, zero_optimization={"stage": before}), rows)
    for _ in range(3):
        first.train_batch()
    first.save_checkpoint(tmp_path)
    expected = [first.train_batch().loss for _ in range(3)]
    second = start(make_model(), settings(config, zero_optimization={"stage": after}), rows)
    second.load_checkpoint(tmp_path)
    assert [second.train_batch().loss for _ in range(3)] == pytest.approx(expected, rel=1e-6)
    first.close()
    second.close()


def test_parts_can_begin_anew(make_model: Make, config: Settings, rows: Any, tmp_path: Path) -> None:
    first = start(make_model(), settings(config), rows)
    for _ in range(3):
        first.train_batch()
    first.save_checkpoint(tmp_path, tag="three")
    weights = {name: p.detach().clone() for name, p in first.module.named_parameters()}

    def resumed(**chosen: bool) -> Engine:
        engine = start(make_model(), settings(config), rows)
        engine.load_checkpoint(tmp_path, tag="three", **chosen)
        assert all(torch.equal(p, weights[name]) for name, p in engine.module.named_parameters())
        return engine

    only_model = resumed(load_module_only=True)
    assert only_model.global_steps == 0
    assert only_model.training_dataloader is not None
    assert only_model.training_dataloader.consumed == 0
    assert only_model.lr_scheduler.state_dict() == {"last_batch_iteration": -1}
    no_data = resumed(load_data_state=False)
    assert no_data.training_dataloader is not None
    assert (no_data.global_steps, no_data.training_dataloader.consumed) == (3, 0)
    no_schedule = resumed(load_lr_scheduler_states=False)
    assert no_schedule.lr_scheduler.state_dict() == {"last_batch_iteration": -1}
    no_optimizer = resumed(load_optimizer_states=False)
    assert no_optimizer.optimizer is not None
    assert not any(s.shard.name.startswith("optim/") for s in no_optimizer.optimizer.shards())
    for engine in (first, only_model, no_data, no_schedule, no_optimizer):
        engine.close()


def test_tied_weights_are_stored_once_and_found_under_both_names(
    make_model: Make, config: Settings, tmp_path: Path
) -> None:
    import ds_ckpt

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    engine = ds_engine.initialize(model=model, config=config())[0]
    manifest = ds_ckpt.inspect(engine.save_checkpoint(tmp_path))
    engine.close()
    assert "param/0.weight" in manifest.tensors
    assert dict(manifest.aliases) == {"param/1.weight": "param/0.weight"}


def test_the_newest_complete_checkpoint_is_loaded(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    engine = start(make_model(), config(), rows)
    for _ in range(2):
        engine.train_batch()
        engine.save_checkpoint(tmp_path)
    (tmp_path / "global_step2" / "manifest.json").unlink()
    path, _ = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step1")
    engine.close()


def test_missing_checkpoints(make_model: Make, config: Settings, rows: Any, tmp_path: Path) -> None:
    engine = start(make_model(), config(), rows)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    for where, tag in ((tmp_path / "nowhere", None), (tmp_path, "step9")):
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(where, tag)
        assert caught.value.code == "ckpt-not-found"
    engine.close()


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("fp16", "fp32"), ("bf16", "fp16")])
def test_frozen_parameters_go_on_in_another_format(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, before: str, after: str
) -> None:
    sections = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}

    def begin(name: str) -> Engine:
        model = make_model()
        next(model.parameters()).requires_grad_(False)
        return start(model, config(**sections[name]), rows)

    first = begin(before)
    expected = next(first.parameters()).detach().clone()
    first.save_checkpoint(tmp_path)
    first.close()
    second = begin(after)
    with torch.no_grad():
        next(second.parameters()).zero_()
    second.load_checkpoint(tmp_path)
    param = next(second.parameters())
    torch.testing.assert_close(param.detach(), expected.to(param.dtype), rtol=0, atol=0)
    second.close()


def test_a_checkpoint_of_another_model_is_refused(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    other = ds_engine.initialize(model=nn.Linear(3, 3), config=config())[0]
    other.save_checkpoint(tmp_path)
    other.close()
    engine = start(make_model(), config(), rows)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    assert caught.value.code == "ckpt-mismatch"
    assert "first.weight" in caught.value.message
    engine.close()


def test_a_checkpoint_of_something_else_is_refused(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    import ds_ckpt

    engine = start(make_model(), config(), rows)
    ds_ckpt.save(str(tmp_path / "theirs"), engine.sharding.param_shards(), {"step": 3})
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path, load_module_only=True)
    assert caught.value.code == "engine-checkpoint"
    engine.close()


def test_a_save_inside_a_step_goes_on_from_its_beginning(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path
) -> None:
    engine = start(make_model(), settings(config), rows)
    for _ in range(2):
        engine.train_batch()
    expected = start(make_model(), settings(config), rows)
    losses = [expected.train_batch().loss for _ in range(4)][2:]
    stream = iter(engine.training_dataloader)  # type: ignore[arg-type]
    engine.backward(engine(*next(stream)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    resumed = start(make_model(), settings(config), rows)
    resumed.load_checkpoint(tmp_path)
    assert (resumed.global_steps, resumed.micro_steps) == (2, 4)
    assert [resumed.train_batch().loss for _ in range(2)] == losses
    for each in (engine, expected, resumed):
        each.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_without_frozen_parameters_and_back_into_another_base(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, stage: int
) -> None:
    def frozen() -> nn.Module:
        model = make_model()
        model.first.requires_grad_(False)
        return model

    asked = config(zero_optimization={"stage": stage})
    first = start(frozen(), asked, rows)
    first.train_batch()
    path = first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    trained = {name: value.clone() for name, value in first.full_state_dict().items()}
    first.close()
    names = {name for name in ds_ckpt.inspect(path).tensors if name.startswith("param/")}
    assert names == {"param/second.weight", "param/second.bias"}
    second = start(frozen(), asked, rows)
    with torch.no_grad():
        second.module.first.weight.zero_()
    for strict in (True, "model"):
        with pytest.raises(CheckpointError):
            second.load_checkpoint(tmp_path, strict=strict)  # type: ignore[arg-type]
    second.load_checkpoint(tmp_path)
    found = second.full_state_dict()
    second.close()
    assert not found["first.weight"].any()
    assert torch.equal(found["second.weight"], trained["second.weight"])


class Buffered(nn.Module):
    """Persistent buffers that are not contiguous, or share their elements."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.register_buffer("turned", torch.full((4, 3), fill).t())
        self.register_buffer("spread", torch.tensor([fill]).expand(5))
        self.register_buffer("plain", torch.full((2, 2), fill))
        self.register_buffer("number", torch.tensor(fill))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_of_any_layout_are_saved_and_loaded(
    config: Callable[..., dict[str, Any]], tmp_path: Path, stage: int
) -> None:
    engines = []
    for fill in (2.0, 0.0):
        model = Buffered(fill)
        if fill:
            model.turned.copy_(torch.arange(12.0).view(3, 4))
        engine, *_ = ds_engine.initialize(model=model, config=config(zero_optimization={"stage": stage}))
        engines.append(engine)
    engines[0].save_checkpoint(tmp_path)
    kept = engines[1].module.plain
    engines[1].load_checkpoint(tmp_path)
    for name, buffer in engines[0].module.named_buffers():
        torch.testing.assert_close(engines[1].module.get_buffer(name), buffer)
    assert engines[1].module.plain is kept
    for engine in engines:
        engine.close()


class Remembering(nn.Module):
    """Has state that is no tensor, and a state dict of its own form, as models of Megatron-DeepSpeed."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.line, self.memory = nn.Linear(3, 3), memory
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).square().mean()

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        plain = super().state_dict(*args, **options)
        return {"line": {"weight": plain["line.weight"], "bias": plain["line.bias"]}, "_extra_state": self.memory}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("layout", [{}, {"layout": "ds"}])
def test_state_that_is_no_tensor_and_models_with_a_state_dict_of_their_own(
    config: Settings, tmp_path: Path, stage: int, layout: dict[str, str]
) -> None:
    asked = config(zero_optimization={"stage": stage}, checkpoint=layout)
    memory = {"scales": torch.tensor([1.0, 3.0]), "of": (1, 2)}
    engines = [ds_engine.initialize(model=Remembering(m), config=asked)[0] for m in (memory, None)]
    engines[0].module.seen.fill_(5.0)
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    assert engines[1].module.memory["of"] == (1, 2)
    assert torch.equal(engines[1].module.memory["scales"], memory["scales"])
    assert torch.equal(engines[1].module.seen, engines[0].module.seen)
    whole = engines[1].full_state_dict()
    assert whole["_extra_state"]["of"] == (1, 2)
    assert whole["line"]["weight"].shape == (3, 3)  # type: ignore[call-overload]
    engines[0].module.memory = object()
    with pytest.raises(UnsupportedError, match="_extra_state"):
        engines[0].save_checkpoint(tmp_path, "refused")
    for engine in engines:
        engine.close()


def test_a_model_on_meta_is_initialized_and_loaded(
    make_model: Callable[[], nn.Module], config: Callable[..., dict[str, Any]], rows: Any, tmp_path: Path
) -> None:
    asked = config(zero_optimization={"stage": 3})
    first, *_ = ds_engine.initialize(model=make_model(), config=asked, training_data=rows)
    first.train_batch()
    first.save_checkpoint(tmp_path)
    with ds_zero.Init(meta=True):
        model = make_model()
    assert all(p.is_meta for p in model.parameters())
    second, *_ = ds_engine.initialize(model=model, config=asked, training_data=rows)
    with pytest.raises(PlanError, match="no values yet"):
        second.train_batch()
    second.load_checkpoint(tmp_path)
    assert second.train_batch().loss == first.train_batch().loss
    for engine in (first, second):
        engine.close()
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def _state(engine: Engine) -> list[Any]:
    optimizer = engine.optimizer
    assert optimizer is not None
    held = [(s.shard.name, s.data.clone()) for s in optimizer.shards()]
    return [*((name, data.tolist()) for name, data in held), optimizer.common_state_dict(), engine.progress()]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fault", ["missing", "cut", "other model", "damaged"])
def test_a_load_that_fails_leaves_the_run_as_it_was_or_lets_nothing_go_on(
    make_model: Make, config: Settings, rows: Any, tmp_path: Path, stage: int, fault: str
) -> None:
    asked = config(zero_optimization={"stage": stage}, gradient_accumulation_steps=1)
    asked = {key: value for key, value in asked.items() if key != "train_batch_size"}
    engine = start(make_model(), {**asked, "train_micro_batch_size_per_gpu": 4}, rows)
    engine.train_batch()
    good, bad = tmp_path / "good", tmp_path / "bad"
    engine.save_checkpoint(tmp_path, tag="good")
    shutil.copytree(good, bad)
    (file,) = bad.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink() if fault == "missing" else file.write_bytes(data[:-9] if fault == "cut" else data)
    if fault == "other model":
        shutil.rmtree(bad)
        other = ds_engine.initialize(
            model=nn.Linear(3, 5), config={"train_batch_size": 1, "optimizer": asked["optimizer"]}
        )[0]
        other.save_checkpoint(tmp_path, tag="bad")
        other.close()
    engine.train_batch()
    before = _state(engine)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, tag="bad", strict=True)
    if fault == "damaged":
        for call in (engine.train_batch, lambda: engine.save_checkpoint(tmp_path, tag="new"), engine.full_state_dict):
            with pytest.raises(PlanError, match="after a load that failed") as caught:
                call()
            assert caught.value.code == "engine-torn"
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path, tag="bad")
        assert not (tmp_path / "new").exists()
    else:
        assert _state(engine) == before
        engine.train_batch()
    engine.load_checkpoint(tmp_path, tag="good")
    engine.train_batch()
    engine.close()

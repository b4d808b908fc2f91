"""Optimizers that reduce gradients themselves: by configuration, in every format, saved and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ckpt
import ds_engine
from ds_engine import Engine, checkpoints
from ds_testing import world

WIDTH = 6
EARLY = {"OneBitAdam": {"freeze_step": 3}, "OneBitLamb": {"freeze_step": 3},
         "ZeroOneAdam": {"var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}}  # fmt: skip
TYPES = pytest.mark.parametrize("name", sorted(EARLY))


class Model(nn.Module):
    """Mean squared error of two layers; `side` is only used by ranks that are told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5 + (dist.get_rank() if dist.is_initialized() else 0))  # rank 0's values win
        self.first, self.second, self.side = nn.Linear(WIDTH, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor, side: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        found = self.second(hidden) + (self.side(hidden) if side else 0.0)
        return (found.float() - y).square().mean()


def batch(step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    return x.to(dtype), x.sum(1, keepdim=True).cos()


def start(name: str, params: dict[str, Any], **changes: Any) -> Engine:
    settings = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
                "optimizer": {"type": name, "params": {"lr": 0.01} | params}} | changes  # fmt: skip
    return ds_engine.initialize(model=Model(), config=settings)[0]


def train(engine: Engine, steps: range, dtype: torch.dtype = torch.float32) -> list[float]:
    rank = dist.get_rank()
    return [engine.train_batch(iter([batch(step % 8, m, rank, dtype) for m in range(2)])).loss for step in steps]


def values(engine: Engine) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])


def the_same_everywhere(mine: Tensor) -> bool:
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine.contiguous())
    return all(torch.equal(both[0], one) for one in both)


@pytest.mark.parametrize(("name", "twin"), [("OneBitAdam", "AdamW"), ("ZeroOneAdam", "AdamW"), ("OneBitLamb", "Lamb")])
@world(2)
def test_with_exact_gradients_it_is_the_plain_optimizer(name: str, twin: str) -> None:
    engine, plain = start(name, {}), start(twin, {})
    assert engine.plan.rows()["gradients"] == "averaged over ranks, by the optimizer"
    assert train(engine, range(4)) == pytest.approx(train(plain, range(4)), rel=1e-5)
    torch.testing.assert_close(values(engine), values(plain), rtol=1e-4, atol=1e-5)
    for one in (engine, plain):
        one.close()


@TYPES
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@world(2)
def test_it_trains_on_signs_in_every_format(name: str, mode: str) -> None:
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    changes: dict[str, Any] = {} if mode == "fp32" else {mode: {"enabled": True}}
    if mode == "fp16":
        changes = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = start(name, {**EARLY[name], "lr": 0.02, next(iter(EARLY[name])): 6}, gradient_clipping=1.0, **changes)
    losses = train(engine, range(32), formats[mode])  # each batch four times
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])  # AdamW: 0.81
    engine.full_state_dict()  # ends the local steps of 0/1 Adam
    assert the_same_everywhere(values(engine))
    engine.close()


@world(2)
def test_a_step_is_skipped_by_all_ranks_or_by_none_and_unused_parameters_meet() -> None:
    engine, rank = (
        start("OneBitAdam", EARLY["OneBitAdam"], fp16={"enabled": True, "initial_scale_power": 4}),
        dist.get_rank(),
    )
    for step in range(6):
        data = [(*batch(step, m, rank, torch.float16), rank == 0) for m in range(2)]
        if step == 4 and rank == 1:
            data[0][1].fill_(float("inf"))
        result = engine.train_batch(iter(data))
        assert result.skipped == (step == 4)
    assert the_same_everywhere(values(engine))
    assert the_same_everywhere(torch.tensor([engine.last.norm]))  # type: ignore[union-attr]
    engine.close()


@world(2)
def test_the_norm_is_that_of_the_ranks_own_gradients() -> None:
    engine = start("OneBitAdam", {}, gradient_clipping=1e9)
    model, squares = Model(), []
    model.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()})
    for rank in range(2):
        model.zero_grad()
        sum(model(*batch(0, m, rank)) / 2 for m in range(2)).backward()  # type: ignore[union-attr]
        squares.append(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    train(engine, range(1))
    assert engine.get_global_grad_norm() == pytest.approx(float((sum(squares) / 2) ** 0.5), rel=1e-5)
    engine.close()


@TYPES
@pytest.mark.parametrize("steps", [2, 5])  # in the exact phase, and after the freeze
@world(2)
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, name: str, steps: int) -> None:
    """State comes back to the bit, also what signs left out so far."""
    engine = start(name, EARLY[name])
    train(engine, range(steps))
    engine.save_checkpoint(tmp_path)
    assert the_same_everywhere(values(engine))
    same = start(name, EARLY[name])
    same.load_checkpoint(tmp_path)
    assert torch.equal(values(engine), values(same))
    assert engine.optimizer is not None
    assert same.optimizer is not None
    old, new = ({s.shard.name: s.data for s in one.optimizer.shards()} for one in (engine, same))
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[key]) for key, value in old.items())
    assert engine.optimizer.common_state_dict() == same.optimizer.common_state_dict()
    errors, again = engine.optimizer.inner.error_tensors(), same.optimizer.inner.error_tensors()  # type: ignore[attr-defined]
    assert bool(errors) == (steps == 5)
    assert errors.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in errors.items())
    for one in (engine, same):
        one.close()


@TYPES
@world(2)
def test_seven_steps_and_thirteen_are_twenty(tmp_path: Path, name: str) -> None:
    """To the bit. 0/1 Adam synchronises where it is saved, so there the run that was saved is the one to equal."""
    straight = start(name, EARLY[name])
    first = train(straight, range(7))
    if name == "ZeroOneAdam":
        straight.save_checkpoint(tmp_path / "straight")
    losses = train(straight, range(7, 20))

    begun = start(name, EARLY[name])
    assert train(begun, range(7)) == first
    begun.save_checkpoint(tmp_path / "runs")
    begun.close()
    resumed = start(name, EARLY[name])
    train(resumed, range(2))  # what it had before is forgotten
    resumed.load_checkpoint(tmp_path / "runs")
    assert train(resumed, range(7, 20)) == losses
    assert torch.equal(values(straight), values(resumed))
    for one in (straight, resumed):
        one.close()


@world(2)
def test_on_another_number_of_ranks_errors_start_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start("OneBitAdam", EARLY["OneBitAdam"])
    train(engine, range(6))
    engine.save_checkpoint(tmp_path)
    manifest = ds_ckpt.inspect(next(tmp_path.glob("global_step*")))
    other = dataclasses.replace(manifest, meta={**manifest.meta, "world": 3})
    monkeypatch.setattr(checkpoints.ds_ckpt, "inspect", lambda path: other)
    told: list[str] = []
    monkeypatch.setattr(checkpoints._log, "info", lambda text, *args: told.append(text))
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer is not None
    assert engine.optimizer.inner.error_bytes == 0  # type: ignore[attr-defined]
    assert sum("error feedback" in text for text in told) == (dist.get_rank() == 0)
    train(engine, range(6, 8))
    engine.close()

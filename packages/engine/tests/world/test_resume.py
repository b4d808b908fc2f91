"""Resuming when checkpoint and run differ: never trained, frozen, thawed, tied, new and removed parameters.

The reference is torch in one process: state is per parameter, and a parameter without any begins without.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_engine
from ds_ckpt.convert.deepspeed_layout import write_universal
from ds_ckpt.convert.tensor_source import open_checkpoint
from ds_config.errors import CheckpointError
from ds_moe import MoE
from ds_testing import world

WIDTH, ROWS, EXPERTS = 6, 8, 4


def routed(ep_size: int) -> MoE:
    """Build experts of which the last two get no token, whatever the input: of two opposite scores one is above theirs, which is zero."""
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size, k=1, drop_tokens=False, use_rts=False)
    first = dist.get_rank() % ep_size * (EXPERTS // ep_size) if ep_size > 1 else 0
    with torch.no_grad():
        for name, param in layer.named_parameters():
            if "experts" in name:
                number = first + int(name.split("deepspeed_experts.")[1].split(".")[0])
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.4)
            else:
                row = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(9)) * 4.0
                param.copy_(torch.cat([row, -row, torch.zeros(EXPERTS - 2, WIDTH)]))
    return layer


class Branches(nn.Module):
    """Layers of which some are not used; which ones, `use` says."""

    def __init__(self, kind: str, late: bool, parted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.late = kind, late
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        if kind == "unused":
            self.spare = nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == ("added" if late else "removed"):
            torch.manual_seed(4)
            self.more = nn.Linear(WIDTH, WIDTH)
        if kind in ("routed", "placed"):
            self.moe = routed(2 if kind == "placed" and parted else 1)
        if kind == "thawed":
            self.body.requires_grad_(late)
        if kind == "between":
            self.body.requires_grad_(not late)

    def forward(self, x: Tensor, used: int) -> Tensor:
        x = self.embed(x) * self.scale
        x = torch.tanh(self.body(x))
        for expert in self.experts[:used]:
            x = x + torch.tanh(expert(x))
        if hasattr(self, "moe"):
            x = x + self.moe(x)[0]
        return self.head(self.more(x) if hasattr(self, "more") else x).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def used_in(kind: str, step: int, layout: str) -> int:
    """Idle experts are used later on; DeepSpeed's layout has a step count for all parameters, so there they stay idle."""
    return 3 if kind != "idle" else 2 if step < 4 or layout != "ours" else 3


OPTIMIZERS = {
    "own": ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    "client": ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "factored": ("Adafactor", {"lr": 0.05}),  # its state has not the parameter's shape
}


def torch_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    kind, arguments = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(params, **arguments)


def reference(kind: str, optimizer: str, layout: str) -> dict[str, Tensor]:
    """Four steps, then four more of the model that resumes, in one process."""
    model = Branches(kind, late=False)
    states: dict[str, Any] = {}
    for late in (False, True):
        if late:
            before, model = model.state_dict(), Branches(kind, late=True)
            model.load_state_dict(before, strict=False)
        chosen = torch_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
        for name, param in model.named_parameters():
            if name in states and param.requires_grad:
                chosen.state[param] = states[name]
        for step in range(4 * late, 4 * late + 4):
            model(batch(step), used_in(kind, step, layout)).backward()
            chosen.step()
            chosen.zero_grad()
        states |= {name: chosen.state[p] for name, p in model.named_parameters() if p in chosen.state}
    return model.state_dict()


def start(kind: str, late: bool, stage: int, optimizer: str, layout: str) -> Any:
    model = Branches(kind, late, parted=True)
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if layout == "deepspeed" or (layout == "universal" and late):
        config["checkpoint"] = {"layout": "deepspeed"}
    if optimizer == "own":
        config["optimizer"] = dict(zip(("type", "params"), OPTIMIZERS[optimizer], strict=True))
        return ds_engine.initialize(model=model, config=config)[0]
    chosen = torch_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
    return ds_engine.initialize(model=model, optimizer=chosen, config=config)[0]


def train(engine: Any, kind: str, steps: range, layout: str) -> None:
    data = engine.mesh["data"]
    for step in steps:
        engine.backward(engine(batch(step).chunk(data.size)[data.rank], used_in(kind, step, layout)))
        engine.step()


def same(engine: Any, wanted: dict[str, Tensor]) -> None:
    found = engine.full_state_dict()
    if engine.mesh.rank == 0:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}"
            )


def same_experts(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """Compare every parameter of a rank with that of its name in the whole model: a rank counts its own experts from 0."""
    for name, param in model.named_parameters():
        head, deep, tail = name.partition("deepspeed_experts.")
        if deep:
            number, _, rest = tail.partition(".")
            name = f"{head}{deep}{int(number) + dist.get_rank() * (EXPERTS // 2)}.{rest}"
        torch.testing.assert_close(
            param.data, wanted[name], rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}"
        )


KINDS = ("unused", "thawed", "between", "idle", "tied", "added", "removed")
GRID = [
    (*cell, stages)
    for cell in itertools.product(
        (*KINDS, "routed", "placed"), ("own", "client", "momentum", "factored"), ("ours", "deepspeed", "universal")
    )
    for stages in ((0, 3), (1, 1), (2, 0), (3, 2), (3, 3))
    # DeepSpeed's files have the state of Adam's kinds alone, its own layout at stages 1 to 3.
    if cell[2] == "ours"
    or (cell[1] in ("own", "client") and (0 not in stages or (cell[2] == "universal" and stages[1] > 0)))
]
DRAWN = [
    *random.Random(56).sample([cell for cell in GRID if cell[0] in KINDS and cell[2] != "universal"], 5),
    ("idle", "own", "ours", (3, 1)),
    ("unused", "factored", "ours", (2, 3)),
    ("routed", "own", "deepspeed", (3, 2)),
    ("placed", "client", "ours", (1, 1)),
    ("thawed", "own", "universal", (0, 3)),
]
MARKED = [*DRAWN, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in GRID if cell not in DRAWN)]


@pytest.mark.parametrize(("kind", "optimizer", "layout", "stages"), MARKED)
@world(2)
def test_a_run_goes_on_as_torch_does(
    kind: str, optimizer: str, layout: str, stages: tuple[int, int], tmp_path: Path
) -> None:
    engine = start(kind, False, stages[0], optimizer, layout)
    train(engine, kind, range(4), layout)
    engine.save_checkpoint(tmp_path, tag="four")
    engine.close()
    if layout == "universal":
        if dist.get_rank() == 0:
            write_universal(open_checkpoint(tmp_path / "four"), tmp_path / "u", "four", allow_pickle=True)
        dist.barrier()
    engine = start(kind, True, stages[1], optimizer, layout)
    train(engine, kind, range(20, 22), layout)  # what it had before is forgotten
    if kind == "added":
        with torch.no_grad():  # a new layer stays as it is, so its training above would count
            fresh = Branches(kind, late=True).state_dict()
        engine.load_full_state_dict(fresh)
    engine.load_checkpoint(tmp_path / "u" if layout == "universal" else tmp_path, tag="four")
    assert engine.global_steps == 4
    train(engine, kind, range(4, 8), layout)
    if kind == "placed":
        engine.close()
        same_experts(engine.module, reference(kind, optimizer, layout))
        return
    same(engine, reference(kind, optimizer, layout))
    engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the tests below, which run on different numbers of ranks."""
    return tmp_path_factory.mktemp("resume")


@world(2)
def test_two_ranks_save(folder: Path) -> None:
    for kind in KINDS:
        engine = start(kind, False, 3, "own", "ours")
        train(engine, kind, range(4), "ours")
        engine.save_checkpoint(folder, tag=kind)
        engine.close()


def goes_on(folder: Path, stage: int, kinds: Iterable[str]) -> None:
    for kind in kinds:
        engine = start(kind, True, stage, "own", "ours")
        engine.load_checkpoint(folder, tag=kind)
        train(engine, kind, range(4, 8), "ours")
        same(engine, reference(kind, "own", "ours"))
        engine.close()


@world(1)
def test_one_rank_goes_on(folder: Path) -> None:
    goes_on(folder, 2, KINDS)


@world(4)
def test_four_ranks_go_on(folder: Path) -> None:
    goes_on(folder, 1, ("thawed", "idle"))


@world(2)
def test_what_differs_is_named_in_one_line_or_refused(folder: Path) -> None:
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("ds_engine").addHandler(handler := Heard())
    expected = {
        "added": ("no values for 2 tensors", "param/more.bias, param/more.weight"),
        "removed": ("6 tensors that nothing here asks for", "optim/more.bias/exp_avg"),
        "thawed": ("no optimizer state of 2 trained parameters", "body.bias, body.weight"),
        "between": ("4 tensors that nothing here asks for", "optim/body.bias/exp_avg"),
    }
    for kind, (count, names) in expected.items():
        heard.clear()
        engine = start(kind, True, 3, "own", "ours")
        engine.load_checkpoint(folder, tag=kind)
        lines = [line for line in heard if count in line]
        if engine.mesh.rank == 0:
            assert len(lines) == len(heard) == 1, heard
            assert names in lines[0]
        else:
            assert not heard
        for strict in (True,) if kind in ("thawed", "between") else (True, "model"):
            if kind == "thawed":  # what was never trained lacks nothing
                engine.load_checkpoint(folder, tag=kind, strict=strict)
                continue
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(folder, tag=kind, strict=strict)
            assert caught.value.code == "ckpt-mismatch"
        engine.close()
    logging.getLogger("ds_engine").removeHandler(handler)


@world(2)
def test_another_optimizer_is_refused_unless_it_is_asked_for(folder: Path) -> None:
    engine = start("unused", True, 2, "momentum", "ours")
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    for chosen in (None, True):
        with pytest.raises(CheckpointError, match="AdamW") as caught:
            engine.load_checkpoint(folder, tag="unused", strict=chosen)
        assert caught.value.code == "optimizer-class"
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    engine.load_checkpoint(folder, tag="unused", strict=False)
    assert engine.global_steps == 4
    assert engine.optimizer.param_groups[0]["momentum"] == 0.9
    assert not any(shard.shard.name.startswith("optim/") for shard in engine.optimizer.shards())
    train(engine, "unused", range(4, 5), "ours")
    engine.close()


@world(2)
def test_a_checkpoint_of_step_0_takes_the_state_of_a_later_one_away(tmp_path: Path) -> None:
    engine = start("unused", False, 3, "own", "ours")
    engine.save_checkpoint(tmp_path, tag="zero")
    train(engine, "unused", range(4), "ours")
    wanted = engine.full_state_dict()
    engine.load_checkpoint(tmp_path, tag="zero")
    train(engine, "unused", range(4), "ours")
    same(engine, wanted)
    engine.close()

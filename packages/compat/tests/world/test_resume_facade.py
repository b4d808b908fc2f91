"""Resuming under upstream's names, when checkpoint and run differ, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_config.errors import CheckpointError
from ds_testing import world


class Partial(nn.Module):
    """One layer is never used, one is frozen at first, one is there later only."""

    def __init__(self, kind, late):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.body, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "unused":
            self.spare = nn.Linear(6, 6)
        if kind == "thawed":
            self.body.requires_grad_(late)
        if kind == "added" and late:
            torch.manual_seed(6)
            self.more = nn.Linear(6, 6)

    def forward(self, x):
        x = self.last(torch.tanh(self.body(torch.tanh(self.first(x)))))
        return (self.more(x) if hasattr(self, "more") else x).square().mean()


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.0)


def single(kind):
    states = {}
    model = Partial(kind, False)
    for late in (False, True):
        if late:
            before, model = model.state_dict(), Partial(kind, True)
            model.load_state_dict(before, strict=False)
        optimizer = adamw(model)
        optimizer.state.update({p: states[n] for n, p in model.named_parameters() if n in states})
        for step in range(3 * late, 3 * late + 3):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()
        states = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
    return model.state_dict()


def start(kind, late, stage, client, layout):
    import deepspeed

    model = Partial(kind, late)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    if layout == "deepspeed":
        config["checkpoint"] = {"layout": "deepspeed"}
    if layout == "universal" and late:
        config["checkpoint"] = {"load_universal": True}
    if client:
        return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, first):
    for step in range(first, first + 3):
        engine.backward(engine(batch(step).chunk(2)[engine.mesh.rank]))
        engine.step()


CELLS = [
    (kind, layout, client, stages)
    for kind in ("unused", "thawed", "added")
    for layout in ("ours", "deepspeed", "universal")
    for client in (False, True)
    for stages in ((1, 3), (3, 2))
]
DRAWN = [CELLS[i] for i in (3, 4, 10, 13, 20, 27, 32)]
MARKED = [*DRAWN, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in DRAWN)]


@pytest.mark.parametrize(("kind", "layout", "client", "stages"), MARKED)
@world(2, backend=None)
def test_a_run_goes_on(kind, layout, client, stages, tmp_path):
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal

    folder = str(tmp_path)
    engine = start(kind, False, stages[0], client, layout)
    train(engine, 0)
    engine.save_checkpoint(folder, "three")
    if layout == "universal":  # `latest` goes on, `latest_universal` does not
        train(engine, 9)
        engine.save_checkpoint(folder, "six")
    engine.destroy()
    if layout == "universal":
        if engine.mesh.rank == 0:
            arguments = ["--input_folder", f"{folder}/three", "--output_folder", f"{folder}/universal"]
            ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
        deepspeed.comm.barrier()
    tag = None if layout == "universal" else "three"
    engine = start(kind, True, stages[1], client, layout)
    if kind == "added":
        with pytest.raises(CheckpointError) as caught:  # upstream's default
            engine.load_checkpoint(folder, tag)
        assert caught.value.code == "ckpt-mismatch"
    path, _ = engine.load_checkpoint(folder, tag, load_module_strict=kind != "added")
    assert path is not None
    assert engine.global_steps == 3
    train(engine, 3)
    found, wanted = engine.full_state_dict(), single(kind)
    for name, value in wanted.items() if engine.mesh.rank == 0 else ():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


def grouped(model):
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    return torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": biases, "lr": 0.02}], lr=0.05
    )


@pytest.mark.parametrize("optimizer", [True, False])
@world(2, backend=None)
def test_a_run_goes_on_from_files_without_zero(optimizer, tmp_path):
    import deepspeed

    model = Partial("", False)
    single_optimizer = grouped(model)

    def alone(first):
        for step in range(first, first + 3):
            single_optimizer.zero_grad()
            model(batch(step)).backward()
            single_optimizer.step()

    alone(0)
    states = {"module": model.state_dict(), "optimizer": single_optimizer.state_dict(), "global_steps": 3}
    if not optimizer:  # the weights in the format of the module, as of fp16 and bf16
        model.bfloat16().float()
        states = {"module": {n: p.bfloat16() for n, p in model.state_dict().items()}, "optimizer": None}
    folder = str(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    fresh = Partial("", False)
    with torch.no_grad():
        fresh.body.weight.zero_()
    engine = deepspeed.initialize(model=fresh, optimizer=grouped(fresh), config=config)[0]
    if engine.mesh.rank == 0:
        (tmp_path / "three").mkdir(exist_ok=True)
        torch.save(states, tmp_path / "three" / "mp_rank_00_model_states.pt")
    deepspeed.comm.barrier()
    path, _ = engine.load_checkpoint(folder, "three", load_optimizer_states=optimizer)
    assert path is not None
    if optimizer:
        assert engine.global_steps == 3
        alone(3)
        train(engine, 3)
    found = engine.full_state_dict()
    for name, value in model.state_dict().items() if engine.mesh.rank == 0 else ():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


class Sparse(nn.Module):
    """Two of four experts never get a token."""

    def __init__(self, split):
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.moe = MoE(6, nn.Linear(6, 6), 4, ep_size=2 if split else 1, k=1, drop_tokens=False, use_rts=False)
        self.last = nn.Linear(6, 6)
        with torch.no_grad():
            gate = self.moe.deepspeed_moe.gate.wg.weight
            gate[1], gate[2:] = -gate[0], 0.0
        gate.requires_grad_(False)

    def forward(self, x):
        return self.last(self.moe(torch.tanh(self.first(x)))[0]).square().mean()


def start_sparse(split, stage, client, layout):
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as groups_of

    model = Sparse(split)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"layout": "deepspeed"} if layout == "deepspeed" else {},
    }
    groups = groups_of({"params": [p for p in model.parameters() if p.requires_grad], "name": "all"})
    if client:
        optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}}
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


SPARSE_CELLS = [
    (split, layout, client, stages)
    for split in (False, True)
    for layout in ("ours", "deepspeed")
    for client in (False, True)
    for stages in ((0, 2), (1, 1), (2, 1), (2, 2), (3, 2), (1, 3))
    if layout == "ours" or stages[0]  # upstream's layout has no stage 0
]
SPARSE_DRAWN = [SPARSE_CELLS[i] for i in (2, 9, 16, 24, 33, 40)]


@pytest.mark.parametrize(
    ("split", "layout", "client", "stages"),
    [*SPARSE_DRAWN, *(pytest.param(*c, marks=pytest.mark.slow) for c in SPARSE_CELLS if c not in SPARSE_DRAWN)],
)
@world(2, backend=None)
def test_a_run_with_idle_experts_goes_on(split, layout, client, stages, tmp_path):
    import deepspeed

    folder = str(tmp_path)
    engine = start_sparse(split, stages[0], client, layout)
    train(engine, 0)
    engine.save_checkpoint(folder, "three")
    train(engine, 3)
    wanted = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    engine = start_sparse(split, stages[1], client, layout)
    path, _ = engine.load_checkpoint(folder, "three")
    assert path is not None
    assert engine.global_steps == 3
    train(engine, 3)
    found = engine.full_state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@world(2)
def test_upstream_files_that_cannot_be_written_are_an_error_on_all_ranks(tmp_path, monkeypatch):
    import deepspeed

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=Partial("plain", False), config=config)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            engine.save_checkpoint(str(tmp_path))
    assert caught.value.code == "ckpt-io"
    assert not list(tmp_path.rglob("*.pt"))
    assert engine.load_checkpoint(str(tmp_path))[0]  # which is complete
    engine.destroy()

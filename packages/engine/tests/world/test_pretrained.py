"""`save_pretrained` of a model that is cut: whole weights, whoever calls it, with or without a state dict."""

from __future__ import annotations

import copy
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
import ds_zero
from ds_config.errors import CheckpointError, PlanError, ShardedAccessError, set_place
from ds_engine.pretrained import SavesWhole
from ds_testing import world


class Saved(nn.Module):
    """As transformers has it; the name of the file says who wrote."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()

    def save_pretrained(
        self, save_directory: str, is_main_process: bool = True, state_dict: dict[str, Any] | None = None, **more: Any
    ) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        if is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            torch.save(state, Path(save_directory) / f"{torch.distributed.get_rank()}.pt")


class Around(nn.Module):
    """A model inside another, whose method takes a state dict only by name, as PEFT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Saved()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def save_pretrained(self, save_directory: str, is_main_process: bool = True, **kwargs: Any) -> None:
        self.inner.__class__.save_pretrained(self, save_directory, is_main_process, kwargs.get("state_dict"))


RULES = {"layer_specs": [{"patterns": [r".*up\.weight"]}, {"patterns": [r".*down\.weight"], "partition_type": "row"}]}


def started(model: nn.Module, stage: int, tensor: int) -> tuple[Any, dict[str, Tensor]]:
    """An engine after a step, and what one process has then."""
    plain, x = copy.deepcopy(model), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain(x).backward()
    optimizer.step()
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor, "partition_config": RULES}
    engine, *_ = ds_engine.initialize(model=model, config=config)
    data = engine.mesh["data"]
    engine.backward(engine(x.chunk(data.size)[data.rank]))
    engine.step()
    return engine, dict(plain.state_dict())


def same(file: Path, state: dict[str, Tensor]) -> None:
    found = torch.load(file, weights_only=True)
    assert list(found) == list(state)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize(("stage", "tensor"), [(0, 1), (2, 1), (3, 1), (0, 2), (3, 2)])
@world(2)
def test_whole_weights_whoever_calls(stage: int, tensor: int, tmp_path: Path) -> None:
    model = Around()
    engine, state = started(model, stage, tensor)
    rank, cut = torch.distributed.get_rank(), stage == 3 or tensor > 1
    model.save_pretrained(str(tmp_path / "all"))
    torch.distributed.barrier()  # a model that is not cut does not wait
    assert sorted(os.listdir(tmp_path / "all")) == ["0.pt"] or not cut  # ranks of a host do not write over each other
    same(tmp_path / "all" / "0.pt", state)
    model.save_pretrained(str(tmp_path / "main"), rank == 0)
    if cut or rank == 0:
        same(tmp_path / "main" / "0.pt", state)
    whole = engine.full_state_dict() or None
    model.save_pretrained(str(tmp_path / "known"), rank == 0)  # which has the weights, and goes on at once
    if cut or rank == 0:
        same(tmp_path / "known" / "0.pt", state)
    model.save_pretrained(str(tmp_path / "given"), is_main_process=rank == 0, state_dict=whole)
    if rank == 0:
        model.save_pretrained(str(tmp_path / "alone"), state_dict=whole)
        same(tmp_path / "given" / "0.pt", state)
        same(tmp_path / "alone" / "0.pt", state)
    model.inner.save_pretrained(str(tmp_path / "inner"), is_main_process=rank == 1)
    if cut or rank == 1:
        same(tmp_path / "inner" / "1.pt", {name.partition(".")[2]: value for name, value in state.items()})
    refs = [weakref.ref(value) for value in (whole or {}).values()]
    del whole
    assert not any(ref() is not None for ref in refs)  # the garbage collector may be paused
    copied = copy.deepcopy(model)
    assert copied.save_pretrained.__self__ is copied
    engine.close()
    assert "save_pretrained" not in vars(model)
    set_place("")


@world(2)
def test_a_rank_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, state = started(Saved(), 3, 1)
    monkeypatch.setattr(SavesWhole, "wait_s", 0.2)
    if engine.mesh.rank == 0:
        with pytest.raises(ShardedAccessError, match=r"called on ranks \[0\] of 2, and ranks \[1\]"):
            engine.save_pretrained(str(tmp_path / "alone"))
    torch.distributed.barrier()
    monkeypatch.setattr(SavesWhole, "wait_s", 60.0)
    engine.save_pretrained(str(tmp_path / "all"))
    same(tmp_path / "all" / "0.pt", state)
    engine.close()
    set_place("")


class Elsewhere(nn.Module):
    """As sentence-transformers has it: another name for the folder, no state dict; its parts are saved by their own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Saved()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.extra(x))

    def save_pretrained(self, path: str, safe: bool = True) -> None:
        self.inner.save_pretrained(path, safe)
        torch.save(self.extra.state_dict(), Path(path) / "extra.pt")


class Adapted(nn.Module):
    """As PEFT has it: what is saved is a part of the model's own state dict, and a prompt that an encoder is called for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.lora = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.prompt_encoder = nn.ModuleDict({"default": nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))})

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt_encoder["default"](torch.arange(4))
        return (self.base(x) + self.lora(x) + prompt).square().mean()

    def save_pretrained(self, save_directory: str, is_main_process: bool = True, **kwargs: Any) -> None:
        state = kwargs.get("state_dict") or self.state_dict()
        chosen = {name: value for name, value in state.items() if name.startswith("lora")}
        chosen["prompt"] = self.prompt_encoder["default"](torch.arange(4)).detach()
        if is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            torch.save(chosen, Path(save_directory) / "adapter.pt")


def engine_of(model: nn.Module) -> tuple[Any, nn.Module]:
    """An engine at stage 3 after a step, and the same model in one process."""
    plain, x = copy.deepcopy(model), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    plain(x).backward()
    optimizer.step()
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = ds_engine.initialize(model=model, config=config)
    engine.backward(engine(x if isinstance(model, Adapted) else x.chunk(2)[engine.mesh.rank]))
    engine.step()
    return engine, plain


def adapter_of(plain: Adapted) -> dict[str, Tensor]:
    state = {name: value for name, value in plain.state_dict().items() if name.startswith("lora")}
    return state | {"prompt": plain.prompt_encoder["default"](torch.arange(4)).detach()}


@pytest.mark.parametrize("chosen", ["all", "trained"])
@world(2)
def test_one_rank_saves_what_is_gathered(chosen: str, tmp_path: Path) -> None:
    """PEFT's recipe; on a rank that waited for others, this would take the test's whole time."""
    engine, plain = engine_of(Adapted())
    params = [p for p in engine.module.parameters() if p.requires_grad or chosen == "all"]
    with ds_zero.GatheredParameters(params):
        if engine.mesh.rank == 0:
            engine.module.save_pretrained(str(tmp_path / "adapter"))
    if engine.mesh.rank == 0:
        same(tmp_path / "adapter" / "adapter.pt", adapter_of(plain))
    engine.close()
    set_place("")


@world(2)
def test_nothing_empty_is_written(tmp_path: Path) -> None:
    engine, _ = engine_of(Around())
    with ds_zero.GatheredParameters([engine.module.inner.up.weight]):
        if engine.mesh.rank == 0:
            with pytest.raises(ShardedAccessError, match=r"inner.up.bias was to be saved by this rank"):
                engine.module.save_pretrained(str(tmp_path / "part"))
    assert "Unreadable" not in str(engine.module.state_dict())
    engine.close()
    set_place("")


@pytest.mark.parametrize("way", ["all", "given", "known"])
@world(2)
def test_a_prompt_is_saved_while_the_other_ranks_wait(way: str, tmp_path: Path) -> None:
    engine, plain = engine_of(Adapted())
    state = engine.full_state_dict() if way != "all" else {}
    if way == "given":
        state = {name: value.clone() for name, value in state.items()}
        if engine.mesh.rank == 0:
            engine.module.save_pretrained(str(tmp_path / "adapter"), state_dict=state)
    elif way == "all" or engine.mesh.rank == 0:
        engine.module.save_pretrained(str(tmp_path / "adapter"))
    if engine.mesh.rank == 0:
        same(tmp_path / "adapter" / "adapter.pt", adapter_of(plain))
    engine.close()
    assert "Sequential" in str(type(engine.module.prompt_encoder["default"]))
    set_place("")


@pytest.mark.parametrize("way", ["all", "known", "gathered"])
@world(2)
def test_a_method_without_a_state_dict_saves_whole_weights(way: str, tmp_path: Path) -> None:
    engine, plain = engine_of(Elsewhere())
    state = engine.full_state_dict() if way == "known" else {}
    if way == "gathered":
        with ds_zero.GatheredParameters(engine.module):
            if engine.mesh.rank == 0:
                engine.module.save_pretrained(str(tmp_path / "m"))
    elif way == "all" or engine.mesh.rank == 0:
        engine.module.save_pretrained(str(tmp_path / "m"))
    if engine.mesh.rank == 0:
        same(tmp_path / "m" / "0.pt", dict(plain.inner.state_dict()))
        same(tmp_path / "m" / "extra.pt", dict(plain.extra.state_dict()))
        assert bool(state) == (way == "known")
    engine.close()
    set_place("")


@world(2)
def test_a_state_that_is_known_is_not_used_after_a_step_and_all_may_call(tmp_path: Path) -> None:
    model = Saved()
    engine, state = started(model, 3, 1)
    whole = engine.full_state_dict()
    model.save_pretrained(str(tmp_path / "first"))
    same(tmp_path / "first" / "0.pt", state)
    x = torch.ones(4, 8).chunk(2)[engine.mesh.rank]
    engine.backward(engine(x))
    engine.step()
    model.save_pretrained(str(tmp_path / "second"))
    found = torch.load(tmp_path / "second" / "0.pt", weights_only=True)
    again = engine.full_state_dict()
    if engine.mesh.rank == 0:
        assert not torch.equal(found["up.weight"], whole["up.weight"])
        same(tmp_path / "second" / "0.pt", again)
    engine.close()
    set_place("")


@world(2)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path, name: str) -> None:
    """Rank 0 alone writes, and the others would go on to a step that never comes."""
    (tmp_path / "file").write_text("in the way")
    engine, _ = started(Saved(), 3, 1)
    with pytest.raises((NotADirectoryError, PlanError), match="Not a directory"):
        engine.module.save_pretrained(str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="FileExistsError") as caught:
        engine.save_16bit_model(tmp_path / "file", name)
    assert caught.value.code == "ckpt-io"
    assert engine.full_state_dict() or torch.distributed.get_rank()
    engine.close()

"""`save_pretrained` of a model that is cut: whole weights, whoever calls it, with or without a state dict."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
from ds_config.errors import ShardedAccessError, set_place
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
    model.save_pretrained(str(tmp_path / "given"), is_main_process=rank == 0, state_dict=whole)
    if rank == 0:
        model.save_pretrained(str(tmp_path / "alone"), state_dict=whole)
        same(tmp_path / "given" / "0.pt", state)
        same(tmp_path / "alone" / "0.pt", state)
    model.inner.save_pretrained(str(tmp_path / "inner"), is_main_process=rank == 1)
    if cut or rank == 1:
        same(tmp_path / "inner" / "1.pt", {name.partition(".")[2]: value for name, value in state.items()})
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

"""Deterministic mode is torch's, for a block; `python -m ds_accel` prints what the machine has."""

from __future__ import annotations

import json
import os

import pytest
import torch

from ds_accel import deterministic, get_accelerator
from ds_accel.__main__ import main


def settings() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )  # fmt: skip


@pytest.mark.parametrize("workspace", [None, ":0:0", ":16:8"])
def test_a_block_is_deterministic_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, workspace: str | None) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA may run already")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before = settings()
    with deterministic():
        assert settings() == (True, False, False, True, ":16:8" if workspace == ":16:8" else ":4096:8")
    assert settings() == before
    with deterministic(warn_only=True):
        assert settings()[:2] == (True, True)
        with deterministic():
            assert settings()[:2] == (True, False)
        assert settings()[:2] == (True, True)


def test_what_has_no_deterministic_algorithm_raises() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA may run already")
    x, places = torch.zeros(4), torch.tensor([0, 0])
    with deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        x.put_(places, torch.ones(2), accumulate=False)
    x.put_(places, torch.ones(2), accumulate=False)


def test_started_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(Exception, match="CUDA runs already") as error, deterministic():
        pass
    assert error.value.code == "accel-deterministic"  # type: ignore[attr-defined]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_table_of_one_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert get_accelerator().name in text
    assert get_accelerator().supports(torch.bfloat16).reason in text
    assert main(["--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {"detection", "device", "communication", "bfloat16", "graphs"} <= set(table)

"""The watch for FSDP runs before every forward of a model with parts: it costs nothing where nothing changed."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from ds_comm.fsdp import _Check, unwatch_fsdp


def test_modules_are_looked_at_only_after_fsdp_came(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    looked: list[str] = []
    find = nn.Module.get_submodule
    monkeypatch.setattr(nn.Module, "get_submodule", lambda self, name: looked.append(name) or find(self, name))
    check = _Check({"0": {}, "1": {}})
    check(model, ())  # states of other tests' models may be in this process
    looked.clear()
    check(model, ())
    assert looked == []
    model._is_fsdp_managed_module = True  # type: ignore[assignment]  # as FSDP marks what it was put around
    check(model, ())
    assert looked == ["0", "1"]
    looked.clear()
    check(model, ())
    assert looked == []
    copy.deepcopy(check)(model, ())  # a copy may be another module's
    assert looked == ["0", "1"]


def test_a_watched_model_is_let_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(_Check({"0": {}}))
    model[0].register_forward_pre_hook(_Check({"": {}}))
    model[0].register_forward_pre_hook(lambda module, args: None)
    unwatch_fsdp(model)
    assert (len(model._forward_pre_hooks), len(model[0]._forward_pre_hooks)) == (0, 1)

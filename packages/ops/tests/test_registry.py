"""Which backend runs, and why."""

from __future__ import annotations

import types

import pytest
import torch

from ds_config.errors import KernelError, UnsupportedError
from ds_ops import _native, registry
from ds_ops.all_ops import every_op
from ds_ops.registry import Backend, Op


def op(*backends: tuple[str, str]) -> Op:
    return Op("test", "", tuple(Backend(n, lambda name=n: name, lambda _d, _t, why=why: why) for n, why in backends))


def test_the_first_without_obstacle_runs_and_the_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_OPS", raising=False)
    choice = registry.choose(op(("a", "no a here"), ("b", ""), ("c", "")), "cpu", torch.float32)
    assert (choice.backend.run(), choice.rejected) == ("b", (("a", "no a here"),))


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", "c")
    choice = registry.choose(op(("a", ""), ("b", ""), ("c", "")), "cpu", torch.float32)
    assert choice.backend.name == "c"
    assert "DS_OPS=c" in dict(choice.rejected)["a"]
    assert registry.choose(op(("a", ""), ("b", "")), "cpu", torch.float32).backend.name == "a"


def test_no_backend_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", "b")
    with pytest.raises(UnsupportedError, match=r"a: DS_OPS=b.*b: too old") as caught:
        registry.choose(op(("a", ""), ("b", "too old")), "cpu", torch.float32)
    assert caught.value.code == "op-no-backend"


def test_every_op_ends_with_the_reference() -> None:
    catalog = every_op()
    assert catalog.broken == ()
    assert {"update", "convert", "sum_squares"} <= {each.name for each in catalog.ops}
    for each in catalog.ops:
        assert each.backends[-1].name == "reference"
        assert each.summary


def test_names_are_unique() -> None:
    with pytest.raises(KernelError, match="twice"):
        registry.register(every_op().ops[0])


def test_native_runs_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_OPS", raising=False)
    (update,) = [o for o in every_op().ops if o.name == "update"]
    built = _native.load("_cpu").module is not None
    assert registry.choose(update, "cpu", torch.float32).backend.name == ("cpu" if built else "torch")
    assert registry.choose(update, "cpu", torch.float64).backend.name == "torch"
    assert registry.choose(update, "meta", torch.float32).backend.name == "torch"


@pytest.mark.parametrize(
    ("devices", "expected"), [((0, "driver too old"), "finds no device: driver too old"), ((1, ""), "")]
)
def test_the_cuda_module_must_see_a_device(
    devices: tuple[int, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runtime is its own, so it may want a newer driver than torch's does."""
    module = types.SimpleNamespace(devices=lambda: devices)
    monkeypatch.setattr(_native, "load", lambda _name: _native.Loaded(module, ""))  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_no_device", registry._no_device.__wrapped__)
    backend = registry.cuda_backend(lambda: None)
    assert expected in backend.obstacle("cuda", torch.float32)
    assert bool(backend.obstacle("cuda", torch.float32)) == bool(expected)
    assert "runs on cuda" in backend.obstacle("cpu", torch.float32)

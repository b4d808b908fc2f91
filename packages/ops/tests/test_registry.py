"""Which backend runs, and why."""

from __future__ import annotations

import types

import pytest
import torch

from ds_config.errors import KernelError, UnsupportedError
from ds_ops import _native, cuda_launch, registry
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


@pytest.mark.parametrize("obstacle", ["", "the driver finds no device"])
def test_what_stands_in_the_way_of_cuda_kernels_is_said(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "load", lambda _name: _native.Loaded(types.ModuleType("_cuda"), ""))
    monkeypatch.setattr(cuda_launch, "obstacle", lambda: obstacle)
    backend = registry.cuda_backend(lambda: None)
    assert backend.obstacle("cuda", torch.float32) == obstacle
    assert "runs on cuda" in backend.obstacle("cpu", torch.float32)


def test_an_op_whose_kernel_cannot_be_compiled_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that finds it out, and every later one; the reason stays with the choice."""
    monkeypatch.setattr(_native, "load", lambda _name: _native.Loaded(types.ModuleType("_cuda"), ""))
    monkeypatch.setattr(cuda_launch, "obstacle", lambda: "")
    monkeypatch.setattr(registry, "_ops", {})

    def fails(_x: int) -> int:
        raise KernelError("nvrtc: no", code="kernel-compile", fix="none")

    op = registry.register(
        registry.Op("late", "", (registry.cuda_backend(fails), registry.reference_backend(lambda x: x + 1)))
    )
    first = registry.choose(op, "cuda", torch.float32)
    assert first.backend.name == "cuda"
    assert first.backend.run(1) == 2
    later = registry.choose(op, "cuda", torch.float32)
    assert later.backend.name == "reference"
    assert later.rejected == (("cuda", "nvrtc: no"),)

    def breaks(_x: int) -> int:
        raise KernelError("refused", code="kernel-launch", fix="none")

    other = registry.register(
        registry.Op("broken", "", (registry.cuda_backend(breaks), registry.reference_backend(lambda x: x)))
    )
    with pytest.raises(KernelError, match="refused"):  # what may have run is never run again
        registry.choose(other, "cuda", torch.float32).backend.run(1)

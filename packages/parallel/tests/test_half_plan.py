"""Which layers run in halves, and in which order: decided before a tensor is touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor.half_plan import (
    FIRST_FREE,
    LATE_GRADIENT,
    HalfPart,
    LayerCut,
    backward_order,
    forward_order,
    half_sizes,
    layers_in_halves,
    wait_number,
)
from ds_parallel.tensor.layer_rules import ShardKind


@given(st.integers(0, 1000))
def test_halves_have_all_samples(batch: int) -> None:
    sizes = half_sizes(batch)
    assert (sizes is None) == (batch < 2)
    if sizes is not None:
        assert sum(sizes) == batch
        assert sizes[0] - sizes[1] in (0, 1)


def test_the_orders_of_a_layer_with_two_sums() -> None:
    a, b = (lambda part: HalfPart(0, part)), (lambda part: HalfPart(1, part))
    assert list(forward_order(3)) == [a(0), b(0), a(1), b(1), a(2), b(2)]
    assert list(backward_order(2)) == [a(1), b(1), a(0), b(0)]


def picks(parts: int) -> Iterator[tuple[str, HalfPart | None]]:
    """What autograd takes: of all that is ready the largest number. Nodes of the first half are the newer ones, as on its thread."""
    ready = {("compute", HalfPart(half, parts - 1)): FIRST_FREE + 1 - half for half in (0, 1)}
    while ready:
        kind, of = max(ready, key=lambda node: ready[node])
        del ready[kind, of]
        yield kind, of
        if kind == "compute":  # its sum starts with its end, and gradients of its weights can be computed
            ready["late", of] = LATE_GRADIENT
            ready["wait", of] = wait_number(of.part, of.half)
        elif kind == "wait" and of.part:
            ready["compute", HalfPart(of.half, of.part - 1)] = FIRST_FREE + 1 - of.half


@given(st.integers(1, 16))
def test_backward_takes_parts_in_turn_and_waits_last(parts: int) -> None:
    taken = list(picks(parts))
    assert [of for kind, of in taken if kind == "compute"] == list(backward_order(parts))
    for of in backward_order(parts):
        between = taken[taken.index(("compute", of)) + 1 : taken.index(("wait", of))]
        assert ("late", of) in between  # the gradients of its own weights, at least
        if of != HalfPart(1, 0):
            assert any(kind in ("compute", "late") and other.half != of.half for kind, other in between)


def cuts(*names: str, kind: ShardKind = ShardKind.ROW) -> list[LayerCut]:
    return [LayerCut(name, kind) for name in names]


def test_layers_are_the_outermost_numbered_modules() -> None:
    names = ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.10.mlp.experts.3.w2"]
    given_cuts = cuts(*names, "head") + cuts("model.layers.11.mlp.up_proj", kind=ShardKind.COLUMN)
    assert layers_in_halves(given_cuts) == ("model.layers.0", "model.layers.10")


@pytest.mark.parametrize("names", [(), ("encoder.o_proj", "encoder.7")])
def test_a_model_without_numbered_layers_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="what is one layer of the model") as caught:
        layers_in_halves(cuts(*names))
    assert caught.value.code == "tensor-halves"


def test_experts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.1\.experts routes the tokens of a whole batch"):
        layers_in_halves(cuts("layers.0.o_proj") + cuts("layers.1.experts", kind=ShardKind.EXPERTS))

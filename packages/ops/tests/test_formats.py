"""Quantization as data: specs, layouts, the swizzle, and a QuantTensor's checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import KernelError
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    Draw,
    Format,
    QuantSpec,
    QuantTensor,
    Swizzle,
)

FORMATS = [INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1]


@given(st.sampled_from(FORMATS), st.integers(1, 64), st.integers(0, 3000), st.booleans())
def test_layout_holds_every_code_and_parameter(f: Format, quads: int, cols: int, symmetric: bool) -> None:
    spec = QuantSpec(f, 4 * quads, symmetric or f.is_float)
    layout = spec.layout(cols)
    assert layout.code_bytes * 8 >= cols * f.bits > (layout.code_bytes - 1) * 8
    assert (layout.groups - 1) * spec.group < cols <= layout.groups * spec.group or (cols, layout.groups) == (0, 0)
    assert layout.params_at % 4 == 0
    assert 0 <= layout.params_at - layout.code_bytes < 4
    assert layout.row_bytes == layout.params_at + 4 * spec.num_params * layout.groups


@pytest.mark.parametrize(("f", "group"), [(INT4, 3), (FP6_E3M2, 6), (INT8, 0), (INT8, -4), (FP4_E2M1, 1)])
def test_a_group_that_is_not_whole_bytes_is_refused(f: Format, group: int) -> None:
    with pytest.raises(KernelError, match="whole number of bytes") as caught:
        QuantSpec(f, group)
    assert caught.value.code == "quant-spec"


def test_asymmetric_floats_are_refused() -> None:
    with pytest.raises(KernelError, match="no zero point"):
        QuantSpec(FP8_E4M3, symmetric=False)


@pytest.mark.parametrize("f", [f for f in FORMATS if f.is_float])
def test_the_largest_code_has_the_largest_value(f: Format) -> None:
    exponent, fraction = f.max_code >> f.mantissa, f.max_code & (2**f.mantissa - 1)
    assert (1 + fraction / 2**f.mantissa) * 2.0 ** (exponent - f.bias) == f.maximum


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_swizzle_sends_each_partition_home(nodes: int, local: int, slices: int) -> None:
    """Both all-to-alls acted out on labels: every rank ends with its own partition from everyone."""
    swizzle = Swizzle(nodes, local, slices)
    order = swizzle.order()
    world = nodes * local
    assert sorted(order) == list(range(world * slices))
    for piece in range(slices):
        wire = [-1] * world  # of one rank: which partition is at which wire row of this slice
        for partition in range(world):
            wire[order[partition * slices + piece] - piece * world] = partition
        for index in range(local):  # first hop: contiguous parts of `nodes` rows to local rank `index`
            part = wire[index * nodes : (index + 1) * nodes]
            assert part == [node * local + index for node in range(nodes)]  # second hop: one row to each node


def test_swizzle_needs_positive_sizes() -> None:
    with pytest.raises(KernelError, match="below 1"):
        Swizzle(2, 0)


def test_quant_tensor_refuses_a_wire_of_another_layout() -> None:
    spec = QuantSpec(INT8, 16)
    good = QuantTensor.empty(spec, 3, 20, like=torch.empty(0))
    assert (good.codes.shape, good.params.shape, good.nbytes) == ((3, 20), (3, 2, 1), 3 * 28)
    for wire in (
        good.wire[:, :24],
        good.wire.view(torch.int8),
        good.wire.t(),
        torch.empty(90, dtype=torch.uint8)[2:86].view(3, 28),
    ):
        with pytest.raises(KernelError, match="found") as caught:
            QuantTensor(wire, spec, 20, (3, 20))
        assert caught.value.code == "quant-wire"
    with pytest.raises(KernelError, match="has not the"):
        QuantTensor(good.wire, spec, 20, (3, 21))


def test_keys_differ_by_seed() -> None:
    keys = {Draw(seed).keys for seed in range(1000)}
    assert len(keys) == 1000
    assert all(0 <= k < 2**32 for pair in keys for k in pair)

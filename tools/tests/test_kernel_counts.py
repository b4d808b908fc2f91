"""CUDA kernels keep what makes them fast: registers, spills, instructions an element and bytes in flight, as tools/ratchets/kernels.json has them."""

from __future__ import annotations

import json

import pytest

from ds_config.errors import KernelError
from repo.cubin import KernelCode
from repo.kernel_counts import FILE, KernelCount, bound, measure, measured_kernels

RATCHET = json.loads(FILE.read_text())["kernels"]


def test_every_kernel_of_the_ratchet_has_a_row() -> None:
    assert {count.kernel.instance for count in measured_kernels()} == set(RATCHET)


def test_what_the_counts_allow_is_near_a_copy() -> None:
    assert {name: row["bound"] for name, row in RATCHET.items() if row["bound"] < 0.85} == {}
    assert {name: row["spills"] for name, row in RATCHET.items() if row["spills"]} == {}


def test_the_bound_sees_instructions_and_loads() -> None:
    """The old dequantizer and the old quantizer, as they were counted and measured."""
    kernel = measured_kernels()[0].kernel
    dequantizer = KernelCount(kernel, 4, 1.016, 2, 16)
    assert 0.1 < bound(dequantizer, KernelCode(68, 0, 237, 0)) < 0.3
    quantizer = KernelCount(kernel, 32, 2, 1.016, 8)
    assert 0.3 < bound(quantizer, KernelCode(46, 0, 300, 0)) < 0.4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ratchet_holds() -> None:
    """Numbers may fall; `python -m repo.kernel_counts` in tools/ writes them anew. They are those of NVRTC 13.0."""
    from ds_ops._call import native
    from ds_ops.kernel_compilers import open_compiler

    try:
        compiler = open_compiler(native("_cuda"), 0)
    except KernelError as error:
        pytest.skip(error.message)
    if tuple(compiler.native.version) != (13, 0):
        pytest.skip(f"the ratchet is of NVRTC 13.0, here is {compiler.name}")
    grown = {}
    for name, row in measure(compiler).items():
        was = RATCHET[name]
        worse = [
            key for key in row if (row[key] < was[key] if key.startswith(("bound", "bytes")) else row[key] > was[key])
        ]
        if worse:
            grown[name] = {key: (was[key], row[key]) for key in worse}
    assert grown == {}

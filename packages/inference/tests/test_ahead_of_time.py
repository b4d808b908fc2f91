"""Machine code of the kernels, compiled without a device: registers, spills and shared memory stay what `triton_resources.json` has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from ds_ops.triton_kernels.ahead_of_time import SHARED_MEMORY
from ds_ops.triton_kernels.triton_products import plan_stages

RECORDED = Path(__file__).parent / "triton_resources.json"


def compiled(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "ds_ops.triton_kernels.ahead_of_time", str(RECORDED), *options]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


@pytest.mark.slow
def test_a_kernel_takes_what_is_recorded() -> None:
    done = compiled("--only", "gate", "--architecture", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kernels compiled" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_takes_what_is_recorded() -> None:
    done = compiled()
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_kernel_takes_more_shared_memory_than_a_block_has() -> None:
    """A card for workstations has 99 KiB, an H100 227: what takes more is not launched there."""
    recorded = json.loads(RECORDED.read_text())
    assert {int(name[3:].partition(",")[0]) for name in recorded} == set(SHARED_MEMORY)
    assert [n for n, one in recorded.items() if one["shared"] > SHARED_MEMORY[int(n[3:].partition(",")[0])]] == []


def test_stages_that_fit() -> None:
    """The product of codes with zero points and many rows has three stages on an A100, and two on a card that has no room for three."""
    for tile, size, zeros, room, stages in (
        ((128, 64), 2, True, 163 << 10, 3),
        ((128, 64), 2, True, 99 << 10, 2),
        ((128, 64), 2, False, 99 << 10, 3),
        ((16, 32), 2, True, 99 << 10, 3),
        ((32, 32), 4, True, 99 << 10, 3),
        ((64, 32), 2, True, 64 << 10, 3),
        ((128, 64), 2, False, 64 << 10, 2),
    ):
        assert plan_stages(tile, size, zeros, room) == stages, (tile, size, zeros, room)


def differences(kernel: Any, arguments: list[Any], others: list[Any]) -> list[str]:
    """Name the arguments for whose values Triton would compile a kernel of its own."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    bind = jit.create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    first, second = (bind(*a, *(0,) * (len(kernel.params) - len(a)))[1] for a in (arguments, others))
    return [p.name for p, one, other in zip(kernel.params, first, second, strict=True) if one != other]


def check_compiled_once() -> None:
    from ds_ops.triton_kernels import triton_attention, triton_products, triton_rotary, triton_sampling

    words = torch.zeros(64, dtype=torch.int32)
    fresh, odd = words[:8], words[1:9]  # parts of one buffer, which begin anywhere
    q = torch.zeros(8)
    attend = [q, q, q, q, q, q, q, q, fresh, fresh, fresh, q, q, 16, 64, 1024, 1024, 128, 128, 0.1, 0.0, 1.0]
    others = [*attend[:8], odd, odd, odd, q, q, 1, 1, *attend[15:]]
    assert differences(triton_attention._attend, attend, others) == []
    assert differences(triton_attention._combine, [q, q, q, fresh, q, 16], [q, q, q, odd, q, 1]) == []
    coded = [q, words, q, q, 1, 4096, 4096, 2176, 512, 128]
    assert differences(triton_products._coded, coded, [*coded[:4], 16, *coded[5:]]) == []
    assert differences(triton_products._coded, coded, [*coded[:5], 4095, *coded[6:]]) == ["outputs"]  # of the model
    assert differences(triton_rotary._rotary_write, [q, q, q, fresh, q], [q, q, q, odd, q]) == []
    assert differences(triton_sampling._adjust, [q, words, q, 1, 128256, 1e30], [q, words, q, 3, 128256, 1e30]) == []
    assert differences(triton_sampling._pick, [q, words, words, 1], [q, words, words, 3]) == []


def test_a_step_of_other_numbers_runs_the_kernel_that_is_compiled() -> None:
    """Triton compiles by whether an integer is 1 or a multiple of 16, and an address one of 16: seconds in the midst of serving."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    check = f"import runpy; runpy.run_path({__file__!r})['check_compiled_once']()"
    command = [sys.executable, "-W", "ignore", "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_kernel_spills() -> None:
    assert [name for name, one in json.loads(RECORDED.read_text()).items() if one["spills"]] == []

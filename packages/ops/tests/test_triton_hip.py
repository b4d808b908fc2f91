"""The Triton kernels compile for AMD's gfx942 (MI300), without a card: what the support page says of ROCm.

In a process of their own: where Triton was imported for its interpreter, it compiles nothing.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

EM_AMDGPU = 224
FEW = ("norm of 4096", "rotary", "gate", "product of int8", "decode, 32/4 heads of 64")
TOO_LARGE = ("decode, latent", "prompts, latent")  # 68 KB: attention of 576 numbers a head has no ROCm kernel yet
SHARED = 64 << 10
"""Bytes of shared memory that a compute unit has."""


def compile_call(name: str) -> list[int]:
    """Compile the kernels of a call for gfx942; return the shared memory of each."""
    import triton

    from ds_ops.triton_kernels import ahead_of_time

    kernels: list[Any] = []

    def compile_for_hip(source: Any, target: Any, options: dict[str, Any]) -> Any:
        assert target.backend == "cuda"
        kernels.append(triton.compile(source, target=ahead_of_time.GPUTarget("hip", "gfx942", 64), options=options))
        return types.SimpleNamespace(asm={"cubin": b""}, metadata=types.SimpleNamespace(shared=0))

    compiler = types.SimpleNamespace(compile=compile_for_hip, __file__=triton.__file__)
    report = types.SimpleNamespace(stdout="REG:0 STACK:0 SHARED:0 LOCAL:0")
    runner = types.SimpleNamespace(run=lambda *_args, **_kwargs: report)
    patches = (
        mock.patch.object(ahead_of_time, "triton", compiler),
        mock.patch.object(ahead_of_time, "subprocess", runner),
        mock.patch.object(torch.version, "hip", "7.0"),
    )
    with patches[0], patches[1], patches[2]:
        ahead_of_time.compile_call(ahead_of_time.CALLS[name], 90)
    for kernel in kernels:
        assert kernel.asm["hsaco"][:4] == b"\x7fELF"
        assert struct.unpack_from("<H", kernel.asm["hsaco"], 18) == (EM_AMDGPU,)
    return [kernel.metadata.shared for kernel in kernels]


def shared_memory(*names: str) -> dict[str, list[int]]:
    """Compile calls (all without names) in a new process."""
    pytest.importorskip("triton", reason="needs the package triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(found: dict[str, list[int]]) -> None:
    for name, kernels in found.items():
        assert kernels, name
        assert (max(kernels) <= SHARED) == (name not in TOO_LARGE), f"{name}: {kernels}"


def test_a_few_kernels_compile_for_gfx942() -> None:
    found = shared_memory(*FEW)
    assert set(found) == set(FEW)
    check(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_gfx942() -> None:
    found = shared_memory()
    assert set(found) >= {*FEW, *TOO_LARGE}
    check(found)


if __name__ == "__main__":
    from ds_ops.triton_kernels import ahead_of_time

    print(json.dumps({name: compile_call(name) for name in sys.argv[1:] or sorted(ahead_of_time.CALLS)}))

"""The Triton kernels compile for AMD's gfx942 (MI300), without a card: what the support page says of ROCm."""

from __future__ import annotations

import struct
import types
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton")

from ds_ops.triton_kernels import ahead_of_time  # noqa: E402  # imports triton

EM_AMDGPU = 224
_FEW = ("norm of 4096", "rotary", "gate", "product of int8", "decode, 32/4 heads of 64")
_TOO_LARGE = ("decode, latent", "prompts, latent")  # 68 KB: attention of 576 numbers a head has no ROCm kernel yet
_CALLS = [
    pytest.param(name, marks=() if name in _FEW else pytest.mark.slow, id=name) for name in sorted(ahead_of_time.CALLS)
]


@pytest.mark.parametrize("name", _CALLS)
def test_a_kernel_compiles_for_gfx942(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def compile_for_hip(source: Any, target: Any, options: dict[str, Any]) -> Any:
        assert target.backend == "cuda"
        made.append(triton.compile(source, target=ahead_of_time.GPUTarget("hip", "gfx942", 64), options=options))
        return types.SimpleNamespace(asm={"cubin": b""}, metadata=types.SimpleNamespace(shared=0))

    report = types.SimpleNamespace(stdout="REG:0 STACK:0 SHARED:0 LOCAL:0")
    monkeypatch.setattr(
        ahead_of_time, "triton", types.SimpleNamespace(compile=compile_for_hip, __file__=triton.__file__)
    )
    monkeypatch.setattr(ahead_of_time, "subprocess", types.SimpleNamespace(run=lambda *_a, **_k: report))
    ahead_of_time.compile_call(ahead_of_time.CALLS[name], 90)
    assert made
    for kernel in made:
        assert kernel.asm["hsaco"][:4] == b"\x7fELF"
        assert struct.unpack_from("<H", kernel.asm["hsaco"], 18) == (EM_AMDGPU,)
    most = max(kernel.metadata.shared for kernel in made)
    assert (most <= 64 << 10) == (name not in _TOO_LARGE)  # what a compute unit has

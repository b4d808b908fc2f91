"""Compile the Triton kernels without a device, and read what the machine code takes: registers, spills, shared memory.

    python -m ds_ops.triton_kernels.ahead_of_time FILE             compare with what FILE has
    python -m ds_ops.triton_kernels.ahead_of_time FILE --update    write FILE

The calls are those of decoders that people run; arguments are described by tensors without memory. Nothing is launched.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_ops.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, Format, QuantSpec, QuantTensor
from ds_ops.triton_kernels import (
    kernel_arguments,
    triton_attention,
    triton_gate,
    triton_norm,
    triton_products,
    triton_rotary,
    triton_sampling,
)

__all__ = ["ARCHITECTURES", "CALLS", "KernelResources", "compile_call", "main"]

ARCHITECTURES: Final = (80, 89, 90, 100)
SHARED_MEMORY: Final = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a block of threads may have: 99 KiB are those of compute capability 8.6, 8.9 and 12.0."""
_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_MODULES = (triton_attention, triton_gate, triton_norm, triton_products, triton_rotary, triton_sampling)


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one compiled kernel takes: registers of a thread, bytes that were spilled, bytes of shared memory of a block."""

    registers: int
    spills: int
    shared: int


@contextmanager
def _recording(architecture: int) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Collect launches inside the context instead of making them; kernels are chosen as for a device of `architecture`."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        del grid
        launches.append((kernel, arguments, constants))

    device = {"launch": note, "multiprocessors": lambda _: 132, "shared_memory": lambda _: SHARED_MEMORY[architecture]}
    before = [(module, name, getattr(module, name)) for module in _MODULES for name in device if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, device[name])
    try:
        yield launches
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def compile_call(call: Callable[[], object], architecture: int) -> dict[str, KernelResources]:
    """Compile every kernel that `call` launches; the call runs on tensors of the meta device."""
    with _recording(architecture) as launches:
        call()
    return {
        kernel.__name__: _compile(kernel, arguments, constants, architecture)
        for kernel, arguments, constants in launches
    }


def _compile(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], architecture: int) -> KernelResources:
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    names = kernel.arg_names
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, (name, value) in enumerate(zip(names, arguments, strict=False)):
        parameter = kernel.params[place]
        by_value, aligned = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
        if isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, int) and value == 1 and by_value:  # as at run time: ones are constants
            constants[name], signature[name] = 1, "constexpr"
            continue
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            aligned = aligned and isinstance(value, int) and value % 16 == 0
        if by_value and aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(names[len(arguments) :], "constexpr")
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [_program("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {kernel.__name__}: {report.stdout[:500]}")
    registers, stack, local = map(int, found.groups())
    return KernelResources(registers, stack + local, compiled.metadata.shared)


def _program(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


# ---- the calls


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    rows: tuple[int, int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    codes: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **traits: Any,
) -> Callable[[], object]:
    """Describe a call of the attention: (sequences, tokens of each), heads, and features of keys and values."""
    (sequences, longest), (width, value_width) = rows, sizes

    def call() -> object:
        count = sequences * longest
        keys, values = (_meta(512, 16, heads[1], w, dtype=codes or dtype) for w in sizes)
        if width != value_width:  # latent attention reads values in its keys
            values = keys[..., :value_width]
        scales = [_meta(512, 16, heads[1], dtype=torch.float32) for _ in range(2)] if codes else []
        starts, lengths = (_meta(n, dtype=torch.int32) for n in (sequences + 1, sequences))
        metadata = kernel_arguments.PagedMetadata(
            starts, lengths, _meta(sequences, 64, dtype=torch.int32), longest, count
        )
        made: dict[str, Any] = {
            name: _meta(heads[0], dtype=torch.float32) if name in ("slopes", "sinks") else v
            for name, v in traits.items()
        }
        return triton_attention.paged_attention(
            _meta(count, heads[0], width, dtype=dtype),
            (keys, values, *scales),
            metadata,
            kernel_arguments.AttentionTraits(0.1, **made),
        )

    return call


def _norms(n: int, post: bool) -> Callable[[], object]:
    def call() -> object:
        norm = kernel_arguments.NormWeights(_meta(n), None, 1e-5)
        return triton_norm.residual_norm(_meta(8, n), _meta(8, n), norm if post else None, norm)

    return call


def _rotary(codes: torch.dtype | None, normed: bool) -> Callable[[], object]:
    def call() -> object:
        norm = _meta(128) if normed else None
        keys, values = (_meta(64, 16, 8, 128, dtype=codes or torch.bfloat16) for _ in range(2))
        scales = [_meta(64, 16, 8, dtype=torch.float32) for _ in range(2)] if codes else []
        traits = kernel_arguments.HeadTraits(32, 8, 128, q_norm=norm, k_norm=norm)
        tables = (_meta(8, 64), _meta(8, 64))
        return triton_rotary.rotary_write(
            _meta(8, 48 * 128), tables, _meta(8, dtype=torch.int32), (keys, values, *scales), traits
        )

    return call


def _product(
    kind: Format, group: int, symmetric: bool, rows: int = 8, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    def call() -> object:
        weight = QuantTensor.empty(QuantSpec(kind, group, symmetric), 4096, 4096, like=_meta(1))
        return triton_products.coded_product(_meta(rows, 4096, dtype=dtype), weight)

    return call


def _experts(kind: Format, group: int, rows: int) -> Callable[[], object]:
    def call() -> object:
        spec = QuantSpec(kind, group, symmetric=True)
        weights = QuantTensor.empty(spec, 32 * 2880, 2880, like=_meta(1), shape=(32, 2880, 2880))
        return triton_products.coded_grouped_product(_meta(rows, 2880), weights, _meta(32, dtype=torch.int64))

    return call


def _tokens(rows: int, vocab: int) -> Callable[[], object]:
    def call() -> object:
        logits = _meta(rows, vocab, dtype=torch.float32)
        triton_sampling.adjust_logits(logits, _meta(300, 5, dtype=torch.int32), 1e30)
        return triton_sampling.draw_tokens(logits, _meta(rows, kernel_arguments.SAMPLING_FIELDS, dtype=torch.int32))

    return call


CALLS: Final[dict[str, Callable[[], object]]] = {
    "decode, 32/8 heads of 128": _attention((8, 1), (32, 8), (128, 128)),
    "decode, 32/4 heads of 64": _attention((1, 1), (32, 4), (64, 64)),
    "decode, 128 rows": _attention((128, 1), (32, 8), (128, 128)),
    "decode, int8 keys": _attention((8, 1), (32, 8), (128, 128), torch.int8),
    "decode, fp8 keys": _attention((8, 1), (32, 8), (128, 128), torch.float8_e4m3fn),
    "decode, window, softcap, heads of 256": _attention((8, 1), (16, 8), (256, 256), window=4096, softcap=50.0),
    "decode, sinks": _attention((8, 1), (64, 8), (64, 64), window=128, sinks=True),
    "decode, ALiBi": _attention((8, 1), (32, 32), (128, 128), slopes=True),
    "decode, latent": _attention((8, 1), (128, 1), (576, 512)),
    "drafts, 5 tokens": _attention((8, 5), (32, 8), (128, 128)),
    "prompts, 32/8 heads of 128": _attention((4, 512), (32, 8), (128, 128)),
    "prompts, 32/4 heads of 64": _attention((4, 512), (32, 4), (64, 64)),
    "prompts, int8 keys": _attention((4, 512), (32, 8), (128, 128), torch.int8),
    "prompts, heads of 256": _attention((4, 512), (16, 8), (256, 256), window=4096, softcap=50.0),
    "prompts, latent": _attention((4, 512), (128, 1), (576, 512)),
    "decode, latent, fp32": _attention((8, 1), (128, 1), (576, 512), dtype=torch.float32),
    "prompts, heads of 128, fp32": _attention((4, 512), (32, 8), (128, 128), dtype=torch.float32),
    "prompts, heads of 256, fp32": _attention((4, 512), (16, 8), (256, 256), dtype=torch.float32),
    "norm of 4096": _norms(4096, post=False),
    "norms of 8192": _norms(8192, post=True),
    "rotary": _rotary(None, normed=False),
    "rotary, head norms": _rotary(None, normed=True),
    "rotary, int8 keys": _rotary(torch.int8, normed=False),
    "rotary, fp8 keys": _rotary(torch.float8_e4m3fn, normed=False),
    "product of int8": _product(INT8, 128, symmetric=True),
    "product of int4 with zeros": _product(INT4, 128, symmetric=False),
    "product of fp8": _product(FP8_E4M3, 128, symmetric=True),
    "product of int8, 512 rows": _product(INT8, 128, symmetric=True, rows=512),
    "product of int4 with zeros, 512 rows": _product(INT4, 128, symmetric=False, rows=512),
    "product of fp8, 512 rows": _product(FP8_E4M3, 128, symmetric=True, rows=512),
    "product of int8 with zeros, 512 rows, fp32": _product(INT8, 128, False, 512, torch.float32),
    "experts of MXFP4": _experts(FP4_E2M1, 32, 64),
    "experts of MXFP4, 8192 rows": _experts(FP4_E2M1, 32, 8192),
    "experts of fp8": _experts(FP8_E4M3, 128, 64),
    "sampling of 8 rows": _tokens(8, 128256),
    "gate": lambda: triton_gate.gated_product(_meta(8, 2 * 14336), "silu"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the resources of every call with the file's, or write the file; return 1 where a kernel spills, takes more, or more than there is."""
    parser = argparse.ArgumentParser(prog="ds_ops.triton_kernels.ahead_of_time", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of what each kernel takes")
    parser.add_argument("--update", action="store_true", help="write the file")
    parser.add_argument("--only", default="", help="calls that contain this")
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, help="one instead of all")
    options = parser.parse_args(arguments)
    architectures = ARCHITECTURES if options.architecture is None else (options.architecture,)
    compiled: dict[str, dict[str, int]] = {}
    for name, call in CALLS.items():
        if options.only in name:
            for architecture in architectures:
                for kernel, resources in compile_call(call, architecture).items():
                    compiled[f"sm_{architecture}, {name}, {kernel}"] = asdict(resources)
    recorded = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.update:
        options.file.write_text(json.dumps(dict(sorted({**recorded, **compiled}.items())), indent=1) + "\n")
        recorded = compiled
    wrong = [
        f"{name}: {resources}, recorded {recorded.get(name)}"
        for name, resources in compiled.items()
        if resources["spills"]
        or resources["shared"] > SHARED_MEMORY[int(name[3:].partition(",")[0])]
        or name not in recorded
        or any(resources[k] > recorded[name][k] for k in resources)
    ]
    sys.stdout.write("".join(f"{line}\n" for line in wrong) + f"{len(compiled)} kernels compiled\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

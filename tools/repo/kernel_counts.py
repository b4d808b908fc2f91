"""The ratchet of the CUDA kernels: what bounds each one's speed, from its machine code for sm_90. `python -m repo.kernel_counts` in tools/ writes it.

The bound is a share of a copy's speed on an H200 (4.26 TB/s, 132 multiprocessors at 1.755 GHz), the least of two:

- issue: a multiprocessor issues 128 instructions of threads a clock, of which 0.8 are taken to be reached;
- bytes in flight: to hide the memory's latency a kernel that reads two bytes for each it writes has to have 29 KB of loads on their way a
  multiprocessor (measured: the old quantizer had 10 KB, and 26 to 32 % of a copy); in proportion for other shares of reading.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from repo import ROOT
from repo.cubin import KernelCode, read_code

__all__ = ["FILE", "KernelCount", "bound", "measure", "measured_kernels"]

FILE = ROOT / "tools" / "ratchets" / "kernels.json"
_BYTES_A_CLOCK = 4.26e12 / 132 / 1.755e9
_ISSUE = 128 * 0.8
_IN_FLIGHT = 29_000 * 1.5  # bytes of a kernel that only reads
_THREADS, _REGISTERS = 2048, 65536


@dataclass(frozen=True, slots=True)
class KernelCount:
    """A kernel and its work. elements: of a thread, once through the main path (or the loop). read, written: bytes an element.

    loads: bytes that a thread has asked for before it uses the first.
    """

    kernel: Any
    elements: int
    read: float
    written: float
    loads: int
    loop: bool = False


def bound(count: KernelCount, code: KernelCode) -> float:
    """Return the share of a copy's speed that the kernel's counts allow, at most 1."""
    instructions = (code.loop if count.loop else code.instructions) / count.elements
    moved = count.read + count.written
    issue = _ISSUE / instructions * moved / _BYTES_A_CLOCK
    allocated = -(-code.registers // 8) * 8
    blocks = min(_THREADS // count.kernel.threads, _REGISTERS // (allocated * count.kernel.threads))
    in_flight = blocks * count.kernel.threads * count.loads
    return min(1.0, issue, in_flight / (_IN_FLIGHT * count.read / moved))


def measured_kernels() -> list[KernelCount]:
    """List the kernels of the ratchet: bf16, groups of 256, rows of 1,024 to 16,384."""
    from ds_ops.cuda_norms import NormShape, norm_grad_kernel, norm_kernel
    from ds_ops.cuda_quant import dense_kernel, quantize_kernel
    from ds_ops.formats import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, INT4, INT8, QuantSpec

    specs = [QuantSpec(f) for f in (INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)]
    specs += [QuantSpec(f, symmetric=False) for f in (INT8, INT4)]
    counts = []
    for spec in specs:
        code = spec.format.bits / 8 + 4 * spec.num_params / spec.group
        quantizer, dense = quantize_kernel(spec, 1, 16), dense_kernel(spec, 1, 16, False)
        if quantizer is None or dense is None:
            raise ValueError(f"{spec} has no kernel of its own")
        numbers = quantizer.per_block * spec.group // quantizer.kernel.threads
        counts.append(KernelCount(quantizer.kernel, numbers, 2, code, 2 * numbers))
        codes = dense.per_block * dense.piece // 256
        counts.append(KernelCount(dense.kernel, codes, code, 2, int(codes * spec.format.bits / 8)))
    for cols in (1024, 4096, 8192, 16384):
        for centre in (False, True):
            for extra in (False, True):
                shape = NormShape(cols, 1, 1, centre, extra)
                forward, backward = norm_kernel(shape), norm_grad_kernel(shape)
                held, kept = (int(k.instance.split(",")[3]) * 8 for k in (forward, backward))
                both = 2 if extra else 1
                counts.append(KernelCount(forward, held, 2 * both, 2 * both, 2 * held * both))
                counts.append(KernelCount(backward, kept, 4 + 2 * extra, 2, 2 * kept * (2 + extra), True))
    return counts


def measure(compiler: Any) -> dict[str, dict[str, float]]:
    """Compile every kernel of the ratchet for sm_90, and return its counts by name."""
    rows = {}
    for count in measured_kernels():
        code = read_code(compiler.compile(count.kernel, "sm_90"), count.kernel.entry)
        instructions = (code.loop if count.loop else code.instructions) / count.elements
        rows[count.kernel.instance] = {
            **{name: value for name, value in asdict(code).items() if name in ("registers", "spills")},
            "instructions an element": round(instructions, 1),
            "bytes in flight a thread": count.loads,
            "bound": round(bound(count, code), 2),
        }
    return dict(sorted(rows.items()))


def main() -> int:
    """Write the ratchet."""
    from ds_ops._call import native
    from ds_ops.kernel_compilers import open_compiler

    compiler = open_compiler(native("_cuda"), 0)
    FILE.write_text(json.dumps({"compiler": "NVRTC 13.0", "kernels": measure(compiler)}, indent=1) + "\n")
    print(f"{FILE}: by {compiler.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The native products of packed weights, one thread, one matrix that fits in the last-level cache: how near the read and the multiply limits.

    nox -s bench -- products [--seconds 40]       writes docs/benchmarks/data/products.json; `inference_page` shows it

Calls are so short (below a millisecond) that the best of many is one that nobody disturbed, on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from ds_ops.formats import INT4, INT8, QuantTensor
from ds_ops.native_decoder import DecoderLayer, DecoderProgram, KeptLayer, Normed, ProductInputs, TokenRun, pack
from ds_ops.quant_linear import quantize_weight

HIDDEN, OUTPUTS, ROWS = 1024, 4096, (1, 4, 12, 96)
DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "products.json"


def _program(head: Tensor | QuantTensor, inputs: ProductInputs = ProductInputs.F32) -> DecoderProgram:
    """A layer of next to nothing, and the matrix as the head."""
    norm = Normed(torch.ones(HIDDEN), eps=1e-5)
    qkv, out, up, down = (pack(torch.rand(s) * 0.02) for s in ((32, HIDDEN), (HIDDEN, 8), (64, HIDDEN), (HIDDEN, 32)))
    norms = (norm, Normed(), norm, Normed(), Normed(), Normed())
    layer = DecoderLayer((qkv, out, up, down), 1, 1, 8, 8, 0.125, norms)
    return DecoderProgram(HIDDEN, [layer], norm, pack(head, inputs=inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.empty(OUTPUTS, HIDDEN).uniform_(-0.03, 0.03)
    codes = {"int8": quantize_weight(weight, INT8), "int4": quantize_weight(weight, INT4)}
    programs = {"nothing": _program(weight[:32]), "fp32": _program(weight), "bf16": _program(weight.bfloat16())}
    programs["bf16 rounded"] = _program(weight.bfloat16(), ProductInputs.BF16)
    for name, coded in codes.items():
        programs[name], programs[f"{name} rounded"] = _program(coded), _program(coded, ProductInputs.INT8)
    cache = [KeptLayer(torch.zeros(8, 16, 1, 8), torch.zeros(8, 16, 1, 8))]
    best: dict[tuple[str, int], float] = {}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        for name, program in programs.items():
            for rows in ROWS:
                x, chunk, outputs = torch.rand(rows, HIDDEN), [TokenRun(0, rows, 0, (0, 1, 2, 3))], torch.arange(rows)
                for _ in range(8 if rows == 1 else 2):
                    begin = time.perf_counter()
                    program.step(x, chunk, outputs, cache)
                    took = time.perf_counter() - begin
                    best[name, rows] = min(best.get((name, rows), took), took)
    record: dict[str, dict[str, float]] = {}
    for name, program in programs.items():
        if name == "nothing":
            continue
        net = {rows: best[name, rows] - best["nothing", rows] for rows in ROWS}
        size = program.head.data.nbytes + (0 if program.head.params is None else program.head.params.nbytes)
        record[name] = {f"gflops_{r}": 2 * r * weight.numel() / net[r] / 1e9 for r in ROWS[1:]}
        record[name]["read_gb_per_s"] = size / net[1] / 1e9
        many = ", ".join(f"{r} rows {2 * r * weight.numel() / net[r] / 1e9:4.0f} GFLOP/s" for r in ROWS[1:])
        print(
            f"{name:14} one row {size / net[1] / 1e9:5.1f} GB/s, {weight.numel() / net[1] / 1e9:5.1f} G weights/s; {many}"
        )
    DATA.write_text(json.dumps({"when": time.strftime("%Y-%m-%d"), "kinds": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()

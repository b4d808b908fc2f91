"""`nox -s bench -- quant`: quantizers and norms of ds-ops as a share of what a copy reaches, beside plain torch.

Every round runs all cases one after another, and a copy before each; a share is the median over rounds of (bytes that the
case must move / its time) / (the copy's rate in that round). Outputs are allocated before, so that no page is touched for
the first time. Plain torch is the reference implementation of the same op (quantizers) or torch's own norm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import records
import torch
from in_turn import seconds
from kernels import Case, norm_cases
from torch import Tensor

from ds_ops import _native, convert
from ds_ops.formats import FP4_E2M1, FP6_E3M2, FP8_E4M3, INT4, INT8, Draw, Format, QuantSpec, QuantTensor, Rounding
from ds_ops.norms import layer_norm
from ds_ops.quant import dequantize, quantize, reduce, reduce_quantized
from ds_ops.reference import quant as reference

N = 16_000_000
GROUP = 256


@dataclass(frozen=True, slots=True)
class Row:
    """gb_s: best rate. share: of the copy, median. peer_ratio: plain torch's time over ours, 0 without a peer."""

    name: str
    threads: int
    gb_s: float
    share: float
    peer_ratio: float


def quant_cases(x: Tensor) -> list[Case]:
    cases = []
    back = torch.empty_like(x)
    specs = [QuantSpec(f, GROUP) for f in (INT8, INT4, FP8_E4M3, FP6_E3M2, FP4_E2M1)]
    specs += [QuantSpec(f, GROUP, symmetric=False) for f in (INT8, INT4)]
    specs += [QuantSpec(f, GROUP, rounding=Rounding.STOCHASTIC) for f in (INT8, INT4)]
    for spec in specs:
        q = quantize(x, spec)
        nbytes = x.nbytes + q.nbytes
        cases.append(Case(f"quantize {title(spec)}", nbytes, lambda s=spec, q=q: quantize(x, s, out=q), plain(x, spec)))
        if spec.rounding is Rounding.NEAREST:
            peer = (lambda q=q: reference.dequantize(q, None, back.view(1, -1))) if plain(x, spec) else None
            cases.append(Case(f"dequantize {title(spec)}", nbytes, lambda q=q: dequantize(q, out=back), peer))
    q = quantize(x, QuantSpec(INT8, GROUP), rows=4)
    total = torch.empty(4_000_000)
    cases.append(Case("sum of 4 int8", q.nbytes + total.nbytes, lambda: reduce(q, 4, out=total)))
    cases.append(Case("sum of 4 int8, int8 again", 1.25 * q.nbytes, lambda: reduce_quantized(q, 4)))
    half = x.bfloat16()
    h = quantize(half, QuantSpec(INT8, GROUP))
    cases.append(Case("quantize bf16 to int8", half.nbytes + h.nbytes, lambda: quantize(half, h.spec, out=h)))
    return cases


def plain(x: Tensor, spec: QuantSpec) -> Callable[[], object] | None:
    """The reference, for the formats people use most; it takes seconds for each."""
    if spec not in (QuantSpec(INT8, GROUP), QuantSpec(INT4, GROUP)):
        return None
    q = QuantTensor.empty(spec, 1, x.numel(), like=x)
    return lambda: reference.quantize(q, x.view(1, -1), None, _NO_DRAW)


def title(spec: QuantSpec) -> str:
    f: Format = spec.format
    kind = "" if f.is_float else " symmetric" if spec.symmetric else " asymmetric"
    return f.name + kind + (" stochastic" if spec.rounding is Rounding.STOCHASTIC else "")


def norms(dtype: torch.dtype) -> list[Case]:
    """Rows that fit the cache with what is made of them, as activations do: 2 MiB a tensor, nothing newly mapped."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    x = torch.randn(4_000_000 // 2000 // dtype.itemsize, 2000).to(dtype)
    weight = torch.ones_like(x[0])
    own = Case(f"layer norm {name} (torch's own)", 2 * x.nbytes, lambda: layer_norm(x, weight))
    return [*norm_cases(x, name), own]


def measure(cases: list[Case], copy: Case, threads: int, rounds: int) -> list[Row]:
    torch.set_num_threads(threads)
    best = {c.name: float("inf") for c in (*cases, copy)}
    shares: dict[str, list[float]] = {c.name: [] for c in cases}
    ratios: dict[str, list[float]] = {c.name: [] for c in cases}
    for number in range(rounds + 1):
        for case in cases:
            limit, took = seconds(copy.ours), seconds(case.ours)
            if number == 0:
                continue  # warm-up
            best[copy.name], best[case.name] = min(best[copy.name], limit), min(best[case.name], took)
            shares[case.name].append(case.nbytes / took / (copy.nbytes / limit))
            if case.peer is not None and number <= 3:
                ratios[case.name].append(seconds(case.peer) / took)
    rows = [Row(copy.name, threads, copy.nbytes / best[copy.name] / 1e9, 1.0, 0.0)]
    for c in cases:
        ratio = statistics.median(ratios[c.name]) if ratios[c.name] else 0.0
        rows.append(Row(c.name, threads, c.nbytes / best[c.name] / 1e9, statistics.median(shares[c.name]), ratio))
    return rows


def main() -> None:
    parser = records.parser_of("quant", __doc__, rounds=9)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    x, y = torch.randn(N), torch.empty(N)
    copy = Case("copy of 64 MB", 2 * x.nbytes, lambda: convert(y, x))
    small = torch.randn(1_000_000)
    small_out = torch.empty_like(small)
    near = Case("copy of 4 MB", 2 * small.nbytes, lambda: small_out.copy_(small))
    rows = []
    with torch.no_grad():
        quant = quant_cases(x)
    rows_of_cache = [*norms(torch.float32), *norms(torch.bfloat16)]
    for threads in arguments.threads:
        rows += measure(quant, copy, threads, arguments.rounds)
        rows += measure(rows_of_cache, near, threads, 5 * arguments.rounds)
    for row in rows:
        peer = f"{row.peer_ratio:6.1f}x plain torch" if row.peer_ratio else ""
        print(f"{row.threads} threads  {row.name:34} {row.gb_s:6.1f} GB/s {100 * row.share:5.0f} % of the copy {peer}")
    isa = _native.load("_cpu").module.isa_name()  # type: ignore[union-attr]
    records.write("quant", isa=isa, rounds=arguments.rounds, rows=[asdict(row) for row in rows])


_NO_DRAW = Draw()

if __name__ == "__main__":
    main()

"""Every op of the registry against its reference: a new op fails here until it has a case.

A case draws its tensors from shapes that are zero-size, of one element, odd, and start anywhere in their memory, and is
run twice: with the backend that the registry chooses here, and with the reference forced.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ds_ops
from ds_config.errors import DsError
from ds_ops import apply_update, update_rules
from ds_ops.activation_functions import bias_gelu, geglu, swiglu
from ds_ops.all_ops import every_op
from ds_ops.apply_update import UpdateSpec, UpdateTensors
from ds_ops.attention import evoformer_attention, masked_softmax
from ds_ops.formats import INT4, INT8, Format, QuantSpec, QuantTensor
from ds_ops.grouped import grouped_matmul, grouped_outer
from ds_ops.module_cache import source_dir
from ds_ops.moe_routing import Pulls, RowPermutation, permute, pulls_of, sort_slots, top_k_gating, unpermute
from ds_ops.native_decoder import ProductInputs, pack
from ds_ops.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ds_ops.packed_linear import packed_linear
from ds_ops.partial_attention import View, partial_attention, partial_attention_grad
from ds_ops.quant import dequantize, quantize, reduce, reduce_quantized
from ds_ops.quant_linear import quantize_weight, quantized_linear
from ds_ops.reduce import sum_sources
from ds_ops.rotary import rotary_tables, rotate
from ds_ops.row_ops import gather_rows, gather_sum
from ds_ops.sparse_attention import Sparsity, bigbird, block_sparse_attention
from ds_ops.stream import copy_ranges, differs_from_cast, norms_of
from ds_ops.token_drop import gather_tokens, scatter_tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 4e-6, torch.float64: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HYPER = update_rules.AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a case makes its tensors of. offset: elements before the first one, so that it is not aligned."""

    rows: int
    n: int
    dtype: torch.dtype
    offset: int

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        count = torch.Size(shape).numel()
        memory = torch.randn(count + self.offset, generator=torch.Generator().manual_seed(seed + count))
        return memory.to(dtype or self.dtype)[self.offset :].view(shape)


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One op's use.

    make: its tensors. call: its results from them. grads: it has gradients. exact: to the bit.
    fine: what `test_a_wrong_tensor_is_a_typed_error` can do to an argument without making it wrong.
    """

    make: Callable[[Draw], Tensors]
    call: Callable[..., Sequence[Tensor]]
    grads: bool = True
    exact: bool = False
    fine: frozenset[tuple[int, str]] = frozenset()


ALONE = frozenset({(0, "elsewhere"), (0, "shape")})  # nothing else has to fit the only tensor


def same_shape(count: int) -> Callable[[Draw], Tensors]:
    return lambda d: tuple(d.tensor(d.rows, d.n, seed=i) for i in range(count))


def stepped(rule: update_rules.UpdateRule, coefficients: tuple[float, ...], states: int) -> Case:
    def make(d: Draw) -> Tensors:
        moments = [d.tensor(d.rows, d.n, dtype=torch.float32, seed=i).abs() for i in range(states)]
        return (d.tensor(d.rows, d.n), d.tensor(d.rows, d.n, seed=9), *moments)

    def call(p: Tensor, g: Tensor, *moments: Tensor) -> Sequence[Tensor]:
        apply_update.update(
            UpdateSpec(rule, coefficients, 0.5), UpdateTensors([p], [g], tuple([m] for m in moments), ())
        )
        return (p, *moments)

    return Case(make, call, grads=False)


def lamb(apply: bool, inside: bool = False) -> Case:
    def call(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Sequence[Tensor]:
        spec = UpdateSpec(
            update_rules.UpdateRule.LAMB_MOMENTS, update_rules.lamb_coefficients(HYPER, 2, eps_inside_sqrt=inside), 0.5
        )
        tensors = UpdateTensors([p], [g], ([m], [v]), ())
        if not apply:
            return (apply_update.lamb_moments(spec, tensors), m, v)
        apply_update.lamb_apply(replace(spec, rule=update_rules.UpdateRule.LAMB_APPLY), tensors, torch.full((1,), 0.7))
        return (p,)

    return Case(stepped(update_rules.UpdateRule.ADAM, (), 2).make, call, grads=False)


def quantized(d: Draw, spec: QuantSpec, rows: int) -> QuantTensor:
    x = d.tensor(rows, d.n)
    with mock.patch.dict(os.environ, DS_OPS="reference"):
        return quantize(x, spec, rows=rows)


def coded(weight: Tensor, kind: Format, symmetric: bool) -> QuantTensor:
    with mock.patch.dict(os.environ, DS_OPS=""):
        return quantize_weight(weight.float(), kind, group=16, symmetric=symmetric)


SPECS = (QuantSpec(INT8, 16), QuantSpec(INT4, 4, symmetric=False))


def from_wire(call: Callable[[QuantTensor], Sequence[Tensor]]) -> Case:
    """Cases whose input is a wire: two formats of the same numbers."""

    def run(*wires: Tensor) -> Sequence[Tensor]:
        n = int(wires[-1].numel())
        whole = [QuantTensor(w, s, n, (w.shape[0], n), torch.float32) for w, s in zip(wires[:2], SPECS, strict=True)]
        return [t for q in whole for t in call(q)]

    return Case(
        lambda d: (*(quantized(d, s, 2 * max(d.rows, 1)).wire for s in SPECS), torch.empty(d.n)),
        run,
        grads=False,
        exact=True,
        fine=frozenset({(0, "elsewhere"), (1, "elsewhere"), (2, "elsewhere"), (2, "dtype")}),  # 2 only says how many
    )


def routed(d: Draw) -> tuple[Tensor, RowPermutation]:
    g = torch.Generator().manual_seed(d.n)
    experts = torch.rand(d.rows, 3, generator=g).argsort(-1)[:, :2]
    return experts, sort_slots(experts, 3)


def parts(numbers: RowPermutation | Pulls) -> Tensors:
    return tuple(getattr(numbers, field.name) for field in fields(numbers))


def with_permutation(op: Callable[..., Tensor], rows: int, weights: bool) -> Case:
    def make(d: Draw) -> Tensors:
        _, p = routed(d)
        extra = (d.tensor(d.rows, 2, dtype=torch.float32, seed=1),) if weights else ()
        return (d.tensor(rows * d.rows, d.n), *extra, p.slots, p.rows, p.ends)

    def call(x: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return (op(x, RowPermutation(*rest[-3:]), *rest[:-3]),)

    last = 3 + weights
    fine = {(0, "dtype")} if not weights else set()
    return Case(make, call, fine=frozenset({*fine, *((last, what) for what in ("elsewhere", "dtype", "shape"))}))


def grouped(d: Draw) -> Tensors:
    ends = torch.tensor([d.rows // 2, d.rows // 2, d.rows])
    return (d.tensor(d.rows, d.n), d.tensor(3, d.n, 2, seed=1), ends)


def rotated(d: Draw) -> Tensors:
    return (d.tensor(d.rows, 2, 2 * d.n + 1), *rotary_tables(torch.arange(d.rows), 2 * max(d.n, 1)))


def dropped(d: Draw) -> Tensors:
    index = torch.arange(0, d.n, 2).repeat(d.rows, 1)
    return (d.tensor(d.rows, d.n, 3), d.tensor(d.rows, index.shape[1], 3, seed=1), index)


def sparse(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    (length, *_) = (t.shape[2] for t in (q, k, v) if t.dim() == 4)
    layout = bigbird(1, 1, 1).layout(-(-length // 3))
    return (block_sparse_attention(q, k, v, Sparsity(layout, 3, causal=True)),)


CASES: dict[str, list[Case]] = {
    "add_layer_norm": [
        Case(
            lambda d: (d.tensor(d.rows, d.n), d.tensor(d.rows, d.n, seed=2), d.tensor(d.n), d.tensor(d.n, seed=1)),
            lambda x, r, w, b: add_layer_norm(x, r, w, b),
        )
    ],
    "add_rms_norm": [Case(lambda d: (*same_shape(2)(d), d.tensor(d.n)), lambda x, r, w: add_rms_norm(x, r, w))],
    "bias_gelu": [Case(lambda d: (d.tensor(d.rows, d.n), d.tensor(d.n)), lambda x, b: (bias_gelu(x, b),))],
    "block_sparse_attention": [Case(lambda d: tuple(d.tensor(d.rows, 2, d.n, 4, seed=i) for i in range(3)), sparse)],
    "convert": [
        Case(same_shape(2), lambda out, x: (ds_ops.convert(out, x, scale=0.5),), grads=False, exact=True),
        Case(
            lambda d: (d.tensor(d.rows, d.n, dtype=torch.bfloat16), d.tensor(d.rows, d.n)),
            lambda out, x: (ds_ops.convert(out, x),),
            grads=False,
            exact=True,
        ),
    ],
    "copy_ranges": [
        Case(
            same_shape(2),
            lambda out, x: (copy_ranges(out, [(x, [(0, 1, out.numel() - 1), (1, 0, 1)])] if out.numel() > 1 else []),),
            grads=False,
            exact=True,
            fine=frozenset({(0, "shape"), (1, "shape")}),
        )
    ],
    "dequantize": [from_wire(lambda q: (dequantize(q),))],
    "differs_from_cast": [
        Case(
            lambda d: (d.tensor(d.rows, d.n, dtype=torch.bfloat16), d.tensor(d.rows, d.n)),
            lambda out, x: (differs_from_cast(out, x), differs_from_cast(x.to(out.dtype), x)),
            grads=False,
            exact=True,
        )
    ],
    "evoformer_attention": [
        Case(
            lambda d: (
                *(d.tensor(1, d.rows, d.n, 2, 4, seed=i) for i in range(3)),
                d.tensor(1, d.rows, 1, 1, d.n),
                d.tensor(1, 1, 2, d.n, d.n),
            ),
            lambda *t: (evoformer_attention(*t),),
        )
    ],
    "fill": [Case(same_shape(1), lambda out: (ds_ops.fill(out, 0.3),), grads=False, exact=True, fine=ALONE)],
    "gated_activation": [
        Case(same_shape(2), lambda gate, up: (swiglu(gate, up), geglu(gate, up))),
    ],
    "gather_rows": [
        Case(
            lambda d: (d.tensor(d.rows, d.n), torch.arange(2 * d.rows).flip(0) % max(1, d.rows)),
            lambda x, i: (gather_rows(x, i), gather_rows(x, i, per=2)),
            grads=False,
            exact=True,
            fine=frozenset({(0, "dtype"), (1, "shape")}),
        )
    ],
    "gather_sum": [
        Case(
            lambda d: (
                d.tensor(d.rows, d.n),
                torch.arange(6).view(2, 3)[: d.rows] % max(1, d.rows),
                d.tensor(min(d.rows, 2), 3),
            ),
            lambda x, i, w: (gather_sum(x, i, w), gather_sum(x, i)),
            grads=False,
            fine=frozenset({(2, "dtype")}),
        )
    ],
    "gather_tokens": [
        Case(lambda d: dropped(d)[::2], lambda x, i: (gather_tokens(x, i),), fine=frozenset({(0, "dtype")}))
    ],
    "grouped_matmul": [Case(grouped, lambda x, w, ends: (grouped_matmul(x, w, ends),))],
    "grouped_outer": [
        Case(
            lambda d: (d.tensor(d.rows, d.n), d.tensor(d.rows, 2, seed=1), grouped(d)[2]),
            lambda x, y, ends: (grouped_outer(x, y, ends),),
            fine=frozenset({(2, "shape")}),  # only `ends` says how many groups there are
        )
    ],
    "lamb_apply": [lamb(apply=True), lamb(apply=True, inside=True)],
    "lamb_moments": [lamb(apply=False), lamb(apply=False, inside=True)],
    "layer_norm": [
        Case(
            lambda d: (d.tensor(d.rows, d.n), d.tensor(d.n), d.tensor(d.n, seed=1)),
            lambda x, w, b: (layer_norm(x, w, b),),
        )
    ],
    "masked_softmax": [
        Case(
            lambda d: (d.tensor(d.rows, d.n, 3), d.tensor(d.rows, 1, 3, dtype=torch.float32) > 0),
            lambda s, m: (masked_softmax(s, m, causal=True),),
        )
    ],
    "partial_attention": [
        Case(
            lambda d: tuple(d.tensor(d.rows, 2, d.n, 8, seed=i) for i in range(3)),
            lambda q, k, v: [t.to(q.dtype) for t in partial_attention(q, k, v, View(causal=True))],
        )
    ],
    "partial_attention_grad": [
        Case(
            lambda d: (
                *(d.tensor(d.rows, 2, d.n, 8, seed=i) for i in range(5)),
                d.tensor(d.rows, 2, d.n, dtype=torch.float32) + 9,
            ),
            lambda dout, q, k, v, out, lse: partial_attention_grad(dout, (q, k, v), out, lse),
            grads=False,
        )
    ],
    "permute": [with_permutation(permute, 1, weights=False)],
    "pulls_of": [
        Case(
            lambda d: (
                torch.arange(d.rows * 3 * d.rows).view(d.rows, -1) % 7
                if d.rows
                else torch.zeros(1, 2, dtype=torch.int64),
            ),
            lambda counts: parts(pulls_of(counts, len(counts) // 2, 1 << 10)),
            grads=False,
            exact=True,
            fine=ALONE,
        )
    ],
    "quantize": [
        Case(
            same_shape(1),
            lambda x, s=spec: (quantize(x, s, rows=x.shape[0] or 1).wire,),
            grads=False,
            exact=True,
            fine=ALONE,
        )
        for spec in SPECS
    ],
    "quantized_linear": [
        Case(
            lambda d, spec=spec: (d.tensor(d.rows, d.n), quantized(d, spec, 3).wire, torch.empty(d.n)),
            lambda x, wire, n, s=spec: (
                quantized_linear(x, QuantTensor(wire, s, n.numel(), (wire.shape[0], n.numel()), torch.float32)),
            ),
            fine=frozenset({(1, "shape"), (2, "elsewhere"), (2, "dtype")}),  # 2 only says how many
        )
        for spec in SPECS
    ],
    "packed_linear": [
        Case(
            lambda d: (d.tensor(d.rows * 5, d.n, dtype=torch.float32), d.tensor(70, d.n, seed=1), d.tensor(70, seed=2)),
            lambda x, w, b, how=how: (packed_linear(x, how(w, b)),),
            grads=False,
            fine=frozenset({(1, "dtype")}),  # the case itself makes floats of the weight
        )
        for how in (
            lambda w, b: pack(w.float(), b, gated=True),
            lambda w, b: pack(w.bfloat16(), b),
            lambda w, b: pack(w.bfloat16(), b, inputs=ProductInputs.BF16),
            lambda w, b: pack(coded(w, INT8, True), b),
            lambda w, b: pack(coded(w, INT8, True), b, inputs=ProductInputs.INT8),
            lambda w, b: pack(coded(w, INT4, False), b, inputs=ProductInputs.INT8),
        )
    ],
    "reduce": [from_wire(lambda q: (reduce(q, 2, factor=0.5),))],
    "reduce_quantized": [from_wire(lambda q: (reduce_quantized(q, 2).wire,))],
    "rms_norm": [Case(lambda d: (d.tensor(d.rows, d.n), d.tensor(d.n)), lambda x, w: (rms_norm(x, w),))],
    "rotate": [Case(rotated, lambda x, cos, sin: (rotate(x, cos, sin),), grads=False)],
    "scatter_tokens": [Case(dropped, lambda x, part, i: (scatter_tokens(x, part, i),), exact=True)],
    "sort_slots": [
        Case(lambda d: (routed(d)[0],), lambda e: parts(sort_slots(e, 3)), grads=False, exact=True, fine=ALONE),
        Case(
            lambda d: (routed(d)[0], routed(d)[0] != d.n % 3),
            lambda e, keep: parts(sort_slots(e, 3, keep=keep)),
            grads=False,
            exact=True,
        ),
    ],
    "norms_of": [
        Case(same_shape(2), lambda a, b: (norms_of([a, b]),), grads=False, fine=frozenset({(0, "shape"), (1, "shape")}))
    ],
    "sum_squares": [
        Case(
            same_shape(1),
            lambda x: (torch.tensor(ds_ops.sum_squares(x), dtype=torch.float64),),
            grads=False,
            fine=ALONE,
        )
    ],
    "sum_ranges": [
        Case(
            same_shape(3),
            lambda out, a, b: (
                sum_sources(out, [a, out, b]),
                out,
            ),
            grads=False,
        ),
    ],
    "top_k_gating": [
        Case(
            lambda d: (d.tensor(d.rows, d.n),),
            lambda x: (top_k_gating(x, 1).weights, top_k_gating(x, 1).counts),
            fine=ALONE,
        )
    ],
    "unpermute": [with_permutation(unpermute, 2, weights=True)],
    "update": [
        stepped(update_rules.UpdateRule.ADAM, update_rules.adam_coefficients(HYPER, 3), 2),
        stepped(update_rules.UpdateRule.LION, update_rules.lion_coefficients(1e-2, (0.9, 0.99), 0.1), 1),
        stepped(update_rules.UpdateRule.ADAGRAD, update_rules.adagrad_coefficients(1e-2, 1e-10, 0.1), 1),
        stepped(update_rules.UpdateRule.SGD, update_rules.sgd_coefficients(1e-2, 0.9, 0.1, 0.1), 1),
        stepped(update_rules.UpdateRule.SGD_PLAIN, update_rules.sgd_plain_coefficients(1e-2, 0.1), 0),
    ],
}
LEAST_N = {
    "add_layer_norm": 8,  # as layer_norm
    "layer_norm": 8,  # of two numbers that are nearly equal, the variance is rounding
    "masked_softmax": 3,
    "packed_linear": 1,
    "rotate": 1,
    "top_k_gating": 1,
}  # what an op cannot do with fewer: tested where it is refused


def test_every_op_has_a_case() -> None:
    assert set(CASES) == {op.name for op in every_op().ops}


def run(case: Case, d: Draw, forced: str, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of the float inputs, on the CPU."""
    inputs = [t.to(device) for t in case.make(d)]
    floats = [t for t in inputs if t.is_floating_point()] if case.grads else []
    for t in floats:
        t.requires_grad_()
    with mock.patch.dict(os.environ, DS_OPS=forced):
        results = list(case.call(*inputs))
        if not floats:
            return [r.cpu() for r in results], []
        diffable = [r for r in results if r.requires_grad]
        ups = [torch.randn(r.shape, generator=torch.Generator().manual_seed(5)).to(r) for r in diffable]
        grads = torch.autograd.grad(diffable, floats, ups, allow_unused=True, materialize_grads=True)
    return [r.detach().cpu() for r in results], [g.cpu() for g in grads]


draws = st.builds(Draw, st.integers(0, 5), st.integers(0, 70), st.sampled_from(DTYPES), st.integers(0, 3))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(d=draws)
def test_the_chosen_backend_agrees_with_the_reference(name: str, device: str, d: Draw) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    if device == "cuda" and name == "packed_linear":
        pytest.skip("weights are packed for the layer loop of the CPU")
    if device == "cuda" and name == "pulls_of":
        pytest.skip("counts of rows are numbers of the host")
    d = replace(d, n=max(d.n, LEAST_N.get(name, 0)))
    for case in CASES[name]:
        ours, theirs = run(case, d, "", device), run(case, d, "reference")
        for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if case.exact:
                assert torch.equal(a, b)
            else:
                tolerance = 4 * TOLERANCE.get(a.dtype, 0.0)
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", sorted(op.name for op in every_op().ops if any(b.name == "torch" for b in op.backends))
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(d=draws)
def test_torchs_own_kernels_agree_with_the_reference(name: str, d: Draw) -> None:
    """What a device without our kernels runs."""
    (op,) = (op for op in every_op().ops if op.name == name)
    (backend,) = (b for b in op.backends if b.name == "torch")
    d = replace(d, n=max(d.n, LEAST_N.get(name, 0)))
    if backend.obstacle("cpu", d.dtype):
        return
    for case in CASES[name]:
        ours, theirs = run(case, d, "torch"), run(case, d, "reference")
        for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            tolerance = 4 * TOLERANCE.get(a.dtype, 0.0)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def spoilt(t: Tensor) -> dict[str, Tensor]:
    """The same tensor, made wrong in one way each; the first one is only unusual, and the last one may be (a weight)."""
    strided = torch.stack((t, t), dim=-1)[..., 0]
    short = t.reshape(-1)[:-1]
    kind = torch.complex64 if t.is_floating_point() else torch.float64 if t.dtype is not torch.bool else torch.int32
    wrong = {"strided": strided, "elsewhere": t.to("meta"), "dtype": t.to(kind), "shape": short}
    return {**wrong, "byte": t.to(torch.float8_e4m3fn)} if t.is_floating_point() else wrong


@pytest.mark.parametrize("forced", ["", "reference"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_wrong_tensor_is_a_typed_error(name: str, forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with one tensor: a typed error, or, if it has only strides, the same numbers."""
    monkeypatch.setenv("DS_OPS", forced)
    d = Draw(4, 5, torch.float32, 0)
    for case in CASES[name]:
        expected = case.call(*case.make(d))
        for i in range(len(case.make(d))):
            for what, wrong in spoilt(case.make(d)[i]).items():
                if (i, what) in case.fine:
                    continue
                inputs = list(case.make(d))
                inputs[i] = wrong
                try:
                    found = case.call(*inputs)
                except DsError:
                    continue
                assert what in ("strided", "byte"), f"argument {i} with another {what} was taken"
                for a, b in zip(found, expected if what == "strided" else [], strict=what == "strided"):
                    torch.testing.assert_close(a, b)


# ---- what is said of each kernel -------------------------------------------------------------------------------------

STATED = {
    "formula": r"[=*/^]|->",
    "shapes": r"\[[^\]]*\]|any shape|one shape|like \w",
    "dtypes": r"fp32|floats|int64|dtype|f32|bytes",
    "cost": r"Cost|cost in bytes",
    "source": r"\b(19|20)\d\d\b|torch|IEEE|Source",
}


def unstated(text: str) -> list[str]:
    return [what for what, pattern in STATED.items() if not re.search(pattern, text)]


def public_functions() -> dict[str, str]:
    """The docstring of the public function of each op, by the op's name."""
    documented: dict[str, str] = {}
    for found in pkgutil.iter_modules(ds_ops.__path__):
        module = (
            None if found.name.startswith(("_", "cli", "cuda_")) else importlib.import_module(f"ds_ops.{found.name}")
        )
        for name in getattr(module, "__all__", ()):
            if inspect.isfunction(getattr(module, name)):
                documented.setdefault(name, inspect.getdoc(getattr(module, name)) or "")
    return {**documented, "gated_activation": documented["swiglu"]}


def test_every_op_states_formula_shapes_dtypes_cost_and_source() -> None:
    documented = public_functions()
    lacking = {op.name: unstated(documented.get(op.name, "")) for op in every_op().ops}
    assert not {name: what for name, what in lacking.items() if what}


def test_every_native_kernel_states_them_too() -> None:
    """The comment above each kernel of the headers in native/include."""
    folder = source_dir()
    if folder is None:
        pytest.skip("this installation carries no native sources")
    kernels = {}
    for header in ("update", "stream", "quant", "norm", "checksum", "shm"):
        text = (folder / "include" / "ds" / f"{header}.h").read_text()
        for comment, name in re.findall(r"((?:^//.*\n)+)^(?:Status|void|std::uint32_t) (\w+)\(", text, re.MULTILINE):
            kernels[f"{header}.h: {name}"] = comment
    assert len(kernels) >= 13
    assert not {name: unstated(comment) for name, comment in kernels.items() if unstated(comment)}

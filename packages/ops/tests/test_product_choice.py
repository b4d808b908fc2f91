"""The table of products: what is chosen for which codes, device and number of rows, and what the others say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_ops.formats import FP4_E2M1, FP6_E3M2, FP8_E4M3, INT4, INT8, Format
from ds_ops.product_choice import (
    EXPERT_PRODUCTS,
    PRODUCTS,
    CodeLayout,
    DeviceTraits,
    ProductFacts,
    choose_layout,
    choose_product,
    device_traits,
)

ALL = frozenset({"_weight_int8pack_mm", "_weight_int4pack_mm", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"})
HOPPER = DeviceTraits("cuda", (9, 0), cuda=(13, 0), shipped=ALL)
NO_TRITON = replace(HOPPER, triton="there is no C compiler")
OLD = replace(NO_TRITON, capability=(7, 5))


def facts(
    kind: Format, group: int, device: DeviceTraits, *, symmetric: bool = True, rounded: bool = False, experts: int = 0,
    dtype: torch.dtype = torch.bfloat16, bf16_params: bool = True, sizes: tuple[int, int] = (4096, 2048),
) -> ProductFacts:  # fmt: skip
    return ProductFacts(kind, group, symmetric, *sizes, experts, dtype, rounded, bf16_params, device)


ROWS, WIRE, TINY = CodeLayout.ROWS, CodeLayout.WIRE, CodeLayout.TINYGEMM
CASES = {
    "our kernel where it runs": (facts(INT8, 4096, HOPPER), WIRE, {1: "triton", 1024: "triton", 1025: "numbers"}),
    "int4 of ours": (facts(INT4, 128, HOPPER), WIRE, {8: "triton"}),
    "MXFP4": (facts(FP4_E2M1, 32, NO_TRITON), WIRE, {1: "numbers"}),
    "fp6": (facts(FP6_E3M2, 128, HOPPER), WIRE, {1: "numbers"}),
    "int4 without a compiler": (facts(INT4, 128, NO_TRITON), TINY, {1: "int4pack_mm", 5000: "int4pack_mm"}),
    "int4 whose scales bf16 rounds": (facts(INT4, 128, NO_TRITON, bf16_params=False), WIRE, {1: "numbers"}),
    "int4 in fp16": (facts(INT4, 128, NO_TRITON, dtype=torch.float16), WIRE, {1: "numbers"}),
    "int4 in odd groups": (facts(INT4, 16, NO_TRITON), WIRE, {1: "numbers"}),
    "int4 on an old card": (facts(INT4, 128, OLD), WIRE, {1: "numbers"}),
    "int8 without a compiler": (facts(INT8, 2048, NO_TRITON), ROWS, {1: "int8pack_mm", 16: "int8pack_mm", 17: "numbers"}),
    "int8 with zeros": (facts(INT8, 2048, NO_TRITON, symmetric=False), WIRE, {1: "numbers"}),
    "fp8": (facts(FP8_E4M3, 128, HOPPER), WIRE, {1: "triton"}),
    "fp8 by row, rounded": (facts(FP8_E4M3, 2048, HOPPER, rounded=True), ROWS, {1: "scaled_mm by row", 9999: "scaled_mm by row"}),
    "fp8 by block, rounded": (facts(FP8_E4M3, 128, HOPPER, rounded=True), ROWS, {64: "scaled_mm by block"}),
    "by block on Ada": (facts(FP8_E4M3, 128, replace(HOPPER, capability=(8, 9)), rounded=True), ROWS, {64: "numbers"}),
    "by row on Ada": (facts(FP8_E4M3, 2048, replace(HOPPER, capability=(8, 9)), rounded=True), ROWS, {64: "scaled_mm by row"}),
    "by block on Blackwell": (facts(FP8_E4M3, 128, replace(HOPPER, capability=(10, 0)), rounded=True), ROWS, {1: "numbers"}),
    "rounded on a CPU": (facts(FP8_E4M3, 128, DeviceTraits("cpu"), rounded=True), ROWS, {1: "numbers"}),
    "experts": (facts(FP4_E2M1, 32, HOPPER, experts=8), WIRE, {1: "triton", 99999: "triton"}),
    "experts without a compiler": (facts(FP4_E2M1, 32, NO_TRITON, experts=8), WIRE, {1: "grouped_mm"}),
    "experts without a compiler on an A100": (facts(FP4_E2M1, 32, replace(NO_TRITON, capability=(8, 0)), experts=8), WIRE, {1: "numbers"}),
    "experts without a compiler on a 5090": (facts(FP4_E2M1, 32, replace(NO_TRITON, capability=(12, 0)), experts=8), WIRE, {1: "numbers"}),
    "many experts without a compiler": (facts(FP4_E2M1, 32, NO_TRITON, experts=256), WIRE, {1: "numbers"}),
    "experts in fp32": (facts(INT8, 32, NO_TRITON, experts=8, dtype=torch.float32), WIRE, {1: "numbers"}),
    "experts, rounded": (facts(FP8_E4M3, 2048, HOPPER, experts=8, rounded=True), ROWS, {64: "scaled_grouped_mm"}),
    "experts, rounded, elsewhere": (facts(FP8_E4M3, 2048, OLD, experts=8, rounded=True), ROWS, {64: "numbers"}),
    "a shape that is not of 16": (facts(FP8_E4M3, 2040, HOPPER, rounded=True, sizes=(4096, 2040)), ROWS, {1: "numbers"}),
    "AMD": (facts(INT4, 128, replace(NO_TRITON, hip=True)), WIRE, {1: "numbers"}),
    "torch without it": (facts(INT4, 128, replace(NO_TRITON, shipped=frozenset())), WIRE, {1: "numbers"}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_chosen(case: str) -> None:
    asked, layout, products = CASES[case]
    assert choose_layout(asked).layout is layout
    for rows, name in products.items():
        each = rows * max(1, asked.experts)
        choice = choose_product(asked, layout, each)
        assert choice.entry.name == name, choice.rejected
        table = EXPERT_PRODUCTS if asked.experts else PRODUCTS
        before = [entry.name for entry in table][: [entry.name for entry in table].index(name)]
        assert [n for n, _ in choice.rejected] == before
        assert all(reason for _, reason in choice.rejected)


@pytest.mark.parametrize(
    ("asked", "name", "said"),
    [
        (facts(FP8_E4M3, 2048, HOPPER), "scaled_mm by row", "inputs are not to be rounded"),
        (facts(FP8_E4M3, 128, HOPPER, rounded=True), "scaled_mm by row", "one for 128 inputs"),
        (facts(FP8_E4M3, 2048, OLD, rounded=True), "scaled_mm by row", "needs compute capability 8.9, the device has 7.5"),
        (facts(FP8_E4M3, 64, HOPPER, rounded=True), "scaled_mm by block", "for 64 of 2048"),
        (facts(INT4, 512, NO_TRITON), "int4pack_mm", "groups of 512"),
        (facts(INT4, 128, NO_TRITON, bf16_params=False), "int4pack_mm", "would round"),
        (facts(INT4, 128, NO_TRITON, sizes=(4095, 2048)), "int4pack_mm", "4095 x 2048"),
        (facts(INT8, 128, NO_TRITON), "int8pack_mm", "one scale a row"),
        (facts(INT8, 128, NO_TRITON), "triton", "no C compiler"),
        (facts(FP4_E2M1, 32, NO_TRITON, experts=256), "grouped_mm", "4.0 GiB of numbers"),
        (facts(INT8, 2048, replace(NO_TRITON, shipped=frozenset())), "int8pack_mm", "has no _weight_int8pack_mm for CUDA"),
        (facts(INT8, 8, DeviceTraits("cpu", triton="no")), "triton", "multiples of 16"),
    ],
)  # fmt: skip
def test_what_an_entry_says(asked: ProductFacts, name: str, said: str) -> None:
    table = EXPERT_PRODUCTS if asked.experts else PRODUCTS
    assert said in next(entry for entry in table if entry.name == name).obstacle(asked)


def test_the_last_entry_runs_everywhere_and_the_host_is_asked_by_it_alone() -> None:
    for table in (PRODUCTS, EXPERT_PRODUCTS):
        assert not table[-1].obstacle(facts(FP6_E3M2, 8, DeviceTraits("cpu")))
        assert table[-1].most_rows is None
        assert set(table[-1].layouts) == set(CodeLayout)
    assert [entry.name for entry in EXPERT_PRODUCTS if entry.asks_host] == ["numbers"]


def test_the_traits_of_this_machine() -> None:
    assert device_traits(torch.device("cpu"), "why") == DeviceTraits("cpu", triton="why")
    found = device_traits(torch.device("cuda"), "")
    assert found.kind == "cuda"
    if not torch.cuda.is_available():
        assert (found.capability, found.shipped) == ((0, 0), frozenset())

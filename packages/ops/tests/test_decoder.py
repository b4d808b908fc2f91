"""Packed weights and the native step's checks; what the step computes is tested by the runner that uses it (ds-inference)."""

from __future__ import annotations

import pytest
import torch

from ds_config.errors import KernelError
from ds_ops.formats import FP8_E4M3, INT4, INT8
from ds_ops.native_decoder import (
    DecoderLayer,
    DecoderProgram,
    KeptLayer,
    Normed,
    PackedWeight,
    ProductInputs,
    TokenRun,
    obstacle,
    pack,
)
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight

HIDDEN, HEADS, WIDTH, INNER, VOCAB = 40, 3, 8, 21, 50


def norm() -> Normed:
    return Normed(torch.ones(HIDDEN), eps=1e-5)


def program(matrices: tuple[PackedWeight, ...], head: PackedWeight) -> DecoderProgram:
    qkv, out, up, down = matrices
    norms = (norm(), Normed(), norm(), Normed(), Normed(), Normed())
    layer = DecoderLayer((qkv, out, up, down), HEADS, HEADS, WIDTH, WIDTH, WIDTH**-0.5, norms)
    return DecoderProgram(HIDDEN, [layer], norm(), head)


def weights() -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = (
        (3 * HEADS * WIDTH, HIDDEN),
        (HIDDEN, HEADS * WIDTH),
        (2 * INNER, HIDDEN),
        (HIDDEN, INNER),
        (VOCAB, HIDDEN),
    )
    return [torch.randn(shape) * 0.2 for shape in shapes]


def packed(given: list[torch.Tensor]) -> tuple[tuple[PackedWeight, ...], PackedWeight]:
    *matrices, head = (pack(w, gated=i == 2) for i, w in enumerate(given))
    return tuple(matrices), head


def plain(x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    """One sequence through one layer, in torch."""
    qkv, out, up, down, head = given

    def normed(t: torch.Tensor) -> torch.Tensor:
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-5)

    q, k, v = (t.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1) for t in (normed(x) @ qkv.t()).chunk(3, -1))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = x + mixed @ out.t()
    gate, value = (normed(x) @ up.t()).chunk(2, -1)
    x = x + (torch.nn.functional.silu(gate) * value) @ down.t()
    return normed(x) @ head.t()


def room(blocks: int = 8, size: int = 4) -> KeptLayer:
    return KeptLayer(torch.zeros(blocks, size, HEADS, WIDTH), torch.zeros(blocks, size, HEADS, WIDTH))


needs_native = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "built")


@needs_native
@pytest.mark.parametrize("length", [1, 4, 13, 29])
def test_a_step_is_the_layer(length: int) -> None:
    given, x = weights(), torch.randn(length, HIDDEN)
    made, rows = program(*packed(given)), torch.arange(length)
    found = made.step(x.clone(), [TokenRun(0, length, 0, tuple(range(8)))], rows, [room()])
    assert (found - plain(x, given)).abs().max() < 1e-4
    again, kept = [], room()  # in two chunks: the second reads what the first kept
    for start, end in ((0, length // 2), (length // 2, length)):
        if end > start:
            chunk = TokenRun(0, end - start, start, (5, 1, 0, 7, 3, 2, 6, 4))
            again.append(made.step(x[start:end].clone(), [chunk], torch.arange(end - start), [kept]))
    assert (torch.cat(again) - found).abs().max() < 1e-4


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_codes_are_as_good_as_their_numbers(kind: object, symmetric: bool) -> None:
    given, x = weights(), torch.randn(9, HIDDEN)
    codes = [quantize_weight(w, kind, group=16, symmetric=symmetric) for w in given]  # type: ignore[arg-type]
    *matrices, head = (pack(w, gated=i == 2) for i, w in enumerate(codes))
    chunk = [TokenRun(0, 9, 0, tuple(range(8)))]
    found = program(tuple(matrices), head).step(x.clone(), chunk, torch.arange(9), [room()])
    assert (found - plain(x, [dequantize(w) for w in codes])).abs().max() < 1e-4
    *matrices, head = (pack(w, gated=i == 2, inputs=ProductInputs.INT8) for i, w in enumerate(codes))
    rounded = program(tuple(matrices), head).step(x.clone(), chunk, torch.arange(9), [room()])
    assert 0 < (found - rounded).abs().max() < 0.1 * found.abs().max()


def test_what_cannot_be_packed_is_refused() -> None:
    for weight in (
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(8),
        quantize_weight(torch.zeros(4, 8), FP8_E4M3, group=8),
    ):
        with pytest.raises(KernelError, match="cannot be packed"):
            pack(weight)
    with pytest.raises(KernelError, match="cannot be packed"):
        pack(torch.zeros(4, 8), inputs=ProductInputs.INT8)


@needs_native
@pytest.mark.parametrize(
    ("chunks", "outputs"),
    [
        ([TokenRun(0, 2, 0, (0,))], [0]),
        ([TokenRun(1, 3, 0, (0,))], [0]),
        ([TokenRun(0, 3, 2, (0,))], [0]),
        ([TokenRun(0, 3, 0, (9,))], [0]),
        ([TokenRun(0, 3, 0, (-1,))], [0]),
        ([TokenRun(0, 3, 0, (0,))], [3]),
        ([TokenRun(0, 3, 0, (0,))], [-1]),
    ],
)
def test_no_address_outside_of_a_tensor(chunks: list[TokenRun], outputs: list[int]) -> None:
    made = program(*packed(weights()))
    with pytest.raises(KernelError, match="decoder step"):
        made.step(torch.zeros(3, HIDDEN), chunks, torch.tensor(outputs), [room()])

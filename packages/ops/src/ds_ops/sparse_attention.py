"""Attention in which a block of queries sees some blocks of keys only: which ones, as data, and the product.

Words: a sequence is cut into *blocks* of so many tokens. A *layout* is a boolean tensor [heads or 1, blocks, blocks]: which
block of keys (last dim) each block of queries sees. A `Pattern` gives a layout for any number of blocks. The patterns of
Child et al. 2019 (`fixed`), Zaheer et al. 2020 (`bigbird`), Beltagy et al. 2020 (`bslongformer`), and what they are made of.

For a compiled model on a GPU, `block_mask` gives the same visibility to torch's own FlexAttention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.attention import masked_softmax
from ds_ops.registry import Op, choose, reference_backend, register, torch_backend

__all__ = [
    "Pattern",
    "Sparsity",
    "bigbird",
    "block_mask",
    "block_sparse_attention",
    "bslongformer",
    "dense",
    "fixed",
    "sliding_window",
    "variable",
]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The union of its parts.

    Attributes:
        windows: Sizes of windows that follow each other, inside of which all see all; the last size repeats. Empty: none.
        reach: How many blocks on either side a block sees; 0: itself; -1: none of this.
        everyone: Ranges (first, end) of blocks that all others see.
        per_window: The last so many blocks of every window are seen by all others.
        shifts: Head h has its `per_window` blocks (h mod shifts) * per_window earlier in the window.
        rows: Blocks that all see, see all.
        random: Blocks drawn for each row.
        causal: No block sees a later one. Inside a block, tokens are the business of `block_sparse_attention`.
    """

    windows: tuple[int, ...] = ()
    reach: int = -1
    everyone: tuple[tuple[int, int], ...] = ()
    per_window: int = 0
    shifts: int = 1
    rows: bool = False
    random: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if any(size < 1 for size in self.windows):
            wrong.append(f"windows {self.windows} must be positive")
        if self.per_window and (len(self.windows) != 1 or self.per_window * self.shifts > self.windows[0]):
            wrong.append(f"{self.per_window} x {self.shifts} blocks that all see do not fit windows {self.windows}")
        if self.shifts < 1 or self.random < 0 or self.per_window < 0:
            wrong.append(f"shifts {self.shifts}, random {self.random} or per_window {self.per_window} is too small")
        if any(not 0 <= first < end for first, end in self.everyone):
            wrong.append(f"everyone {self.everyone} must be ranges (first, end) with 0 <= first < end")
        if wrong:
            raise KernelError("; ".join(wrong) + ".", code="sparse-pattern", fix="Correct the numbers of the pattern.")

    def layout(self, blocks: int, heads: int = 1, *, seed: int = 0) -> Tensor:
        """Build the layout of visible blocks, bool [heads, blocks, blocks].

        A single head serves all heads of `block_sparse_attention`.
        """
        place = torch.arange(blocks, device="cpu")
        row, col = place[:, None], place[None, :]
        near = (row - col).abs() <= self.reach
        if self.windows:
            number = _window_of(self.windows, blocks)
            near = near | (number[:, None] == number[None, :])
        draws = torch.Generator().manual_seed(seed)
        layers = [near | self._seen_by_all(blocks, head) | self._drawn(blocks, draws) for head in range(heads)]
        whole = torch.stack(layers) if layers else torch.zeros(0, blocks, blocks, dtype=torch.bool, device="cpu")
        return whole & (col <= row) if self.causal else whole

    def _seen_by_all(self, blocks: int, head: int) -> Tensor:
        visible = torch.zeros(blocks, dtype=torch.bool, device="cpu")
        for first, end in self.everyone:
            visible[first:end] = True
        if self.per_window:
            size = self.windows[0]
            lead = size - (1 + head % self.shifts) * self.per_window
            for start in range(0, blocks, size):
                # A window that the end of the sequence cuts keeps its blocks within what is left of it.
                first = min(start + lead, max(blocks - self.per_window, 0))
                visible[first : first + self.per_window] = True
        columns = visible[None, :].expand(blocks, blocks)
        return columns | visible[:, None] if self.rows else columns

    def _drawn(self, blocks: int, draws: torch.Generator) -> Tensor:
        chosen = torch.zeros(blocks, blocks, dtype=torch.bool, device="cpu")
        for row in range(blocks if self.random else 0):
            most = row + 1 if self.causal else blocks
            chosen[row, torch.randperm(most, generator=draws, device="cpu")[: self.random]] = True
        return chosen


def _window_of(sizes: tuple[int, ...], blocks: int) -> Tensor:
    """Return the number of each block's window, int64 [blocks]."""
    lengths = list(sizes)
    while sum(lengths) < blocks:
        lengths.append(sizes[-1])
    return torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), torch.tensor(lengths, device="cpu"))[
        :blocks
    ]


def dense(*, causal: bool = False) -> Pattern:
    """Build the pattern in which all blocks attend to all (earlier) blocks."""
    return Pattern(everyone=((0, 1 << 40),), causal=causal)


def fixed(
    local: int = 4, global_blocks: int = 1, *, shifts: int = 1, rows: bool = False, causal: bool = False
) -> Pattern:
    """Build windows of `local` blocks; the last `global_blocks` of each window are visible to all."""
    return Pattern(windows=(local,), per_window=global_blocks, shifts=shifts, rows=rows, causal=causal)


def variable(
    windows: tuple[int, ...] = (4,),
    everyone: tuple[tuple[int, int], ...] = ((0, 1),),
    *,
    random: int = 0,
    rows: bool = False,
    causal: bool = False,
) -> Pattern:
    """Build windows of chosen sizes, chosen global blocks that are visible to all, and random blocks."""
    return Pattern(windows=windows, everyone=everyone, random=random, rows=rows, causal=causal)


def bigbird(random: int = 1, window: int = 3, global_blocks: int = 1, *, causal: bool = False) -> Pattern:
    """Build BigBird's pattern: random blocks, a sliding window of `window` blocks, and global blocks.

    The first `global_blocks` blocks are global. Global blocks attend to all blocks and are visible to all.
    """
    return Pattern(
        reach=window // 2,
        everyone=((0, global_blocks),) if global_blocks else (),
        rows=True,
        random=random,
        causal=causal,
    )


def bslongformer(
    window: int = 3, everyone: tuple[tuple[int, int], ...] = ((0, 1),), *, causal: bool = False
) -> Pattern:
    """Build Longformer's pattern: a sliding window, and global blocks that attend to all and are visible to all."""
    return Pattern(reach=window // 2, everyone=everyone, rows=True, causal=causal)


def sliding_window(window: int = 3, *, causal: bool = True) -> Pattern:
    """Build a window of window // 2 blocks on either side, or only of earlier blocks."""
    return Pattern(reach=window // 2, causal=causal)


@dataclass(frozen=True, slots=True, eq=False)
class Sparsity:
    """What may be seen: layout bool [heads or 1, blocks, blocks], tokens of a block, and whether no token sees a later one."""

    layout: Tensor
    block: int
    causal: bool = False


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sparsity: Sparsity, *, key_mask: Tensor | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys that `sparsity` and `key_mask` make visible.

    A query without a visible key gets zeros.

    Args:
        q, k, v: [batch, heads, length, d] floats of one shape; any length, the last block may be short.
        key_mask: bool [batch, length], true where a key is visible; None: everywhere.
    Returns: like q, with gradients for all three.

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: operations in proportion to the visible blocks; their keys and values are copied once per block that attends
    to them:
        2 * visible * batch * heads * block * d elements. Torch's fused attention runs on rows with equally many blocks.
    Source: Child et al. 2019.
    """
    _require(q, k, v, sparsity, key_mask)
    out: Tensor = choose(_SPARSE, q.device.type, q.dtype).backend.run(q, k, v, sparsity, key_mask)
    return out


def block_mask(sparsity: Sparsity, length: int) -> BlockMask:
    """Build the mask of the same visibility for `torch.nn.attention.flex_attention`, which torch.compile fuses.

    Args:
        length: of queries and keys. Blocks should be multiples of the kernel's tiles: 128 suits every device.
    Returns: a mask on the layout's device, for one batch (it broadcasts) and the layout's heads.
    """
    block, causal = sparsity.block, sparsity.causal
    layout = sparsity.layout.tril() if causal else sparsity.layout
    heads = layout.shape[0]
    # Visible blocks of each row first, in order; the rest of a row of indices is not read.
    order = (~layout).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
    counts = layout.sum(-1, dtype=torch.int32)

    def visible(_batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = layout[head % heads, query // block, key // block]
        return shown & (key <= query) if causal else shown

    mask: BlockMask = BlockMask.from_kv_blocks(
        counts[None], order[None], BLOCK_SIZE=block, mask_mod=visible, seq_lengths=(length, length)
    )
    return mask


def _require(q: Tensor, k: Tensor, v: Tensor, s: Sparsity, key_mask: Tensor | None) -> None:
    same = all((t.shape, t.dtype, t.device) == (q.shape, q.dtype, q.device) for t in (k, v))
    if q.dim() != 4 or not q.is_floating_point() or not same:
        shown = "; ".join(map(_call.describe, (q, k, v)))
        raise _call.refuse(f"q, k, v: expected floats of one shape [batch, heads, length, d]; found {shown}.")
    batch, heads, length, _ = q.shape
    blocks = -(-length // s.block) if s.block > 0 else -1
    if s.layout.dtype is not torch.bool or list(s.layout.shape) not in ([1, blocks, blocks], [heads, blocks, blocks]):
        wanted = f"bool [1 or {heads}, {blocks}, {blocks}] for {length} tokens in blocks of {s.block}"
        raise _call.refuse(f"layout: expected {wanted}; found {_call.describe(s.layout)}.")
    if key_mask is not None and (key_mask.dtype is not torch.bool or list(key_mask.shape) != [batch, length]):
        raise _call.refuse(f"key_mask: expected bool {[batch, length]}; found {_call.describe(key_mask)}.")


def _reference_sparse(q: Tensor, k: Tensor, v: Tensor, s: Sparsity, key_mask: Tensor | None) -> Tensor:
    length = q.shape[2]
    allowed = s.layout.repeat_interleave(s.block, 1).repeat_interleave(s.block, 2)[:, :length, :length].to(q.device)
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2)
    probabilities = masked_softmax(scores, allowed, scale=max(q.shape[-1], 1) ** -0.5, causal=s.causal)
    return (probabilities @ v.to(wide)).to(q.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _EqualRows:
    """Rows of blocks that see equally many blocks. rows [R]; cols [R, c]: what each row sees."""

    rows: Tensor
    cols: Tensor


def _parts(layout: Tensor) -> Iterator[_EqualRows]:
    """Split the visible part of a head's layout [blocks, blocks] into parts that are a dense product each."""
    counts = layout.sum(-1)
    for count in counts[counts > 0].unique().tolist():
        rows = (counts == count).nonzero()[:, 0]
        yield _EqualRows(rows, layout[rows].nonzero()[:, 1].view(-1, count))


def _torch_sparse(q: Tensor, k: Tensor, v: Tensor, s: Sparsity, key_mask: Tensor | None) -> Tensor:
    batch, heads, length, d = q.shape
    blocks = s.layout.shape[-1]
    shown = torch.ones(1, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    short = blocks * s.block - length
    shown = functional.pad(shown, (0, short))  # keys that fill the last block are not seen
    a, b, c = (functional.pad(t, (0, 0, 0, short)).view(batch, heads, blocks, s.block, d) for t in (q, k, v))
    layout = s.layout.to(q.device)
    if not layout.any() or not q.numel():  # zeros that still have a gradient
        return (q + k + v).masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0)
    outs = []
    for head in range(len(layout)):
        head_slice = slice(head, head + 1) if len(layout) > 1 else slice(None)
        parts = list(_parts(layout[head]))
        outputs = [
            _attend(a[:, head_slice], b[:, head_slice], c[:, head_slice], _visible(p, s, shown), p) for p in parts
        ]
        empty = torch.zeros_like(a[:, head_slice])
        outs.append(empty.index_copy(2, torch.cat([p.rows for p in parts]), torch.cat(outputs, 2)) if parts else empty)
    return torch.cat(outs, 1).flatten(2, 3)[:, :, :length]


def _visible(part: _EqualRows, s: Sparsity, shown: Tensor) -> Tensor:
    """Compute the visible keys of each query, in the order of part.cols: bool [batch or 1, 1, R, block, c * block]."""
    inside = torch.arange(s.block, device=shown.device)
    keys = (part.cols[..., None] * s.block + inside).flatten(1)
    visible = shown[:, keys][:, None, :, None, :]
    if s.causal:
        queries = part.rows[:, None] * s.block + inside
        visible = visible & (keys[:, None, :] <= queries[:, :, None])
    return visible.expand(-1, -1, -1, s.block, -1)


def _attend(a: Tensor, b: Tensor, c: Tensor, visible: Tensor, part: _EqualRows) -> Tensor:
    """Compute attention [batch, heads, R, block, d] for the rows of `part`.

    a, b, c: [batch, heads, blocks, block, d].
    """
    batch, heads = a.shape[:2]
    queries = a[:, :, part.rows].flatten(1, 2)
    keys, values = (t[:, :, part.cols].flatten(3, 4).flatten(1, 2) for t in (b, c))
    blind = ~visible.any(-1, keepdim=True)
    # Blind rows see everything and are emptied afterwards: a softmax of nothing has no gradient, not even zero.
    mask = (visible | blind).expand(-1, heads, -1, -1, -1).flatten(1, 2)
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return attended.view(batch, heads, len(part.rows), *attended.shape[2:]).masked_fill(blind, 0)


_SPARSE = register(
    Op(
        "block_sparse_attention",
        "attention on the visible blocks of a layout",
        (torch_backend(_torch_sparse), reference_backend(_reference_sparse)),
    )
)

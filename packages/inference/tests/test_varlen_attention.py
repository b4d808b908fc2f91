"""What torch's `varlen_attn` is told equals what the gather computes; here its definition stands for it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_inference import varlen_attention
from ds_inference.paged_attention import ATTENTION, _attend_by_gather, _attend_varlen, make_batch
from ds_inference.requests import ScheduledChunk
from ds_inference.spec import AttentionSpec


def defined(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, **how: Any
) -> Tensor:
    """A token sees the last tokens of its sequence up to itself, `window_size[0]` before it, or all for -1."""
    out = torch.empty_like(query)
    left, right = how["window_size"]
    assert (right, how["num_splits"], how["enable_gqa"]) == (0, 1, query.shape[1] != key.shape[2])
    for i, length in enumerate(how["seqused_k"].tolist()):
        first, last = cu_seq_q[i].item(), cu_seq_q[i + 1].item()
        assert last - first <= max_q
        assert length <= max_k
        keys, values = (t[how["block_table"][i].long()].flatten(0, 1)[:length] for t in (key, value))
        for at in range(first, last):
            here = length - (last - at)
            seen = slice(0 if left < 0 else max(0, here - left), here + 1)
            for head in range(query.shape[1]):
                group = head // (query.shape[1] // key.shape[2])
                scores = keys[seen, group] @ query[at, head] * how["scale"]
                out[at, head] = torch.softmax(scores, 0) @ values[seen, group]
    return out


@pytest.mark.parametrize("window", [None, 3])
def test_the_same_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_function", lambda: defined)
    spec = AttentionSpec(4, 2, 8, 8, 0.3, window=window)
    cache = torch.randn(4, 256, 2, 8), torch.randn(4, 256, 2, 8)
    chunks = [
        ScheduledChunk(0, (1, 2, 3), 254, (2, 0), 1),
        ScheduledChunk(1, (1,), 5, (1,), 1),
        ScheduledChunk(2, (4, 5), 0, (3,), 1),
    ]
    batch, _ = make_batch(chunks, 256, torch.device("cpu"))
    q = torch.randn(6, 4, 8)
    assert varlen_attention.varlen_reads(spec, cache, (None, None))
    found, wanted = (run(q, cache, batch, spec, (None, None)) for run in (_attend_varlen, _attend_by_gather))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_what_it_does_not_do_is_gathered() -> None:
    spec, large = AttentionSpec(4, 2, 8, 8, 0.3), (torch.zeros(1, 256, 2, 8),) * 2
    small = (torch.zeros(1, 16, 2, 8),) * 2
    assert not varlen_attention.varlen_reads(spec, small, (None, None))
    assert not varlen_attention.varlen_reads(spec, large, (None, torch.zeros(4)))
    assert not varlen_attention.varlen_reads(spec, (*large, *large), (None, None))
    assert not varlen_attention.varlen_reads(AttentionSpec(4, 2, 8, 8, 0.3, softcap=5.0), large, (None, None))


def test_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [b.name for b in ATTENTION.backends] == ["triton", "flashinfer", "varlen", "reference"]
    assert "cuda tensors" in varlen_attention.varlen_obstacle("cpu", torch.bfloat16)
    assert "float32" in varlen_attention.varlen_obstacle("cuda", torch.float32)
    varlen_attention._no_block_table.cache_clear()
    monkeypatch.setattr(varlen_attention, "_function", lambda: lambda query, key: None)
    assert "block table" in varlen_attention.varlen_obstacle("cuda", torch.bfloat16)
    varlen_attention._no_block_table.cache_clear()
    monkeypatch.undo()
    newest = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    expected = "block_table" in inspect.signature(newest).parameters
    assert (varlen_attention.varlen_obstacle("cuda", torch.bfloat16) == "") == expected
    varlen_attention._no_block_table.cache_clear()

"""Shares of weights: every head is somewhere, in its place, and sizes are those that are computed before."""

from __future__ import annotations

import pytest
import torch
from deepspeed._ours.parallel import head_sharding as s
from hypothesis import assume, given
from hypothesis import strategies as st

SIZE = 4


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    kv, ratio, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    q = kv * ratio
    assume(q >= ranks and (ratio == 1 or max(kv, ranks) % min(kv, ranks) == 0))
    return q, kv, ranks


@given(layouts())
def test_every_query_head_is_on_one_rank_beside_its_key(layout: tuple[int, int, int]) -> None:
    q, kv, ranks = layout
    heads = torch.cat([torch.arange(q), 100 + torch.arange(kv), 200 + torch.arange(kv)]).repeat_interleave(SIZE)
    seen = []
    for rank in range(ranks):
        own = s.shard_qkv_param(heads[:, None], rank, ranks, SIZE, q, kv)[:, 0].view(-1, SIZE)[:, 0].tolist()
        mine, shared = s.get_local_heads(rank, ranks, q, kv)
        assert len(own) == mine + 2 * shared == s.qkv_out_features(q * SIZE, rank, ranks, SIZE, q, kv) // SIZE
        queries, keys, values = own[:mine], own[mine : mine + shared], own[mine + shared :]
        assert [key + 100 for key in keys] == values
        assert {100 + head // (q // kv) for head in queries} == set(keys)
        columns = s.shard_attn_out_param(heads[None, : q * SIZE], rank, ranks, SIZE, q, kv)
        assert columns[0, ::SIZE].tolist() == queries
        assert s.attn_out_in_features(q * SIZE, rank, ranks, SIZE, q, kv) == mine * SIZE
        seen += queries
    assert seen == list(range(q))


def test_layers_between_are_cut_in_even_pieces() -> None:
    first, second = torch.arange(96.0)[:, None].expand(96, 2), torch.arange(96.0).expand(2, 96)
    assert [len(s.shard_mlp_1_param(first, rank, 2)) for rank in range(2)] == [64, 32]
    assert [s.sharded_intermediate_dim(96, 2, rank) for rank in range(2)] == [64, 32]
    assert s.shard_mlp_2_param(second, 1, 2).tolist() == second[:, 64:].tolist()
    assert s.shard_mlp_2_param(second[0], 1, 2) is None
    assert s.shard_mlp_1_param(first.expand(3, 96, 2), 1, 3, is_moe=True).shape == (3, 32, 2)
    assert [len(s.shard_unembed_param(first, rank, 5)) for rank in range(5)] == [20, 19, 19, 19, 19]
    assert s.sharded_embedding_dim(96, 0, 2) == s.shard_embedding_param(second, 0, 2).shape[1] == 64


@pytest.mark.parametrize(("rows", "heads"), [(64, ()), (24, (4, 2)), (12, (None, 1))])
def test_what_is_not_of_these_heads_is_refused(rows: int, heads: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="heads"):
        s.shard_qkv_param(torch.empty(rows, 8), 0, 1, SIZE if heads else 7, *heads)

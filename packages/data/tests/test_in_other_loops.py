"""Sequences of this package in torch's own data sets and loaders."""

from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from ds_data import PackedSequences, RankSlice, TokenFile, TokenLoader, TokenWriter


@pytest.fixture
def sequences(tmp_path):
    rng = np.random.default_rng(0)
    with TokenWriter(str(tmp_path / "corpus"), np.uint16) as out:
        for _ in range(40):
            out.add(rng.integers(0, 500, rng.integers(3, 30)).tolist())
    return PackedSequences(TokenFile(str(tmp_path / "corpus")), length=16)


def test_two_ranks_read_what_one_reads(sequences):
    one = TokenLoader(sequences, RankSlice(0, 1, 4), seed=3)
    two = [TokenLoader(sequences, RankSlice(rank, 2, 2), seed=3) for rank in range(2)]
    for batch, *parts in islice(zip(one, *two, strict=False), 8):
        assert torch.equal(batch["input_ids"], torch.cat([part["input_ids"] for part in parts]))


def test_a_copy_of_a_loader_goes_on_where_it_is(sequences):
    loader = TokenLoader(sequences, RankSlice(0, 1, 4), seed=3)
    running = iter(loader)
    next(running)
    other = copy.deepcopy(loader)
    assert torch.equal(next(running)["input_ids"], next(iter(other))["input_ids"])


def test_in_torchs_data_sets(sequences):
    both = ConcatDataset([Subset(sequences, range(5)), sequences])
    batches = list(DataLoader(both, batch_size=2))
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert len(rows) == 5 + len(sequences)
    assert torch.equal(rows[:5], rows[5:10])

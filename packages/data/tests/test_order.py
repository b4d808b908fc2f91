"""Orders are permutations, and no interruption, number of ranks or of workers changes them."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ds_config.errors import CheckpointError, ConfigError
from ds_data.mixing import BlendedDataset
from ds_data.packed_sequences import IGNORE_INDEX, FillInMiddle, PackedSequences
from ds_data.permutation import KeyedPermutation
from ds_data.sample_order import BlendOrder, RankBatchSampler, RankSlice, SampleStream, _block_layout, split_ranges
from ds_data.token_loader import TokenLoader
from ds_data.token_writer import write_items
from ds_data.tokens import TokenFile


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_has_everything_once(length: int, key: int) -> None:
    order = KeyedPermutation(length, key)(np.arange(length))
    assert sorted(order.tolist()) == list(range(length))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 40), st.integers(0, 2**64 - 1), st.data())
def test_a_permutation_of_up_to_2_to_the_40_goes_back(length: int, key: int, data: st.DataObject) -> None:
    """A function with an inverse, within the range: a bijection, without looking at every place."""
    places = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    order = KeyedPermutation(length, key)
    there = order(places)
    assert there.min() >= 0
    assert there.max() < length
    assert (order.inverse(there) == places).all()
    assert (order(order.inverse(places)) == places).all()


def test_permutations_look_drawn() -> None:
    """Of all 24 orders of four things each comes about as often, and neighbours do not stay neighbours."""
    seen = Counter(tuple(KeyedPermutation(4, key)(np.arange(4)).tolist()) for key in range(2400))
    assert len(seen) == 24
    assert min(seen.values()) > 50
    order = KeyedPermutation(100_000, 7)(np.arange(100_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).mean() < 1e-3
    with pytest.raises(ConfigError):
        KeyedPermutation(0, 1)
    with pytest.raises(IndexError):
        KeyedPermutation(3, 1)([3])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    random = np.random.default_rng(1)
    sizes = [0, *random.integers(0, 40, 120).tolist()]
    return write_items(tmp_path_factory.mktemp("c") / "corpus", [random.integers(10, 900, n) for n in sizes], np.uint16)


def ids(loader: TokenLoader, rows: int) -> list[list[tuple[int, ...]]]:
    return [[tuple(row) for row in batch["input_ids"].tolist()] for batch in islice(iter(loader), rows)]


@pytest.mark.parametrize("trials", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_interruptions(corpus: TokenFile, trials: int) -> None:
    """Interrupted anywhere and gone on with on 1 to 4 ranks, with other threads: every step has the samples it would have had."""
    data, train, steps = PackedSequences(corpus, 16), 12, 14
    stream = SampleStream(len(data), 5)
    wanted = [Counter(stream.samples(np.arange(k * train, (k + 1) * train)).tolist()) for k in range(steps)]
    names = {tuple(data.tokens([i])[0, :-1].tolist()): i for i in range(len(data))}
    random = np.random.default_rng(0)
    for trial in range(trials):
        threads = [int(random.integers(0, 3)) if trial % 25 == 0 else 0 for _ in range(2)]
        stop, ranks, again = int(random.integers(1, steps - 2)), *random.choice([1, 2, 3, 4], 2).tolist()
        before = [
            TokenLoader(data, RankSlice(r, ranks, train // ranks), seed=5, threads=threads[0]) for r in range(ranks)
        ]
        for loader in before[:1]:
            taken = ids(loader, stop)
            assert len(taken) == stop
        micro = train // again // (2 if trial % 2 and train // again % 2 == 0 else 1)
        after = [TokenLoader(data, RankSlice(r, again, micro), seed=9, threads=threads[1]) for r in range(again)]
        for loader in after:
            loader.load_state_dict(before[0].state_dict())
        rows = 2 * train // (micro * again)  # two steps
        read = [ids(loader, rows) for loader in after]
        got = [names[row] for k in range(rows) for rank in read for row in rank[k]]
        assert Counter(got[:train]) == wanted[stop]
        assert Counter(got[train:]) == wanted[stop + 1]


def test_threads_and_workers_have_no_say(corpus: TokenFile) -> None:
    data, lane = PackedSequences(corpus, 16), RankSlice(1, 2, 3)
    orders = [ids(TokenLoader(data, lane, seed=3, threads=n), 30) for n in (0, 1, 3)]
    assert orders[0] == orders[1] == orders[2]
    rows = RankBatchSampler(SampleStream(len(data), 3), lane, range(0, 30 * lane.row, lane.row))
    for workers in (0, 2):
        batches = DataLoader(data, batch_sampler=rows, num_workers=workers)
        assert [[tuple(r) for r in b["input_ids"].tolist()] for b in batches] == orders[0]


def test_other_data_under_a_saved_position(corpus: TokenFile, tmp_path: Path) -> None:
    state = TokenLoader(PackedSequences(corpus, 16), RankSlice(0, 1, 2)).state_dict()
    items = [item.copy() for item in corpus]
    items[1][0] += 1
    other = write_items(tmp_path / "other", items, np.uint16)
    with pytest.raises(CheckpointError, match="fingerprint") as error:
        TokenLoader(PackedSequences(other, 16), RankSlice(0, 1, 2)).load_state_dict(state)
    assert error.value.code == "data-changed"


def test_packing_equals_a_loop(corpus: TokenFile) -> None:
    flat = [(d, p, int(v)) for d, item in enumerate(corpus) for p, v in enumerate(item)]
    data = PackedSequences(corpus, 13)
    assert len(data) == (len(flat) - 1) // 13
    for i in range(len(data)):
        part, after = flat[i * 13 : (i + 1) * 13], flat[i * 13 + 1 : (i + 1) * 13 + 1]
        names = sorted({d for d, _, _ in part})
        firsts = {d: next(k for k, (e, _, _) in enumerate(part) if e == d) for d in names}
        got = {name: row.tolist() for name, row in data[i].items()}
        assert got["input_ids"] == [v for _, _, v in part]
        assert got["labels"] == [v if p else IGNORE_INDEX for _, p, v in after]
        assert got["document_ids"] == [names.index(d) for d, _, _ in part]
        assert got["position_ids"] == [k - firsts[d] for k, (d, _, _) in enumerate(part)]
        assert data.boundaries(i) == [*firsts.values(), 13]
    assert data[-1]["input_ids"].tolist() == data[len(data) - 1]["input_ids"].tolist()


def test_parts_of_the_documents(corpus: TokenFile) -> None:
    parts = split_ranges(len(corpus), (8, 1, 1))
    assert [i for part in parts for i in part] == list(range(len(corpus)))
    flat = [v for i in parts[1] for v in corpus[i].tolist()]
    data = PackedSequences(corpus, 16, documents=parts[1])
    assert data.tokens(range(len(data)))[:, :-1].reshape(-1).tolist() == flat[: 16 * len(data)]
    with pytest.raises(ConfigError) as error:
        PackedSequences(corpus, 10**6)
    assert error.value.code == "data-packing"


@pytest.mark.parametrize("seed", range(20))
def test_the_middle_goes_to_the_end(seed: int) -> None:
    rule = FillInMiddle(1, 2, 3, rate=1.0, seed=seed)
    tokens = np.arange(10, 40)
    turned = rule.apply(tokens, seed).tolist()
    assert len(turned) == 30
    assert turned[0] == 1
    parts = {1: [], 2: [], 3: []}  # type: dict[int, list[int]]
    if turned[1] == 3:  # the suffix first: prefix and middle stand together after the middle's sentinel
        at = turned.index(2)
        assert turned[at + 1 :] + turned[2:at] == list(range(10, 37))
        return
    for value in turned:
        if value < 10:
            into = parts[value]
        else:
            into.append(value)
    assert parts[1] + parts[2] + parts[3] == list(range(10, 37))


def test_filling_in_stays_within_documents(corpus: TokenFile) -> None:
    plain, turned = (
        PackedSequences(corpus, 32),
        PackedSequences(corpus, 32, fill_in_middle=FillInMiddle(1, 2, 3, rate=1.0)),
    )
    changed = 0
    for i in range(len(plain)):
        edges, before, after = plain.boundaries(i), plain.tokens([i])[0], turned.tokens([i])[0]
        for a, b in pairwise(edges[:-1]):
            assert set(after[a:b].tolist()) - {1, 2, 3} <= set(before[a:b].tolist())
            changed += int((after[a:b] != before[a:b]).any())
    assert changed > 50
    assert turned.fingerprint != plain.fingerprint


def test_a_mixture_keeps_its_shares_and_its_sources_epochs() -> None:
    mixture = BlendOrder([SampleStream(1000, 1), SampleStream(50, 2), SampleStream(7, 3)], [0.7, 0.25, 0.05])
    source, sample = mixture.samples(np.arange(2 * 65536))
    assert np.bincount(source).tolist() == (2 * mixture.quotas).tolist()
    assert np.abs(mixture.quotas / 65536 - [0.7, 0.25, 0.05]).max() < 2e-5
    for number, length in enumerate((1000, 50, 7)):
        counts = np.bincount(sample[source == number], minlength=length)
        assert counts.max() - counts.min() <= 1, "whole epochs, one after the other"
    at = np.random.default_rng(0).integers(0, 2 * 65536, 100)
    assert (mixture.samples(at)[1] == sample[at]).all()
    assert np.abs(np.bincount(source[:1000]) / 1000 - [0.7, 0.25, 0.05]).max() < 0.05
    for bad in ([1.0], [1.0, -1.0, 0.0], [1.0, 1e-9, 1.0], [0, 0, 0]):
        with pytest.raises(ConfigError) as error:
            BlendOrder([SampleStream(1), SampleStream(1), SampleStream(1)], bad)
        assert error.value.code == "data-mixture"


def test_mixed_sequences_are_loaded(corpus: TokenFile, tmp_path: Path) -> None:
    other = write_items(tmp_path / "b", [np.full(200, 5)], np.uint16)
    mixed = BlendedDataset([PackedSequences(corpus, 16), PackedSequences(other, 16)], [3, 1])
    loader = TokenLoader(mixed, RankSlice(0, 1, 64), shuffle=False)
    batches = list(islice(iter(loader), 20))
    sources = torch.cat([batch["source"] for batch in batches])
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert ((rows == 5).all(1) == (sources == 1)).all()
    assert abs(float(sources.double().mean()) - 0.25) < 0.05
    assert loader.waited_s > 0


def test_narrow_on_the_way_and_wide_where_it_is_used(corpus: TokenFile, tmp_path: Path) -> None:
    lane = RankSlice(0, 1, 3)
    wide, narrow = PackedSequences(corpus, 16), PackedSequences(corpus, 16, dtype=np.int32)
    assert {array.dtype for array in narrow.batch([0, 1]).values()} == {np.dtype(np.int32)}
    ways = TokenLoader(wide, lane), TokenLoader(narrow, lane), TokenLoader(narrow, lane, device="cpu", threads=0)
    for plain, sent, there in islice(zip(*ways, strict=False), 7):
        for name, rows in plain.items():
            assert (rows.dtype, sent[name].dtype, there[name].dtype) == (torch.int64, torch.int32, torch.int64)
            assert torch.equal(rows, sent[name].long())
            assert torch.equal(rows, there[name])
    assert torch.equal(ways[2].read(0)["labels"], next(iter(TokenLoader(wide, lane)))["labels"])
    wide_file = write_items(tmp_path / "wide", [[1, 2, 3, 4]], np.int64)
    with pytest.raises(ConfigError, match="may not hold"):
        PackedSequences(wide_file, 2, dtype=np.int32)


@pytest.mark.parametrize("numbers", [(3, 2, 1), (2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0), (0, 2, -4)])
def test_a_part_that_no_rank_has_is_refused(numbers):
    """Rank 3 of 2 read what rank 1 reads next."""
    with pytest.raises(ConfigError, match="data-rank-slice"):
        RankSlice(*numbers)


def test_a_mixture_is_drawn_without_replacement(corpus):
    """Two epochs in a shuffled order of 2**62 places missed 13 % of the sequences."""
    source = PackedSequences(corpus, 16)
    mixed = BlendedDataset([source], [1.0])
    batches = iter(TokenLoader(mixed, RankSlice(0, 1, 1)))
    seen = [tuple(next(batches)["labels"][0].tolist()) for _ in range(2 * len(source))]
    whole = sorted(tuple(row) for row in source.batch(np.arange(len(source)))["labels"].tolist())
    assert sorted(seen[: len(source)]) == sorted(seen[len(source) :]) == whole
    with pytest.raises(ConfigError, match="with replacement") as error:
        TokenLoader(mixed, RankSlice(0, 1, 1), shuffle=True)
    assert error.value.code == "data-mixture"


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("epoch_end", ["never", "drop", "fill"])
def test_an_open_iteration_follows_a_loaded_state(corpus, threads, epoch_end):
    """The next batch went on where the iteration was, and overwrote the position."""
    data, lane = PackedSequences(corpus, 16), RankSlice(0, 1, 2)

    def loader():
        return TokenLoader(data, lane, threads=threads, epoch_end=epoch_end)

    source = loader()
    before = iter(source)
    for _ in range(3):
        next(before)
    state = source.state_dict()
    wanted = [next(before)["labels"] for _ in range(2)]
    for drawn in (0, 1, 2):
        other = loader()
        batches = iter(other)
        for _ in range(drawn):
            next(batches)
        other.load_state_dict(state)
        assert all(torch.equal(next(batches)["labels"], labels) for labels in wanted)
        assert other.consumed == state["taken"] + 2 * lane.row
        other.consumed = state["taken"]
        assert torch.equal(next(batches)["labels"], wanted[0])


def test_mixtures_that_take_turns_do_not_draw_their_blocks_again() -> None:
    orders = [BlendOrder([SampleStream(100), SampleStream(50)], [3.0, 1.0], seed) for seed in range(3)]
    edge = range((1 << 16) - 4, (1 << 16) + 4)  # a batch at the end of a block is of two
    drawn = []
    for _ in range(2):
        for order in orders:
            order.samples(list(edge))
        drawn.append(_block_layout.cache_info().misses)
    assert drawn[0] == drawn[1]


def test_an_iteration_that_is_closed_does_not_wait_for_a_read() -> None:
    """The collector closes iterations inside any line: in a thread that begins, holding a lock that the end of another needs."""
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 64

        def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
            if samples.min() >= 8:
                reading.set()
                go_on.wait(20)
            return {"n": np.asarray(samples)}

    batches = iter(TokenLoader(Slow(), RankSlice(0, 1, 1), shuffle=False, threads=1))
    assert [int(next(batches)["n"]) for _ in range(2)] == [0, 1]
    assert reading.wait(20)
    closing = threading.Thread(target=batches.close)
    closing.start()
    closing.join(10)
    waited = closing.is_alive()
    go_on.set()
    closing.join()
    assert not waited

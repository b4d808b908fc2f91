"""Whole documents fill sequences as first-fit decreasing by hand does; masks leave labels out; Megatron's order; shards below URLs; ends."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler

from ds_config.errors import ConfigError
from ds_data import (
    IGNORE_INDEX,
    BlendedDataset,
    FillInMiddle,
    LossMaskedSequences,
    MegatronSequences,
    PackedSequences,
    RankSlice,
    RemoteSequences,
    SampleStream,
    TokenFile,
    TokenLoader,
    WholeDocuments,
    pack_by_seqlens,
    pack_first_fit,
    split_ranges,
    write_items,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    random = np.random.default_rng(3)
    items = [random.integers(1, 900, int(n)) for n in random.integers(1, 60, 40)]
    return write_items(tmp_path_factory.mktemp("c") / "corpus", items, np.uint16)


def by_hand(sizes: list[int], length: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for inside in bins:
            if sum(sizes[i] for i in inside) + sizes[item] <= length:
                inside.append(item)
                break
        else:
            bins.append([item])
    return bins


@pytest.mark.parametrize("seed", range(5))
def test_packing_equals_first_fit_decreasing_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 65, int(random.integers(1, 300))).tolist()
    order, ends = pack_first_fit(sizes, 64)
    assert [part.tolist() for part in np.split(order, ends[:-1])] == by_hand(sizes, 64)
    for bad in ([0], [65]):
        with pytest.raises(ConfigError, match="items of") as error:
            pack_first_fit(bad, 64)
        assert error.value.code == "data-packing"


def test_whole_documents_are_fuller_than_next_fit(tmp_path: Path) -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 2000).astype(int), 1, 512)
    file = write_items(tmp_path / "many", [np.ones(n, np.uint16) for n in sizes], np.uint16)
    next_fit = pack_by_seqlens(sizes, 512)
    share = sum(sizes[i] for micro in next_fit.microbatches for i in micro) / (len(next_fit.microbatches) * 512)
    assert share < 0.85
    assert WholeDocuments(file, 512).filled > 0.99


@pytest.mark.parametrize("length", [59, 25])
def test_whole_documents_hold_every_token_once(corpus: TokenFile, length: int) -> None:
    data = WholeDocuments(corpus, length, longer="cut", pad=7)
    wanted = sorted(
        (tuple(item[a : a + length].tolist()), tuple([*item[a + 1 : a + length + 1].tolist(), IGNORE_INDEX][: len(item[a : a + length])]))
        for item in corpus
        for a in range(0, len(item), length)
    )  # fmt: skip
    found = []
    for at in range(len(data)):
        row, edges = data[at], data.boundaries(at)
        assert edges[0] == 0
        assert edges[-1] == length
        for number, (a, b) in enumerate(pairwise(edges)):
            assert (row["document_ids"][a:b] == number).all()
            assert row["position_ids"][a:b].tolist() == list(range(b - a))
            tokens, labels = row["input_ids"][a:b], row["labels"][a:b]
            piece = tuple(tokens.tolist()), tuple(labels.tolist())
            if b == length and piece not in wanted:
                assert (tokens == 7).all(), "padding"
                assert (labels == IGNORE_INDEX).all()
            else:
                found.append(piece)
    assert sorted(found) == wanted


def test_longer_documents(corpus: TokenFile) -> None:
    with pytest.raises(ConfigError, match="documents have more than 30") as error:
        WholeDocuments(corpus, 30)
    assert error.value.code == "data-packing"
    kept = WholeDocuments(corpus, 30, longer="leave_out")
    tokens = sum(int((row["document_ids"] < row["document_ids"].max()).sum()) for row in kept)
    assert tokens <= sum(n for n in corpus.sizes.tolist() if n <= 30)
    assert kept.filled == pytest.approx(sum(n for n in corpus.sizes.tolist() if n <= 30) / (30 * len(kept)))
    with pytest.raises(ConfigError, match="which has 40"):
        WholeDocuments(corpus, 64, documents=range(3, 41))


@pytest.mark.parametrize("kind", ["packed", "whole"])
def test_labels_count_where_the_mask_says(corpus: TokenFile, tmp_path: Path, kind: str) -> None:
    """The sum of the losses is that of the answers' tokens, each document by itself."""
    mask = write_items(tmp_path / "mask", [item % 3 == 0 for item in corpus], np.uint8)
    plain = PackedSequences(corpus, 16) if kind == "packed" else WholeDocuments(corpus, 64)
    data = LossMaskedSequences(plain, mask)
    before, after = plain.batch(range(len(plain))), data.batch(range(len(data)))
    wanted = np.where((before["labels"] % 3 == 0) & (before["labels"] >= 0), before["labels"], IGNORE_INDEX)
    assert (after["labels"] == wanted).all()
    assert (after["input_ids"] == before["input_ids"]).all()
    assert 0 < (wanted >= 0).sum() < (before["labels"] >= 0).sum()
    assert data.fingerprint != plain.fingerprint
    assert (next(iter(TokenLoader(data, RankSlice(0, 1, 2), shuffle=False)))["labels"].numpy() == wanted[:2]).all()
    with pytest.raises(ConfigError, match="of other sizes"):
        LossMaskedSequences(plain, write_items(tmp_path / "short", [item[:1] % 2 for item in corpus], np.uint8))
    with pytest.raises(ConfigError, match="reordered"):
        LossMaskedSequences(PackedSequences(corpus, 16, fill_in_middle=FillInMiddle(1, 2, 3)), mask)


# What megatron-core 0.16.1's GPTDataset gives for this file (split "1,0,0"): sequence length, samples, seed, items; then its length, the first
# tokens of its first four samples, and the sum over i of (i + 1) times the sum of the tokens of sample i, modulo 1,000,003.
MEGATRON = [
    (16, None, 1, range(40), 72, [374, 246, 283, 197], 580613),
    (16, 50, 1, range(40), 72, [374, 246, 283, 197], 580613),
    (16, 100, 7, range(40), 144, [107, 648, 179, 533], 926002),  # the last epoch apart
    (16, 140, 7, range(40), 144, [152, 39, 541, 888], 123220),  # the last epoch among the others
    (13, 300, 1234, range(30), 300, [392, 689, 838, 375], 66599),
    (64, 45, 5, range(10, 40), 57, [544, 446, 34, 775], 614973),
]


@pytest.mark.parametrize(("length", "samples", "seed", "items", "count", "first", "digest"), MEGATRON)
def test_the_order_is_megatrons(
    corpus: TokenFile,
    length: int,
    samples: int | None,
    seed: int,
    items: range,
    count: int,
    first: list[int],
    digest: int,
) -> None:
    data = MegatronSequences(corpus, length, samples, seed=seed, items=items)
    rows = data.batch(range(len(data)))
    assert len(data) == count
    assert rows["input_ids"][:4, 0].tolist() == first
    assert int((rows["input_ids"].sum(1) * np.arange(1, count + 1)).sum()) % 1000003 == digest
    assert (rows["labels"][:, :-1] == rows["input_ids"][:, 1:]).all()
    loader = TokenLoader(data, RankSlice(1, 2, 3), shuffle=False)
    assert (next(iter(loader))["input_ids"].numpy() == rows["input_ids"][3:6]).all(), (
        "rank 1 reads what Megatron's does"
    )


def test_the_order_of_megatron_refuses(corpus: TokenFile) -> None:
    for bad in (range(0, 41), range(0, 40, 2), range(5, 5)):
        with pytest.raises(ConfigError) as error:
            MegatronSequences(corpus, 16, items=bad)
        assert error.value.code == "data-packing"
    assert len(MegatronSequences(corpus, 16, items=split_ranges(40, (9, 1))[0])) > 10


def test_shards_below_urls_equal_local_ones(corpus: TokenFile, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    locals_, urls = [], []
    for number, part in enumerate(split_ranges(40, (1, 1, 1))):
        file = write_items(tmp_path / f"part{number}", [corpus[i] for i in part], np.uint16)
        for end in ("idx", "bin"):
            memory.pipe(f"/shards/{number}.{end}", Path(f"{file.prefix}.{end}").read_bytes())
        locals_.append(PackedSequences(file, 16))
        urls.append(f"memory://shards/{number}")
    cache = tmp_path / "cache"
    data = RemoteSequences(urls, 16, cache)
    assert len(data) == sum(map(len, locals_))
    assert len(list(cache.glob("*.bin"))) == 0, "data files are copied when they are read"
    assert (data[len(locals_[0])]["input_ids"] == locals_[1][0]["input_ids"]).all()
    assert len(list(cache.glob("*.bin"))) == 1
    again: RemoteSequences = pickle.loads(pickle.dumps(data))
    order = np.random.default_rng(0).permutation(len(data))
    wanted = {name: np.concatenate([part.batch(range(len(part)))[name] for part in locals_])[order] for name in data[0]}
    for name, rows in again.batch(order).items():
        assert (rows == wanted[name]).all()
    assert sorted(path.suffix for path in cache.iterdir()) == [".bin"] * 3 + [".idx"] * 3, "no part is left"
    assert RemoteSequences(urls[:2], 16, cache).fingerprint != data.fingerprint == again.fingerprint
    with pytest.raises(ConfigError, match=r"there is no .*7\.idx") as error:
        RemoteSequences(["memory://shards/7"], 16, cache)
    assert error.value.code == "data-file"
    with pytest.raises(ConfigError, match="do not fill one sequence"):
        RemoteSequences(urls, 10**6, cache)
    batches = DataLoader(data, batch_size=4, num_workers=2)  # type: ignore[arg-type]
    assert sum(len(batch["input_ids"]) for batch in batches) == len(data)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_epochs_end(corpus: TokenFile, threads: int, ranks: int) -> None:
    """As torch's DataLoader with a DistributedSampler: as many microbatches a rank, every sample at most (or at least) once an epoch."""
    data, micro = PackedSequences(corpus, 16), 5
    length, names = (
        len(data),
        {tuple(row["input_ids"].tolist()): i for i, row in enumerate(PackedSequences(corpus, 16))},
    )
    epochs: list[list[int]] = [[], []]
    for rank in range(ranks):
        loader = TokenLoader(data, RankSlice(rank, ranks, micro), threads=threads, epoch_end="drop")
        peer = DataLoader(range(length), micro, sampler=DistributedSampler(range(length), ranks, rank, drop_last=True), drop_last=True)  # type: ignore[arg-type]  # fmt: skip
        for epoch in epochs:
            assert len(loader) == len(peer)
            batches = list(loader)
            assert len(batches) == len(peer)
            epoch += [names[tuple(row)] for batch in batches for row in batch["input_ids"].tolist()]
        assert loader.state_dict()["taken"] == 2 * length
    stream = SampleStream(length)
    for number, epoch in enumerate(epochs):
        used = length - length % (ranks * micro)
        assert sorted(epoch) == sorted(stream.samples(number * length + np.arange(used)).tolist())
    loader = TokenLoader(data, RankSlice(0, ranks, micro), threads=threads, epoch_end="fill")
    first, second = len(list(loader)), len(list(loader))
    assert first == -(-length // (ranks * micro))
    assert (first + second) * ranks * micro >= 2 * length > (first + second - 1) * ranks * micro


def test_an_epoch_that_was_interrupted_ends_where_it_would_have(corpus: TokenFile) -> None:
    data = PackedSequences(corpus, 16)
    loader = TokenLoader(data, RankSlice(0, 1, 4), epoch_end="drop")
    for _ in zip(range(7), loader, strict=False):
        pass
    resumed = TokenLoader(data, RankSlice(0, 2, 3), epoch_end="drop")
    resumed.load_state_dict({**loader.state_dict(), "taken": len(data) - 5})
    assert len(resumed) == len(data) // 6, "five samples fill no row of six: the next epoch begins"
    assert len(list(resumed)) == len(data) // 6
    assert resumed.state_dict()["taken"] == 2 * len(data)
    with pytest.raises(TypeError, match="no length"):
        len(TokenLoader(data, RankSlice(0, 1, 4)))
    mixture = BlendedDataset([data], [1.0])
    for bad in ((mixture, RankSlice(0, 1, 4)), (data, RankSlice(0, 1, len(data) + 1))):
        with pytest.raises(ConfigError, match="epoch_end") as error:
            TokenLoader(*bad, shuffle=False, epoch_end="drop")  # type: ignore[arg-type]
        assert error.value.code == "data-epoch"


def test_arguments_that_say_nothing_are_refused(corpus: TokenFile) -> None:
    with pytest.raises(ConfigError, match=r"'truncate'.*\n.*refuse, cut, leave_out"):
        WholeDocuments(corpus, 16, longer="truncate")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="0 of sequences"):
        MegatronSequences(corpus, 16, 0)
    with pytest.raises(ConfigError, match="-1 threads"):
        TokenLoader(WholeDocuments(corpus, 16, longer="cut"), RankSlice(0, 1, 2), threads=-1)
    with pytest.raises(ConfigError, match="samples of -1 tokens"):
        pack_by_seqlens([3, -1], 8)

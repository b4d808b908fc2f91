"""Every sample once an epoch, the same samples in the same steps on any number of ranks, from any position."""

from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from ds_config.errors import CheckpointError, ConfigError, UnsupportedError
from ds_data import RankSlice, SampleStream
from ds_engine.loader import ResumableLoader, SampleOrder


class Ids(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loaders(length: int, ranks: int, micro: int, multiple: int = 1, seed: int = 3) -> list[ResumableLoader]:
    return [
        ResumableLoader(Ids(length), RankSlice(r, ranks, micro), SampleOrder(seed, multiple=multiple))
        for r in range(ranks)
    ]


def samples(group: list[ResumableLoader], rows: int) -> list[int]:
    """The next `rows` rows, ranks side by side."""
    streams = [loader.forever() for loader in group]
    return [int(i) for _ in range(rows) for stream in streams for i in next(stream)]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_an_epoch_has_every_sample_at_most_once(length: int, multiple: int, shuffle: bool) -> None:
    stream = SampleStream(length, 5, shuffle, multiple)
    size = stream.epoch_length
    assert size % multiple == 0
    assert 0 <= length - size < multiple
    for epoch in range(3 if size else 0):
        seen = Counter(stream.sample(p) for p in range(epoch * size, (epoch + 1) * size))
        assert set(seen.values()) == {1}
        assert set(seen) <= set(range(length))
        assert multiple > 1 or len(seen) == length


@settings(deadline=None, max_examples=40)
@given(st.integers(5, 60), st.integers(0, 12), st.data())
def test_any_number_of_ranks_goes_on_with_the_next_sample(length: int, stop: int, data: st.DataObject) -> None:
    """24 samples a step, however they are split over ranks and microbatches."""
    splits = st.sampled_from([(1, 24), (1, 6), (2, 12), (2, 3), (3, 8), (4, 6), (4, 1)])
    before, after = data.draw(splits), data.draw(splits)
    expected = samples(loaders(length, 1, 24), stop + 2)
    first = loaders(length, *before)
    head = samples(first, stop * 24 // (before[0] * before[1]))
    second = loaders(length, *after, seed=99)  # the checkpoint's seed wins
    for loader in second:
        loader.load_state_dict(first[-1].state_dict())
    tail = samples(second, 2 * 24 // (after[0] * after[1]))
    assert head + tail == expected


def test_epochs_are_shuffled_differently_and_reproducibly() -> None:
    stream = SampleStream(100, 7)
    order = [stream.sample(p) for p in range(200)]
    assert order[:100] != order[100:]
    assert order == [SampleStream(100, 7).sample(p) for p in range(200)]
    assert order != [SampleStream(100, 8).sample(p) for p in range(200)]
    assert [SampleStream(5, 7, shuffle=False).sample(p) for p in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_read_ahead_of_workers_is_not_counted() -> None:
    loader = ResumableLoader(Ids(32), RankSlice(0, 1, 2), options={"num_workers": 1, "prefetch_factor": 4})
    stream = iter(loader)
    next(stream)
    next(stream)
    assert loader.consumed == 4
    del stream


def test_iterating_again_is_the_next_epoch() -> None:
    loader = loaders(8, 1, 4)[0]
    first = [int(i) for batch in loader for i in batch]
    second = [int(i) for batch in loader for i in batch]
    assert (loader.epoch, loader.consumed, len(loader)) == (2, 16, 2)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(8))


def test_rows_may_straddle_epochs_and_no_sample_is_lost() -> None:
    group = loaders(7, 2, 2)
    lengths, seen = [], Counter[int]()
    for _ in range(4):
        epoch = [[batch.tolist() for batch in loader] for loader in group]
        assert len(epoch[0]) == len(epoch[1])
        lengths.append(len(epoch[0]))
        seen.update(chain.from_iterable(chain.from_iterable(epoch)))
    assert lengths == [2, 2, 2, 1]
    assert seen == Counter(dict.fromkeys(range(7), 4))


def test_another_dataset_is_refused() -> None:
    loader = loaders(8, 1, 4)[0]
    with pytest.raises(CheckpointError) as caught:
        loader.load_state_dict(loaders(9, 1, 4)[0].state_dict())
    assert caught.value.code == "data-changed"
    assert "9 samples" in caught.value.message


def test_streams_are_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> object:
            return iter(range(3))

    with pytest.raises(UnsupportedError) as caught:
        ResumableLoader(Endless(), RankSlice(0, 1, 1))
    assert caught.value.code == "data-iterable"


@pytest.mark.parametrize(("length", "multiple"), [(0, 1), (7, 8)])
def test_an_empty_epoch_is_refused(length: int, multiple: int) -> None:
    with pytest.raises(ConfigError) as caught:
        loaders(length, 2, 4, multiple)
    assert caught.value.code == "data-empty"
    assert f"{length} samples" in caught.value.message


def test_no_order_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **more: made.append(n) or plain(n, **more))
    loaders = [iter(ResumableLoader(range(12), RankSlice(0, 1, 2), SampleOrder(seed))) for seed in range(5)]  # type: ignore[arg-type]
    for _ in range(6):
        for loader in loaders:
            next(loader)
    assert made == []

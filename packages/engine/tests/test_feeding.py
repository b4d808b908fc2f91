"""Where microbatches come from, without an engine."""

from __future__ import annotations

import pytest
from torch.utils.data import Dataset

from ds_config.errors import PlanError
from ds_data.sample_order import RankSlice
from ds_engine.batches import BatchSource
from ds_engine.loader import ResumableLoader


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


@pytest.fixture
def own():
    return ResumableLoader(Numbers(), RankSlice(0, 1, 2), options={"collate_fn": list})


def test_own_data_go_on_over_epochs_and_count_when_the_step_is_complete(own):
    feed = BatchSource(own)
    seen = [next(feed.stream()) for _ in range(6)]
    assert sorted(number for batch in seen[:4] for number in batch) == list(range(8))
    assert (feed.consumed, own.consumed, feed.epoch) == (0, 12, 1)
    assert feed.complete() > 0
    assert (feed.consumed, feed.complete()) == (12, 0)


def test_what_a_call_brings_goes_on_where_it_ended_and_own_data_where_they_were(own):
    feed, brought = BatchSource(own), [1, 2, 3]
    first = next(feed.stream())
    assert [next(feed.stream(brought)) for _ in range(4)] == [1, 2, 3, 1]
    assert list(feed.stream(iter(brought))) == brought
    assert next(feed.stream()) != first
    assert own.consumed == 4


def test_a_loader_in_the_place_of_the_own(own):
    feed = BatchSource(own)
    next(feed.stream())
    feed.replace([7])
    assert [next(feed.stream()), next(feed.stream())] == [7, 7]
    assert (feed.loader, feed.consumed, feed.has_data) == ([7], 0, True)
    feed.replace(None)
    assert not feed.has_data
    with pytest.raises(PlanError, match="no data") as refused:
        feed.stream()
    assert refused.value.code == "data-missing"


def test_an_iterator_is_drawn_to_its_end_and_an_empty_loader_ends():
    feed = BatchSource(None)
    feed.draw_from(iter([1, 2]))
    assert list(feed.stream()) == [1, 2]
    feed.draw_from([])
    assert list(feed.stream()) == []


def test_data_that_are_drawn_from_outlive_a_checkpoint_and_end_with_a_new_loader(own):
    feed = BatchSource(own)
    feed.draw_from(iter([1, 2, 3]))
    first = next(feed.stream())
    feed.restart()
    assert [first, next(feed.stream())] == [1, 2]
    feed.replace([7])
    assert next(feed.stream()) == 7

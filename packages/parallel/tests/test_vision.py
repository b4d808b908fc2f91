"""Where the tokens of images go in a text."""

from __future__ import annotations

import pytest
import torch

from ds_config.errors import PlanError
from ds_parallel.sequence import vision

TEXT = torch.arange(10.0).view(2, 5, 1)
IMAGE = 100 + torch.arange(8.0).view(2, 4, 1)


def rows(whole: torch.Tensor) -> list[list[float]]:
    return whole.flatten(1).tolist()


def test_an_image_takes_the_place_of_a_token() -> None:
    ids = torch.tensor([[9, 1, 9, 1, 1], [1, 1, 1, 1, 1]])
    found = rows(vision.replace_tokens(TEXT, IMAGE, ids, 9))
    assert found == [[100, 101, 1, 102, 103, 3, 4], [5, 6, 7, 8, 9, 0, 0]]


def test_each_token_of_an_image_takes_a_place() -> None:
    ids = torch.tensor([[1, 9, 9, 1, 9], [1, 1, 1, 1, 1]])
    assert rows(vision.fill_runs(TEXT, IMAGE, ids, 9)) == [[0, 100, 101, 3, 102], [5, 6, 7, 8, 9]]
    with pytest.raises(PlanError, match="5 places for tokens of images, and there are 4") as caught:
        vision.fill_runs(TEXT, IMAGE, torch.full((2, 5), 9), 9)
    assert caught.value.code == "sequence-length"


def test_what_is_between_two_tokens_is_an_image() -> None:
    ids = torch.tensor([[7, 1, 8, 1, 1], [7, 1, 1, 1, 8]])
    assert rows(vision.fill_between(TEXT, IMAGE, ids, 7, 8)) == [[0, 100, 2, 3, 4], [5, 104, 105, 106, 9]]

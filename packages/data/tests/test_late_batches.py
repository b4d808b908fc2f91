"""On a device whose work comes late: batches of page-locked memory arrive as they were read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_data.sample_order import RankSlice
from ds_data.token_loader import TokenLoader
from ds_testing.late_device import drawn_orders, late_device


class Numbers:
    """Rows that have the number of their sample."""

    def __len__(self) -> int:
        return 64

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": np.repeat(np.asarray(samples, dtype=np.int32)[:, None], 8, 1)}


@pytest.mark.parametrize("threads", [0, 2])
@drawn_orders
def test_batches_of_page_locked_memory(order: int, threads: int) -> None:
    def read(device: torch.device | None) -> list[int]:
        loader = TokenLoader(
            Numbers(), RankSlice(0, 1, 4), threads=threads, pin_memory=device is not None, device=device
        )
        batches = iter(loader)
        sums = [next(batches)["tokens"].sum() for _ in range(12)]
        batches.close()
        return [int(one) for one in sums]

    expected = read(None)
    with late_device(order) as device:
        assert read(torch.device("cpu")) == expected
    assert device.copies == 12 or threads

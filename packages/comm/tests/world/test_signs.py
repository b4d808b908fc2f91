"""One bit per element: what travels, and that over many steps nothing is lost."""

from __future__ import annotations

import pytest
import torch

import ds_comm
from ds_comm.codecs.signs import BLOCK, SignErrors, mean_of_signs, pack_signs, unpack_signs
from ds_config.errors import CommError
from ds_testing import world


def noise(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).tanh()


def test_the_wire_has_signs_and_the_mean_magnitude() -> None:
    x = noise(0, 3 * BLOCK).view(3, BLOCK)
    wire = pack_signs(x)
    assert wire.shape == (3, BLOCK // 8 + 4)
    assert int(wire[0, 0]) == sum(int(x[0, bit] >= 0) << bit for bit in range(8))
    told = unpack_signs(wire)
    assert torch.equal(told.sign(), torch.where(x >= 0, 1.0, -1.0))
    torch.testing.assert_close(told.abs()[:, 0], x.abs().mean(1))
    assert (x - told).norm() < x.norm(), "the error is smaller than the message: feedback converges"


def test_padding_does_not_count() -> None:
    x = torch.zeros(1, BLOCK)
    x[0, :3] = 2.0
    assert unpack_signs(pack_signs(x, torch.tensor([3])))[0, 0] == 2.0


def check(group: ds_comm.Group, n: int) -> None:
    errors, total, off = SignErrors.zeros(n, group.size), torch.zeros(n), {}
    exact = torch.stack([noise(r, n) for r in range(group.size)]).mean(0)
    for step in range(1, 41):
        x = noise(group.rank, n)
        mean_of_signs(x, errors, group, unit="m")
        total += x
        off[step] = float((total / step - exact).norm())
    assert errors.worker[n:].abs().sum() == 0
    # What is owed is bounded, so what is owed per step falls as 1 / steps once the bound is reached.
    assert off[40] < max(0.5 * off[8], 1e-4), f"{off[40]} of {n} elements over {group.size} ranks"
    rows = [torch.empty(n) for _ in range(group.size)]
    ds_comm.all_gather(rows, total, group)
    assert all(torch.equal(row, total) for row in rows)


@pytest.mark.parametrize("ranks", [2, 3])
@world(3)
def test_the_mean_of_many_messages_is_the_mean(ranks: int) -> None:
    group = ds_comm.new_group(list(range(ranks)), "some")
    if group is not None:
        for n in (1, 100, BLOCK * ranks, BLOCK * ranks + 5):
            check(group, n)


@world(2)
def test_equal_magnitudes_survive_exactly() -> None:
    rank = ds_comm.world_group().rank
    x = torch.where(noise(5, 5000) > 0, 0.5, -0.5)
    y = x.clone()
    mean_of_signs(y, SignErrors.zeros(5000, 2), unit="m")
    torch.testing.assert_close(y, x)
    z = torch.full((10,), 1.0 if rank == 0 else 3.0)
    mean_of_signs(z, SignErrors.zeros(10, 2), unit="m")
    torch.testing.assert_close(z, torch.full((10,), 2.0))


def test_one_rank_and_what_does_not_fit() -> None:
    group, errors = ds_comm.self_group(), SignErrors.zeros(4, 1)
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    mean_of_signs(x, errors, group)
    assert x.tolist() == [1.0, -1.0, 1.0, -1.0]
    mean_of_signs(torch.empty(0), SignErrors.zeros(0, 1), group)
    with pytest.raises(CommError, match="4 elements over 1 ranks"):
        mean_of_signs(x, SignErrors.zeros(4, 2), group)
    with pytest.raises(CommError, match="bfloat16"):
        mean_of_signs(x.bfloat16(), errors, group)
    errors.worker.fill_(1.0)
    errors.clear()
    assert not errors.worker.any()

"""A loss is averaged over what it says it is averaged over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_comm import self_group
from ds_config.errors import PlanError
from ds_engine.loss_total import LossAccumulator, SumLoss, Totals, loss_of

ONE = torch.tensor(1.5)


@pytest.mark.parametrize(
    "output", [ONE, SimpleNamespace(loss=ONE), (ONE, torch.zeros(3)), [ONE], {"loss": ONE}, ONE.reshape(1)]
)
def test_the_loss_is_found(output: Any) -> None:
    found = loss_of(output)
    assert isinstance(found, torch.Tensor)
    assert found.item() == 1.5


def test_sum_losses_are_found() -> None:
    loss = SumLoss(ONE, 3)
    assert loss_of(loss) is loss
    assert loss_of((loss, "logits")) is loss


@pytest.mark.parametrize("output", [torch.zeros(3), None, (), "loss", {"logits": ONE}, SumLoss(torch.zeros(2), 1), 1.5])
def test_no_loss_is_an_error(output: Any) -> None:
    with pytest.raises(PlanError) as caught:
        loss_of(output)
    assert caught.value.code == "loss-missing"


def test_means_weigh_the_same_and_sums_by_their_count() -> None:
    ledger = LossAccumulator()
    for value in (1.0, 2.0, 6.0):
        ledger.add(torch.tensor(value))
    totals = ledger.close(self_group())
    assert totals is not None
    assert (float(totals.loss), totals.count) == (3.0, None)
    ledger.add(SumLoss(torch.tensor(10.0), 4))
    ledger.add(SumLoss(torch.tensor(2.0), torch.tensor(2)))
    totals = ledger.close(self_group())
    assert totals is not None
    assert (float(totals.loss), totals.count) == (2.0, 6.0)
    assert ledger.close(self_group()) is None


def test_nothing_counted_is_zero_not_a_division() -> None:
    ledger = LossAccumulator()
    ledger.add(SumLoss(torch.tensor(0.0), 0))
    totals = ledger.close(self_group())
    assert totals is not None
    assert (float(totals.loss), totals.count) == (0.0, 0.0)


def test_mixing_is_an_error() -> None:
    ledger = LossAccumulator()
    ledger.add(ONE)
    with pytest.raises(PlanError) as caught:
        ledger.add(SumLoss(ONE, 1))
    assert caught.value.code == "loss-mixed"


def test_mean_losses_may_be_added_up_by_the_caller() -> None:
    ledger = LossAccumulator()
    for value in (1.0, 2.0, 6.0):
        ledger.add(torch.tensor(value))
    assert ledger.waits
    totals = Totals.of(*ledger.leave())
    assert totals is not None
    assert (float(totals.loss), totals.count, ledger.losses) == (3.0, None, 0)
    assert Totals.of(*ledger.leave()) is None


def test_the_count_of_sum_losses_is_needed_at_once() -> None:
    ledger = LossAccumulator()
    ledger.add(SumLoss(torch.tensor(10.0), 4))
    assert not ledger.waits

"""Batches of different sizes: what goes together is loaded together, and rates follow the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_config.errors import ConfigError
from ds_data import batch_by_seqlens, scale_lr, write_items
from ds_data.variable import (
    VariableBatchSizeLR,
    dataloader_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    lr_scheduler_for_variable_batch_size,
    seqlens_of,
)


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from(["linear", "sqrt", "none"]), st.integers(1, 9)
)
def test_rates_are_those_of_the_schedule_times_the_factor(sizes: list[int], method: str, base: int) -> None:
    plain, scaled = optimizer(), optimizer()
    theirs = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    ours = lr_scheduler_for_variable_batch_size(
        base, sizes, None, torch.optim.lr_scheduler.ExponentialLR(scaled, 0.9), method
    )
    for step in range(10):
        want = scale_lr(base, sizes[step % len(sizes)], plain.param_groups[0]["lr"], method)
        assert scaled.param_groups[0]["lr"] == pytest.approx(want)
        assert ours.get_lr() == [scaled.param_groups[0]["lr"]]
        assert ours.get_last_lr() == pytest.approx([plain.param_groups[0]["lr"]])
        for made in (plain, scaled):
            made.step()
        theirs.step()
        ours.step()


def test_it_goes_on_from_a_saved_state() -> None:
    def made() -> tuple[torch.optim.Optimizer, VariableBatchSizeLR]:
        opt = optimizer()
        base = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
        return opt, lr_scheduler_for_variable_batch_size(4, [4, 8, 2], None, base)

    first, schedule = made()
    for _ in range(5):
        first.step()
        schedule.step()
    second, other = made()
    other.load_state_dict(schedule.state_dict())
    assert other.get_lr() == schedule.get_lr() == pytest.approx([0.5 * 0.5 * 2 / 4])
    for _ in range(4):
        for opt, one in ((first, schedule), (second, other)):
            opt.step()
            one.step()
        assert other.get_lr() == schedule.get_lr()


def test_constant_rates_and_what_has_none() -> None:
    opt = optimizer(0.1)
    schedule = lr_scheduler_for_variable_batch_size(2, [1, 4], None, opt)
    seen = []
    for _ in range(3):
        seen.append(opt.param_groups[0]["lr"])
        schedule.step()
    assert seen == pytest.approx([0.05, 0.2, 0.05])
    schedule.skip()
    assert schedule.get_lr() == pytest.approx([0.05])
    with pytest.raises(ConfigError, match="has no rates"):
        lr_scheduler_for_variable_batch_size(2, [1], None, object())


class Words:
    lengths: ClassVar[list[int]] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> list[int]:
        return [at] * self.lengths[at]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_give_every_rank_its_microbatches(ranks: int, workers: int) -> None:
    ids, sizes, _ = batch_by_seqlens(Words.lengths, 9, effective_batch_size=2)
    seen: dict[int, list[list[int]]] = {}
    for rank in range(ranks):
        loader, schedule, options = get_dataloader_and_lr_scheduler_for_variable_batch_size(
            Words(), Words.lengths, 9, 2, dataloader_rank=rank, dataloader_num_replicas=ranks, dataloader_num_workers=workers,
            lr_scheduler_or_optimizer=optimizer(),
        )  # fmt: skip
        seen[rank] = [[sample[0] for sample in batch] for batch in loader]
        assert schedule.batch_sizes == sizes
        assert {"dataset", "batch_size", "data_sampler", "collate_fn"} <= options.keys()
    for at, (_, samples) in enumerate(ids):
        assert seen[at % ranks][at // ranks] == samples


def test_samples_of_one_length_for_pipelines() -> None:
    def pad(sample: list[int], length: int) -> list[int]:
        return sample + [0] * (length - len(sample))

    ids, _, longest = batch_by_seqlens(
        Words.lengths, 9, effective_batch_size=2, required_microbatches_of_same_size=True
    )
    told: dict[str, Any] = {"dataloader_num_workers": 0, "required_microbatches_of_same_seqlen": True}
    loader, _ = dataloader_for_variable_batch_size(
        Words(), ids, longest, dataloader_collate_fn=torch.tensor, sample_padding_fn=pad, **told
    )
    for (batch, samples), tensor in zip(ids, loader, strict=True):
        assert tensor.shape == (len(samples), longest[batch])
    with pytest.raises(ConfigError, match="no sample_padding_fn"):
        dataloader_for_variable_batch_size(Words(), ids, longest, **told)


def test_lengths_of_an_analyzer(tmp_path: Path) -> None:
    write_items(tmp_path / "seqlen" / "seqlen_sample_to_metric", [[n] for n in Words.lengths], "int16")
    assert seqlens_of(tmp_path, 12).tolist() == Words.lengths
    with pytest.raises(ConfigError, match="12 samples, the data set has 11"):
        seqlens_of(tmp_path, 11)
    with pytest.raises(ConfigError, match="there is no"):
        seqlens_of(tmp_path / "nowhere", 12)

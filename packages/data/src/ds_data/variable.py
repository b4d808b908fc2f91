"""Batches of different numbers of samples: a data set of packed microbatches, and rates that follow the batch.

The pure part, which samples go together, is `ds_data.seqlens`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ds_config.errors import ConfigError
from ds_data.seqlens import batch_by_seqlens, scale_lr
from ds_data.tokens import TokenFile

__all__ = [
    "ConstantSchedule",
    "Joined",
    "PackedDataset",
    "VariableBatchSizeLR",
    "dataloader_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "lr_scheduler_for_variable_batch_size",
    "seqlens_of",
]

_log = logging.getLogger("ds_data")

Collate = Callable[[list[Any]], Any]
Pad = Callable[[Any, int], Any]


class PackedDataset(Dataset[list[Any]]):
    """Items are microbatches: lists of samples of another data set.

    Args:
        dataset: Map-style.
        microbatches: Sample ids of each.
        longest: What `pad` pads the samples of each microbatch to.
        pad: Called with a sample and a length.
    """

    def __init__(
        self,
        dataset: Any,
        microbatches: Sequence[Sequence[int]],
        longest: Sequence[int] | None = None,
        pad: Pad | None = None,
    ) -> None:
        self.dataset, self.microbatches, self._longest, self._pad = dataset, microbatches, longest, pad

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, at: int) -> list[Any]:
        samples = [self.dataset[i] for i in self.microbatches[at]]
        if self._pad is None or self._longest is None:
            return samples
        return [self._pad(sample, self._longest[at]) for sample in samples]


@dataclass(frozen=True, slots=True)
class Joined:
    """A `collate_fn` for items that are lists of samples.

    Attributes:
        collate: For a list of samples; None gives the list.
    """

    collate: Collate | None = None

    def __call__(self, items: list[list[Any]]) -> Any:
        samples = [sample for item in items for sample in item]
        return samples if self.collate is None else self.collate(samples)


class VariableBatchSizeLR:
    """A schedule whose rates are scaled by the size of the batch they are for.

    Args:
        lr_scheduler: Says the rates for `base_batch_size`; it writes them into the parameter groups of its optimizer.
        base_batch_size: Samples of a batch that those rates suit.
        batch_sizes: Samples of each batch; after the last one the first comes again.
        dataloader: Kept for its place; not read.
        lr_scaling_method: "linear", "sqrt" or "none".
        last_epoch: Batches before the first.
        verbose: Log each batch's rates.
        optimizer: Whose parameter groups the rates are in; the scheduler's by default.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
        optimizer: Any = None,
    ) -> None:
        self.base_lr_scheduler, self.dataloader = lr_scheduler, dataloader
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method, self.verbose = lr_scaling_method, verbose
        self.optimizer = lr_scheduler.optimizer if optimizer is None else optimizer
        self.base_lrs = [float(group["lr"]) for group in self._groups]
        self._unscaled, self.last_epoch = list(self.base_lrs), last_epoch + 1
        if getattr(lr_scheduler, "last_batch_iteration", 0) < 0:
            self.step(self.last_epoch)  # as DeepSpeed: its schedules are moved to the first batch
        else:
            self._scale()

    @property
    def _groups(self) -> Sequence[MutableMapping[str, Any]]:
        groups: Sequence[MutableMapping[str, Any]] = self.optimizer.param_groups
        return groups  # as they are now: torch's `load_state_dict` puts others in their place

    def step(self, epoch: int | None = None, **options: Any) -> None:
        """Set the learning rates for the next batch, after an applied update.

        `epoch` goes to a batch; other options are passed to the base schedule.
        """
        for group, rate in zip(self._groups, self.base_lrs if epoch == 0 else self._unscaled, strict=True):
            group["lr"] = rate
        if epoch != 0 or hasattr(self.base_lr_scheduler, "last_batch_iteration"):
            self.base_lr_scheduler.step(*([] if epoch is None else [epoch]), **options)
        self._unscaled = [float(group["lr"]) for group in self._groups]
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def skip(self) -> None:
        """Set the learning rates for the next batch without a step of the schedule: the batch was left out."""
        self.last_epoch += 1
        self._scale()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the next batch."""
        return [float(group["lr"]) for group in self._groups]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the base schedule, before scaling."""
        return list(self._unscaled)

    def get_mom(self) -> Any:
        """Return the momentum of the base schedule."""
        return self.base_lr_scheduler.get_mom()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, with the sizes of the batches that come next."""
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": self.batch_sizes,
            "base_lrs": self.base_lrs,
            "unscaled_lrs": self._unscaled,
            "last_epoch": self.last_epoch,
            "verbose": self.verbose,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, with its batches and way of scaling."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_batch_size, self.batch_sizes = state_dict["base_batch_size"], list(state_dict["batch_sizes"])
        self.lr_scaling_method, self.verbose = state_dict["lr_scaling_method"], state_dict["verbose"]
        self.base_lrs, self.last_epoch = list(state_dict["base_lrs"]), int(state_dict["last_epoch"])
        unscaled = state_dict.get("unscaled_lrs")
        self._unscaled = [float(group["lr"]) for group in self._groups] if unscaled is None else list(unscaled)
        self._scale()

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group, rate in zip(self._groups, self._unscaled, strict=True):
            group["lr"] = scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method)
        if self.verbose:
            rates = self.get_lr()
            _log.info("batch %d of %d samples: rates %s, scaled from %s", self.last_epoch, size, rates, self._unscaled)


class ConstantSchedule:
    """A schedule that leaves the rates alone.

    Attributes:
        optimizer: Whose rates they are.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **options: Any) -> None:
        """Do nothing: the learning rate is constant."""

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state dict: a constant schedule has no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a constant schedule has no state."""


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Build a schedule that scales learning rates by the batch size, over a base schedule or a constant optimizer.

    Raises:
        ConfigError: the base is neither a scheduler nor an optimizer ("data-max-tokens").
    """
    base = lr_scheduler_or_optimizer
    if isinstance(base, Optimizer) or (hasattr(base, "param_groups") and not hasattr(base, "optimizer")):
        base = ConstantSchedule(base)
    elif not hasattr(getattr(base, "optimizer", None), "param_groups"):
        raise ConfigError(
            f"a {type(base).__name__} has no rates", code="data-max-tokens", fix="Pass a scheduler or an optimizer."
        )
    return VariableBatchSizeLR(base, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose)


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[tuple[int, Sequence[int]]],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Collate | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Pad | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Build a loader of this rank's packed microbatches, and the arguments for `engine.deepspeed_io`.

    Args:
        microbatch_ids: (batch, sample ids) of each microbatch, as `batch_by_seqlens` returns them.
        batch_max_seqlens: Longest sample of each batch.
        required_microbatches_of_same_seqlen: Pad every sample of a batch to its longest, by
            `sample_padding_fn(sample, length)`.
    Raises:
        ConfigError: padding is required, and no function was given ("data-max-tokens").
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError(
            "samples of a batch must have one length, and there is no sample_padding_fn",
            code="data-max-tokens",
            fix="Pass sample_padding_fn(sample, length).",
        )
    longest = (
        [batch_max_seqlens[batch] for batch, _ in microbatch_ids] if required_microbatches_of_same_seqlen else None
    )
    packed = PackedDataset(dataset, [list(ids) for _, ids in microbatch_ids], longest, sample_padding_fn)
    sampler: DistributedSampler[Any] = DistributedSampler(
        packed, dataloader_num_replicas, dataloader_rank, shuffle=False, drop_last=False
    )
    options: dict[str, Any] = {
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "collate_fn": Joined(dataloader_collate_fn),
    }
    loader: DataLoader[Any] = DataLoader(packed, sampler=sampler, num_workers=dataloader_num_workers, **options)
    rest = {"dataset": packed, "data_sampler": sampler, "num_local_io_workers": dataloader_num_workers}
    return loader, {**rest, **options}


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Any,
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[Sequence[int]] | None = None,
    lr_scaling_method: str = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: Any = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Collate | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Pad | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Build the loader and the learning-rate schedule of a variable batch size in a single call.

    Calls `batch_by_seqlens`, `dataloader_for_variable_batch_size` and `lr_scheduler_for_variable_batch_size`.
    """
    microbatches, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, options = dataloader_for_variable_batch_size(
        dataset,
        microbatches,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    scheduler = lr_scheduler_for_variable_batch_size(
        effective_batch_size, sizes, loader, lr_scheduler_or_optimizer, lr_scaling_method, verbose
    )
    return loader, scheduler, options


def seqlens_of(metrics_path: str | PathLike[str], length: int) -> NDArray[np.int64]:
    """Read the lengths of a data set's samples, int64 [length], that an analyzer wrote under `metrics_path`.

    The metric is `seqlen`.

    Raises:
        ConfigError: there are none, or of another data set ("data-file", "data-max-tokens").
    """
    file = TokenFile(os.path.join(metrics_path, "seqlen", "seqlen_sample_to_metric"))
    if file.num_tokens != length:
        raise ConfigError(
            f"{file.prefix} has the lengths of {file.num_tokens} samples, the data set has {length}",
            code="data-max-tokens",
            fix="Analyse this data set again: ds_data.DataAnalyzer with the metric seqlen.",
        )
    return file.values.astype(np.int64)

"""How the engine's loader reads training data, as a part of the plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ds_config.errors import ConfigError
from ds_data.config import DataEfficiencyConfig, DynamicBatchingConfig, SamplingCurriculumConfig

__all__ = ["DataLoaderPlan", "SampleOrder", "reading_of"]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """How a loader goes through its samples.

    Attributes:
        seed: Of the order.
        shuffle: Whether it is a permutation or the dataset's own.
        multiple: Cut every epoch to a multiple of it: the train batch size for `dataloader_drop_last`, else 1.
        epochs: The loader ends after so many passes; None: never.
    """

    seed: int = 1234
    shuffle: bool = True
    multiple: int = 1
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class DataLoaderPlan:
    """How training data are read.

    Attributes:
        order: Of the samples, where neither of the next two says otherwise.
        curriculum: Chooses the samples of each step; None: all are as good.
        batching: Puts samples together by length; None: by number.
        workers: Processes that read.
        pin_memory: Whether they read into page-locked memory.
    """

    order: SampleOrder
    curriculum: SamplingCurriculumConfig | None = None
    batching: DynamicBatchingConfig | None = None
    workers: int = 0
    pin_memory: bool = False


def reading_of(section: DataEfficiencyConfig, *, multiple: int, shuffle: bool) -> DataLoaderPlan:
    """Build the data loading plan from the section `data_efficiency`.

    Args:
        multiple, shuffle: See `SampleOrder`.
    Raises:
        ConfigError: a curriculum and dynamic batching together, or the latter without a limit ("data-max-tokens").
    """
    sampling = section.sampling
    if sampling is None:
        return DataLoaderPlan(SampleOrder(section.seed, shuffle, multiple))
    batching = section.batching
    if batching is not None and (batching.max_tokens is None or section.curriculum is not None):
        conflict = (
            "no max_tokens" if batching.max_tokens is None else "a curriculum, which chooses samples by other rules"
        )
        raise ConfigError(
            f"dynamic_batching is enabled, with {conflict}",
            code="data-max-tokens",
            fix="Give max_tokens, and leave curriculum_learning of data_sampling out.",
        )
    order = SampleOrder(section.seed, shuffle, multiple, sampling.num_epochs)
    return DataLoaderPlan(order, section.curriculum, batching, sampling.num_workers, sampling.pin_memory)

"""What an engine reads under upstream's names: its loaders, curricula, routed layers.

Without a curriculum the order of samples is upstream's: torch's DistributedSampler, which nobody tells the epoch, so every pass
has the same order. A checkpoint does not know where such a loader stands, as upstream's do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from deepspeed._ours.base.raising import refused
from deepspeed._ours.data.data_pipeline import CurriculumScheduler, RandomLTDScheduler
from ds_compress import CompressionScheduler
from ds_data.token_dropping import start_routing
from ds_engine import Engine
from ds_engine.loader import CurriculumLoader, ResumableLoader
from ds_engine.transforms.token_routing import RandomLTD


class DeepSpeedDataLoader:
    """Microbatches of this rank, in the same order every time it is iterated over.

    Args:
        dataset: Has `len()` and `dataset[i]`.
        batch_size: Samples a microbatch.
        pin_memory: Where there is an accelerator.
        local_rank, tput_timer, deepspeed_dataloader_config: Not read.
        num_local_io_workers: Processes that load. None by default, where upstream starts two.
        data_sampler: By default a shuffling `DistributedSampler` over the next two.
    Raises:
        UnsupportedError: a dataset that can only be iterated over ("data-iterable").
    """

    def __init__(
        self, dataset: Any, batch_size: int, pin_memory: bool = False, local_rank: int = 0, tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_local_io_workers: int | None = None, data_sampler: Any
        = None, data_parallel_world_size: int | None = None, data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False, deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        del local_rank, tput_timer, deepspeed_dataloader_config
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise refused("iterable-dataset", type(dataset).__name__)
        if data_sampler is None:
            data_sampler = DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        self.dataset, self.data_sampler = dataset, data_sampler
        self.batch_size, self.collate_fn = batch_size, collate_fn
        self.dataloader = DataLoader(
            dataset,
            batch_size,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            collate_fn=collate_fn,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            drop_last=dataloader_drop_last,
        )

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)


class ReadsData(Engine):
    """The engine's part that meets data."""

    @property
    def curriculum_scheduler(self) -> CurriculumScheduler | None:
        """Of `curriculum_learning`, at the step that comes next; None where it is not enabled."""
        if self.plan.curriculum is None:
            return None
        scheduler = CurriculumScheduler(self.config["curriculum_learning"])
        scheduler.update_difficulty(self.global_steps + 1)
        return scheduler

    @property
    def compression_scheduler(self) -> CompressionScheduler | None:
        """What moves the schedule of a compressed model on; None of another model."""
        return self.follower(CompressionScheduler)

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """Of the routed layers; None where nothing is routed."""
        random_ltd = self.follower(RandomLTD)
        if random_ltd is None:
            return None
        return RandomLTDScheduler(
            {**self.random_ltd_config(), "global_batch_size": self.train_batch_size()}, random_ltd.router
        )

    def random_ltd_initialize(self) -> None:
        """Route tokens around the layers that `convert_to_random_ltd` converted, from the step that comes next.

        Raises:
            PlanError: the configuration does not enable random-LTD ("compat-call-order").
            ConfigError: the module has no converted layers, or fewer than the configuration names ("data-routing").
        """
        random_ltd = self.follower(RandomLTD)
        if random_ltd is None:
            raise refused("no-random-ltd")
        start_routing(self.module, random_ltd.router)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Mapping[str, Any]], Any]) -> None:
        """Call this with every microbatch of the engine's loader, and where its order stands; what it returns is trained on."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set custom schedules, functions of the step, for the metrics of the curriculum, by name."""
        if isinstance(self.training_dataloader, CurriculumLoader):
            self.training_dataloader.curriculum.set_schedules(schedule_func_dict)

    def deepspeed_io(  # type: ignore[override]
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader | ResumableLoader:
        """Build a loader of this rank's microbatches; shuffled on the route `train`, except for a pipeline."""
        if self.plan.reading.curriculum is not None or self.plan.reading.batching is not None:
            return super().deepspeed_io(dataset, batch_size, route, collate_fn=collate_fn)
        ranks = self.mesh["data"]
        if data_sampler is None and (route in ("eval", "predict") or self.plan.staging is not None):
            data_sampler = DistributedSampler(dataset, ranks.size, ranks.rank, shuffle=False)
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.plan.batch.micro,
            pin_memory,
            collate_fn=collate_fn,
            num_local_io_workers=self.plan.reading.workers if num_local_io_workers is None else num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=ranks.size,
            data_parallel_rank=ranks.rank,
            dataloader_drop_last=self.plan.config.dataloader_drop_last,
        )

"""Curricula, random-LTD and token files by upstream's names: adapters over ds-data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset

import ds_data
from deepspeed._ours.base.forwarding import calls, method, tells
from deepspeed._ours.base.raising import raising, refused
from ds_data import DistributedDataAnalyzer, RankSlice, Router, RouterConfig, TokenFile, TokenWriter
from ds_data.codes import smallest_int_dtype
from ds_data.config import DataEfficiencyConfig
from ds_data.curriculum import Curriculum, make_metrics
from ds_data.difficulty_schedules import Schedule, make_schedule
from ds_data.variable import (
    VariableBatchSizeLR,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    seqlens_of,
)


class CurriculumScheduler:
    """The difficulty of a step, from a section with `min_difficulty`, `max_difficulty`, `schedule_type` and `schedule_config`.

    Attributes:
        state: The section, with `current_difficulty`.
    Raises:
        ConfigError: a key is missing or says nothing ("data-schedule").
    """

    @raising(AssertionError)
    def __init__(self, config: Mapping[str, Any]) -> None:
        missing = sorted({"min_difficulty", "max_difficulty", "schedule_type"} - config.keys())
        if missing:
            raise refused("curriculum-keys", ", ".join(missing))
        names = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
        self.state: dict[str, Any] = {name: config[name] for name in names if name in config}
        self.state["current_difficulty"] = config["min_difficulty"]
        self._custom: Schedule | None = None
        if config["schedule_type"] != "custom":
            self._schedule()

    def set_custom_get_difficulty(self, schedule_function: Schedule) -> None:
        """Use this function of the step, with schedule_type custom."""
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """Return the schedule's difficulty at a step, the first of which is 1."""
        return self._schedule()(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Go to a step. Once the greatest difficulty is reached, it stays."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return int(self.state["current_difficulty"])

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the last update."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set it."""
        self.state["current_difficulty"] = difficulty

    get_state = tells("state", "Return the scheduler's state, from which training can resume.")

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`."""
        self.state = state

    def _schedule(self) -> Schedule:
        state = self.state
        options = state.get("schedule_config", {})
        return make_schedule(
            state["schedule_type"], state["min_difficulty"], state["max_difficulty"], options, self._custom
        )


class RandomLTDScheduler:
    """How many tokens routed layers see, from a section `random_ltd` with `global_batch_size`.

    Args:
        router: One that an engine moves on; a new one by default.
    """

    def __init__(self, config: Mapping[str, Any], router: Router | None = None) -> None:
        count = int(config["random_ltd_layer_num"])
        settings = {"random_ltd_layer_id": list(range(count)), **config}
        self.router = Router(RouterConfig.of(settings)) if router is None else router
        self.global_batch_size, self.model_layer_num = int(config["global_batch_size"]), int(config["total_layer_num"])
        self.random_ltd_layer_num = count

    def update_seq(self, global_steps: int) -> None:
        """Go to a step."""
        self.router.update(global_steps, self.global_batch_size)

    get_current_seq = tells("router.num_kept", "Return the number of tokens that the layers process now.")
    get_random_ltd_layer_num = tells(
        "random_ltd_layer_num", "Return the number of layers that tokens are routed around."
    )
    state = property(lambda self: self.get_state(), doc="`get_state()`: a copy.")

    def set_current_seq(self, seq_length: int) -> None:
        """Set the number of tokens that the layers process until the schedule's next step."""
        self.router.num_kept = int(seq_length)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Count tokens times layers over `train_iters` steps from the first step; advances the schedule."""
        for step in range(train_iters):
            self.update_seq(step)
        return self.router.consumed

    def reset_to_init(self) -> None:
        """Reset the schedule to its state before the first step."""
        self.router.load_state_dict({"kept": self.router.config.min_value, "step": -1, "consumed": 0})

    def get_state(self) -> dict[str, Any]:
        """`state_dict()`, with the schedule."""
        config = self.router.config
        steps = {"require_steps": config.require_steps, "seq_per_step": config.seq_per_step}
        return {**self.state_dict(), "schedule_type": "fixed_linear", "schedule_config": steps}

    def state_dict(self) -> dict[str, int]:
        """Return the schedule's state dict, from which training can resume."""
        router = self.router
        return {
            "consumed_layer_tokens": router.consumed,
            "current_steps": router.step,
            "current_value": router.num_kept,
            "min_value": router.config.min_value,
            "max_value": router.config.max_value,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from `state_dict`."""
        keys = {"kept": "current_value", "step": "current_steps", "consumed": "consumed_layer_tokens"}
        self.router.load_state_dict({ours: state_dict[upstream_key] for ours, upstream_key in keys.items()})

    set_state = load_state_dict


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module]) -> Any:
    """Make all layers of a class routable, of a model before `initialize` or of an engine, which routes them from now on. Returns `model`.

    Raises:
        ConfigError: there is no such layer, it is converted already, or the configuration names layers that are not there ("data-routing").
        PlanError: the engine's configuration does not enable random-LTD ("compat-call-order").
    """
    ds_data.convert_to_random_ltd(_module_of(model), convert_type)
    if hasattr(model, "random_ltd_initialize"):
        model.random_ltd_initialize()
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """Return the state dict of a routed model, or of an engine's, under the plain model's names."""
    return ds_data.save_without_random_ltd(_module_of(model))


def _module_of(model: Any) -> nn.Module:
    """Return the module that an engine, or another wrapper of a model, has; the model itself where it has none."""
    module: nn.Module = getattr(model, "module", model)
    return module


class DeepSpeedDataSampler:
    """Sample ids of this rank, one list a microbatch, as a curriculum chooses them. A `batch_sampler`.

    Every rank computes the same batches: nothing is sent, and `data_parallel_group` is not used.

    Args:
        data_efficiency_config: The section `data_efficiency`.
        one_epoch_total_samples: Samples of the data set.
        drop_last: Kept for its place: all batches are whole.
    """

    def __init__(
        self, data_efficiency_config: Mapping[str, Any], one_epoch_total_samples: int, micro_batch_size: int,
        data_parallel_rank: int, data_parallel_size: int, data_parallel_group: Any, gradient_accumulation_steps: int,
        global_rank: int, drop_last: bool = True,
    ) -> None:  # fmt: skip
        del data_parallel_group, drop_last
        config = DataEfficiencyConfig.model_validate(dict(data_efficiency_config))
        section, length = config.curriculum, one_epoch_total_samples
        self._lane = RankSlice(data_parallel_rank, data_parallel_size, micro_batch_size)
        self.global_batch_size = self._lane.row * gradient_accumulation_steps
        self.total_samples = length * config.data_sampling.num_epochs
        metrics = () if section is None else make_metrics(section, length)
        folder = None if section is None or global_rank != 0 else section.data_cluster_path
        self.curriculum = Curriculum(length, metrics, config.seed, self.total_samples, folder)
        self.consumed_samples = 0
        self._before: Mapping[str, Any] = self.curriculum.state_dict()
        self._progress: Mapping[str, Any] = self.curriculum.progress()

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        self.curriculum.load_state_dict(self._before)
        for row in self.curriculum.rows(self._lane, self.global_batch_size, self.consumed_samples):
            self._before, self._progress, self.consumed_samples = row.state, row.progress, row.consumed
            yield row.samples

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Schedule]) -> None:
        """Set custom schedules, functions of the step, by metric."""
        self.curriculum.set_schedules(schedule_func_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state dict, from which any number of ranks can resume."""
        return {**self._progress, "consumed_samples": self.consumed_samples, "curriculum": dict(self._before)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. States that upstream's sampler saved hold a position, and no way to what follows it: refused."""
        if "curriculum" not in state_dict:
            raise refused("sampler-state")
        self._before = state_dict["curriculum"]
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum.load_state_dict(self._before)
        self._progress = self.curriculum.progress()


class MMapIndexedDataset(TokenFile, Dataset[Any]):
    """A token file by upstream's name: `dataset[i]` is an array.

    Args:
        skip_warmup: Kept for its place: a map is read when it is used.
    """

    supports_prefetch = False

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        del skip_warmup
        super().__init__(path)

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: first item of each document, and the end."""
        return self.index.bounds

    get_doc_idx = tells("doc_idx", "Return the document boundaries, `doc_idx`.")

    def size(self, index: int) -> int:
        """Return the number of values of an item."""
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Writes a token file: items one after the other, and where documents end.

    Args:
        out_file: Path of the `.bin` file.
        dtype: Format of the values, of numpy or torch.
    """

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        self._out = TokenWriter(out_file, dtype, table="deepspeed")

    def add_item(self, tensor: Any) -> None:
        """Append an item: a tensor or any array-like."""
        self.add_item_numpy(tensor.numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor))

    add_item_numpy = method(
        lambda self, np_array: self._out.add(np_array, ends_document=False), "Append an item given as a numpy array."
    )

    def add_items(self, arr_list: Sequence[Any]) -> None:
        """Append several items in their order."""
        for item in arr_list:
            self.add_item(item)

    end_document = calls("_out.end_document", "End a document: all items added since the previous end.")

    merge_file_ = calls("_out.merge", "Append all items and documents of another file.", "another_file")

    def finalize(self, index_file: str) -> None:
        """Make the files what readers see.

        Raises:
            ConfigError: `index_file` is not the `.idx` beside the `.bin` ("compat-argument").
        """
        if os.path.abspath(index_file) != os.path.abspath(f"{self._out.prefix}.idx"):
            raise refused("finalize-name", index_file, self._out.prefix)
        self._out.finish()


def index_file_path(prefix_path: str) -> str:
    """Return the path of the index file of a prefix."""
    return prefix_path + ".idx"


def data_file_path(prefix_path: str) -> str:
    """Return the path of the file with the values of a prefix."""
    return prefix_path + ".bin"


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> MMapIndexedDataset | None:
    """Open a token file of any layout; None where the file does not exist."""
    del impl
    return MMapIndexedDataset(path, skip_warmup) if MMapIndexedDataset.exists(path) else None


def make_builder(out_file: str, impl: str, vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """Create a builder for tokens of a vocabulary: 16 bits where the vocabulary fits, else 32.

    Only the layout `mmap` is written.
    """
    if impl != "mmap":
        raise refused("builder-layout", impl)
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """Find the smallest integer dtype for a range, unsigned where the range has no negative values."""
    return smallest_int_dtype(min_value, max_value).type


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Split an index range into ranges of about the same length."""
    ends = np.linspace(start_idx, end_idx, num=num_partitions + 1, dtype=int).tolist()
    return list(pairwise(ends))


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any, engine: Any, dataset_seqlens: Any = None, dataset_filter_ids: Any = None, dataloader_collate_fn: Any =
    None, sample_padding_fn: Any = None, batch_seqlens_fn: Any = None,
) -> tuple[Any, VariableBatchSizeLR, dict[str, Any]]:  # fmt: skip
    """Build the loader and LR scheduler of an engine's `data_sampling.dynamic_batching` for a data set.

    Collective if lengths are computed.

    Args:
        dataset_seqlens: Tokens of each sample; by default those that an analyzer wrote under `metrics_path`.
        batch_seqlens_fn: Lengths of a batch of samples, for an analyzer that is run where no lengths were written.
    Raises:
        ConfigError: dynamic batching is off, or no lengths are known ("data-max-tokens").
    """
    plan = engine.plan
    batching, lane = plan.reading.batching, engine.mesh["data"]
    if batching is None:
        raise refused("no-dynamic-batching")
    if dataset_seqlens is None:
        dataset_seqlens = _lengths(dataset, engine, batching.metrics_path, batch_seqlens_fn, dataloader_collate_fn)
    staged = plan.staging is not None
    same = ("lr_scaling_method", "min_batch_size", "max_batch_size", "sequence_picking_order", "verbose")
    loading = {
        "batch_size": plan.batch.micro, "rank": lane.rank, "num_replicas": lane.size, "num_workers": plan.reading.workers,
        "collate_fn": dataloader_collate_fn, "pin_memory": plan.reading.pin_memory,
    }  # fmt: skip
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        batching.max_tokens or 0,
        plan.batch.train,
        dataset_filter_ids=dataset_filter_ids,
        lr_scheduler_or_optimizer=engine.lr_scheduler or engine.optimizer,
        required_microbatches_of_same_size=staged,
        required_microbatches_of_same_seqlen=staged,
        sample_padding_fn=sample_padding_fn,
        seed=plan.reading.order.seed,
        **{name: getattr(batching, name) for name in same},
        **{f"dataloader_{name}": value for name, value in loading.items()},
    )


def _lengths(dataset: Any, engine: Any, folder: str | None, measure: Any, collate: Any) -> NDArray[np.int64]:
    if folder is None:
        raise refused("no-lengths")
    left = os.path.exists(os.path.join(folder, "seqlen", "seqlen_sample_to_metric.idx"))
    if not left and measure is not None:
        DistributedDataAnalyzer(
            dataset=dataset,
            num_workers=engine.world_size,
            worker_id=engine.global_rank,
            metric_names=["seqlen"],
            metric_functions=[measure],
            metric_types=["single_value_per_sample"],
            save_path=folder,
            collate_fn=collate,
        ).run_map_reduce()
    return seqlens_of(folder, len(dataset))

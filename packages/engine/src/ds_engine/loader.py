"""The engine's loader: microbatches of this rank from any map-style dataset; it can stop and go on anywhere.

Its order is that of `ds_data.sample_order`, or of a curriculum.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ds_comm import Group
from ds_config.errors import CheckpointError, ConfigError, UnsupportedError
from ds_data.curriculum import Curriculum, RankMicrobatch, make_metrics
from ds_data.sample_order import RankSlice, SampleStream
from ds_data.seqlens import BatchPacking, pack_by_seqlens
from ds_data.token_loader import check_state
from ds_data.variable import Joined, PackedDataset, seqlens_of
from ds_engine.data_plan import SampleOrder
from ds_engine.plan import Plan

__all__ = ["CurriculumLoader", "LoaderRole", "PackedLoader", "ResumableLoader", "loader_of", "make_loader"]

_log = logging.getLogger("ds_engine")

_PLAIN = SampleOrder()
PostProcess = Callable[[Any, Mapping[str, Any]], Any]


class ResumableLoader:
    """Microbatches of this rank until the end of the epoch; iterating again goes on with the next epoch.

    Args:
        dataset: Map-style: it has `len()` and `dataset[i]`.
        lane: This rank's part.
        order: Of the samples.
        options: Passed to torch's DataLoader (`collate_fn`, `num_workers`, `pin_memory`, ...).
    Attributes:
        consumed: Samples returned so far, over all ranks and epochs.
        samples: Dataset indices of the microbatch that this rank was given last.
        waited_s: Seconds that the caller has waited for data.
        post_process: Called with each microbatch and where the order stands ("consumed_samples" and, in a curriculum,
            "current_difficulties", ...); what it returns is the batch.
    Raises:
        UnsupportedError: an iterable dataset ("data-iterable"): it cannot go on where it stopped.
        ConfigError: no samples, or none left after the cut ("data-empty").
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lane: RankSlice,
        order: SampleOrder = _PLAIN,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UnsupportedError(
                f"training_data is a {type(dataset).__name__}, which has no len() and no index",
                code="data-iterable",
                fix="Pass a map-style dataset, or your own iterator to train_batch(data_iter).",
            )
        self.dataset, self.lane, self.consumed, self.waited_s = dataset, lane, 0, 0.0
        self.samples: Sequence[int] = ()
        self.post_process: PostProcess | None = None
        self.stream = SampleStream(len(dataset), order.seed, order.shuffle, order.multiple)
        self._epochs, self._options = order.epochs, options or {}
        if self.stream.epoch_length == 0:
            raise ConfigError(
                f"the dataset has {len(dataset)} samples, of which none is left when cut to a multiple of {order.multiple}",
                code="data-empty",
                fix="Give more data, a smaller batch, or dataloader_drop_last = false.",
            )

    @property
    def epoch(self) -> int:
        """Whole passes taken."""
        return self.consumed // self.stream.epoch_length

    def __len__(self) -> int:
        """Return the number of this rank's microbatches in an epoch that begins with a row."""
        return -(-self.stream.epoch_length // self.lane.row)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[RankMicrobatch] = deque()

        def samples() -> Iterator[list[int]]:
            for row in self._rows():
                ahead.append(row)
                yield row.samples

        # A generator of its own: making an iterator must not move the random numbers of the training.
        generator = torch.Generator().manual_seed(self.stream.seed + self.consumed)
        batches = iter(DataLoader(self.dataset, batch_sampler=samples(), generator=generator, **self._options))
        while True:
            begun = perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            row = ahead.popleft()
            self._hand_out(row)
            if self.post_process is not None:
                batch = self.post_process(batch, {"consumed_samples": row.consumed, **row.progress})
            self.waited_s += perf_counter() - begun
            yield batch

    def forever(self) -> Iterator[Any]:
        """Yield microbatches, epoch after epoch; endless unless the number of epochs is limited."""
        while not self._ended():
            yield from self

    def rebatch(self, micro: int, train: int) -> None:
        """Give microbatches of `micro` samples from the next iteration on, of steps that take `train` over all ranks."""
        del train
        self.lane = RankSlice(self.lane.rank, self.lane.ranks, micro)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, on any world size. JSON-able. Includes the dataset's `fingerprint`, if any."""
        mark = getattr(self.dataset, "fingerprint", None)
        state = {"taken": self.consumed, "seed": self.stream.seed, "length": self.stream.length}
        return state if mark is None else state | {"fingerprint": str(mark)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the dataset has another length or fingerprint, or was read in an order of another kind ("data-changed").
        """
        current = self.state_dict()
        check_state(state, current)
        if ("curriculum" in state) != ("curriculum" in current):
            raise CheckpointError(
                f"the checkpoint was written {'with' if 'curriculum' in state else 'without'} a curriculum of samples, this run is "
                f"{'with' if 'curriculum' in current else 'without'} one",
                code="data-changed",
                fix="Keep data_efficiency.data_sampling as it was, or begin the data anew: load_checkpoint(..., load_data_state=False).",
            )
        self.stream = SampleStream(self.stream.length, state["seed"], self.stream.shuffle, self.stream.multiple)
        self.consumed = state["taken"]

    def _ended(self) -> bool:
        return self._epochs is not None and self.epoch >= self._epochs

    def _rows(self) -> Iterator[RankMicrobatch]:
        """Yield the rows that remain in this epoch."""
        row = self.lane.row
        end = self.consumed if self._ended() else (self.epoch + 1) * self.stream.epoch_length
        for start in range(self.consumed, end, row):
            yield RankMicrobatch(self.stream.samples(list(self.lane.positions(start))).tolist(), start + row)

    def _hand_out(self, row: RankMicrobatch) -> None:
        self.samples = row.samples
        self.consumed = row.consumed  # counted when returned, not when sampled: workers read ahead


class CurriculumLoader(ResumableLoader):
    """Microbatches of this rank whose samples a curriculum chooses; it has no epochs, and ends with the curriculum.

    Args:
        curriculum: Chooses.
        train: Samples of a step over all ranks: how many are chosen together.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lane: RankSlice,
        curriculum: Curriculum,
        *,
        train: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dataset, lane, SampleOrder(curriculum.seed), options)
        self.curriculum, self._train = curriculum, train
        self._before: Mapping[str, Any] = curriculum.state_dict()

    def __len__(self) -> int:
        """Return the number of this rank's microbatches until the curriculum ends, or in one pass if endless."""
        return (self.curriculum.total or self.stream.length) // self._train * self._train // self.lane.row

    def rebatch(self, micro: int, train: int) -> None:
        """Give other microbatches from the next iteration on. Only between two steps."""
        super().rebatch(micro, train)
        self._train = train

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, on any number of ranks. JSON-able."""
        return super().state_dict() | {"curriculum": dict(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises CheckpointError ("data-changed") for other data or metrics."""
        super().load_state_dict(state)
        self.curriculum.load_state_dict(state["curriculum"])
        self._before = state["curriculum"]

    def _ended(self) -> bool:
        total = self.curriculum.total
        return total is not None and self.consumed + self._train > total

    def _rows(self) -> Iterator[RankMicrobatch]:
        self.curriculum.load_state_dict(self._before)  # what was drawn ahead, and never returned, is drawn again
        return self.curriculum.rows(self.lane, self._train, self.consumed)

    def _hand_out(self, row: RankMicrobatch) -> None:
        super()._hand_out(row)
        self._before = row.state


class PackedLoader(ResumableLoader):
    """Microbatches of samples that were put together by length. In its positions a packed microbatch counts as one sample.

    Args:
        packing: What goes together.
        options: Of `ResumableLoader`; `collate_fn` joins the samples of a microbatch.
    Attributes:
        packing: What goes together.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lane: RankSlice,
        order: SampleOrder,
        packing: BatchPacking,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        loader_options = dict(options or {})
        collate = loader_options.pop("collate_fn", None) or default_collate
        self.packing, packed = packing, PackedDataset(dataset, packing.microbatches)
        self._numbers = [0, *accumulate(map(len, packing.microbatches))]
        self._mark = getattr(dataset, "fingerprint", None)
        super().__init__(packed, lane, order, {**loader_options, "collate_fn": Joined(collate)})

    def samples_between(self, begun: int, ended: int) -> int:
        """Samples of the positions from `begun` to `ended`."""
        every, total = len(self._numbers) - 1, self._numbers[-1]
        first, last = (at // every * total + self._numbers[at % every] for at in (begun, ended))
        return last - first

    def rebatch(self, micro: int, train: int) -> None:
        """Raise ConfigError: samples were packed for one train batch size ("data-max-tokens")."""
        raise ConfigError(
            f"the train batch shall become {train} microbatches of {micro}, and samples were put together for another one",
            code="data-max-tokens",
            fix="Load a checkpoint into an engine that is configured with the new batch.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, on any number of ranks. JSON-able."""
        state = super().state_dict()
        return state if self._mark is None else state | {"fingerprint": str(self._mark)}


@dataclass(frozen=True, slots=True)
class LoaderRole:
    """What a loader is for.

    Attributes:
        name: `train` reads in the plan's order; `eval` and `predict` keep the dataset's.
        micro: Samples a microbatch; None is the plan's.
    """

    name: str = "train"
    micro: int | None = None


def loader_of(
    plan: Plan, data: Group, dataset: Dataset[Any], route: LoaderRole, options: Mapping[str, Any]
) -> ResumableLoader:
    """Build the loader of this rank's microbatches for a data route.

    Raises:
        UnsupportedError: no such route ("data-route").
    """
    if route.name not in ("train", "eval", "predict"):
        raise UnsupportedError(
            f"there is no data route {route.name!r}", code="data-route", fix="Use train, eval or predict."
        )
    lane = RankSlice(data.rank, data.size, route.micro or plan.batch.micro)
    if route.name != "train":
        return ResumableLoader(dataset, lane, SampleOrder(shuffle=False), options)
    return make_loader(plan, lane, dataset, options)


def make_loader(
    plan: Plan, lane: RankSlice, dataset: Dataset[Any], options: Mapping[str, Any], *, lead: bool = False
) -> ResumableLoader:
    """Build the loader of a plan for a data set.

    Args:
        options: Passed to torch's DataLoader; they override those of the plan.
        lead: Whether this rank writes the files that all ranks share.
    """
    reading, order = plan.reading, plan.reading.order
    options = {"num_workers": reading.workers, "pin_memory": reading.pin_memory, **options}
    plain = ResumableLoader(dataset, lane, order, options)
    length, train = plain.stream.length, lane.row * plan.batch.accumulation
    if reading.curriculum is not None:
        section = reading.curriculum
        total, folder = length * (order.epochs or 1), section.data_cluster_path if lead else None
        curriculum = Curriculum(length, make_metrics(section, length), order.seed, total, folder)
        return CurriculumLoader(dataset, lane, curriculum, train=train, options=options)
    if reading.batching is not None:
        if plan.staging is not None:
            raise UnsupportedError(
                "dynamic_batching in a pipeline: its stages need samples of one length, which only you can pad",
                code="data-max-tokens",
                fix="get_dataloader_and_lr_scheduler_for_variable_batch_size with sample_padding_fn, and train_batch(data_iter).",
            )
        packing = pack_for(plan, length, train)
        return PackedLoader(
            dataset, lane, SampleOrder(order.seed, shuffle=False, epochs=order.epochs), packing, options
        )
    return plain


def pack_for(plan: Plan, length: int, train: int) -> BatchPacking:
    """Pack the microbatches of `dynamic_batching` for a data set of `length` samples, `train` of them a step.

    Raises:
        ConfigError: their lengths are not known, or they fill no batch ("data-max-tokens", "data-file").
    """
    batching = plan.reading.batching
    if batching is None or batching.metrics_path is None or batching.max_tokens is None:
        raise ConfigError(
            "dynamic_batching has no metrics_path, where the lengths of samples are",
            code="data-max-tokens",
            fix="Analyse the data with the metric seqlen, or pass lengths to get_dataloader_and_lr_scheduler_for_variable_batch_size.",
        )
    packing = pack_by_seqlens(
        seqlens_of(batching.metrics_path, length),
        batching.max_tokens,
        sizes=(batching.min_batch_size, batching.max_batch_size),
        order=batching.sequence_picking_order,
        per_batch=train,
        seed=plan.reading.order.seed,
    )
    if packing.dropped or batching.verbose:
        text = (
            "%d samples longer than %d tokens are dropped; %d at the end fill no batch; %d batches of %d to %d samples"
        )
        sizes = packing.sizes
        _log.warning(text, packing.dropped, batching.max_tokens, packing.left_out, len(sizes), min(sizes), max(sizes))
    return packing

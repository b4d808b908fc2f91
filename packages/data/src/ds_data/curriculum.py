"""Which samples a step may draw, by how hard they are: the samples of every batch, from a few integers.

Words: a *metric* measures how hard a sample is; with its schedule it admits more samples from step to step. A sample is admitted when
every metric admits it. A *cluster* is the samples that were admitted at the same step; clusters stay. To *draw* a batch is to choose a
cluster for each of its places, in proportion to their sizes, and to take the next sample of that cluster: every sample of a cluster is
seen once before any is seen again. Choices and orders are computed from seed and position, so every rank draws the same batches
without asking another one, and a run goes on from a saved state on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_config.errors import CheckpointError, ConfigError
from ds_data.config import CurriculumMetricConfig, SamplingCurriculumConfig
from ds_data.difficulty_schedules import Schedule, make_schedule
from ds_data.permutation import KeyedPermutation, mix_keys, uniform
from ds_data.sample_order import RankSlice
from ds_data.token_writer import write_items
from ds_data.tokens import TokenFile

__all__ = [
    "AdmittedCluster",
    "Curriculum",
    "DifficultyIndex",
    "Metric",
    "RankMicrobatch",
    "cluster_name",
    "make_metrics",
]

_AHEAD = 1024  # samples of a cluster that are drawn at once
Samples = NDArray[np.int64]


class DifficultyIndex:
    """The samples of a data set, easy first, as an analyzer wrote them. Read through memory maps.

    Args:
        samples: Token file with an item for every value, its samples; in rising order of values.
        values: Token file with one item of one value for every item of `samples`; None where only the order counts.
        parts: Of how many parts a difficulty counts, where only the order counts.
        length: Samples of the data set.
    Raises:
        ConfigError: the files do not fit each other or the data set ("data-curriculum").
    """

    def __init__(self, samples: str, values: str | None, *, parts: int, length: int) -> None:
        self._file, self._parts, self._length = TokenFile(samples), parts, length
        self._values = None if values is None else TokenFile(values)
        wrong = None
        if self._values is not None and (
            len(self._values) != len(self._file) or set(self._values.sizes.tolist()) - {1}
        ):
            wrong = f"{values} has {len(self._values)} items for {len(self._file)} of {samples}, or some of more than one value"
        elif self._file.num_tokens > length:
            wrong = f"{samples} has {self._file.num_tokens} samples, the data set {length}"
        if wrong is not None:
            raise ConfigError(
                wrong, code="data-curriculum", fix="Give the files that an analyzer wrote for this data set."
            )

    def __call__(self, difficulty: float) -> Samples:
        """Return the samples that are at most of `difficulty`, int64 [k], in no order."""
        file = self._file
        if self._values is None:
            count = self._length if difficulty >= self._parts else self._length // self._parts * max(0, int(difficulty))
            ends = np.cumsum(file.sizes)
            whole = int(np.searchsorted(ends, count, side="right"))
            rest = count - (int(ends[whole - 1]) if whole else 0)
            rows = [file[i] for i in range(whole)] + ([file[whole][:rest]] if rest and whole < len(file) else [])
        else:
            hard = self._values.values[self._values.index.starts]
            rows = [file[i] for i in np.flatnonzero(hard <= difficulty).tolist()]
        samples = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)
        if samples.size and not 0 <= int(samples.min()) <= int(samples.max()) < self._length:
            raise ConfigError(
                f"{file.prefix} names sample {int(samples.max())} of a data set of {self._length}",
                code="data-curriculum",
                fix="Give the files that an analyzer wrote for this data set.",
            )
        return samples


@dataclass(frozen=True)
class Metric:
    """One measure of how hard a sample is.

    Attributes:
        name: Of the metric.
        schedule: Difficulty of a step, the first of which is 1; None until a function is given.
        admission: The samples up to a difficulty; None admits all at once.
    """

    name: str
    schedule: Schedule | None
    admission: Callable[[float], Samples] | None = None

    def difficulty(self, step: int) -> int:
        """Return the scheduled difficulty of a step."""
        if self.schedule is None:
            raise ConfigError(
                f"metric {self.name} has schedule_type custom, and no function was given",
                code="data-schedule",
                fix=f"Call set_custom_curriculum_learning_schedule({{{self.name!r}: function of the step}}) before the first batch.",
            )
        return self.schedule(step)


def make_metrics(section: SamplingCurriculumConfig, length: int) -> tuple[Metric, ...]:
    """Build the metrics of a configuration, with their files opened.

    Args:
        length: Samples of the data set.
    Raises:
        ConfigError: there is no metric, a file is missing or does not fit ("data-curriculum", "data-file"); a schedule
        is
            incomplete ("data-schedule").
    """
    if not section.curriculum_metrics:
        raise ConfigError(
            "curriculum_learning of data_sampling is enabled, and curriculum_metrics is empty",
            code="data-curriculum",
            fix="Give a metric, with its schedule and the files of an analyzer.",
        )
    return tuple(_metric(name, config, length) for name, config in section.curriculum_metrics.items())


def _metric(name: str, config: CurriculumMetricConfig, length: int) -> Metric:
    custom = config.schedule_type == "custom"
    options, bounds = config.schedule_config, (config.min_difficulty, config.max_difficulty)
    schedule = None if custom else make_schedule(config.schedule_type, *bounds, options)
    if config.clustering_type == "single_cluster":
        return Metric(name, schedule)
    by_value = config.difficulty_type == "value"
    needed = {"index_to_sample_path": config.index_to_sample_path} | (
        {"index_to_metric_path": config.index_to_metric_path} if by_value else {}
    )
    missing = [key for key, path in needed.items() if path is None]
    if missing:
        raise ConfigError(
            f"metric {name}: no {' and no '.join(missing)}",
            code="data-curriculum",
            fix="Give the files that ds_data.DataAnalyzer wrote, or clustering_type single_cluster.",
        )
    values = config.index_to_metric_path if by_value else None
    return Metric(
        name,
        schedule,
        DifficultyIndex(str(config.index_to_sample_path), values, parts=config.max_difficulty, length=length),
    )


@dataclass
class AdmittedCluster:
    """Samples that were admitted together.

    Attributes:
        difficulties: Of each metric, when they were.
        samples: int64 [k], in the order in which they are drawn the first time.
        key: Of the orders of later times.
        drawn: How many were drawn so far.
    """

    difficulties: dict[str, int]
    samples: Samples
    key: int
    drawn: int = 0
    _from: int = 0
    _ahead: Samples = field(default_factory=lambda: np.zeros(0, np.int64))

    def draw(self, count: int) -> Samples:
        """Draw the next `count` samples of this cluster, int64 [count]."""
        at = self.drawn - self._from
        if not 0 <= at <= at + count <= len(self._ahead):
            # Of a few places a permutation costs as much as of a thousand.
            ahead = max(count, min(_AHEAD, len(self.samples)))
            self._from, self._ahead, at = self.drawn, self._samples(self.drawn, ahead), 0
        self.drawn += count
        return self._ahead[at : at + count]

    def _samples(self, start: int, count: int) -> Samples:
        times, places = np.divmod(np.arange(start, start + count), len(self.samples))
        for time in np.unique(times[times > 0]):
            inside = times == time
            places[inside] = _permuted(len(self.samples), mix_keys(self.key, int(time)), places[inside])
        return self.samples[places]


@dataclass(frozen=True, slots=True)
class RankMicrobatch:
    """One microbatch of a rank.

    Attributes:
        samples: Its samples.
        consumed: Samples that all ranks have taken after this row.
        state: Of the curriculum, to go on from after this row: before the batch that the row belongs to, or after it if the row is its last.
        progress: Of the batch: its difficulties and positions, by the names that DeepSpeed's sampler has.
    """

    samples: list[int]
    consumed: int
    state: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Curriculum:
    """The samples of batch after batch.

    Attributes:
        length: Samples of the data set.
        metrics: What makes them hard.
        seed: Of all choices.
        total: Samples to take before it ends; None goes on for ever.
        folder: Where each cluster is left as a token file, for other programs; None: nowhere. Give it to one rank only.
        consumed: Samples drawn so far, over all ranks.
        step: Batches drawn so far.
        difficulties: Of the last batch, by metric.
        clusters: What was admitted so far.
    """

    length: int
    metrics: tuple[Metric, ...]
    seed: int = 1234
    total: int | None = None
    folder: str | PathLike[str] | None = None
    consumed: int = 0
    step: int = 0
    difficulties: dict[str, int] = field(default_factory=dict)
    clusters: list[AdmittedCluster] = field(default_factory=list)

    def set_schedules(self, functions: Mapping[str, Schedule]) -> None:
        """Use these functions of the step, by metric; others stay.

        Raises:
            ConfigError: there is no such metric ("data-schedule").
        """
        unknown = sorted(functions.keys() - {metric.name for metric in self.metrics})
        if unknown:
            raise ConfigError(
                f"there is no metric {', '.join(unknown)}",
                code="data-schedule",
                fix=f"The metrics are {', '.join(metric.name for metric in self.metrics)}.",
            )
        self.metrics = tuple(replace(m, schedule=functions.get(m.name, m.schedule)) for m in self.metrics)

    def draw(self, batch: int) -> Samples:
        """Draw the samples of the next batch over all ranks, int64 [batch].

        Raises:
            ConfigError: no sample is admitted at the first difficulty ("data-curriculum").
        """
        now = {metric.name: int(metric.difficulty(self.step + 1)) for metric in self.metrics}
        if self.step == 0 or now != self.difficulties:
            self._admit(now)
        if not self.clusters:
            raise ConfigError(
                f"no sample is as easy as {now}",
                code="data-curriculum",
                fix="Raise min_difficulty, or look at the metric's files.",
            )
        self.step, self.difficulties = self.step + 1, now
        ends = np.cumsum([len(cluster.samples) for cluster in self.clusters])
        chosen = uniform(mix_keys(self.seed, 4), np.arange(self.consumed, self.consumed + batch)) * int(ends[-1])
        counts = np.bincount(np.searchsorted(ends, chosen, side="right"), minlength=len(ends))
        drawn = [cluster.draw(int(count)) for cluster, count in zip(self.clusters, counts, strict=True) if count]
        self.consumed += batch
        return np.concatenate(drawn)[
            np.argsort(uniform(mix_keys(self.seed, 5, self.step), np.arange(batch)), kind="stable")
        ]

    def rows(self, lane: RankSlice, batch: int, position: int) -> Iterator[RankMicrobatch]:
        """Yield this rank's rows from `position` on, which lies in the batch that is drawn next.

        Args:
            batch: Samples of a batch, over all ranks; a multiple of `lane.row`.
        """
        while self.total is None or self.consumed + batch <= self.total:
            before, begun = self.state_dict(), self.consumed
            samples = self.draw(batch)
            after, progress = self.state_dict(), self.progress() | {"batch": samples.tolist()}
            for start in range(begun, begun + batch, lane.row):
                local_span, end = lane.positions(start - begun), start + lane.row
                if start >= position:
                    state = before if end < begun + batch else after
                    yield RankMicrobatch(samples[local_span.start : local_span.stop].tolist(), end, state, progress)

    def progress(self) -> dict[str, Any]:
        """Return the state of the curriculum under the names of DeepSpeed's sampler."""
        return {
            "consumed_samples": self.consumed,
            "curriculum_step": self.step,
            "current_difficulties": dict(self.difficulties),
            "data_cluster_paths": [cluster_name(cluster.difficulties) for cluster in self.clusters],
            "data_cluster_current_position": [cluster.drawn % len(cluster.samples) for cluster in self.clusters],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, on any number of ranks. JSON-able; grows with the number of clusters."""
        return {
            "seed": self.seed,
            "length": self.length,
            "taken": self.consumed,
            "step": self.step,
            "difficulties": dict(self.difficulties),
            "clusters": [{"difficulties": cluster.difficulties, "drawn": cluster.drawn} for cluster in self.clusters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state. Clusters are made again from the metrics' files.

        Raises:
            CheckpointError: the data set or the metrics are others ("data-changed").
        """
        if state["length"] != self.length or any(c["difficulties"].keys() != self._names for c in state["clusters"]):
            raise CheckpointError(
                f"the checkpoint's curriculum is over {state['length']} samples, this one over {self.length}; its metrics are "
                f"{sorted(state['difficulties'])}, these {sorted(self._names)}",
                code="data-changed",
                fix="Give the same data and metrics, or begin anew: load_checkpoint(..., load_data_state=False).",
            )
        self.seed, self.consumed, self.step = int(state["seed"]), int(state["taken"]), int(state["step"])
        self.clusters = []
        for saved in state["clusters"]:
            self._admit({name: int(value) for name, value in saved["difficulties"].items()})
            self.clusters[-1].drawn = int(saved["drawn"])
        self.difficulties = {name: int(value) for name, value in state["difficulties"].items()}

    @cached_property
    def _names(self) -> set[str]:
        return {metric.name for metric in self.metrics}

    def _admit(self, now: Mapping[str, int]) -> None:
        """Add a cluster of the samples that are admitted now and were not before; no cluster if there are none."""
        open_ = np.ones(self.length, bool)
        for metric in self.metrics:
            if metric.admission is not None:
                easy = np.zeros(self.length, bool)
                easy[metric.admission(now[metric.name])] = True
                open_ &= easy
        for cluster in self.clusters:
            open_[cluster.samples] = False
        fresh = np.flatnonzero(open_)
        if not len(fresh):
            return
        key = mix_keys(self.seed, 6, len(self.clusters))
        samples = fresh[_permuted(len(fresh), mix_keys(key, 0), np.arange(len(fresh)))]
        self.clusters.append(AdmittedCluster(dict(now), samples, key))
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            write_items(os.path.join(self.folder, cluster_name(now)), [samples], np.int64)


def _permuted(length: int, key: int, places: Samples) -> Samples:
    """Return the entries at `places` of a random order of `length` elements.

    A short order is sorted whole, which costs less than a few places.
    """
    if length > _AHEAD:
        return KeyedPermutation(length, key)(places)
    return np.argsort(uniform(key, np.arange(length)), kind="stable")[places]


def cluster_name(difficulties: Mapping[str, int]) -> str:
    """Name of a cluster's token file, as DeepSpeed has it."""
    return "cluster" + "".join(f"_{name}{value}" for name, value in difficulties.items())

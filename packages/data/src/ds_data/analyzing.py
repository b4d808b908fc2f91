"""Measure every sample of a data set, and write what a curriculum reads.

Words: a *metric* is a function of a batch; it gives one integer a sample ("single_value_per_sample"), or a tensor that is added up
over all samples ("accumulate_value_over_samples"). A *chunk* is a run of samples whose values are in one file. To *map* is to
write chunks, by several workers, each in several processes; to *reduce* is to write the files of a metric from all chunks:

    <metric>_sample_to_metric                    the value of each sample
    <metric>_index_to_sample, _index_to_metric   for each value, low ones first, its samples; and the value
    <metric>_index_to_sample_percentile_merged   the same samples in about a hundred items
    <metric>_metric_value                        of a metric that is added up

These are the files of DeepSpeed's analyzer, in its table of formats. Chunks have the same bounds on every worker, and get their
names when they are complete: a map that was interrupted goes on, with any number of workers and processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch.utils.data import default_collate

from ds_config.errors import ConfigError, DsError
from ds_data.chunks import Metrics, MetricType, _nothing, map_chunks, reduce_chunks

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer", "MetricType", "Metrics", "map_chunks", "reduce_chunks"]


class DataAnalyzer:
    """Measures a data set, and writes the files of `data_efficiency`'s curriculum.

    Args:
        dataset: Map-style.
        num_workers, worker_id: How many jobs map, and which this one is. They write to one folder.
        num_threads: Processes of this worker.
        num_threads_reduce: Kept for its place: to reduce is one sort.
        specific_threads: Which of them to run here; all by default.
        batch_size: Samples that a function sees at once.
        metric_names, metric_functions, metric_types, metric_dtypes: See `Metrics`.
        save_path: The folder.
        collate_fn: Samples -> batch; torch's by default.
        custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: Instead of ours, called as DeepSpeed calls them. The
            first three go together.
        sample_indices: What each sample is called; its place by default.
    Raises:
        ConfigError: they do not fit ("data-analysis").
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[MetricType] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        self.custom = (custom_map_init, custom_map_update, custom_map_finalize)
        num_custom = sum(function is not None for function in self.custom)
        if not 0 <= worker_id < num_workers or num_threads < 1 or batch_size < 1 or num_custom not in (0, 3):
            raise ConfigError(
                f"worker {worker_id} of {num_workers}, {num_threads} processes, batches of {batch_size}, {num_custom} of 3 custom map functions",
                code="data-analysis",
                fix="Count workers from 0, give positive numbers, and all three of custom_map_init, _update and _finalize or none.",
            )
        self.dataset, self.num_workers, self.worker_id = dataset, num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads, self.batch_size, self.save_path = list(specific_threads), batch_size, save_path
        self.collate_fn, self.sample_indices, self.custom_reduce = collate_fn, sample_indices, custom_reduce
        self.metrics = Metrics(metric_names, metric_functions, metric_types, list(metric_dtypes) or None)

    def run_map(self) -> None:
        """Measure this worker's part; what was measured before an interruption is left out.

        Raises:
            ConfigError: a process failed ("data-analysis"); its own error was logged.
        """
        threads = self.specific_threads or list(range(self.num_threads))
        if self.num_threads == 1:
            for thread in threads:
                self._map(thread)
            return
        # Forked: data sets and functions need not be importable.
        context = multiprocessing.get_context("fork")
        running = [context.Process(target=self._map, args=(thread,)) for thread in threads]
        for process in running:
            process.start()
        for process in running:
            process.join()
        failed = [thread for thread, process in zip(threads, running, strict=True) if process.exitcode]
        if failed:
            raise ConfigError(
                f"processes {failed} of worker {self.worker_id} failed",
                code="data-analysis",
                fix="Their errors stand above. Run it again: what is done stays.",
            )

    def run_reduce(self) -> None:
        """Write the files, when every worker has mapped."""
        if self.custom_reduce is not None:
            arguments = (self.metrics.names, self.metrics.types, self.save_path, self.num_workers)
            self.custom_reduce(self.dataset, *arguments, self.num_threads, self.num_threads_reduce)
            return
        reduce_chunks(self.dataset, self.metrics, self.save_path, batch_size=self.batch_size)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map; and, when all workers have, reduce on worker 0. Collective over `comm_group` (the world) if there are several.

        Raises:
            ConfigError: it failed on another rank ("data-analysis").
        """
        self._together(self.run_map, comm_group)
        self._together(self.run_reduce if self.worker_id == 0 else _nothing, comm_group)

    def _together(self, action: Callable[[], None], group: Any) -> None:
        """Run it; a failure of one rank is one of all. Collective where workers are ranks."""
        from ds_comm import all_gather_json, as_group

        ranks = as_group(group)
        own_error: Exception | None = None
        try:
            action()
        except (DsError, OSError, ValueError, TypeError, RuntimeError, LookupError) as error:
            own_error = error
        messages = all_gather_json("" if own_error is None else str(own_error), ranks) if ranks.size > 1 else []
        if own_error is not None:
            raise own_error
        for rank, text in enumerate(messages):
            if text:
                raise ConfigError(
                    f"the analysis failed on rank {rank}: {text}",
                    code="data-analysis",
                    fix="See the error of that rank.",
                )

    def _map(self, thread: int) -> None:
        part = self.worker_id * self.num_threads + thread, self.num_workers * self.num_threads
        if self.custom[0] is not None:
            self._map_by_hand(thread, part)
            return
        map_chunks(
            self.dataset,
            self.metrics,
            self.save_path,
            batch_size=self.batch_size,
            collate_fn=self.collate_fn,
            sample_indices=self.sample_indices,
            part=part,
        )

    def _map_by_hand(self, thread: int, part: tuple[int, int]) -> None:
        init, update, finalize = self.custom
        if init is None or update is None or finalize is None:
            raise RuntimeError("checked when it was made")
        metrics, dtypes = self.metrics, self.metrics.dtypes
        results = init(thread, metrics.names, metrics.types, dtypes, self.save_path, self.worker_id)
        begin, end = (len(self.dataset) * number // part[1] for number in (part[0], part[0] + 1))
        for at in range(begin, end, self.batch_size):
            batch = (self.collate_fn or default_collate)(
                [self.dataset[i] for i in range(at, min(at + self.batch_size, end))]
            )
            update(batch, metrics.types, dtypes, metrics.functions, results, at)
        finalize(metrics.types, dtypes, results)


class DistributedDataAnalyzer(DataAnalyzer):
    """A `DataAnalyzer` whose workers are the ranks of a group; it writes to a folder that all of them see.

    Args:
        device: Kept for its place: values are reduced on the host.
        comm_group: The ranks; the world by default.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[MetricType] = (),
        save_path: str | PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        from ds_comm import as_group

        del device
        ranks = as_group(comm_group)
        if ranks.size > 1:
            num_workers, worker_id = ranks.size, ranks.rank
        self._group = comm_group
        super().__init__(
            dataset,
            num_workers,
            worker_id,
            num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map on every rank, and reduce on the first. Collective."""
        super().run_map_reduce(self._group if comm_group is None else comm_group)

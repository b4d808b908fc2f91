"""Metrics of samples, in chunks of a data set that are computed once and kept: `map_chunks` computes, `reduce_chunks` joins."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from ds_config.errors import ConfigError
from ds_config.regular_file import replacing
from ds_data.codes import smallest_int_dtype
from ds_data.token_writer import TokenWriter

__all__ = ["MetricType", "Metrics", "map_chunks", "reduce_chunks"]


_log = logging.getLogger("ds_data")


_CHUNK = 1 << 16  # most samples of a chunk


MetricType = Literal["single_value_per_sample", "accumulate_value_over_samples"]


_TYPES = ("single_value_per_sample", "accumulate_value_over_samples")


Values = NDArray[Any]


@dataclass(frozen=True)
class Metrics:
    """What is measured.

    Attributes:
        names: Of the metrics: their folders.
        functions: Batch -> tensor or array: [samples] integers, or what is added up.
        types: Of each.
        dtypes: What each function must give, of torch or numpy; None takes what comes.
    Raises:
        ConfigError: they are not equally many, a name says nothing, or a type is unknown ("data-analysis").
    """

    names: Sequence[str]
    functions: Sequence[Callable[[Any], Any]]
    types: Sequence[MetricType]
    dtypes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        dtypes = self.dtypes or [None] * len(self.names)
        counts = [len(self.names), len(self.functions), len(self.types), len(dtypes)]
        wrong = [name for name in self.names if not name or "/" in name or name in (".", "..")]
        problem = (
            f"{counts[0]} names, {counts[1]} functions, {counts[2]} types and {counts[3]} dtypes"
            if len(set(counts)) > 1 or not self.names
            else f"metrics named {wrong}"
            if wrong or len(set(self.names)) < len(self.names)
            else f"types {list(self.types)}"
            if set(self.types) - set(_TYPES)
            else None
        )
        if problem is not None:
            raise ConfigError(
                f"metrics with {problem}",
                code="data-analysis",
                fix=f"Give one name, function and type a metric, all names different; types are {', '.join(_TYPES)}.",
            )

    def __call__(self, batch: Any) -> list[Values]:
        """Compute the values of every metric for a batch."""
        dtypes = self.dtypes or [None] * len(self.names)
        return [
            _checked(*row)
            for row in zip(self.names, [f(batch) for f in self.functions], self.types, dtypes, strict=True)
        ]


def map_chunks(
    dataset: Any,
    metrics: Metrics,
    folder: str | PathLike[str],
    *,
    batch_size: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_indices: Sequence[int] | None = None,
    part: tuple[int, int] = (0, 1),
    chunk: int | None = None,
) -> int:
    """Measure the chunks of one part of a data set, leaving out those that are there. Returns how many samples were measured.

    Args:
        dataset: Map-style.
        batch_size: Samples that a function sees at once.
        collate_fn: Samples -> batch; torch's by default.
        sample_indices: What each sample of `dataset` is called; its place by default. A batch that is a mapping with "index"
            ([samples, ...]) says it itself.
        part: Number of this part, and how many there are; together they have every chunk once.
        chunk: Samples of a chunk, rounded to whole batches; by default a 64th of the data set, at most 65,536.
    """
    every = _every(len(dataset), batch_size, chunk)
    place = _chunks_folder(folder, dataset, metrics, batch_size, every)
    number, parts = part
    done = 0
    for start in range(number * every, len(dataset), parts * every):
        end = min(start + every, len(dataset))
        target = place / f"{start}.npz"
        if target.exists():
            continue
        single: list[list[Values]] = [[] for _ in metrics.names]
        sums: list[Values | None] = [None for _ in metrics.names]
        ids: list[Values] = []
        for at in range(start, end, batch_size):
            places = range(at, min(at + batch_size, end))
            batch = (collate_fn or default_collate)([dataset[i] for i in places])
            ids.append(_ids(batch, places, sample_indices))
            for m, values in enumerate(metrics(batch)):
                if metrics.types[m] == "single_value_per_sample":
                    _same_number(metrics.names[m], values, places)
                    single[m].append(values)
                else:
                    sums[m] = values if (before := sums[m]) is None else before + values
        arrays: dict[str, Any] = {"ids": np.concatenate(ids)}
        for m, rows in enumerate(single):
            arrays[f"m{m}"] = np.concatenate(rows) if rows else sums[m]
        with replacing(target) as draft, draft.open("wb") as out:
            np.savez(out, **arrays)
        done += end - start
        _log.info("part %d of %d: %d samples measured, up to %d of %d", number, parts, done, end, len(dataset))
    return done


def reduce_chunks(
    dataset: Any, metrics: Metrics, folder: str | PathLike[str], *, batch_size: int = 1, chunk: int | None = None
) -> None:
    """Write the files of every metric, and remove the chunks.

    Raises:
        ConfigError: a chunk is missing ("data-analysis"): a worker has not finished.
    Cost: all values and sample ids are in memory, 16 bytes a sample.
    """
    every = _every(len(dataset), batch_size, chunk)
    place = _chunks_folder(folder, dataset, metrics, batch_size, every)
    files = [place / f"{start}.npz" for start in range(0, len(dataset), every)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(files)} chunks of {place} are not there, the first of them {missing[0]}",
            code="data-analysis",
            fix="Let every worker map its part first; what is there is not measured again.",
        )
    chunks = [dict(np.load(file)) for file in files]
    ids = np.concatenate([arrays["ids"] for arrays in chunks]) if chunks else np.zeros(0, np.int64)
    for m, (name, kind) in enumerate(zip(metrics.names, metrics.types, strict=True)):
        target = Path(folder) / name
        target.mkdir(parents=True, exist_ok=True)
        values = [arrays[f"m{m}"] for arrays in chunks]
        if kind == "single_value_per_sample":
            _write_values(target / name, np.concatenate(values), ids)
        else:
            total = sum(values[1:], values[0].astype(np.int64)).reshape(-1)
            _write(f"{target / name}_metric_value", total, [len(total)])
    shutil.rmtree(place)


def _every(length: int, batch_size: int, chunk: int | None) -> int:
    """Samples of a chunk: the same for every worker, and enough chunks for all of them."""
    wanted = min(_CHUNK, length // 64) if chunk is None else chunk
    return max(1, wanted // batch_size) * batch_size


def _nothing() -> None:
    """Do nothing: only the first worker reduces."""


def _chunks_folder(folder: str | PathLike[str], dataset: Any, metrics: Metrics, batch_size: int, every: int) -> Path:
    """Create the folder for the chunks of this analysis, named by a hash of its inputs, and return its path.

    Another analysis has another name, so that its chunks are not used for this analysis.
    """
    code = [getattr(function, "__code__", None) for function in metrics.functions]
    known = [None if c is None else c.co_code.hex() + repr(c.co_consts) for c in code]
    mark = getattr(dataset, "fingerprint", None)
    identity = [len(dataset), mark, list(metrics.names), list(metrics.types), known, batch_size, every]
    mark = hashlib.blake2b(json.dumps(identity, default=str).encode(), digest_size=6).hexdigest()
    place = Path(folder) / f"chunks-{mark}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def _checked(name: str, result: Any, kind: MetricType, dtype: Any) -> Values:
    values = result.detach().cpu().numpy() if isinstance(result, torch.Tensor) else result
    wanted = (
        None if dtype is None else np.dtype(str(dtype).rpartition(".")[2] if isinstance(dtype, torch.dtype) else dtype)
    )
    if (
        not isinstance(values, np.ndarray)
        or values.dtype.kind not in "iub"
        or (wanted is not None and values.dtype != wanted)
    ):
        actual = values.dtype if isinstance(values, np.ndarray) else type(result).__name__
        raise ConfigError(
            f"metric {name} gave {actual}, expected {'integers' if wanted is None else wanted}",
            code="data-analysis",
            fix="Return a tensor or an array of whole numbers, of the dtype that was announced.",
        )
    return values.reshape(-1) if kind == "single_value_per_sample" else values


def _same_number(name: str, values: Values, places: range) -> None:
    if len(values) != len(places):
        raise ConfigError(
            f"metric {name} gave {len(values)} values for {len(places)} samples, from {places.start} on",
            code="data-analysis",
            fix="Return one value a sample, or announce accumulate_value_over_samples.",
        )


def _ids(batch: Any, places: range, names: Sequence[int] | None) -> NDArray[np.int64]:
    if isinstance(batch, Mapping) and "index" in batch:
        index = batch["index"]
        ids = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index, np.int64)
        return ids.reshape(len(ids), -1)[:, 0]
    if names is not None:
        return np.array([int(names[i]) for i in places], np.int64)
    return np.arange(places.start, places.stop, dtype=np.int64)


def _write_values(path: Path, values: Values, ids: NDArray[np.int64]) -> None:
    kind = smallest_int_dtype(int(values.min(initial=0)), int(values.max(initial=0)))
    names = smallest_int_dtype(0, int(ids.max(initial=0)))
    by_id = np.argsort(ids, kind="stable")
    ordered_values = values[by_id] if bool((ids[by_id] == np.arange(len(ids))).all()) else values
    _write(f"{path}_sample_to_metric", ordered_values, np.ones(len(ordered_values), np.int64), kind)
    order = np.lexsort((ids, values))
    distinct, counts = np.unique(values, return_counts=True)
    samples = ids[order]
    _write(f"{path}_index_to_sample", samples, counts, names)
    _write(f"{path}_index_to_metric", distinct, np.ones(len(distinct), np.int64), kind)
    for share, value in _percentiles(dict(zip(distinct.tolist(), counts.tolist(), strict=True))):
        _log.info("%s: %d %% of the samples are at most %d", path.name, share, value)
    together = max(1, len(distinct) // 100)
    merged = [int(counts[at : at + together].sum()) for at in range(0, len(distinct), together)]
    _write(f"{path}_index_to_sample_percentile_merged", samples, merged, names)


def _write(path: str, values: Values, sizes: Any, dtype: Any = None) -> None:
    kind = smallest_int_dtype(int(values.min(initial=0)), int(values.max(initial=0))) if dtype is None else dtype
    with TokenWriter(path, kind, table="deepspeed") as out:
        out.add_flat(values.astype(kind), np.asarray(sizes, np.int64), ends_documents=False)
        out.end_document()


def _percentiles(counts: Mapping[int, int], every: int = 5) -> Iterator[tuple[int, int]]:
    """Yield (share in percent, value) for each `every` percent of samples, from the number of samples of each value."""
    total, reached, share = sum(counts.values()), 0, every
    for value in sorted(counts):
        reached += counts[value]
        while share <= 100 and reached * 100 >= total * share:
            yield share, value
            share += every

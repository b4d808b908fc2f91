"""An analyzer's files are those of sorting; whoever maps, and wherever it was interrupted."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_data import DataAnalyzer, Metrics, TokenFile, map_chunks, reduce_chunks
from ds_data.curriculum import DifficultyIndex


class Rows:
    """Sample i is [values[i]]; each look is noted, and one of them may fail."""

    def __init__(self, values: list[int], fails_at: int | None = None) -> None:
        self.values, self.fails_at, self.looks = values, fails_at, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == self.fails_at:
            raise OSError(f"sample {at} cannot be read")
        self.looks += 1
        return torch.tensor([self.values[at]])


def first(batch: torch.Tensor) -> torch.Tensor:
    return batch[:, 0]


def histogram(batch: torch.Tensor) -> np.ndarray:
    return np.bincount(batch[:, 0].numpy(), minlength=8)


BOTH: dict[str, Any] = {
    "metric_names": ["rarity", "counts"], "metric_functions": [first, histogram],
    "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
    "metric_dtypes": [torch.int64, torch.int64],
}  # fmt: skip


def check(folder: Path, values: list[int], names: list[int] | None = None) -> None:
    names = names or list(range(len(values)))
    groups = defaultdict(list)
    for name, value in zip(names, values, strict=True):
        groups[value].append(name)
    at = folder / "rarity" / "rarity"
    assert [item.tolist() for item in TokenFile(f"{at}_index_to_metric")] == [[value] for value in sorted(groups)]
    assert [item.tolist() for item in TokenFile(f"{at}_index_to_sample")] == [
        sorted(groups[value]) for value in sorted(groups)
    ]
    merged = TokenFile(f"{at}_index_to_sample_percentile_merged")
    assert merged.values.tolist() == [name for value in sorted(groups) for name in sorted(groups[value])]
    by_name = (
        [values[names.index(i)] for i in range(len(values))] if sorted(names) == list(range(len(values))) else values
    )
    assert TokenFile(f"{at}_sample_to_metric").values.tolist() == by_name
    counts = TokenFile(folder / "counts" / "counts_metric_value")[0].tolist()
    assert counts == [values.count(value) for value in range(8)]
    assert not list(folder.glob("chunks-*"))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_its_files_are_those_of_sorting(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("analysis")
    values = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=40))
    workers, batch, chunk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    names = data.draw(st.none() | st.permutations(range(len(values))))
    metrics = Metrics(BOTH["metric_names"], BOTH["metric_functions"], BOTH["metric_types"])
    for worker in data.draw(st.permutations(range(workers))):
        map_chunks(
            Rows(values), metrics, folder, batch_size=batch, sample_indices=names, part=(worker, workers), chunk=chunk
        )
    reduce_chunks(Rows(values), metrics, folder, batch_size=batch, chunk=chunk)
    check(folder, values, names)
    at = folder / "rarity" / "rarity"
    easy = DifficultyIndex(f"{at}_index_to_sample", f"{at}_index_to_metric", parts=7, length=len(values))
    assert sorted(easy(3).tolist()) == sorted(names[i] if names else i for i, v in enumerate(values) if v <= 3)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_workers_and_their_processes(tmp_path: Path, workers: int, threads: int) -> None:
    values = [i * 5 % 8 for i in range(50)]
    told = {**BOTH, "num_workers": workers, "num_threads": threads, "batch_size": 4, "save_path": tmp_path}
    made = [DataAnalyzer(Rows(values), worker_id=worker, **told) for worker in range(workers)]
    for worker in made:
        worker.run_map()
    made[0].run_reduce()
    check(tmp_path, values)


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    values, metrics = (
        [i % 8 for i in range(40)],
        Metrics(BOTH["metric_names"], BOTH["metric_functions"], BOTH["metric_types"]),
    )
    with pytest.raises(OSError, match="sample 25"):
        map_chunks(Rows(values, fails_at=25), metrics, tmp_path, chunk=10)
    with pytest.raises(ConfigError, match="2 of 4 chunks"):
        reduce_chunks(Rows(values), metrics, tmp_path, chunk=10)
    rest = Rows(values)
    assert (
        sum(map_chunks(rest, metrics, tmp_path, part=(worker, 3), chunk=10) for worker in range(3)) == rest.looks == 20
    )
    reduce_chunks(rest, metrics, tmp_path, chunk=10)
    check(tmp_path, values)


def test_chunks_of_another_function_are_not_taken(tmp_path: Path) -> None:
    values, kind = [1, 2, 3], ["single_value_per_sample"]
    map_chunks(Rows(values), Metrics(["rarity"], [lambda batch: batch[:, 0]], kind), tmp_path)  # type: ignore[arg-type]
    other = Metrics(["rarity"], [lambda batch: batch[:, 0] * 2], kind)  # type: ignore[arg-type]
    assert map_chunks(Rows(values), other, tmp_path) == 3


def test_a_batch_says_which_samples_it_has(tmp_path: Path) -> None:
    class Named(Rows):
        def __getitem__(self, at: int) -> Any:
            return {"text": super().__getitem__(at), "index": torch.tensor([len(self) - 1 - at])}

    values = [3, 1, 2, 1]
    DataAnalyzer(
        Named(values), batch_size=3, metric_names=["rarity"], metric_types=["single_value_per_sample"],
        metric_functions=[lambda batch: batch["text"][:, 0]], save_path=tmp_path,
    ).run_map_reduce()  # fmt: skip
    assert TokenFile(tmp_path / "rarity" / "rarity_sample_to_metric").values.tolist() == values[::-1]
    assert [i.tolist() for i in TokenFile(tmp_path / "rarity" / "rarity_index_to_sample")] == [[0, 2], [1], [3]]


def test_functions_of_the_callers(tmp_path: Path) -> None:
    log: list[Any] = []

    def init(thread: int, names: Any, types: Any, dtypes: Any, path: Any, worker: int) -> list[int]:
        log.append((thread, list(names), worker))
        return [0]

    def update(batch: Any, types: Any, dtypes: Any, functions: Any, results: list[int], start: int) -> None:
        results[0] += int(functions[0](batch).sum())
        log.append(start)

    def reduce(dataset: Any, names: Any, types: Any, path: Any, *numbers: int) -> None:
        log.append((len(dataset), numbers))

    told = {**BOTH, "batch_size": 2, "save_path": tmp_path, "custom_map_init": init, "custom_map_update": update}
    made = DataAnalyzer(
        Rows([1, 2, 3]), custom_map_finalize=lambda *told: log.append(told[-1]), custom_reduce=reduce, **told
    )
    made.run_map_reduce()
    assert log == [(0, ["rarity", "counts"], 0), 0, 2, [6], (3, (1, 1, 1))]
    with pytest.raises(ConfigError, match="2 of 3 custom map functions"):
        DataAnalyzer(Rows([1]), **told)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"metric_types": ["single_value_per_sample"]}, "1 types"),
        ({"metric_types": ["mean", "mean"]}, "types"),
        ({"metric_names": ["../up", "counts"]}, "named"),
        ({"metric_names": ["same", "same"]}, "named"),
        ({"worker_id": 2, "num_workers": 2}, "worker 2 of 2"),
        ({"metric_dtypes": [torch.int32, torch.int64]}, "gave int64, expected int32"),
        ({"metric_functions": [lambda batch: batch[:, 0] * 0.5, histogram], "metric_dtypes": []}, "gave float32"),
        ({"metric_functions": [lambda batch: 3, histogram]}, "gave int,"),
        ({"metric_functions": [lambda batch: batch[:1, 0], histogram]}, "1 values for 2 samples"),
    ],
)
def test_metrics_that_do_not_fit(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DataAnalyzer(Rows([1, 2, 3]), **{**BOTH, "batch_size": 2, "save_path": tmp_path, **change}).run_map_reduce()


def test_a_process_that_fails_is_told(tmp_path: Path) -> None:
    made = DataAnalyzer(
        Rows(list(range(8)), fails_at=5), num_threads=2, save_path=tmp_path, **{**BOTH, "batch_size": 4}
    )
    with pytest.raises(ConfigError, match=r"processes \[1\] of worker 0 failed"):
        made.run_map()

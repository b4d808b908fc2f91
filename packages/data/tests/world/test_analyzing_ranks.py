"""An analysis by ranks is that of one process; what fails on one fails on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_config.errors import ConfigError
from ds_data import DistributedDataAnalyzer, TokenFile
from ds_testing import world


class Rows:
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 200

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == self.fails_at:
            raise OSError(f"sample {at} cannot be read")
        return torch.tensor([at * 7 % 11])


def analyzer(folder: Any, **change: Any) -> DistributedDataAnalyzer:
    told = {
        "metric_names": ["rarity", "sum"], "metric_functions": [lambda batch: batch[:, 0], lambda batch: batch.sum(0)],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"], "batch_size": 4, "save_path": folder,
    }  # fmt: skip
    return DistributedDataAnalyzer(change.pop("dataset", Rows()), **{**told, **change})


def check(folder: Path) -> None:
    analyzer(folder).run_map_reduce()
    values = [at * 7 % 11 for at in range(200)]
    found = TokenFile(folder / "rarity" / "rarity_index_to_sample")
    assert [item.tolist() for item in found] == [[i for i, v in enumerate(values) if v == value] for value in range(11)]
    assert TokenFile(folder / "sum" / "sum_metric_value")[0].tolist() == [sum(values)]


@world(2)
def test_two_ranks_share_the_work(tmp_path: Path) -> None:
    check(tmp_path)


@world(3)
def test_three_ranks_share_the_work(tmp_path: Path) -> None:
    check(tmp_path)


@world(2)
def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    fails = Rows(fails_at=199 if dist.get_rank() == 1 else None)
    with pytest.raises((OSError, ConfigError), match="sample 199 cannot be read"):
        analyzer(tmp_path, dataset=fails).run_map_reduce()
    analyzer(tmp_path).run_map_reduce()
    assert TokenFile(tmp_path / "rarity" / "rarity_sample_to_metric").num_tokens == 200

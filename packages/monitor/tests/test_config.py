"""The configuration sections: the schema's keys and defaults, and the sinks that come of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ds_config
import ds_monitor as m
from ds_config.errors import ConfigError
from ds_monitor.config import MonitorConfig, make_sinks


def test_defaults_are_the_schemas_and_make_no_sink() -> None:
    config = ds_config.load(MonitorConfig, {})
    assert make_sinks(config) == []
    assert config.tensorboard.job_name == config.csv_monitor.job_name == "DeepSpeedJobName"
    assert config.wandb.project == "deepspeed"
    assert config.comet.samples_log_interval == 100
    assert config.timers.throughput.enabled
    assert config.timers.throughput.synchronized


def test_enabled_sections_make_sinks_on_rank_0_only(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    source = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "tb"), "job_name": "job"},
    }
    config = ds_config.load(MonitorConfig, source)
    assert make_sinks(config, rank=1) == []
    m.configure(make_sinks(config, rank=0))
    m.set_step(1, samples=32)
    m.gauge("Train/Samples/lr", 0.1)
    m.shutdown()
    assert (tmp_path / "csv/job/Train_Samples_lr.csv").read_text().splitlines() == ["step,lr", "32,0.1"]
    assert len(list((tmp_path / "tb/job").glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"csv_monitor": {"enable": True}}, "enabled"),
        ({"tensor_board": {}}, "tensorboard"),
        ({"comet": {"mode": "make"}}, "get_or_create"),
        ({"timers": {"throughput": {"synchronised": False}}}, "synchronized"),
    ],
)
def test_a_typo_names_the_key_that_was_meant(source: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ds_config.load(MonitorConfig, source)

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


def test_any_sink_by_its_name_on_rank_0_or_on_each(tmp_path: Path) -> None:
    asked = [
        {"sink": "csv", "ranks": "all", "options": {"directory": str(tmp_path / "csv")}},
        {"sink": "jsonl", "options": {"path": str(tmp_path / "a.jsonl"), "kinds": ["gauge"]}},
        {"sink": "memory", "ranks": "all"},
    ]
    config = ds_config.load(MonitorConfig, {"monitor": {"sinks": asked}})
    assert [sink.label for sink in make_sinks(config, rank=1)] == ["CsvSink", "MemorySink"]
    for rank in (0, 1):
        m.configure(make_sinks(config, rank=rank))
        m.set_step(1)
        m.gauge("loss", rank)
        m.counter("tokens", 3)
        m.shutdown()
        assert (tmp_path / f"csv/rank{rank}/loss.csv").read_text().splitlines() == ["step,loss", f"1,{rank}.0"]
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1


def test_an_option_that_a_sink_has_not_names_the_nearest() -> None:
    config = ds_config.load(MonitorConfig, {"monitor": {"sinks": [{"sink": "csv", "options": {"directry": "x"}}]}})
    with pytest.raises(ConfigError, match="directry") as caught:
        make_sinks(config)
    assert caught.value.code == "monitor-sink-options"
    assert "Did you mean `directory`?" in caught.value.fix


def test_a_key_among_the_options_is_given_to_the_sink_and_never_shown() -> None:
    source = {"sink": "comet", "options": {"api_key": "s3cr3t", "project": "p"}}
    config = ds_config.load(MonitorConfig, {"monitor": {"sinks": [source]}})
    assert "s3cr3t" not in config.model_dump_json() + repr(config)
    assert config.monitor.sinks[0].known() == source["options"]


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = [{"sink": "jsonl", "options": {"path": str(tmp_path / "file" / "a.jsonl")}}, {"sink": "memory"}]
    config = ds_config.load(MonitorConfig, {"monitor": {"sinks": asked}})
    with pytest.warns(RuntimeWarning, match="jsonl could not start"):
        assert len(make_sinks(config)) == 1

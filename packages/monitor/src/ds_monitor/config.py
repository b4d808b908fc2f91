"""The configuration sections that ds-monitor owns, and the sinks they ask for.

Imported only by who reads a configuration: this module needs pydantic, `import ds_monitor` does not. The keys and their
defaults are those of DeepSpeed's schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from ds_config import StrictModel
from ds_monitor.api import Sink
from ds_monitor.sinks import CometSink, CsvSink, TensorBoardSink, WandbSink

__all__ = [
    "CometConfig",
    "CsvMonitorConfig",
    "MonitorConfig",
    "TensorBoardConfig",
    "ThroughputTimerConfig",
    "TimersConfig",
    "WandbConfig",
    "make_sinks",
]


class TensorBoardConfig(StrictModel):
    """`tensorboard`: event files in `<output_path>/<job_name>`."""

    enabled: bool = False
    output_path: str = ""  # empty: the working directory
    job_name: str = "DeepSpeedJobName"


class CsvMonitorConfig(StrictModel):
    """`csv_monitor`: one CSV file per metric in `<output_path>/<job_name>`."""

    enabled: bool = False
    output_path: str = ""  # empty: the working directory
    job_name: str = "DeepSpeedJobName"


class WandbConfig(StrictModel):
    """`wandb`: Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(StrictModel):
    """`comet`: Comet. `samples_log_interval` is the least number of samples between two rows sent."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: SecretStr | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class ThroughputTimerConfig(StrictModel):
    """`timers.throughput`: whether speed is measured, and whether the device is waited for when it is read."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(StrictModel):
    """`timers`."""

    throughput: ThroughputTimerConfig = ThroughputTimerConfig()


class MonitorConfig(StrictModel):
    """The sections together, under the names they have in a configuration file; a whole configuration may inherit this."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    timers: TimersConfig = TimersConfig()
    wall_clock_breakdown: bool = False


def make_sinks(config: MonitorConfig, *, rank: int = 0) -> list[Sink]:
    """Make the sinks that the sections enable; none on ranks other than 0. Metrics lie over samples, as the schema's do.

    Raises:
        UnsupportedError: a section is enabled whose package is not installed ("monitor-extra").
    """
    sinks: list[Sink] = []
    if rank != 0:
        return sinks
    if config.tensorboard.enabled:
        sinks.append(
            TensorBoardSink(Path(config.tensorboard.output_path) / config.tensorboard.job_name, axis="samples")
        )
    if config.csv_monitor.enabled:
        sinks.append(CsvSink(Path(config.csv_monitor.output_path) / config.csv_monitor.job_name, axis="samples"))
    if config.wandb.enabled:
        section = config.wandb
        sinks.append(WandbSink(axis="samples", project=section.project, group=section.group, entity=section.team))
    if config.comet.enabled:
        options = config.comet.model_dump(exclude={"enabled"})
        key = config.comet.api_key
        options["api_key"] = None if key is None else key.get_secret_value()
        sinks.append(CometSink(axis="samples", **options))
    return sinks

"""The configuration sections that ds-monitor owns, and the sinks they ask for.

Imported only by who reads a configuration: this module needs pydantic, `import ds_monitor` does not. The keys and their
defaults are those of DeepSpeed's schema.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from ds_config import StrictModel
from ds_config.errors import DsError
from ds_monitor.recording import Sink
from ds_monitor.sinks import BackgroundSink, CometSink, CsvSink, TensorBoardSink, WandbSink
from ds_monitor.sinks.sink_registry import make_sink, takes_rank

__all__ = [
    "CometConfig",
    "CsvMonitorConfig",
    "MonitorConfig",
    "MonitorSection",
    "SinkConfig",
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


_SECRET = re.compile(r"key|token|secret|password|headers", re.IGNORECASE)


class SinkConfig(StrictModel):
    """One sink of `monitor.sinks`."""

    sink: str = Field(
        description="Its name: `jsonl`, `prometheus`, `opentelemetry`, `mlflow`, or any that an installed package registers."
    )
    ranks: Literal["lead", "all"] = Field(
        default="lead", description="Rank 0 alone, or one on each rank, with files, ports or runs of its own."
    )
    options: dict[str, Any] = Field(
        default={},
        description="What the sink is made with. A value whose name tells of a key or password is never shown.",
    )

    @field_validator("options")
    @classmethod
    def _hide(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {key: SecretStr(v) if _SECRET.search(key) and isinstance(v, str) else v for key, v in options.items()}

    def known(self) -> dict[str, Any]:
        """Return the options for the sink's constructor, with secrets revealed."""
        return {key: v.get_secret_value() if isinstance(v, SecretStr) else v for key, v in self.options.items()}


class MonitorSection(StrictModel):
    """`monitor`: sinks beside those of DeepSpeed's schema, and what utilisation is measured against."""

    sinks: list[SinkConfig] = Field(default=[], description="Who else listens.")
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="What one device does at best, in 1e12 operations a second: reports model FLOPs utilisation.",
    )


class MonitorConfig(StrictModel):
    """The sections together, under the names they have in a configuration file; a whole configuration may inherit this."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    monitor: MonitorSection = Field(
        default=MonitorSection(), description="Sinks beside those of the schema's sections."
    )
    timers: TimersConfig = TimersConfig()
    wall_clock_breakdown: bool = False


def make_sinks(config: MonitorConfig, *, rank: int = 0) -> list[Sink]:
    """Make the sinks that the configuration asks for on this rank: the sections' on rank 0, `monitor.sinks` where they say.

    Each is written by a thread of its own. One that cannot start (a port in use, a folder that is not writable) is left out with a
    warning; the others go on. The sections' metrics lie over samples, as the schema's do.

    Raises:
        UnsupportedError: a sink's package is not installed ("monitor-extra"); nothing is called so ("monitor-sink").
        ConfigError: a sink has no such option ("monitor-sink-options").
    """
    started = [_started(name, make) for name, make in _makers(config, rank)]
    return [BackgroundSink(sink) for sink in started if sink is not None]


def _started(name: str, make: Callable[[], Sink]) -> Sink | None:
    try:
        return make()
    except DsError:
        raise
    except Exception as error:
        warnings.warn(
            f"monitor sink {name} could not start; training goes on without it: {error!r}", RuntimeWarning, stacklevel=4
        )
        return None


def _makers(config: MonitorConfig, rank: int) -> list[tuple[str, Callable[[], Sink]]]:
    makers: list[tuple[str, Callable[[], Sink]]] = []
    board, table, weights, comet = config.tensorboard, config.csv_monitor, config.wandb, config.comet
    if rank == 0 and board.enabled:
        folder = Path(board.output_path) / board.job_name
        makers.append(("tensorboard", partial(TensorBoardSink, folder, axis="samples")))
    if rank == 0 and table.enabled:
        makers.append(("csv_monitor", partial(CsvSink, Path(table.output_path) / table.job_name, axis="samples")))
    if rank == 0 and weights.enabled:
        named: dict[str, Any] = {"project": weights.project, "group": weights.group, "entity": weights.team}
        makers.append(("wandb", partial(WandbSink, axis="samples", **named)))
    if rank == 0 and comet.enabled:
        options = comet.model_dump(exclude={"enabled"})
        options["api_key"] = None if comet.api_key is None else comet.api_key.get_secret_value()
        makers.append(("comet", partial(CometSink, axis="samples", **options)))
    for entry in config.monitor.sinks:
        if entry.ranks == "all" or rank == 0:
            defaults = {"rank": rank} if entry.ranks == "all" and takes_rank(entry.sink) else {}
            makers.append((entry.sink, partial(make_sink, entry.sink, **{**defaults, **entry.known()})))
    return makers

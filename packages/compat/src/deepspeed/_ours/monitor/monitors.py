"""`deepspeed.monitor`: writers by class, for programs that write events of their own: [(name, value, samples), ...].

The engine's own metrics go through ds-monitor; these write with the same sinks, so that both are found in one place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_comm import world_group
from ds_monitor.sinks import CsvSink, WandbSink
from ds_monitor.sinks.sink import require

Event = tuple[str, Any, int]


class Monitor(ABC):
    """A writer of events; a program may bring its own.

    Attributes:
        monitor_config: The section it was made of.
        enabled: Whether it was asked for.
    """

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(getattr(monitor_config, "enabled", False))

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, value, samples) of each."""

    @property
    def _writes(self) -> bool:
        return self.enabled and world_group().rank == 0


class _FileMonitor(Monitor):
    """A monitor that writes below `output_path/job_name`."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.output_path, self.job_name = monitor_config.output_path, monitor_config.job_name

    @property
    def _folder(self) -> Path:
        return Path(self.output_path or "") / self.job_name


class TensorBoardMonitor(_FileMonitor):
    """Event files, on rank 0.

    Attributes:
        summary_writer: torch's, for figures and texts of the program's own; None on other ranks.
    """

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.summary_writer: Any = None
        if self.enabled:
            self.get_summary_writer()

    def get_summary_writer(self, base: str | None = None) -> Any:
        """Return the writer, which the first call creates.

        `base` is ignored: the folder comes from the section.
        """
        del base
        if self._writes and self.summary_writer is None:
            require("tensorboard", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter  # takes half a second, and an extra

            self.summary_writer = SummaryWriter(log_dir=str(self._folder))
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write each event as a scalar."""
        if self.summary_writer is None:
            return
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, value, samples)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Make visible what was written."""
        if self.summary_writer is not None:
            self.summary_writer.flush()


class csvMonitor(_FileMonitor):  # noqa: N801  upstream's spelling
    """A CSV file for each name, on rank 0.

    Attributes:
        log_dir: Where; None on other ranks.
    """

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self._sink = CsvSink(self._folder) if self._writes else None
        self.log_dir = str(self._folder) if self._writes else None
        if self.log_dir is not None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write each event as a row of the file of its name."""
        if self._sink is None:
            return
        for name, value, samples in event_list:
            self._sink.put(name.replace(" ", "_"), float(value), samples, 0.0)


class WandbMonitor(Monitor):
    """Weights & Biases, on rank 0."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        options = {"project": self.project, "group": self.group, "entity": self.team}
        self._sink = WandbSink(axis="samples", **options) if self._writes else None

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write all events as a single row."""
        if self._sink is None:
            return
        for name, value, samples in event_list:
            self._sink.put(name, float(value), samples, 0.0)
        self._sink.end_step(0)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None, sync: Any = None) -> None:
        """Log `data` to the run with `wandb.log`, on rank 0."""
        del sync
        if self._sink is not None:
            require("wandb", "wandb").log(data, step=step, commit=commit)


class CometMonitor(Monitor):
    """Comet, on rank 0.

    Attributes:
        samples_log_interval: Least number of samples between two values of one name.
        experiment: Comet's own; None on other ranks.
    """

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval = comet_config.samples_log_interval
        self.experiment: Any = None
        self._sent: dict[str, int] = {}
        if not self._writes:
            return
        key = comet_config.api_key
        same = ("project", "workspace", "experiment_key", "mode", "online")
        self.experiment = require("comet_ml", "comet").start(
            api_key=key.get_secret_value() if hasattr(key, "get_secret_value") else key,
            **{name: getattr(comet_config, name) for name in same},
        )
        if comet_config.experiment_name is not None:
            self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log each event as a metric, unless its name was logged less than `samples_log_interval` samples ago."""
        if self.experiment is None:
            return
        for name, value, samples in event_list:
            if name not in self._sent or samples - self._sent[name] >= self.samples_log_interval:
                self._sent[name] = samples
                self.experiment.log_metric(name, value, step=samples)


class MonitorMaster(Monitor):
    """All monitors that the sections ask for, on rank 0.

    Attributes:
        tb_monitor, csv_monitor, wandb_monitor, comet_monitor: Each, or None.
    """

    tb_monitor: TensorBoardMonitor | None
    csv_monitor: csvMonitor | None
    wandb_monitor: WandbMonitor | None
    comet_monitor: CometMonitor | None

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self._monitors: list[Monitor] = []
        for name, (kind, section_name) in _KINDS.items():
            section = getattr(monitor_config, section_name)
            monitor = kind(section) if section.enabled and world_group().rank == 0 else None
            setattr(self, name, monitor)
            self._monitors += [] if monitor is None else [monitor]

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events to each enabled monitor."""
        for monitor in self._monitors:
            monitor.write_events(event_list)


_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "tb_monitor": (TensorBoardMonitor, "tensorboard"),
    "wandb_monitor": (WandbMonitor, "wandb"),
    "csv_monitor": (csvMonitor, "csv_monitor"),
    "comet_monitor": (CometMonitor, "comet"),
}
"""Attributes of a `MonitorMaster`: the class, and its section."""

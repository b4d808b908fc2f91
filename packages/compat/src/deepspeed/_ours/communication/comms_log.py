"""`deepspeed.utils.comms_logging`, and the comms logger that `deepspeed.comm.configure` switches on.

What is collected is ds-comm's. Numbers are given in upstream's shape: {operation: {bytes: [count, [ms], [Gbps], [bus Gbps]]}}.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import ds_monitor
from ds_comm import world_group
from ds_comm.bandwidth import bandwidth
from ds_comm.config import CommsLoggerConfig
from ds_comm.logger import CommsLogger as Collector
from ds_monitor.stats import trimmed_mean

_TRIMMED = 0.1
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
_OURS = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
_switched: list[Collector] = []


def collector() -> Collector | None:
    """Return the active comms logger: that of `configure`, or else an engine's; None without any."""
    return next((sink for sink in (*_switched, *ds_monitor.active_sinks()) if isinstance(sink, Collector)), None)


def switch(config: CommsLoggerConfig) -> None:
    """Attach or detach this process's comms logger as the configuration says.

    Records collected before stay with the detached logger.
    """
    while _switched:
        ds_monitor.detach([_switched.pop()])
    if config.enabled:
        _switched.append(Collector(config))
        ds_monitor.attach(_switched)


def print_rank_0(message: str) -> None:
    """Print on rank 0."""
    if world_group().rank == 0:
        print(message)


def convert_size(size_bytes: int) -> str:
    """Format bytes in the largest unit that leaves a whole part, to two decimal places: "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    power = min((size_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {_UNITS[power]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Compute the algorithm and bus bandwidth in Gbps of an operation of `size` bytes a rank and `duration` ms."""
    speed = bandwidth(_OURS.get(comm_op, comm_op), size, world_group().size, duration / 1e3)
    return speed.algorithm_gbps, speed.bus_gbps


class CommsLogger:
    """Counts, latencies and bandwidths by operation and size, as upstream keeps them.

    Attributes:
        comms_dict: {operation: {bytes: [count, [ms], [Gbps], [bus Gbps]]}}.
    """

    def __init__(self) -> None:
        defaults = CommsLoggerConfig()
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.verbose, self.debug, self.enabled = defaults.verbose, defaults.debug, defaults.enabled
        self.prof_ops, self.prof_all = list(defaults.prof_ops), defaults.prof_all

    def configure(self, comms_config: Any) -> None:
        """Take the switches of a configuration."""
        section = getattr(comms_config, "comms_logger", comms_config)
        self.enabled = bool(getattr(comms_config, "comms_logger_enabled", getattr(section, "enabled", False)))
        if self.enabled:
            self.verbose, self.debug = section.verbose, section.debug
            self.prof_ops, self.prof_all = list(section.prof_ops), section.prof_all

    def start_profiling_comms(self) -> None:
        """Count every operation."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Count only what was asked for by name."""
        self.prof_all = False

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Count one operation that took `latency` ms."""
        speeds = calc_bw_log(raw_name, msg_size, latency)
        row = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        row[0] += 1
        for column, value in zip(row[1:], (latency, *speeds), strict=True):
            column.append(value)

    def has_data(self) -> bool:
        """Whether anything was counted."""
        return bool(self.comms_dict)

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Return a shallow copy of `comms_dict`; its rows are the same lists."""
        return dict(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of operations logged so far."""
        return sum(row[0] for sizes in self.comms_dict.values() for row in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return count and trimmed averages by message size; None for an operation that was not counted."""
        sizes = self.comms_dict.get(operation_name)
        return None if sizes is None else {size: _summed(size, row) for size, row in sizes.items()}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the table, or give it as data. Straggling ranks are told by `deepspeed.comm.log_summary`."""
        del show_straggler
        summaries = {name: self.get_operation_summary(name) for name in self.comms_dict}
        if print_log:
            _print(summaries)
        return _report(summaries, None) if return_dict else None


def _summed(size: int, row: list[Any]) -> dict[str, Any]:
    count, latencies, *speeds = row
    means = [trimmed_mean(numbers, _TRIMMED) for numbers in (latencies, *speeds)]
    return _counted(size, count) | dict(zip(_NUMBERS, (sum(latencies), *means), strict=True))


def _counted(size: int, count: int) -> dict[str, Any]:
    return {"count": count, "msg_size_bytes": size, "msg_size_str": convert_size(size)}


_NUMBERS = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
_HEAD = (
    "Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)",
)  # fmt: skip


def _print(summaries: dict[str, Any]) -> None:
    print("".join(f"{word:<20}" for word in _HEAD))
    for name, sizes in summaries.items():
        print(name)
        for size in sorted(sizes):
            row = sizes[size]
            cells = ["", row["msg_size_str"], str(row["count"]), *(f"{row[name]:.2f}" for name in _NUMBERS)]
            print("".join(f"{cell:<20}" for cell in cells))


def _report(summaries: dict[str, Any], straggling: dict[str, Any] | None) -> dict[str, Any]:
    world = world_group()
    stamp = datetime.now().isoformat()
    return {
        "summary": summaries,
        "straggler_analysis": straggling,
        "metadata": {"world_size": world.size, "rank": world.rank, "timestamp": stamp},
    }


def collected(logger: Collector | None, show_straggler: bool = False) -> dict[str, Any]:
    """Return the records of a comms logger in upstream's format.

    With `show_straggler` the call is collective over all ranks.
    """
    summaries: dict[str, Any] = {}
    straggling: dict[str, Any] = {}
    for row in [] if logger is None else logger.as_dict(show_straggler)["summary"]:
        size = row["message_bytes"]
        base = _counted(size, row["count"])
        ours = ("total_ms", "average_ms", "algorithm_gbps", "bus_gbps")
        summaries.setdefault(row["op"], {})[size] = base | {n: row[o] for n, o in zip(_NUMBERS, ours, strict=True)}
        if show_straggler:
            straggling.setdefault(row["op"], {})[size] = base | {
                "total_comm_lat_ms": row["comm_ms"],
                "total_straggler_ms": row["straggler_ms"],
                "avg_comm_lat_ms": row["comm_ms"] / row["count"],
                "avg_straggler_ms": row["straggler_ms"] / row["count"],
            }
    return _report(summaries, straggling if show_straggler else None)


def print_collected(report: dict[str, Any]) -> None:
    """Print the table of a report of `collected`, on rank 0."""
    if world_group().rank == 0:
        _print(report["summary"])

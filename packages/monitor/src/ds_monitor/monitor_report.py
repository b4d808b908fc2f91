"""This package's part of `ds report`: which sinks there are, and which of them lack a library."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec

from ds_config.report_tables import Check, PackageReport, ReportLevel
from ds_monitor.sinks.sink_registry import GROUP

__all__ = ["report"]

_LIBRARIES = {
    "comet": "comet_ml",
    "mlflow": "mlflow",
    "opentelemetry": "opentelemetry",
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def report(quick: bool = False) -> PackageReport:
    """Report every registered sink, without importing its libraries.

    `quick` makes no difference.
    """
    del quick
    return PackageReport(tuple(_sinks()))


def _sinks() -> Iterator[Check]:
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        library = _LIBRARIES.get(point.name) if point.value.startswith("ds_monitor.") else None
        if library is None or find_spec(library) is not None:
            package = point.dist.name if point.dist is not None else point.value
            yield Check("sinks", point.name, ReportLevel.FINE, f"of {package}")
        else:
            fix = f"pip install 'ds-monitor[{point.name}]'"
            yield Check("sinks", point.name, ReportLevel.INFO, f"{library} is not installed", fix)

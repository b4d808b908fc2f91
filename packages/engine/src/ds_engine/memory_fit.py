"""What fits: stages and tiers of a model on so many devices, from numbers alone. Pure; nothing runs, no device is looked at.

The answer for each row is a whole plan (`make_plan`) of bf16 training with Adam: parameters, gradients, masters and optimizer state in
shards, and what passes. Activations are not in it: they need `left_bytes`, what a device has beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_config.errors import ConfigError
from ds_config.sizes import bytes_text, parse_bytes
from ds_engine.config import load_config
from ds_engine.plan import Shapes
from ds_engine.planner import make_plan
from ds_zero.layout.units import ModuleInfo, ParamInfo

__all__ = ["DeviceCluster", "Fit", "cluster_of", "fit_table", "fits_of", "numel_of", "shapes_of_numbers", "size_of"]

_CLUSTER = re.compile(r"(?:(\d+)x)?(\d+)x([0-9.]+\s*[KMGTP]?(?:iB|B)?)", re.IGNORECASE)
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_CPU = {"device": "cpu", "pin_memory": True}
_TIERS: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "device": ((0, 1, 2, 3), {}),
    "optimizer in host memory": ((1, 2, 3), {"offload_optimizer": _CPU}),
    "optimizer and parameters in host memory": ((3,), {"offload_optimizer": _CPU, "offload_param": _CPU}),
}


@dataclass(frozen=True, slots=True)
class DeviceCluster:
    """So many devices of so much memory on each of so many hosts."""

    hosts: int
    devices: int
    device_bytes: int

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices


@dataclass(frozen=True, slots=True)
class Fit:
    """One stage and tier.

    Attributes:
        device_bytes: Of one device at most.
        host_bytes: Of one host, for all of its devices.
        left_bytes: Of one device, for activations; negative: it does not fit.
    """

    stage: int
    tier: str
    device_bytes: int
    host_bytes: int
    left_bytes: int

    @property
    def fits(self) -> bool:
        """Whether anything is left."""
        return self.left_bytes > 0


def size_of(text: str) -> int:
    """Parse a size into bytes. Raises ConfigError: the text is no size ("plan-size")."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error), code="plan-size", fix="Write bytes, or 64K, 16MiB, 80GB.") from error


def cluster_of(text: str) -> DeviceCluster:
    """Parse a cluster: `8x80GB` for devices of one host, `4x8x80GB` for four hosts.

    Raises:
        ConfigError: anything else ("plan-size").
    """
    match = _CLUSTER.fullmatch(text.strip())
    if match is None or int(match[2]) < 1 or int(match[1] or 1) < 1:
        raise ConfigError(
            f"{text!r} is no number of devices and their memory",
            code="plan-size",
            fix="Write 8x80GB, or 4x8x80GB for four hosts.",
        )
    return DeviceCluster(int(match[1] or 1), int(match[2]), size_of(match[3]))


def numel_of(text: str) -> int | None:
    """Parse `7B`, `350M` or `1.3e9` as a number of parameters; None where the text is no number."""
    match = _COUNT.fullmatch(text.strip())
    if match is not None:
        return int(float(match[1]) * _COUNTS[match[2].upper()])
    try:
        return int(float(text))
    except ValueError:
        return None


def shapes_of_numbers(numel: int, layers: int = 32) -> Shapes:
    """Build the shapes of a model with equal layers from its number of parameters.

    Raises ConfigError: no parameters or no layers ("plan-model").
    """
    if numel < 1 or layers < 1:
        raise ConfigError(
            f"a model of {numel} parameters in {layers} layers", code="plan-model", fix="Give at least one of each."
        )
    size, more = divmod(numel, layers)
    sizes = [size + (i < more) for i in range(layers)]
    params = tuple(ParamInfo(f"layer{i}.weight", (n,), "float32", f"layer{i}", 0) for i, n in enumerate(sizes) if n)
    return Shapes(params, (ModuleInfo(""), *(ModuleInfo(p.module) for p in params)))


def fits_of(cluster: DeviceCluster, shapes: Shapes) -> Iterator[Fit]:
    """Yield the memory fit of every stage and offload tier, by the bytes that a step moves: the least first."""
    for tier, (stages, section) in _TIERS.items():
        for stage in stages:
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": stage, **section},
            }
            zero = make_plan(load_config(config), shapes, cluster.world).zero
            device = zero.peak
            yield Fit(stage, tier, device, zero.host * cluster.devices, cluster.device_bytes - device)


def fit_table(cluster: DeviceCluster, shapes: Shapes) -> str:
    """Format the fits as a table, with the first that fits."""
    rows = list(fits_of(cluster, shapes))
    lines = [
        f"{shapes.numel:,} parameters, bf16 with Adam, on {cluster.world} devices of {bytes_text(cluster.device_bytes)}",
        f"{'stage':<7}{'states':<42}{'a device':>12}{'a host':>12}   left for activations",
    ]
    for row in rows:
        left = bytes_text(row.left_bytes) if row.fits else f"does not fit: {bytes_text(-row.left_bytes)} too much"
        lines.append(
            f"{row.stage:<7}{row.tier:<42}{bytes_text(row.device_bytes):>12}{bytes_text(row.host_bytes):>12}   {left}"
        )
    first = next((row for row in rows if row.fits), None)
    lines.append(
        "nothing fits: take more devices"
        if first is None
        else f"the first that fits: stage {first.stage}, {first.tier}"
    )
    return "\n".join(lines)

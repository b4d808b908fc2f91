"""The accelerators of this host, as far as can be seen without torch or a driver: environment and device files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_config.errors import ConfigError

__all__ = ["KINDS", "Devices", "find_devices", "restrict"]


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    variable: str  # what narrows the devices a process sees
    files: str  # one file per device, below /
    sign: str = ""  # a path that must exist too; device files of several makers look alike


KINDS = (
    _Kind("cuda", "CUDA_VISIBLE_DEVICES", "dev/nvidia[0-9]*"),
    _Kind("rocm", "HIP_VISIBLE_DEVICES", "dev/dri/renderD*", "dev/kfd"),
    _Kind("npu", "ASCEND_RT_VISIBLE_DEVICES", "dev/davinci[0-9]*"),
    _Kind("hpu", "HABANA_VISIBLE_MODULES", "dev/accel/accel[0-9]*", "dev/hl0"),
    _Kind("xpu", "ZE_AFFINITY_MASK", "dev/dri/renderD*", "sys/module/xe"),
)


@dataclass(frozen=True, slots=True)
class Devices:
    """What ranks of this host can use.

    Attributes:
        kind: name of the kind; empty when there is none.
        variable: the environment variable that narrows them; empty when there is none.
        visible: what the variable says now, or 0..n-1. Entries may be numbers, UUIDs (`GPU-...`) or MIG instances.
    """

    kind: str = ""
    variable: str = ""
    visible: tuple[str, ...] = ()


def find_devices(env: Mapping[str, str], root: Path = Path("/")) -> Devices:
    """Look for devices: a visible-devices variable that is set decides (also when it is empty), else the device files do."""
    for kind in KINDS:
        if kind.variable in env:
            entries = [entry.strip() for entry in env[kind.variable].split(",")]
            # CUDA reads up to the first entry that is no device: "-1" and "" end the list.
            end = next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
            return Devices(kind.name, kind.variable, tuple(entries[:end]))
    for kind in KINDS:
        count = len(list(root.glob(kind.files)))
        if count and (not kind.sign or (root / kind.sign).exists()):
            return Devices(kind.name, kind.variable, tuple(str(i) for i in range(count)))
    return Devices()


def restrict(devices: Devices, slots: Sequence[int]) -> dict[str, str]:
    """Return the variable that makes only the devices at positions `slots` visible; empty without devices.

    Raises:
        ConfigError: a position that no visible device has ("launch-devices").
    """
    if not devices.visible:
        return {}
    missing = [slot for slot in slots if slot >= len(devices.visible)]
    if missing:
        raise ConfigError(
            f"slots {', '.join(map(str, missing))} were asked for; this host shows {len(devices.visible)} devices "
            f"({devices.variable or 'devices'} = {','.join(devices.visible)})",
            code="launch-devices",
            fix=f"Slots count the visible devices from 0. Ask for fewer, or change {devices.variable}.",
        )
    return {devices.variable: ",".join(devices.visible[slot] for slot in slots)}

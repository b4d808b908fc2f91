"""Which device this process uses: forced by `DS_ACCELERATOR`, or the first in the detection order that works.

Nothing happens at import. Detection counts devices the cheap way (`device_count`, which torch answers from the management
library where it can), so it does not start a device in this process and does not spoil a later fork.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import torch

from ds_accel.accelerator import Accelerator
from ds_accel.device_facts import DETECTION_ORDER, TABLE, Capability, DeviceFacts
from ds_accel.probes import present
from ds_config.did_you_mean import nearest
from ds_config.errors import ConfigError, UnsupportedError

__all__ = [
    "ENTRY_POINTS",
    "Detection",
    "detect",
    "facts_of",
    "get_accelerator",
    "known_devices",
    "load_device",
    "set_accelerator",
]

ENTRY_POINTS = "ds_accel.devices"
FORCE = "DS_ACCELERATOR"


@dataclass(frozen=True, slots=True)
class Detection:
    """What was chosen, and what each device that was asked answered, in the order of asking."""

    accelerator: Accelerator
    tried: tuple[tuple[str, Capability], ...]

    def __str__(self) -> str:
        lines = [f"{'yes' if verdict else 'no ':3} {verdict.reason}" for _, verdict in self.tried]
        return "\n".join([*lines, f"using {self.accelerator.name}"])


def known_devices() -> tuple[str, ...]:
    """Return the names of all known devices in the order of detection, without importing any.

    Third-party devices come first, by name, then `DETECTION_ORDER`.
    """
    return _order(_others())


def _others() -> dict[str, EntryPoint]:
    """Return the entry points of third-party devices by name.

    Cost: reads the metadata of every installed distribution, some 10 ms.
    """
    entries: dict[str, EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        entries.setdefault(entry.name, entry)
    return entries


def _order(others: Collection[str]) -> tuple[str, ...]:
    return (*sorted(others), *(name for name in DETECTION_ORDER if name not in others))


def facts_of(name: str, others: Mapping[str, EntryPoint] | None = None) -> DeviceFacts:
    """Return the facts of a known device, from the third party's entry point of this name or from the table.

    An entry point that cannot be imported gives facts whose device does not load: the reason is shown where the device
    is
    requested, and other devices stay usable.

    Args:
        others: Third parties by name, where they are known already.
    Raises:
        ConfigError: the entry point's value is not a `DeviceFacts`, or a `DeviceFacts` of another name ("accel-plugin").
        KeyError: no device has this name.
    """
    entry = (_others() if others is None else others).get(name)
    if entry is None:
        return TABLE[name]
    try:
        facts = entry.load()
    except (ImportError, AttributeError):
        return DeviceFacts(name=name, torch_type=name, module=entry.module)
    if not isinstance(facts, DeviceFacts) or facts.name != name:
        described = f"the Facts of {facts.name!r}" if isinstance(facts, DeviceFacts) else f"a {type(facts).__name__}"
        raise ConfigError(
            f"the entry point {name} = {entry.value} of {ENTRY_POINTS} is {described}, not the Facts of {name!r}.",
            code="accel-plugin",
            fix="Correct the package that brings it, or uninstall it.",
        )
    return facts


def load_device(facts: DeviceFacts, environ: Mapping[str, str] = os.environ) -> tuple[Any, Capability]:
    """Import what a device needs and count its devices: (module, verdict). The module is None where the verdict is no."""
    verdict = present(facts, environ)
    if not verdict:
        return None, verdict
    try:
        if facts.vendor_package:
            importlib.import_module(facts.vendor_package)
        module = importlib.import_module(facts.module) if facts.module else torch.get_device_module(facts.torch_type)
    except (ImportError, OSError, RuntimeError) as error:
        # RuntimeError: torch does not know the type. OSError: a shared library of the vendor is missing.
        return None, Capability(False, f"{facts.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    try:
        count = int(module.device_count())
        if count > 0 and facts.probe:
            getattr(module, facts.probe)()
    except (RuntimeError, AttributeError) as error:
        return None, Capability(False, f"{facts.name}: asking for devices failed: {error}")
    if count < 1:
        return None, Capability(False, f"{facts.name}: torch {torch.__version__} finds no device")
    return module, Capability(True, f"{facts.name}: {count} device{'s' if count > 1 else ''}")


def detect(environ: Mapping[str, str] = os.environ) -> Detection:
    """Choose the device for this process.

    Args:
        environ: Read for `DS_ACCELERATOR` and for what vendors need; never changed.
    Raises:
        ConfigError: `DS_ACCELERATOR` names no known device ("accel-unknown"; lists them).
        UnsupportedError: the forced device does not work here ("accel-unavailable"; says what is missing).
    """
    forced, others = environ.get(FORCE, "").strip().lower(), _others()
    if forced:
        return _forced(forced, environ, others)
    tried: list[tuple[str, Capability]] = []
    for name in _order(others):
        facts = facts_of(name, others)
        module, verdict = load_device(facts, environ)
        tried.append((name, verdict))
        if verdict:
            return Detection(Accelerator(facts, module), tuple(tried))
    raise UnsupportedError(
        "no device works here, not even the CPU:\n" + "\n".join(f"  {verdict.reason}" for _, verdict in tried),
        code="accel-unavailable",
        fix="Reinstall torch.",
    )


def _forced(name: str, environ: Mapping[str, str], others: Mapping[str, EntryPoint]) -> Detection:
    known = _order(others)
    if name not in known:
        close = nearest(name, known)
        raise ConfigError(
            f"{FORCE}={name!r} is no known device; known are {', '.join(sorted(known))}.",
            code="accel-unknown",
            fix=f"Did you mean {close[0]!r}?"
            if close
            else f"Unset {FORCE}, or install the package that brings the device.",
        )
    facts = facts_of(name, others)
    module, verdict = load_device(facts, environ)
    if not verdict:
        raise UnsupportedError(
            f"{FORCE}={name!r} cannot be used here. {verdict.reason}.",
            code="accel-unavailable",
            fix=f"Install what is missing, or unset {FORCE} to take what is there.",
        )
    return Detection(Accelerator(facts, module), ((name, verdict),))


_current: list[Accelerator] = []


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process; the first call detects it (see `detect`)."""
    if not _current:
        _current.append(detect().accelerator)
    return _current[0]


def set_accelerator(accelerator: Accelerator | None) -> None:
    """Use `accelerator` in this process from now on; None: detect again at the next call."""
    _current[:] = [] if accelerator is None else [accelerator]

"""Rules applied to one machine: verdicts with their reasons.

A probe is a plain function of facts, a device module and an index, so that a fake module tests it. The devices that one process
sees are taken to be alike: index 0 stands for all unless another is given.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from ds_accel.device_facts import Capability, CapabilityRule, CommBackend, DeviceFacts

__all__ = [
    "comm_backend",
    "find_package",
    "graphs",
    "judge",
    "present",
    "supports",
    "triton",
    "visible_devices",
    "visible_env",
]


def find_package(name: str) -> bool:
    """Whether `name` (dotted) can be imported, without importing it; its parents are."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def judge(rule: CapabilityRule, module: Any, index: int, what: str) -> Capability:
    """Apply a rule to device `index` of `module`; `what` names the capability in the reason."""
    if rule.ask:
        ask = getattr(module, rule.ask, None)
        if ask is None:
            return Capability(False, f"{what}: {_name(module)} has no {rule.ask}() to ask")
        return Capability(bool(ask()), f"{what}: {rule.ask}() says so")
    if not rule.ok:
        return Capability(False, f"{what}: {rule.note}")
    needed = rule.min_capability or rule.native_from
    if needed is None:
        return Capability(True, f"{what}: {rule.note or 'supported'}")
    capability = _capability(module, index)
    if capability is None:
        return Capability(rule.native_from is not None, f"{what}: {_name(module)} does not tell its compute capability")
    enough = capability >= needed
    comparison = f"compute capability {_dots(capability)} {'>=' if enough else '<'} {_dots(needed)}"
    if rule.min_capability is None:
        return Capability(True, f"{what}: {'native' if enough else 'emulated'}, {comparison}")
    return Capability(enough, f"{what}: {comparison}")


def supports(facts: DeviceFacts, module: Any, dtype: str, index: int = 0) -> Capability:
    """Whether tensors of `dtype` ("bfloat16") can be computed with on device `index`."""
    rule = facts.dtypes.get(dtype, facts.dtypes.get("float32", CapabilityRule()))
    return judge(rule, module, index, f"{dtype} on {facts.name}")


def graphs(facts: DeviceFacts, module: Any) -> Capability:
    """Whether work can be recorded once and replayed."""
    if not facts.graph_class:
        return Capability(False, f"graphs on {facts.name}: this device has none")
    if not hasattr(module, facts.graph_class):
        return Capability(False, f"graphs on {facts.name}: {_name(module)} has no {facts.graph_class}")
    return Capability(True, f"graphs on {facts.name}: {facts.graph_class}")


def triton(facts: DeviceFacts, module: Any, index: int = 0) -> Capability:
    """Whether Triton kernels can run on device `index`."""
    verdict = judge(facts.triton, module, index, f"Triton on {facts.name}")
    if verdict and not find_package("triton"):
        return Capability(False, f"Triton on {facts.name}: the package triton is not installed")
    return verdict


def comm_backend(facts: DeviceFacts, platform: str = sys.platform) -> str:
    """Return the torch.distributed backend for this device; empty when no backend of the facts fits this machine."""

    def fits(backend: CommBackend) -> bool:
        return backend.platform in ("", platform) and (not backend.package or find_package(backend.package))

    return next((backend.name for backend in facts.backends if fits(backend)), "")


def present(facts: DeviceFacts, environ: Mapping[str, str] = os.environ) -> Capability:
    """Whether the vendor's software for the device is there, as far as can be known without importing or starting it."""
    if facts.vendor_package and not find_package(facts.vendor_package):
        return Capability(False, f"{facts.name}: the package {facts.vendor_package} is not installed")
    missing = [name for name in facts.needs_env if name not in environ]
    if missing:
        return Capability(False, f"{facts.name}: the environment has no {', '.join(missing)}")
    return Capability(True, f"{facts.name}: its software is installed")


def visible_devices(facts: DeviceFacts, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the devices that `environ` makes visible, as written there (ids, UUIDs).

    None when the variable is unset or the device has no such variable.
    """
    text = environ.get(facts.visible_env) if facts.visible_env else None
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def visible_env(facts: DeviceFacts, devices: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variable that makes only `devices` visible to a process.

    Empty where the device has no such variable.
    """
    return {facts.visible_env: ",".join(devices)} if facts.visible_env else {}


def _capability(module: Any, index: int) -> tuple[int, int] | None:
    read = getattr(module, "get_device_capability", None)
    capability = read(index) if read is not None else None
    # xpu and others answer with a dictionary of properties, which has no order.
    return (int(capability[0]), int(capability[1])) if isinstance(capability, tuple) else None


def _dots(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _name(module: Any) -> str:
    return str(getattr(module, "__name__", type(module).__name__))

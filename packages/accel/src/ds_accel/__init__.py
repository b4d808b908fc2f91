"""One accelerator interface over torch's device modules, described by a table of facts per device."""

from ds_accel.accelerator import Accelerator
from ds_accel.detection import Detection, detect, get_accelerator, known_devices, set_accelerator
from ds_accel.device_facts import TABLE, CommBackend, DeviceFacts, CapabilityRule, Capability
from ds_accel.device_memory import ProcessMemory, MemoryStats, host_memory
from ds_accel.pinned import PinnedBuffer, PinnedMemoryError, PinnedPool, PoolStats
from ds_accel.rng import RngError, RngStreams, derive_seed
from ds_accel.device_timer import DeviceTimer

__all__ = [
    "TABLE",
    "Accelerator",
    "CommBackend",
    "Detection",
    "DeviceFacts",
    "ProcessMemory",
    "MemoryStats",
    "PinnedBuffer",
    "PinnedMemoryError",
    "PinnedPool",
    "PoolStats",
    "RngError",
    "RngStreams",
    "CapabilityRule",
    "DeviceTimer",
    "Capability",
    "derive_seed",
    "detect",
    "get_accelerator",
    "host_memory",
    "known_devices",
    "set_accelerator",
]

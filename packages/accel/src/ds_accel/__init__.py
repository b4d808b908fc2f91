"""One accelerator interface over torch's device modules, described by a table of facts per device."""

from ds_accel._torch import storage_uses
from ds_accel.accelerator import Accelerator
from ds_accel.detection import Detection, detect, get_accelerator, known_devices, set_accelerator
from ds_accel.determinism import deterministic
from ds_accel.device_facts import TABLE, Capability, CapabilityRule, CommBackend, DeviceFacts
from ds_accel.device_memory import MemoryStats, ProcessMemory, host_memory
from ds_accel.device_timer import DeviceTimer
from ds_accel.pinned import PinnedBuffer, PinnedMemoryError, PinnedPool, PoolStats
from ds_accel.rng import RngError, RngStreams, derive_seed, preserve_random_streams

__all__ = [
    "TABLE",
    "Accelerator",
    "Capability",
    "CapabilityRule",
    "CommBackend",
    "Detection",
    "DeviceFacts",
    "DeviceTimer",
    "MemoryStats",
    "PinnedBuffer",
    "PinnedMemoryError",
    "PinnedPool",
    "PoolStats",
    "ProcessMemory",
    "RngError",
    "RngStreams",
    "derive_seed",
    "detect",
    "deterministic",
    "get_accelerator",
    "host_memory",
    "known_devices",
    "preserve_random_streams",
    "set_accelerator",
    "storage_uses",
]

"""What differs between devices, as data: one frozen `DeviceFacts` per device in one table.

Nothing here imports torch, asks a driver or reads the environment; `detection.py` and `accelerator.py` do.

Words: a *rule* says when a capability is there; a *verdict* is a rule applied to one machine, with its reason; the *module*
is the device's Python face (`torch.cuda`, `torch.npu`, ...) as `torch.get_device_module` returns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["DETECTION_ORDER", "TABLE", "Capability", "CapabilityRule", "CommBackend", "DeviceFacts"]


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether something is possible here, and why. True and false in conditions."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class CapabilityRule:
    """When a capability is there.

    Attributes:
        ok: The answer where nothing below is set.
        min_capability: Needs at least this compute capability (major, minor).
        native_from: Works below this compute capability too, but emulated.
        ask: Name of a function of the device's module that answers, without arguments.
        note: Said with the verdict.
    """

    ok: bool = True
    min_capability: tuple[int, int] | None = None
    native_from: tuple[int, int] | None = None
    ask: str = ""
    note: str = ""


YES = CapabilityRule()
NO = CapabilityRule(ok=False, note="this device has none")


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_NO_FLOAT8 = {name: CapabilityRule(ok=False, note="no float8 arithmetic here") for name in _FLOAT8}
_ALL_FLOATS = {"float32": YES, "bfloat16": YES, "float16": YES, **_NO_FLOAT8}
_NO_FLOAT64 = {"float64": CapabilityRule(ok=False, note="the device has no float64")}


@dataclass(frozen=True, slots=True)
class CommBackend:
    """A torch.distributed backend and when it is the one to take: its package is there, and this is its platform."""

    name: str
    package: str = ""
    platform: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Everything about one kind of device that torch does not say itself.

    Attributes:
        name: What users call it (`DS_ACCELERATOR=<name>`).
        torch_type: Type of its torch.device.
        module: Import path of its module where torch has no attribute of that type; usually empty.
        vendor_package: Import that makes the device known to torch; empty for devices that torch has in-tree.
        probe: A function of the module that must run for the device to count as working; may be empty.
        needs_env: Environment variables without which the vendor's software does not work.
        backends: torch.distributed backends, the first that fits is taken; empty: what torch has registered for the type.
        visible_env: Environment variable that lists the devices a process may see; empty: there is none.
        exported_prefixes: Environment variables whose names begin so belong on every node of a job.
        launch_env: (name, value) of variables that a launcher should set for a rank before it starts.
        dtypes: Rule by dtype name as in torch ("bfloat16"); a dtype that is not listed is as "float32".
        graph_class: Class of the module that records and replays a stream of kernels; empty: there is none.
        triton: When Triton kernels run.
        compile_backend: torch.compile backend.
        pinned: Whether page-locked host memory makes copies faster.
        synchronous: Whether an operation is done when its call returns.
        host_timers: Whether time is measured on the host because the device has no timing events.
        resolves_data_dependency: Whether the device orders operations of different streams on the same data itself.
        handles_memory_backpressure: Whether the device waits for memory instead of failing.
        ranges: Object of the module that has range_push and range_pop; empty: there is none.
    """

    name: str
    torch_type: str
    module: str = ""
    vendor_package: str = ""
    probe: str = ""
    needs_env: tuple[str, ...] = ()
    backends: tuple[CommBackend, ...] = ()
    visible_env: str = ""
    exported_prefixes: tuple[str, ...] = ()
    launch_env: tuple[tuple[str, str], ...] = ()
    dtypes: Mapping[str, CapabilityRule] = field(default_factory=lambda: MappingProxyType(_ALL_FLOATS))
    graph_class: str = ""
    triton: CapabilityRule = NO
    compile_backend: str = "inductor"
    pinned: bool = True
    synchronous: bool = False
    host_timers: bool = False
    resolves_data_dependency: bool = False
    handles_memory_backpressure: bool = False
    ranges: str = ""


_ROWS = (
    DeviceFacts(
        name="cpu",
        torch_type="cpu",
        backends=(CommBackend("ccl", package="oneccl_bindings_for_pytorch"), CommBackend("gloo")),
        dtypes={
            **_ALL_FLOATS,
            "float16": CapabilityRule(note="through float32 on CPUs without float16 arithmetic: right, but slow"),
        },
        pinned=False,
        synchronous=True,
        host_timers=True,
    ),
    DeviceFacts(
        name="cuda",  # ROCm too: torch shows AMD devices as "cuda"
        torch_type="cuda",
        backends=(CommBackend("gloo", platform="win32"), CommBackend("nccl")),
        visible_env="CUDA_VISIBLE_DEVICES",
        exported_prefixes=("NCCL",),
        dtypes={
            "float32": YES,
            "bfloat16": CapabilityRule(native_from=(8, 0)),
            "float16": CapabilityRule(min_capability=(7, 0)),
            **{name: CapabilityRule(min_capability=(8, 9)) for name in _FLOAT8},
        },
        graph_class="CUDAGraph",
        triton=CapabilityRule(min_capability=(8, 0)),
        ranges="nvtx",
    ),
    DeviceFacts(
        name="xpu",
        torch_type="xpu",
        backends=(CommBackend("ccl", package="oneccl_bindings_for_pytorch"), CommBackend("xccl")),
        visible_env="ZE_AFFINITY_MASK",
        triton=CapabilityRule(ok=False, note="not validated on xpu"),
    ),
    DeviceFacts(
        name="npu",
        torch_type="npu",
        vendor_package="torch_npu",
        needs_env=("ASCEND_HOME_PATH",),
        backends=(CommBackend("hccl"),),
        visible_env="ASCEND_RT_VISIBLE_DEVICES",
        exported_prefixes=("ASCEND", "HCCL", "LD_LIBRARY", "PATH"),
    ),
    DeviceFacts(
        name="sdaa",
        torch_type="sdaa",
        vendor_package="torch_sdaa",
        backends=(CommBackend("tccl"),),
        visible_env="SDAA_VISIBLE_DEVICES",
        exported_prefixes=("NCCL", "LD_LIBRARY", "PATH"),
    ),
    DeviceFacts(
        name="mps",
        torch_type="mps",
        probe="current_allocated_memory",
        backends=(CommBackend("gloo"),),
        dtypes={**_ALL_FLOATS, **_NO_FLOAT64},
        pinned=False,
        host_timers=True,
    ),
    DeviceFacts(
        name="hpu",
        torch_type="hpu",
        vendor_package="habana_frameworks.torch",
        backends=(CommBackend("hccl"),),
        visible_env="HABANA_VISIBLE_MODULES",
        launch_env=(("PT_HPU_LAZY_ACC_PAR_MODE", "0"), ("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "0")),
        dtypes={**_ALL_FLOATS, "float16": CapabilityRule(ask="is_fp16_supported")},
        graph_class="HPUGraph",
        compile_backend="hpu_backend",
        resolves_data_dependency=True,
        handles_memory_backpressure=True,
    ),
    DeviceFacts(
        name="mlu",
        torch_type="mlu",
        vendor_package="torch_mlu",
        backends=(CommBackend("cncl"),),
        visible_env="MLU_VISIBLE_DEVICES",
        exported_prefixes=("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"),
        graph_class="MLUGraph",
        triton=YES,
    ),
    DeviceFacts(
        name="supa",
        torch_type="supa",
        vendor_package="torch_supa",
        backends=(CommBackend("gloo", platform="win32"), CommBackend("bccl")),
        visible_env="SUPA_VISIBLE_DEVICES",
        exported_prefixes=("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH"),
        graph_class="SUPAGraph",
        triton=YES,
    ),
)

TABLE: Mapping[str, DeviceFacts] = MappingProxyType({facts.name: facts for facts in _ROWS})
"""The devices that are known without anything installed, by name."""

# supa stands before cuda because its package also answers as torch.cuda.
DETECTION_ORDER = ("xpu", "npu", "sdaa", "mps", "hpu", "mlu", "supa", "cuda", "cpu")
"""Who is asked first. Third parties come before all of these, in the order of their names."""

"""Judges a machine: facts in, findings out. Pure; `ds_ops.machine` reads the facts, `ds report` shows the findings.

Words: a *check* is one fact with its verdict (`ds_config.report_tables`); an *op row* says which backend runs an op for a kind of tensors
and why better ones do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_config.report_tables import Check, ReportLevel
from ds_ops.machine import Machine, ProbeStage
from ds_ops.toolchain import Tool

__all__ = ["Check", "Diagnosis", "OpRow", "ReportLevel", "diagnose"]

_SMALL_SHM = 512 << 20
_LEVELS = ("baseline", "avx2", "avx512", "neon")
_REFERENCE = "reference"
_MAX_TRIAL_DIFFERENCE = 1e-5


@dataclass(frozen=True, slots=True)
class OpRow:
    """Which backend runs `op` for tensors of `dtypes` on `device`.

    backend: empty if none does; then `why_not` has the reasons.
    why_not: (backend, reason, fix) of every better backend.
    """

    op: str
    summary: str
    device: str
    dtypes: tuple[str, ...]
    backend: str
    why_not: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, and all ops."""

    checks: tuple[Check, ...]
    ops: tuple[OpRow, ...] = field(default=())

    @property
    def broken(self) -> tuple[Check, ...]:
        """What makes `ds report` fail."""
        return tuple(check for check in self.checks if check.verdict is ReportLevel.BROKEN)

    def as_dict(self) -> dict[str, Any]:
        """Convert the diagnosis to plain values for JSON."""
        return {
            "ok": not self.broken,
            "checks": [
                {"section": c.section, "name": c.name, "verdict": c.verdict.value, "found": c.result, "fix": c.fix}
                for c in self.checks
            ],
            "ops": [
                {
                    "op": row.op,
                    "summary": row.summary,
                    "device": row.device,
                    "dtypes": list(row.dtypes),
                    "backend": row.backend,
                    "why_not": [dict(zip(("backend", "reason", "fix"), why, strict=True)) for why in row.why_not],
                }
                for row in self.ops
            ],
        }


def diagnose(machine: Machine) -> Diagnosis:
    """Run every check and collect every op row of `machine`, in display order."""
    ops = op_rows(machine.stages.get("ops", ProbeStage()).results)
    checks = [
        *_system(machine),
        *_torch(machine),
        *_device(machine),
        *_native(machine),
        *_compilers(machine),
        *_files(machine),
        *_settings(machine),
        *_op_checks(machine, ops),
    ]
    return Diagnosis(tuple(checks), ops)


def op_rows(probe: Mapping[str, Any]) -> tuple[OpRow, ...]:
    """Merge the probe's rows whose dtypes are treated alike.

    The reference for a dtype that no native kernel takes is not a defect, so "does not take" is left to the row's
    dtypes.
    """
    merged: dict[tuple[Any, ...], list[str]] = {}
    for row in probe.get("rows", ()):
        why = tuple((w["backend"], w["reason"], w["fix"]) for w in row["rejected"])
        if row["error"]:
            why = ((row["backend"] or "any", row["error"], "unset DS_OPS"),)
        merged.setdefault((row["op"], row["summary"], row["device"], row["backend"], why), []).append(row["dtype"])
    return tuple(OpRow(o, s, d, tuple(dtypes), b, why) for (o, s, d, b, why), dtypes in merged.items())


def _check(section: str, name: str, finding: str, good: bool, otherwise: tuple[ReportLevel, str]) -> Check:
    verdict, fix = (ReportLevel.FINE, "") if good else otherwise
    return Check(section, name, verdict, finding, fix)


def _info(section: str, name: str, finding: str) -> Check:
    return Check(section, name, ReportLevel.INFO, finding)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _system(m: Machine) -> Iterator[Check]:
    yield _info("system", "Python", m.python)
    yield _info("system", "platform", m.system)
    yield _info("system", "cores", str(m.cpus))
    yield _info("system", "memory", _gib(m.memory_bytes) if m.memory_bytes else "unknown")
    yield _info("system", "NUMA nodes", str(m.numa_nodes or "unknown"))
    huge = m.huge_pages or "unknown"
    fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled   (as root; a third more optimizer bandwidth)"
    yield _check("system", "transparent huge pages", huge, m.huge_pages != "never", (ReportLevel.SLOWER, fix))
    if m.shm_bytes is None:
        yield Check(
            "system", "/dev/shm", ReportLevel.SLOWER, "absent: ranks of a host cannot share memory", "mount a tmpfs"
        )
    else:
        small = "docker run --shm-size=8g (or mount -o remount,size=8g /dev/shm): ranks of a host share memory there"
        text = f"{_gib(m.shm_bytes[0])}, {_gib(m.shm_bytes[1])} free"
        yield _check("system", "/dev/shm", text, m.shm_bytes[1] >= _SMALL_SHM, (ReportLevel.SLOWER, small))


def _torch(m: Machine) -> Iterator[Check]:
    if broken := m.stages.get("probe"):
        yield Check(
            "torch",
            "probe",
            ReportLevel.BROKEN,
            broken.error,
            f"run `{m.python.split('(')[-1].rstrip(')')} -m ds_ops.probe`",
        )
    stage = m.stages.get("torch", ProbeStage(error="not asked"))
    if stage.error:
        yield Check("torch", "torch", ReportLevel.BROKEN, stage.error, "pip install --force-reinstall 'torch>=2.11'")
        return
    built = [f"CUDA {stage.results['cuda']}"] if stage.results["cuda"] else []
    built += [f"ROCm {stage.results['hip']}"] if stage.results["hip"] else []
    yield _info("torch", "torch", f"{stage.results['version']}, built for {' and '.join(built) or 'CPU only'}")
    yield _info("torch", "threads", f"{stage.results['threads']} of torch, on {m.cpus} cores")
    yield _info("torch", "instruction set of torch", str(stage.results["cpu_capability"]))
    triton = m.stages.get("triton", ProbeStage(error="not asked"))
    yield _info("torch", "triton", str(triton.results.get("version") or triton.error))


def _device(m: Machine) -> Iterator[Check]:
    stage, torch = m.stages.get("cuda", ProbeStage()), m.stages.get("torch", ProbeStage())
    files = ", ".join(f"/dev/{name}" for name in m.device_files)
    if torch.error:
        return
    if stage.error:
        yield Check(
            "device", "accelerator", ReportLevel.BROKEN, stage.error, "look at `nvidia-smi` or `rocm-smi` first"
        )
    elif stage.results.get("available"):
        for i, text in enumerate(stage.results["devices"]):
            yield Check("device", f"device {i}", ReportLevel.FINE, text)
    elif files and not torch.results.get("cuda") and not torch.results.get("hip"):
        fix = "install a torch that is built for this device (pytorch.org/get-started)"
        yield Check("device", "accelerator", ReportLevel.BROKEN, f"{files} is there, torch is built for CPU only", fix)
    elif files:
        hidden = m.variables.get("CUDA_VISIBLE_DEVICES")
        reason = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "the driver is too old or not running"
        verdict = ReportLevel.INFO if hidden is not None else ReportLevel.BROKEN
        fix = "unset CUDA_VISIBLE_DEVICES" if hidden is not None else "nvidia-smi   (then update the driver)"
        yield Check("device", "accelerator", verdict, f"{files} is there, torch sees no device: {reason}", fix)
    else:
        yield _info("device", "accelerator", "none")


def _native(m: Machine) -> Iterator[Check]:
    stage = m.stages.get("native", ProbeStage())
    if m.stages.get("torch", ProbeStage()).error:
        return
    if stage.error:
        yield Check("native", "_cpu", ReportLevel.BROKEN, stage.error, "ds ops build --force cpu")
        return
    reasons, build = stage.results.get("reasons", {}), stage.results.get("build", {})
    for name, wanted in (("_cpu", True), ("_cuda", bool(m.device_files))):
        reason = reasons.get(name, "not asked")
        fix = "ds ops build cpu" if name == "_cpu" else "pip install --force-reinstall --no-deps ds-ops"
        if not reason:
            yield Check("native", name, ReportLevel.FINE, stage.results.get("files", {}).get(name, ""))
        elif "does not load" in reason:
            yield Check("native", name, ReportLevel.BROKEN, reason, fix.replace("build", "build --force"))
        else:
            verdict = ReportLevel.SLOWER if wanted else ReportLevel.INFO
            yield Check("native", name, verdict, f"{reason}; its ops run in plain torch", fix if wanted else "")
    yield from _cuda_kernels(m.stages.get("kernels", ProbeStage()))
    if stage.results.get("isa"):
        yield _info("native", "instruction set", f"{stage.results['isa']} of {stage.results['isa_supported']}")
    if build:
        yield _info("native", "built with", f"{build.get('compiler', '')}, {build.get('build_type', '')}")
        one = (ReportLevel.SLOWER, "build with a compiler that has OpenMP: ds ops build --force cpu")
        yield _check("native", "threads", f"OpenMP {build.get('openmp')}", build.get("openmp") == "ON", one)
    yield from _trial(m.stages.get("trial", ProbeStage(error="not asked")))


def _cuda_kernels(stage: ProbeStage) -> Iterator[Check]:
    """Report where CUDA kernels come from, on a machine with a device."""
    name, found = "CUDA kernels", stage.results
    if why := stage.error or found.get("obstacle", ""):
        fix = "pip install nvidia-cuda-nvrtc, or a torch whose CUDA fits the driver and the device"
        yield Check("native", name, ReportLevel.SLOWER, f"{why}; their ops run in plain torch", fix)
    elif found.get("unkept"):
        finding = f"{found['compiler']}; compiled anew in every process: {found['unkept']}"
        yield Check(
            "native", name, ReportLevel.SLOWER, finding, "set DS_OPS_CACHE to a folder of yours on a local disk"
        )
    elif found:
        finding = f"{found['compiler']}; {found['compiled']} of {found['all']} are compiled, in {found['folder']}"
        yield Check("native", name, ReportLevel.FINE, finding)


def _trial(stage: ProbeStage) -> Iterator[Check]:
    fix = "DS_OPS=reference avoids it; please report this with the output of `ds report`"
    if stage.error:
        yield Check("native", "trial step", ReportLevel.BROKEN, stage.error, fix)
    elif stage.results:
        worst = float(stage.results["difference"])
        text = f"{stage.results['backend']}, {worst:.1e} from the reference"
        yield _check("native", "trial step", text, worst <= _MAX_TRIAL_DIFFERENCE, (ReportLevel.BROKEN, fix))


def _compilers(m: Machine) -> Iterator[Check]:
    built = not m.stages.get("native", ProbeStage()).results.get("reasons", {}).get("_cpu", "unknown")
    for name, tool in m.tools.items():
        if tool.works:
            yield _info("compilers", name, f"{tool.path}  {tool.version}")
            continue
        needed = not built and name not in ("ninja", "nvcc", "hipcc")
        finding = f"{tool.path}: {tool.problem}" if tool.path else "not found"
        verdict = ReportLevel.SLOWER if needed else ReportLevel.INFO
        yield Check("compilers", name, verdict, finding, _install(name, tool) if needed else "")
    yield _info("compilers", "native sources", m.native_sources or "not installed: `ds ops build` cannot work")


def _install(name: str, tool: Tool) -> str:
    if tool.path:
        return f"unset {'CC' if name == 'c compiler' else 'CXX'}, or let it name a compiler that works"
    if name in ("cmake", "pybind11"):
        return "pip install 'ds-ops[build]'"
    return "apt-get install g++   (or your system's compiler package)"


def _files(m: Machine) -> Iterator[Check]:
    stage = m.stages.get("io", ProbeStage())
    backends: Mapping[str, str] = stage.results.get("backends", {})
    native = [name for name in backends if name != "python"]
    for name, why in backends.items():
        others = [other for other in native if not backends[other]]
        verdict = ReportLevel.FINE if not why else ReportLevel.INFO if others else ReportLevel.SLOWER
        fix = "" if not why else _io_fix(name, why)
        yield Check("files", f"{name} transfers", verdict, why or "works", fix)
    if stage.error and not m.stages.get("torch", ProbeStage()).error:
        yield Check("files", "transfers", ReportLevel.BROKEN, stage.error, "ds ops build --force cpu")
    if "gds" in stage.results:
        yield _info("files", "GPUDirect Storage", stage.results["gds"] or "works")
    if m.memlock_bytes:
        soft, hard = (_limit(value) for value in m.memlock_bytes)
        yield _info("files", "locked memory", f"{soft}, may be raised to {hard} (ulimit -l); pinned buffers need it")
    if m.aio_requests:
        used, most = m.aio_requests
        full = (ReportLevel.SLOWER, "sysctl -w fs.aio-max-nr=1048576")
        yield _check("files", "kernel AIO requests", f"{used} of {most} in use", used < most // 2, full)


def _io_fix(name: str, why: str) -> str:
    if "not installed" in why:
        return "ds ops build cpu"
    if name == "io_uring":
        return "sysctl -w kernel.io_uring_disabled=0, or a container profile that allows io_uring_setup"
    return "allow the call in the container's seccomp profile"


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else _gib(value)


def _settings(m: Machine) -> Iterator[Check]:
    known = {*m.stages.get("ops", ProbeStage()).results.get("backends", ()), _REFERENCE, "cpu", "cuda"}
    for name, value in m.variables.items():
        if name == "DS_OPS" and value and value not in known:
            fix = f"unset DS_OPS, or set it to one of {', '.join(sorted(known))}"
            yield Check("settings", name, ReportLevel.BROKEN, f"{value!r} is no backend, so it does nothing", fix)
        elif name == "DS_CPU_ISA" and value and value not in _LEVELS:
            fix = f"unset DS_CPU_ISA, or set it to one of {', '.join(_LEVELS)}"
            yield Check("settings", name, ReportLevel.BROKEN, f"{value!r} is no level, so it does nothing", fix)
        elif name in ("DS_OPS", "DS_CPU_ISA") and value:
            yield Check("settings", name, ReportLevel.SLOWER, value, f"unset {name}   (unless you are testing)")
        else:
            yield _info("settings", name, value)


def _op_checks(m: Machine, ops: Sequence[OpRow]) -> Iterator[Check]:
    stage = m.stages.get("ops", ProbeStage())
    if m.stages.get("torch", ProbeStage()).error:
        return
    if stage.error:
        yield Check(
            "ops", "registry", ReportLevel.BROKEN, stage.error, "pip install --force-reinstall --no-deps ds-ops"
        )
    for module, why in stage.results.get("broken", ()):
        fix = "pip install --force-reinstall --no-deps ds-ops"
        yield Check("ops", module, ReportLevel.BROKEN, why, fix)
    for row in ops:
        if not row.backend:
            _backend, reason, fix = row.why_not[0]
            yield Check("ops", f"{row.op} on {row.device}", ReportLevel.BROKEN, reason, fix)

"""Host memory from procfs files that the tests write, and from the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_accel import host_memory
from ds_accel.device_memory import reset_host_peak
from ds_config.errors import UnsupportedError

KB = 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A procfs with one process: /proc/self below tmp_path."""
    me = tmp_path / "self"
    me.mkdir()
    (me / "status").write_text("Name:\tpython\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nThreads:\t4\n")
    (me / "smaps_rollup").write_text("00400000-7ff ---p 00000000 00:00 0 [rollup]\nRss:  200 kB\nPss:  120 kB\n")
    (me / "clear_refs").write_text("")
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\nHugePages_Total: 0\n"
    )
    return me


def test_figures_of_procfs(proc: Path) -> None:
    memory = host_memory(pss=True, proc=proc, cgroups=())
    assert (memory.rss, memory.pss, memory.peak_rss) == (200 * KB, 120 * KB, 300 * KB)
    assert (memory.available, memory.total) == (600 * KB, 1000 * KB)
    assert host_memory(proc=proc, cgroups=()).pss == -1


@pytest.mark.parametrize(
    ("limit_file", "used_file"), [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]
)
def test_the_limit_of_the_container_counts(proc: Path, tmp_path: Path, limit_file: str, used_file: str) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / limit_file).write_text(f"{500 * KB}\n")
    (group / used_file).write_text(f"{450 * KB}\n")
    memory = host_memory(proc=proc, cgroups=(tmp_path / "none", group))
    assert (memory.available, memory.total) == (50 * KB, 500 * KB)
    (group / limit_file).write_text("max\n" if limit_file == "memory.max" else str(1 << 63))
    assert host_memory(proc=proc, cgroups=(group,)).total == 1000 * KB
    (group / limit_file).write_text(str(100 * KB))
    assert host_memory(proc=proc, cgroups=(group,)).available == 0, "over the limit, nothing is left"


def test_resetting_the_peak(proc: Path) -> None:
    assert reset_host_peak(proc)
    assert (proc / "clear_refs").read_text() == "5"
    assert not reset_host_peak(proc / "not there")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no procfs")
def test_the_real_procfs() -> None:
    memory = host_memory(pss=True)
    assert 0 < memory.pss <= memory.rss <= memory.peak_rss + (4 << 20)
    assert 0 <= memory.available <= memory.total


def test_without_procfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(UnsupportedError, match="no /proc, and psutil is not installed") as caught:
        host_memory(proc=tmp_path)
    assert caught.value.code == "accel-host-memory"
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5, peak_wset=9))
    fake = SimpleNamespace(Process=lambda: process, virtual_memory=lambda: SimpleNamespace(available=70, total=100))
    monkeypatch.setitem(sys.modules, "psutil", fake)
    memory = host_memory(proc=tmp_path)
    assert (memory.rss, memory.pss, memory.peak_rss, memory.available, memory.total) == (5, -1, 9, 70, 100)

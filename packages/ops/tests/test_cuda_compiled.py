"""CUDA kernels compiled by NVRTC without a device, and launched into a driver that only records: the way of an installed wheel.

Needs the package nvidia-cuda-nvrtc (`nox -s native` installs it) or a torch built for CUDA; skipped by name without.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ds_config.errors import KernelError
from ds_ops import _native, build_kernels, cli_ops, cuda_launch, cuda_norms, cuda_quant, cuda_stream
from ds_ops.formats import INT8, Draw, QuantSpec, QuantTensor
from ds_ops.kernel_compilers import Nvrtc, find_nvrtc, open_compiler
from ds_ops.kernel_images import KernelImages
from ds_ops.kernel_source import CudaKernel

ARCHITECTURES = (75, 80, 89, 90, 100)
EM_CUDA = 190


@pytest.fixture(scope="module")
def module() -> ModuleType:
    loaded = _native.load("_cuda")
    if loaded.module is None:
        pytest.skip(loaded.reason)
    return loaded.module


@pytest.fixture(scope="module")
def nvrtc(module: ModuleType) -> Nvrtc:
    try:
        return open_compiler(module, 0)
    except KernelError as error:
        pytest.skip(error.message)


def check_image(image: bytes, kernel: CudaKernel) -> None:
    assert image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", image, 18) == (EM_CUDA,)
    assert f".text.{kernel.entry}\0".encode() in image


def one_a_source() -> list[CudaKernel]:
    named = {kernel.instance.partition("<")[0]: kernel for kernel in reversed(build_kernels.kernel_table())}
    return [named[name] for name in ("sum_squares", "lamb_moments", "norm_grad", "quantize", "dense")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", one_a_source(), ids=lambda k: k.instance)
def test_a_kernel_of_each_family_compiles(nvrtc: Nvrtc, kernel: CudaKernel, architecture: int) -> None:
    if (
        architecture == 75 or kernel.source == "quant.cu"
    ):  # the oldest, and what has parts of its own for an architecture
        check_image(nvrtc.compile(kernel, f"sm_{architecture}"), kernel)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_of_the_table_compiles(nvrtc: Nvrtc, architecture: int) -> None:
    for kernel in build_kernels.kernel_table():
        check_image(nvrtc.compile(kernel, f"sm_{architecture}"), kernel)


def test_what_a_compiler_does_not_know() -> None:
    class Old:
        version = (12, 8)
        architectures = (75, 80, 90)

    old = Nvrtc(Old(), "libnvrtc.so.12")
    assert old.target((8, 0)) == "sm_80"
    assert old.target((8, 6)) == "sm_80"  # the same generation runs it
    assert old.target((12, 0)) == "compute_90"  # the driver compiles the rest
    with pytest.raises(KernelError, match=r"does not know devices of compute capability 7\.0: it begins at 75"):
        old.target((7, 0))


def test_an_error_of_the_compiler_is_shown(nvrtc: Nvrtc) -> None:
    broken = CudaKernel("stream.cu", "no_such_kernel", "ConvertCall", "P")
    with pytest.raises(KernelError, match="no_such_kernel") as caught:
        nvrtc.compile(broken, "sm_80")
    assert caught.value.code == "kernel-compile"


def test_where_nvrtc_is_looked_for(tmp_path: Path, module: ModuleType) -> None:
    assert find_nvrtc({"DS_NVRTC": "/x/libnvrtc.so"}) == ["/x/libnvrtc.so"]
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12").write_bytes(b"")
    assert str(tmp_path / "lib64" / "libnvrtc.so.12") in find_nvrtc({"CUDA_HOME": str(tmp_path)})
    with pytest.raises(KernelError, match="NVRTC, CUDA's run-time compiler, was not found") as caught:
        open_compiler(module, 0, {"DS_NVRTC": str(tmp_path / "none.so")})
    assert caught.value.code == "kernel-compile"


# ---- the whole way, with a driver that records ---------------------------------------------------------------------------


class _Recorded(cuda_launch.CudaRuntime):
    def place(self, device: torch.device) -> tuple[int, int]:
        return device.index or 0, 7


@pytest.fixture
def recording(
    nvrtc: Nvrtc, module: ModuleType, emulated_libraries: tuple[Path, Any], tmp_path: Path
) -> Iterator[tuple[_Recorded, ctypes.CDLL]]:
    library, _ = emulated_libraries
    assert module.open_driver(str(library)) == ""
    driver = ctypes.CDLL(str(library))
    driver.fake_launches.restype = ctypes.c_char_p
    driver.fake_launches()
    devices = tuple(cuda_launch.Device(n, (a, b), c) for n, a, b, c in module.devices())
    with cuda_launch.use_runtime(
        _Recorded(module, devices, nvrtc, KernelImages(tmp_path / "kernels", nvrtc.identity))
    ) as here:
        yield here, driver  # type: ignore[misc]


def test_images_are_compiled_loaded_kept_and_launched(recording: tuple[_Recorded, ctypes.CDLL], tmp_path: Path) -> None:
    here, driver = recording
    assert cuda_launch.obstacle() == ""
    x = torch.ones(20_000)
    cuda_stream.fill(x, 2.0)
    q = QuantTensor.empty(QuantSpec(INT8, 256), 4, 1024, like=x)
    cuda_quant.quantize(q, torch.ones(4, 1024, dtype=torch.bfloat16), None, Draw())
    cuda_norms.norm(cuda_norms.NormInput(torch.ones(3, 4096), None, None, None, 1e-6, False))
    rows = [line.split() for line in driver.fake_launches().decode().splitlines()]
    assert [(name, int(blocks)) for _d, name, blocks, _t, _s in rows] == [
        ("ds_convert_true", 3),
        ("ds_quantize_8_m1_0_127_false_false_bf16_8_2_16", 1),
        ("ds_norm_f32_f32_256_4_false_false", 3),
    ]
    assert all("NVRTC" in origin.place and not origin.unkept for origin in here.origins)
    assert len(list((tmp_path / "kernels").iterdir())) == 3

    again = _Recorded(here.module, here.devices, here.compiler, here.images)
    with cuda_launch.use_runtime(again):
        cuda_stream.fill(x, 3.0)
    assert [Path(o.place).parent for o in again.origins] == [tmp_path / "kernels"]


class _Slow:
    """A compiler that waits to be let go, and counts."""

    name, identity = "slow", "slow"

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.compiled: list[str] = []

    def target(self, capability: tuple[int, int]) -> str:
        return "sm_90"

    def compile(self, kernel: CudaKernel, architecture: str) -> bytes:
        self.compiled.append(kernel.instance)
        self.begun.set()
        if kernel.instance == "refused":
            raise KernelError("no", code="kernel-compile", fix="none")
        if kernel.instance.startswith("slow"):
            assert self.release.wait(60)
        return kernel.instance.encode()


class _Loads:
    def load(self, device: int, image: bytes, entry: str) -> tuple[int, str]:
        return len(image), ""


def test_kernels_are_compiled_beside_the_start(tmp_path: Path) -> None:
    """Another kernel does not wait for the one that is being compiled; that one is compiled once; ranks share by the disk."""
    compiler, images = _Slow(), KernelImages(tmp_path, "slow")
    devices = (cuda_launch.Device("card", (9, 0), 132),)
    one, refused, slow, last = (CudaKernel("a.cu", name, "Call", "P") for name in ("one", "refused", "slow", "last"))
    here = cuda_launch.CudaRuntime(_Loads(), devices, compiler, images)  # type: ignore[arg-type]
    thread = here.compile_ahead((one, refused, slow, last), 0, first=1)
    assert compiler.begun.wait(60)
    while "slow" not in compiler.compiled:
        compiler.begun.wait(0.01)
    assert here.function(one, 0)[0] == 3  # not the thread's turn yet
    handles: list[int] = []
    waiting = threading.Thread(target=lambda: handles.append(here.function(slow, 0)[0]))
    waiting.start()
    compiler.release.set()
    waiting.join(60)
    thread.join(60)
    assert (handles, thread.is_alive()) == ([4], False)
    assert sorted(compiler.compiled) == ["last", "one", "refused", "slow"]
    assert {o.kernel.instance for o in here.origins} == {"one", "slow"}
    with pytest.raises(KernelError, match="no"):
        here.function(refused, 0)

    other = cuda_launch.CudaRuntime(_Loads(), devices, compiler, images)  # type: ignore[arg-type]
    other.compile_ahead((one, slow, last), 0, first=2).join(60)
    assert sorted(compiler.compiled) == ["last", "one", "refused", "refused", "slow"]
    homeless = cuda_launch.CudaRuntime(_Loads(), devices, compiler, KernelImages(tmp_path / "one" / "no", "x"))  # type: ignore[arg-type]
    (tmp_path / "one").write_text("")
    homeless.compile_ahead((last,), 0).join(60)
    assert homeless.function(last, 0)[0] == 4
    assert compiler.compiled.count("last") == 2  # the image is handed over in memory
    assert homeless.origins[0].unkept


def test_a_rank_takes_no_memory_of_another_ranks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether kernels run is tried on the rank's own device: a module that is loaded on the first one makes a context there, of every rank."""
    loaded: list[int] = []

    class Driver:
        def load(self, device: int, image: bytes, entry: str) -> tuple[int, str]:
            loaded.append(device)
            return 1, ""

    devices = (cuda_launch.Device("card", (9, 0), 132),) * 3 + (cuda_launch.Device("other", (8, 0), 108),)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for current in (2, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)  # noqa: B023  # called at once
        here = cuda_launch.CudaRuntime(Driver(), devices, _Slow(), KernelImages(tmp_path, "slow"))  # type: ignore[arg-type]
        with cuda_launch.use_runtime(here):
            assert cuda_launch.obstacle() == ""
    assert loaded == [2, 0]


def test_damaged_images_and_a_home_that_cannot_be_written(
    recording: tuple[_Recorded, ctypes.CDLL], tmp_path: Path
) -> None:
    here, _ = recording
    cuda_stream.fill(torch.ones(8), 2.0)
    (path,) = (tmp_path / "kernels").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-5], b"", whole[:60] + b"x" + whole[61:], b"another file"):
        path.write_bytes(damaged)
        fresh = _Recorded(here.module, here.devices, here.compiler, here.images)
        with cuda_launch.use_runtime(fresh):
            cuda_stream.fill(torch.ones(8), 2.0)
        assert "NVRTC" in fresh.origins[0].place
        assert path.read_bytes() == whole
    (tmp_path / "file").write_text("")
    images = KernelImages(tmp_path / "file", here.images.compiler)  # no folder can be made there
    homeless = _Recorded(here.module, here.devices, here.compiler, images)
    with cuda_launch.use_runtime(homeless):
        cuda_stream.fill(torch.ones(8), 2.0)
    assert homeless.origins[0].unkept


def test_many_write_one_image_at_once(tmp_path: Path) -> None:
    kernel = CudaKernel("stream.cu", "convert<true>", "ConvertCall", "P")
    images, image = KernelImages(tmp_path, "c"), bytes(range(256)) * 400
    seen: list[bytes | None] = []

    def rank() -> None:
        for _ in range(20):
            assert images.write(kernel, "sm_90", image) == ""
            seen.append(images.read(kernel, "sm_90"))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [image] * 80
    assert [p.name.startswith(".image") for p in tmp_path.iterdir()] == [False]
    assert KernelImages(tmp_path, "another").read(kernel, "sm_90") is None
    assert images.read(kernel, "sm_80") is None


def test_a_launch_that_the_driver_refuses(recording: tuple[_Recorded, ctypes.CDLL]) -> None:
    _, driver = recording
    cuda_stream.fill(torch.ones(8), 2.0)
    driver.fake_refuse(700)
    with pytest.raises(KernelError, match="refuses the launch of 1 blocks of 256 threads") as caught:
        cuda_stream.fill(torch.ones(8), 2.0)
    assert caught.value.code == "kernel-launch"
    with pytest.raises(KernelError, match="more than one launch may have"):
        cuda_launch.launch(cuda_stream.KERNELS[2], torch.device("cpu"), 1 << 31)


def test_a_device_that_the_compiler_does_not_know_runs_torch(
    recording: tuple[_Recorded, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A V100 beside NVRTC of CUDA 13: an obstacle with its reason, no error in a step."""
    here, _ = recording
    old = cuda_launch.Device("old", (3, 5), 13)
    with cuda_launch.use_runtime(_Recorded(here.module, (*here.devices, old), here.compiler, here.images)):
        assert "does not know devices of compute capability 3.5" in cuda_launch.obstacle()


def test_no_driver_is_an_obstacle(module: ModuleType) -> None:
    assert "cannot open" in module.open_driver("/nowhere/libcuda.so.1")
    assert module.devices() == []
    assert module.launch(0, 0, 1, 1, b"", 0) == "there is no such device"


def test_the_command_builds_and_lists(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    monkeypatch.setenv("DS_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(build_kernels, "kernel_table", lambda: cuda_stream.KERNELS[1:3])
    parser = argparse.ArgumentParser()
    cli_ops.register(parser)

    def run(*words: str) -> tuple[int, str]:
        status = cli_ops.main(parser.parse_args(words))
        read = capsys.readouterr()
        return status, read.out + read.err

    assert "0 of 2 kernels are compiled" in run("kernels", "--arch", "9.0")[1]
    assert "2 of 2 kernels are compiled" in run("build", "cuda", "--arch", "sm_90")[1]
    listed = run("kernels", "--arch", "9.0")[1]
    assert "2 of 2" in listed
    assert str(tmp_path) in listed
    assert run("kernels", "--arch", "x")[0] == 1
    if not Path("/dev/nvidia0").exists():
        status, text = run("kernels")
        assert status == 1
        assert "--arch 9.0" in text


def test_kernels_include_nothing_outside_native() -> None:
    from ds_ops.kernel_source import kernel_folders

    for folder in kernel_folders()[:1]:
        for path in folder.glob("*.cu"):
            lines = [line for line in path.read_text().splitlines() if line.startswith("#include")]
            assert lines == ['#include "device.h"'], path

"""What a user gets: a wheel made from the sdist alone, one made without a compiler, and one wheel on lesser processors.

Installed here means unpacked into a folder and run by the base interpreter, so that nothing of the checkout is importable
but what is named in PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # a fixture's compilation counts as the first test that needs it

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "packages" / "ops"
HASH = Path(__file__).with_name("kernel_hash.py")
TORCH_HASH = Path(__file__).with_name("torch_hash.py")
BASE_PYTHON = str(Path(sys.executable).resolve())


def run(*command: str, cwd: Path, timeout: float = 300, **environ: str) -> str:
    """Standard output and error of a command that must succeed."""
    env = {**os.environ, **environ}
    done = subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist, in a folder that knows nothing of the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=OPS)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def make_wheel(sdist: Path, out: Path, **environ: str) -> tuple[Path, str]:
    """The wheel, and what was said while it was made."""
    source = shutil.copytree(sdist, out / "source")  # a build leaves CMake's cache behind, with the compiler in it
    flags = ("-v", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check", "-w", str(out))
    said = run(sys.executable, "-m", "pip", "wheel", *flags, str(source), cwd=out, **environ)
    (wheel,) = out.glob("*.whl")
    return wheel, said


def installed(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack a wheel; the environment in which it is importable, beside its third-party dependencies and those of ours."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    ours = [ROOT / "packages" / name / "src" for name in ("accel", "config", "monitor")]
    places = [folder, *ours, Path(sysconfig.get_path("purelib"))]
    return {"PYTHONPATH": os.pathsep.join(map(str, places)), "DS_OPS_CACHE": str(folder / "cache"), "DS_OPS": ""}


@pytest.fixture(scope="module")
def pure(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return make_wheel(sdist, tmp_path_factory.mktemp("pure"), CC="/bin/false")


@pytest.fixture(scope="module")
def native(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheel, said = make_wheel(sdist, tmp_path_factory.mktemp("native"))
    assert "WITHOUT native kernels" not in said, [line for line in said.splitlines() if "rror" in line][:5]
    return wheel


@pytest.fixture(scope="module")
def module(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled module out of the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    installed(native, folder)
    (found,) = folder.glob("ds_ops/_native/_cpu*.so")
    return found


_STEP = """
import json, sys, ds_ops, torch
from ds_ops import _native
from ds_ops.optim import AdamW
assert "{folder}" in ds_ops.__file__, ds_ops.__file__
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(1000)); q = torch.nn.Parameter(p.detach().clone())
ours, theirs = AdamW([p]), torch.optim.AdamW([q], fused=True)
for _ in range(3):
    p.grad = torch.randn(1000); q.grad = p.grad.clone(); ours.step(); theirs.step()
print(json.dumps([_native.load("_cpu").reason, float((p - q).detach().abs().max())]))
"""
_REPORT = """
import json
from ds_ops.doctor import diagnose
from ds_ops.machine import read_machine
print(json.dumps(diagnose(read_machine()).as_dict()))
"""

_BUILD = """
import argparse, sys
from ds_ops import cli_ops
parser = argparse.ArgumentParser()
cli_ops.register(parser)
sys.exit(cli_ops.main(parser.parse_args(["build"])))
"""


@pytest.mark.slow
def test_without_a_compiler_the_install_is_pure_python_and_says_so(pure: tuple[Path, str], tmp_path: Path) -> None:
    wheel, said = pure
    assert wheel.name.endswith("py3-none-any.whl")
    assert "installed WITHOUT native kernels" in said
    env = installed(wheel, tmp_path)
    reason, difference = json.loads(run(BASE_PYTHON, "-c", _STEP.format(folder=tmp_path), cwd=tmp_path, **env))
    assert "was not built" in reason
    assert difference < 1e-6
    report = json.loads(run(BASE_PYTHON, "-c", _REPORT, cwd=tmp_path, **env))
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["_cpu"]["fix"] == "ds ops build cpu"
    assert checks["_cpu"]["verdict"] == "slower"
    assert {row["backend"] for row in report["ops"]} <= {"reference", "torch"}


def test_the_sdist_has_all_sources_and_nothing_that_was_built(sdist: Path) -> None:
    names = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert {"native/CMakeLists.txt", "native/cpu/dispatch.cpp", "src/ds_ops/_native/_cpu.pyi"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc")) or name.startswith("native/build/")]


# ---- the compiled wheel: building it takes most of a minute, several beside other work


@pytest.mark.slow
def test_the_wheel_from_the_sdist_is_compiled_and_carries_its_sources(native: Path) -> None:
    assert not native.name.endswith("none-any.whl")
    names = zipfile.ZipFile(native).namelist()
    assert [name for name in names if re.fullmatch(r"ds_ops/_native/_cpu\..*\.so", name)]
    assert "ds_ops/_src/CMakeLists.txt" in names


@pytest.mark.slow
def test_the_module_needs_no_torch(module: Path) -> None:
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed")
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", str(module), cwd=module.parent))
    assert needed
    assert not [name for name in needed if re.search("torch|c10|python|cuda", name)]
    versions = re.findall(r"GOMP_(\d+)\.(\d+)", run("readelf", "-V", str(module), cwd=module.parent))
    assert all((int(a), int(b)) <= (4, 5) for a, b in versions), "newer than what some builds of torch bring"


@pytest.mark.slow
def test_every_level_gives_the_same_bits(module: Path) -> None:
    seen = {}
    for level in ("baseline", "avx2", "avx512"):
        status, name, digest = run(sys.executable, str(HASH), str(module), cwd=module.parent, DS_CPU_ISA=level).split()
        assert status == "0"
        seen[name] = digest
    assert len(set(seen.values())) == 1, seen


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "level"), [("Nehalem", "baseline"), ("Haswell", "avx2")])
def test_a_lesser_processor_runs_the_same_wheel(module: Path, cpu: str, level: str) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed (Debian: apt-get install qemu-user)")
    words = (BASE_PYTHON, str(HASH), str(module))
    said = run(emulator, "-cpu", cpu, *words, cwd=module.parent)
    status, name, digest = said.splitlines()[-1].split()  # above it, the features that the emulator does not have
    assert (status, name) == ("0", level)
    assert digest == run(*words, cwd=module.parent).split()[2]


def another_torch() -> str:
    """An interpreter of our Python version with another torch: $DS_OTHER_PYTHON, or Debian's with python3-torch."""
    python = os.environ.get("DS_OTHER_PYTHON", "/usr/bin/python3")
    ask = "import sys, torch; print(*sys.version_info[:2], torch.__version__)"
    try:
        said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{python} has no torch (Debian: apt-get install python3-torch, or set DS_OTHER_PYTHON): {error}")
    major, minor, found = said.split()
    version = f"{major}.{minor}"
    if version != sysconfig.get_python_version() or found == importlib.metadata.version("torch"):
        pytest.skip(f"{python} is Python {version} with torch {found}: not another torch for the same wheel")
    return python


@pytest.mark.slow
def test_one_module_serves_two_versions_of_torch(module: Path) -> None:
    """The same bits in tensors of both, on two threads of the OpenMP that each brings, and both near torch's own AdamW."""
    pythons = (BASE_PYTHON, another_torch())
    own = {"PYTHONPATH": sysconfig.get_path("purelib")}
    here, there = (
        json.loads(run(python, str(TORCH_HASH), str(module), cwd=module.parent, **env).splitlines()[-1])
        for python, env in zip(pythons, (own, {}), strict=True)
    )
    assert here["torch"] != there["torch"]
    assert here["statuses"] == there["statuses"] == [0, 0, 0, 0]
    assert (here["digest"], here["squares"]) == (there["digest"], there["squares"])
    assert max(here["apart"], there["apart"]) < 1e-6


@pytest.mark.slow
def test_a_pure_installation_builds_its_module_later(pure: tuple[Path, str], tmp_path: Path) -> None:
    env = installed(pure[0], tmp_path)
    said = run(BASE_PYTHON, "-c", _BUILD, cwd=tmp_path, **env)
    assert "built: " in said
    reason, difference = json.loads(run(BASE_PYTHON, "-c", _STEP.format(folder=tmp_path), cwd=tmp_path, **env))
    assert reason == ""
    assert difference < 1e-6

"""Make an environment whose torch is a CUDA build that runs on the CPU: python tools/emulated_cuda/prepare.py FOLDER.

Takes a torch wheel of CUDA without the CUDA packages that it requires (0.5 GB), and headers of CUDA (50 MB). Needs g++, nm and readelf, and the
development environment, whose packages are seen from the new one. Writes FOLDER/run, which runs a command on emulated cards.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRITON = {"2.11": "triton==3.6.0", "2.14": "triton==3.8.0"}
HEADERS = ("nvidia-cuda-runtime<14", "nvidia-cuda-crt<14", "nvidia-cuda-cupti<14")
OURS = {"libcudart.so.13", "libcuda.so.1", "libnccl.so.2"}
ANSWERS = {
    **dict.fromkeys(
        ("cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusolverDnCreate", "cusparseCreate"),
        "int {0}(void **handle) {{ *handle = (void *)64; return 0; }}",
    ),
    "cublasLtMatmulDescCreate": "int {0}(void **made, int a, int b) {{ *made = (void *)64; return 0; }}",
    "cublasGetVersion_v2": "int {0}(void *handle, int *version) {{ *version = 130000; return 0; }}",
    **dict.fromkeys(
        ("cublasGetPointerMode_v2", "cublasGetMathMode"), "int {0}(void *h, int *mode) {{ *mode = 0; return 0; }}"
    ),
    "cublasLtMatmulAlgoGetHeuristic": (
        "int {0}(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *results, int *found) "
        "{{ *found = 1; return 0; }}"
    ),
    "cudnnGetVersion": "unsigned long {0}(void) {{ return 91900; }}",
    "cudnnGetCudartVersion": "unsigned long {0}(void) {{ return 13000; }}",
}
"""Functions of libraries that have to write something; all others of these libraries do nothing and return 0."""
RUN = """#!/bin/sh
# run COMMAND...: on emulated cards. EMULATED_CUDA_DEVICES (2), EMULATED_CUDA_GB (80), EMULATED_CUDA_LAG_US, EMULATED_NCCL_LIMIT (100 s).
export EMULATED_CUDA=1 EMULATED_CUDA_DEVICES=${{EMULATED_CUDA_DEVICES:-2}} OMP_NUM_THREADS=1 TRITON_INTERPRET=${{TRITON_INTERPRET-1}}
export LD_LIBRARY_PATH={libraries} PATH={scripts}:{development}:$PATH PYTHONPATH={here}${{PYTHONPATH:+:$PYTHONPATH}}
exec "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="2.11.0", help="version of the wheel")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    torch = install(folder, chosen.torch)
    headers = fetch_headers(folder)
    libraries = folder / "lib"
    libraries.mkdir(exist_ok=True)
    build(torch, headers, libraries)
    here = folder / "run"
    here.write_text(
        RUN.format(libraries=libraries, scripts=folder / "venv" / "bin", development=Path(sys.executable).parent, here=f"{HERE}:{libraries}")
    )  # fmt: skip
    here.chmod(0o755)
    subprocess.run([str(here), "python", "-c", "import torch; print(torch.ones(3, device='cuda') + 1)"], check=True)


def install(folder: Path, version: str) -> Path:
    """Make the environment of Python, and return torch's folder in it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    triton = TRITON[".".join(version.split(".")[:2])]
    wanted = [f"torch=={version}", triton, "numpy<2.4"]  # Triton's interpreter fails with newer ones
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *wanted], check=True)
    packages = Path(
        subprocess.run(
            [str(python), "-c", "import site; print(site.getsitepackages()[0])"], check=True, text=True, capture_output=True
        ).stdout.strip()
    )  # fmt: skip
    development = sysconfig.get_paths()["purelib"]
    (packages / "a_development.pth").write_text(f"import site; site.addsitedir({development!r})\n")
    (packages / "a_emulated.pth").write_text(f"import sys; sys.path.append({str(HERE)!r}); import startup\n")
    return packages / "torch"


def fetch_headers(folder: Path) -> Path:
    """Return the folder of CUDA's headers and of the libraries beside them."""
    place = folder / "headers"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(place), *HEADERS], check=True)
    for wheel in place.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(place)
    return next(place.glob("nvidia/*/include"))


def symbols(library: Path, kind: str) -> set[str]:
    """Return the names that a library defines or leaves undefined, with versions."""
    out = subprocess.run(["nm", "-D", f"--{kind}-only", str(library)], check=True, text=True, capture_output=True)
    return {line.split()[-1] for line in out.stdout.splitlines() if line.split()[-2] not in "wv"}


def build(torch: Path, headers: Path, libraries: Path) -> None:
    """Compile the libraries, and stubs of all that torch's are linked with beside them."""
    common = ["g++", "-w", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{headers}"]
    script = libraries / "exported.map"
    script.write_text("libcudart.so.13 { global: cuda*; __cuda*; emulated_*; local: *; };\n")
    runtime = libraries / "libcudart.so.13"
    soname = "-Wl,-soname,"
    compile_(
        [*common, "-o", runtime, HERE / "runtime.cpp", soname + runtime.name, f"-Wl,--version-script={script}", "-ldl"]
    )
    driver = libraries / "libcuda.so.1"
    compile_([*common, "-o", driver, HERE / "driver.cpp", soname + driver.name, runtime])
    parts = sorted((torch / "lib").glob("*.so"))
    by_version, plain = undefined(parts)
    nccl = libraries / "libnccl.so.2"
    rest = libraries / "rest.cpp"
    there = set.union(*(defined(path) for path in (runtime, driver)))
    text = (HERE / "nccl.cpp").read_text()
    names = plain - there - set(re.findall(r"\b(nccl\w+)\(", text)) - set(re.findall(r"Z\((\w+)\)", text))
    rest.write_text("".join(f'extern "C" long {name}(void) {{ return 0; }}\n' for name in sorted(names)))
    compile_([*common, "-O2", "-o", nccl, HERE / "nccl.cpp", rest, soname + nccl.name, runtime])
    for library in (headers.parent / "lib").glob("libcupti.so.*"):
        (libraries / library.name).write_bytes(library.read_bytes())
    for name in sorted(needed(parts) - OURS - {path.name for path in libraries.iterdir()}):
        stub(libraries / name, {v: by_version[v] for v in by_version if belongs(v, name)})
    python = sysconfig.get_paths()["include"]
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{python}"]
    links = [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-lc10_cuda", runtime]
    define = "-DTORCH_EXTENSION_NAME=emulated_kernels"
    output = libraries / "emulated_kernels.so"
    compile_([*common, define, *includes, "-o", output, HERE / "kernels.cpp", *links, f"-Wl,-rpath,{torch}/lib"])


def compile_(command: list[str | Path]) -> None:
    subprocess.run([str(part) for part in command], check=True)


def defined(library: Path) -> set[str]:
    """Return the names that a library defines, without versions."""
    return {name.split("@")[0] for name in symbols(library, "defined")}


def needed(parts: list[Path]) -> set[str]:
    """Return the libraries of CUDA that torch's are linked with."""
    text = "".join(
        subprocess.run(["readelf", "-d", str(path)], text=True, capture_output=True).stdout for path in parts
    )
    found = re.findall(r"\(NEEDED\).*\[((?:libcu|libnccl|libnv)[^]]*)\]", text)
    return set(found) - {path.name for path in parts}


def undefined(parts: list[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Return what torch's libraries look for elsewhere: names by version, and those of CUDA's libraries that have none."""
    here = set.union(*map(defined, parts))
    by_version: dict[str, set[str]] = defaultdict(set)
    plain: set[str] = set()
    for path in parts:
        for name in symbols(path, "undefined"):
            base, _, version = name.partition("@")
            if base in here:
                continue
            if re.match(r"libcu|libnv|NVSHMEM", version.strip("@")):
                by_version[version.strip("@")].add(base)
            elif not version and re.match(r"cu[A-Z]|cu[a-z]+Lt|nccl|nvshmem|nvrtc|curand|cufft", base):
                plain.add(base)
    return by_version, plain


def belongs(version: str, library: str) -> bool:
    """Whether names of a version are those of a library."""
    return version == library or (version == "NVSHMEM" and "nvshmem" in library)


def stub(library: Path, by_version: dict[str, set[str]]) -> None:
    """Write a library whose functions do nothing."""
    code, script = library.with_suffix(".c"), library.with_suffix(".map")
    every = sorted(set.union(set(), *by_version.values()))
    code.write_text(
        "\n".join(ANSWERS.get(name, "long {0}(void) {{ return 0; }}").format(name) for name in every) + "\n"
    )
    script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(names))}; }};\n" for v, names in by_version.items()))
    versions = [f"-Wl,--version-script={script}"] if by_version else []
    compile_(
        ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", library, f"-Wl,-soname,{library.name}", *versions, code]
    )


if __name__ == "__main__":
    main()

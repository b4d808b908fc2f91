"""Environments of the systems we are measured against: each peer from the package index, in a virtual environment of its own.

A peer never shares an environment with us, so neither can change what the other imports. All use the torch that
constraints.txt pins, so that a ratio compares frameworks and not torch builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DEEPSPEED = ("deepspeed==0.19.8", "setuptools", "ninja")
_CLIENTS = ("accelerate==1.15.0", "transformers==5.23.0", "trl==1.16.0", "peft==0.21.2", "lightning==2.6.6")
PEERS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": _DEEPSPEED,
    "transformers": ("transformers==5.23.0",),
    "openvino": ("openvino==2026.4.1", "openvino-genai", "openvino-tokenizers", "optimum-intel==2.2.0"),
    "llamacpp": ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors"),
    "deepspeed-clients": _DEEPSPEED + _CLIENTS,
}
_ENV = {name: {"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1"} for name in ("deepspeed", "deepspeed-clients")}


def ensure(peer: str) -> Path:
    """The Python interpreter of `peer`'s environment, made on first use (about 800 MB on disk) and kept in .nox/.

    Raises:
        SystemExit: the peer is not in the table, or its installation failed (with the installer's own output).
    """
    if peer not in PEERS:
        raise SystemExit(f"unknown peer {peer!r}; known: {', '.join(sorted(PEERS))}")
    home = ROOT / ".nox" / f"peer-{peer}"
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(PEERS[peer])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    env = {**os.environ, **_ENV.get(peer, {})}
    # torch first: a peer's setup script imports it, and must find the pinned build.
    subprocess.run([*pip, "torch", "numpy", "setuptools", "wheel", "ninja", "scikit-build-core"], check=True, env=env)
    subprocess.run([*pip, "--no-build-isolation", *PEERS[peer]], check=True, env=env)
    # optimum asks for torchvision, whose build is for another torch: then transformers' processors cannot be imported.
    subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True, env=env)
    stamp.write_text(wanted)
    return python


def python_of(engine: str) -> str:
    """The interpreter that an engine runs under: DeepSpeed's is its own."""
    return str(ensure("deepspeed")) if engine.startswith("deepspeed") else sys.executable


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        print(ensure(name))

"""Importing ds_accel does nothing: no device, no environment, no thread, no file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout  # where numpy is missing, torch says so on the other stream


def test_nothing_happens_at_import() -> None:
    code = """
import sys
sys.dont_write_bytecode = True
import torch, os, threading
before, threads, seen = dict(os.environ), threading.active_count(), []
def hook(event, args):
    if event in ("subprocess.Popen", "socket.__new__", "os.fork", "os.putenv", "os.mkdir", "os.remove", "os.rename"):
        seen.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(args[0])
def never(*args, **kwargs):
    seen.append("a device was asked")
    return 0
for module in (torch.cuda, torch.xpu, torch.mps):
    module.device_count = module.is_available = never
sys.addaudithook(hook)
import ds_accel, ds_accel.contract
print(seen, dict(os.environ) == before, threading.active_count() == threads, torch.cuda.is_initialized(), "pydantic" in sys.modules)
"""
    assert run(code) == "[] True True False False\n"


def test_detection_changes_no_environment_and_starts_no_device() -> None:
    code = """
import os, torch
before = dict(os.environ)
from ds_accel import get_accelerator
accelerator = get_accelerator()
accelerator.supports(torch.bfloat16), accelerator.graphs(), accelerator.comm_backend, accelerator.device_count()
print(dict(os.environ) == before, torch.cuda.is_initialized())
"""
    assert run(code) == "True False\n"


def test_readme_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})


def test_every_code_of_this_package_has_a_section() -> None:
    page = Path(__file__).parents[3] / "docs/reference/errors.d/accel.md"
    if not page.is_file():
        pytest.skip("the tests run outside the repository")
    import ds_accel

    sections = set(re.findall(r"^## (\S+)", page.read_text(), re.MULTILINE))
    sources = "\n".join(path.read_text() for path in Path(ds_accel.__file__).parent.glob("*.py"))
    assert set(re.findall(r"code=\"([a-z-]+)\"", sources)) == sections

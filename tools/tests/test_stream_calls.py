"""Only ds_accel.streams calls torch for copies that are queued, for events, streams and page-locked memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from repo import ROOT
from repo.imports import parse

HOME = {"packages/accel/src/ds_accel/streams.py", "packages/accel/src/ds_accel/device_timer.py"}
# A rehearsal paces and times torch's streams themselves.
TIMED = "packages/comm/src/ds_comm/rehearsal/"
METHODS = {"record_stream", "wait_event", "is_current_stream_capturing"}
KINDS = {"Event", "Stream", "ExternalStream"}
NAMES = {*METHODS, *KINDS, "current_stream", "stream", "wait_stream", "pin_memory"}
FACTORIES = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "tensor", "rand", "randn"}


def raw_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each call of torch that belongs into ds_accel.streams."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name not in NAMES and not keywords & {"non_blocking", "pin_memory"}:
            continue
        base = ast.unparse(node.func.value)
        of_torch = base.split(".")[0] == "torch"
        if "non_blocking" in keywords:
            yield node.lineno, f"{name}(non_blocking=)"
        if name in METHODS and base != "streams":
            yield node.lineno, f"{name}()"
        if name in KINDS and of_torch:
            yield node.lineno, f"{base}.{name}()"
        if (name in ("current_stream", "stream") and of_torch) or (name == "wait_stream" and base != "streams"):
            yield node.lineno, f"{base}.{name}()"
        if name == "pin_memory" and not node.args:
            yield node.lineno, "pin_memory()"
        if name in FACTORIES and of_torch and "pin_memory" in keywords:
            yield node.lineno, f"{name}(pin_memory=)"


def test_they_are_seen() -> None:
    text = """
x.to(device, non_blocking=True)
y.copy_(x, non_blocking=flag)
x.record_stream(s)
torch.Event(device)
torch.cuda.Stream()
torch.cuda.current_stream(device)
s.wait_stream(t)
x.pin_memory()
torch.empty(3, pin_memory=True)
threading.Event()
config.section(pin_memory=True)
streams.wait_stream(s, t)
accelerator.current_stream()
"""
    assert [line for line, _ in raw_calls(ast.parse(text))] == list(range(2, 11))


# What a user's program or DeepSpeed's own API does with torch is not ours to queue.
@pytest.mark.parametrize(
    "package", sorted(path.name for path in (ROOT / "packages").iterdir() if path.name != "compat")
)
def test_no_other_file_makes_them(package: str) -> None:
    found = []
    for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name in HOME or name.startswith(TIMED):
            continue
        found += [f"{name}:{line}: {what}" for line, what in raw_calls(parse(file))]
    assert not found, "call ds_accel.streams instead:\n" + "\n".join(found)

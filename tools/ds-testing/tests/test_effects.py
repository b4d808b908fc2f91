"""The audit hears each thing that an import must not do."""

from __future__ import annotations

import pytest

from ds_testing.effects import import_effects


@pytest.fixture
def effects_of(tmp_path, monkeypatch):
    def effects(text: str) -> str:
        (tmp_path / "loud.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        return "\n".join(import_effects("loud").effects)

    return effects


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("open('x', 'w')", "opens 'x' for writing"),
        ("import os; os.close(os.open('x', os.O_CREAT | os.O_RDWR))", "opens 'x' for writing"),
        ("import pathlib; pathlib.Path('d').mkdir()", "changes files: os.mkdir"),
        ("import tempfile; tempfile.mkdtemp()", "changes files: tempfile.mkdtemp"),
        ("import threading; threading.Thread(target=int).start()", "starts a thread"),
        ("import _thread; _thread.start_new_thread(int, ())", "starts a thread"),
        ("import subprocess; subprocess.run(['true'])", "starts a process: subprocess.Popen"),
        ("import os; os.system('true')", "starts a process: os.system"),
        ("import socket; socket.socket()", "uses a socket"),
        ("import os; os.environ['A_NEW_ONE'] = '1'", "sets an environment variable: b'A_NEW_ONE'"),
        ("import os; os.chdir('/')", "working directory"),
        ("import sys; sys.path.append('/x')", "sys.path"),
        ("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "signal handlers"),
    ],
)
def test_heard(effects_of, text, heard):
    assert heard in effects_of(text)


def test_a_quiet_module_is_quiet(effects_of):
    assert effects_of("import dataclasses, json\nopen(__file__).close()") == ""


def test_the_baseline_is_not_listened_to(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text("open('x', 'w').close()")
    (tmp_path / "quiet.py").write_text("import loud")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = import_effects("quiet", baseline=("loud",))
    assert found.effects == ()
    assert {"quiet", "loud"} <= found.modules


def test_a_failing_import_is_an_error(effects_of):
    with pytest.raises(RuntimeError, match="ValueError: no"):
        effects_of("raise ValueError('no')")

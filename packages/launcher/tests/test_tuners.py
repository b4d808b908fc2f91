"""`--autotuning` is the business of whoever registers as a tuner: the launcher names none."""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from ds_config.errors import LaunchError
from ds_launcher.commands import run

LINE = ["--nproc", "2", "--autotuning", "run", "train.py", "--deepspeed_config", "c.json"]
calls: list[tuple[Any, ...]] = []


def tune(*words: Any) -> int:
    calls.append(words)
    return 3


def start() -> int:
    parser = argparse.ArgumentParser(exit_on_error=False)
    run.register(parser)
    return run.main(parser.parse_args(run.prepare(LINE)))


def test_the_tuner_is_called_with_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "entry_points", lambda group: [EntryPoint("toy", f"{__name__}:tune", group)])
    calls.clear()
    assert start() == 3
    assert calls == [("run", ("--nproc", "2"), "train.py", ("--deepspeed_config", "c.json"))]


def test_without_a_tuner_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "entry_points", lambda group: [])
    with pytest.raises(LaunchError, match=r"ds-tune, which is not installed .*ds\.autotuning") as caught:
        start()
    assert caught.value.code == "launch-tuner"

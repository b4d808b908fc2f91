"""Benchmarks refuse what they do not know before they touch a record."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["zero", "comm"])
def test_an_unknown_word_is_refused_and_the_record_stays(name, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    bench = importlib.import_module(name)
    data = tmp_path / "record.json"
    data.write_text("{}")
    monkeypatch.setattr(bench, "DATA", data)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["sunall"])
    assert "sunall" in f"{stopped.value.code}{capsys.readouterr().err}"
    assert data.read_text() == "{}"

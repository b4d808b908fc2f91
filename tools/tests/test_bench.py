"""Benchmarks refuse what they do not know before they touch a record."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest

from repo import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))


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


def test_a_table_is_filled_from_its_record_alone(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "PAGES", tmp_path)
    page = tmp_path / "monitor.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    assert tables.filled("monitor") == (page, page.read_text())  # no record yet
    line = {"sinks": "csv", "calls_us": 60.4, "threads_us": 40, "share": 0.00502, "step_ms": 21, "with_ms": 21.2}
    record = {"date": "2026-01-01", "machine": "a machine", "others": 0.031, "lines": [line]}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "monitor.json").write_text(json.dumps(record))
    text = tables.filled("monitor")[1]
    assert text.startswith("before\n<!-- table -->\n")
    assert "| csv | 60 | 40 | **0.50 %** | 21.00 | 21.20 |" in text
    assert "background load 3.1 %: a machine." in text
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text


def test_a_page_shows_rows_between_its_marks_and_keeps_its_own_text(bench):
    page = importlib.import_module("bench_page")
    text = page.markdown_table(["engine", "ms"], [["ours", "1.2"], ["peer", "3.4"]])
    assert text == "| engine | ms |\n|---|---:|\n| ours | 1.2 |\n| peer | 3.4 |\n"
    before = "# Page\n<!-- rows -->\nold\n<!-- end of rows -->\nafter\n"
    assert (
        page.filled(before, "rows", "end of rows", text)
        == f"# Page\n<!-- rows -->\n{text}<!-- end of rows -->\nafter\n"
    )
    assert page.filled("# Page\n", "rows", "end of rows", text) == "# Page\n"


def test_no_benchmark_imports_another_in_a_circle(bench):
    folder = ROOT / "tools" / "bench"
    needs = {
        file.stem: {
            name
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            if name and (folder / f"{name}.py").is_file()
        }
        for file in folder.glob("*.py")
    }
    left = dict(needs)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}

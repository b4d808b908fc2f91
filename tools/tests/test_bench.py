"""Benchmarks refuse what they do not know before they touch a record."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import sys
import time

import pytest

from repo import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))


@pytest.mark.parametrize("name", ["zero", "comm"])
def test_an_unknown_word_is_refused_and_the_record_stays(name, bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.import_module("records"), "PAGES", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(["sunall"])
    assert "sunall" in f"{stopped.value.code}{capsys.readouterr().err}"
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_stamped_and_keeps_its_other_parts(bench, monkeypatch, tmp_path):
    records = importlib.import_module("records")
    monkeypatch.setattr(records, "PAGES", tmp_path)
    (tmp_path / "data").mkdir()
    assert records.read("one") == {}
    records.write("one", lines=[1])
    records.add("one", machine="another", stages={"a": 2})
    assert records.read("one") == {
        "date": time.strftime("%Y-%m-%d"),
        "machine": "another",
        "lines": [1],
        "stages": {"a": 2},
    }


def test_a_table_is_filled_from_its_record_alone(bench, monkeypatch, tmp_path):
    tables, records = importlib.import_module("tables"), importlib.import_module("records")
    monkeypatch.setattr(records, "PAGES", tmp_path)
    page = tmp_path / "monitor.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    assert tables.filled("monitor", page) == page.read_text()  # no record yet
    line = {"sinks": "csv", "calls_us": 60.4, "threads_us": 40, "share": 0.00502, "step_ms": 21, "with_ms": 21.2}
    record = {"date": "2026-01-01", "machine": "a machine", "others": 0.031, "lines": [line]}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "monitor.json").write_text(json.dumps(record))
    text = tables.filled("monitor", page)
    assert text.startswith("before\n<!-- table -->\n")
    assert "| csv | 60 | 40 | **0.50 %** | 21.00 | 21.20 |" in text
    assert "background load 3.1 %: a machine." in text
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text


def test_tables_of_pages_are_as_their_records_say(bench):
    tables = importlib.import_module("tables")
    stale = [
        page.name
        for name in tables.TABLES
        for page in tables.pages_of(name)
        if tables.filled(name, page) != page.read_text()
    ]
    assert stale == [], "run: nox -s bench -- tables"


def test_what_is_compared_takes_turns_and_a_first_round_does_not_count(bench):
    in_turn = importlib.import_module("in_turn")
    count = itertools.count()
    measures = {name: lambda name=name: f"{name}{next(count)}" for name in "ab"}
    assert in_turn.in_turn(measures, 2) == {"a": ["a2", "a4"], "b": ["b3", "b5"]}
    assert in_turn.ratio({"ours": [1.0, 2.0, 4.0], "peer": [3.0, 2.0, 8.0]}, "peer", "ours") == 2.0


def test_a_worker_answers_every_line_and_what_libraries_print_is_no_answer(bench, tmp_path):
    worker = tmp_path / "worker.py"
    folder = ROOT / "tools" / "bench" / "workers"
    worker.write_text(
        f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom answering import answering, serve\n"
        "answer = answering(); print('noise'); answer({'ready': True}); serve(answer, lambda line: line.upper())\n"
    )
    process = importlib.import_module("in_turn").Answering([sys.executable, worker])
    assert process.first == {"ready": True}
    assert [process.ask(word) for word in ("a", "b")] == ["A", "B"]
    process.close()


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

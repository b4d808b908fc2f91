"""Ranks that share cards, NCCL's answer, and the table of a run on devices: all of it without a card."""

from __future__ import annotations

import json
import sys

import pytest

from ds_testing.cards import NO_CARD, CardBook, NcclAnswer, ask_nccl, card_variables, read_answers
from ds_testing.device_table import (
    DeviceRow,
    DeviceRun,
    merge_record,
    package_of,
    render_table,
    summarize,
    to_record,
)
from ds_testing.spec import World

SCENARIOS = """
import os

import pytest
import torch

from ds_testing import world
from ds_testing.device_worlds import device_world


@world(2, device="cuda")
def test_on_cards_alone():
    raise ValueError("no card here")


@device_world(2)
@pytest.mark.parametrize("number", [1, 2])
def test_on_both(number, device, tmp_path):
    import ds_comm
    from ds_accel import get_accelerator
    from ds_config.errors import CommError

    assert get_accelerator().device() == device
    value = torch.full((2,), float(number), device=device)
    ds_comm.all_reduce(value)
    assert value.tolist() == [2 * number, 2 * number]
    with pytest.raises(CommError, match="a tensor of the host"):
        ds_comm.all_reduce(torch.ones(2))


@device_world(2, host="cpu")
def test_on_the_plain_host(device):
    assert device == torch.device("cpu")


@world(2)
def test_another_device(device="cpu"):
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.gpu
def test_one_card():
    pytest.skip("needs one")
"""
SETTINGS = "markers =\n    gpu: a card\n    device_world: groups of a device\n"


def test_ranks_that_share_a_card_are_hosts_of_their_own():
    shared = [card_variables(rank, 4, 1) for rank in range(4)]
    assert [variables["NCCL_HOSTID"] for variables in shared] == ["rank0", "rank1", "rank2", "rank3"]
    assert {variables["LOCAL_RANK"] for variables in shared} == {"0"}
    assert all(variables["NCCL_P2P_DISABLE"] == variables["NCCL_SHM_DISABLE"] == "1" for variables in shared)
    assert all(variables["NCCL_SOCKET_IFNAME"] == "lo" for variables in shared)


def test_ranks_with_a_card_each_are_one_host():
    each = [card_variables(rank, 2, 2) for rank in range(2)]
    assert [variables["LOCAL_RANK"] for variables in each] == ["0", "1"]
    assert not any("NCCL_HOSTID" in variables or "LOCAL_WORLD_SIZE" in variables for variables in each)
    assert card_variables(1, 2, 0) == {}


def test_what_nccl_answers_decides_the_backend():
    assert read_answers(['noise\n{"version": "2.28.3"}\n', '{"version": "2.28.3"}']) == NcclAnswer(True, "NCCL 2.28.3")
    refused = "init.cc:1 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
    answer = read_answers([f"{refused}\nTraceback\nDistBackendError: ncclInvalidUsage", '{"version": "2"}'])
    assert answer == NcclAnswer(False, refused)
    assert read_answers([""]).text == "it said nothing"
    assert read_answers(["1"]).works is False
    assert NcclAnswer(True, "").backend == "cpu:gloo,cuda:nccl"
    assert answer.backend == "cpu:gloo,cuda:gloo"


def test_it_is_asked_in_processes_of_their_own():
    says = "import json, os; print(json.dumps({'version': os.environ['NCCL_HOSTID'] + '/' + os.environ['WORLD_SIZE']}))"
    assert ask_nccl(2, 1, (sys.executable, "-c", says)) == NcclAnswer(True, "NCCL rank0/2")
    fails = "import os, sys; sys.exit('refused by ' + os.environ['RANK'])"
    assert ask_nccl(2, 1, (sys.executable, "-c", fails)) == NcclAnswer(False, "refused by 0")
    waits = "import time; print('here', flush=True); time.sleep(600)"
    assert ask_nccl(2, 1, (sys.executable, "-c", waits), 0.5) == NcclAnswer(False, "no answer in 0.5 s")


def test_it_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr("ds_testing.cards.ask_nccl", lambda size, cards: asked.append(size) or NcclAnswer(True, "x"))
    monkeypatch.setattr("ds_testing.cards.count_cards", lambda: 1)
    book = CardBook()
    assert [book.answer(2), book.answer(2), book.answer(4)] == [NcclAnswer(True, "x")] * 3
    assert asked == [2, 4]


def test_a_device_is_named():
    assert World(2, device="cuda").device == "cuda"
    with pytest.raises(ValueError, match="not on 'tpu'"):
        World(2, device="tpu")


RUNS = [
    DeviceRun("zero", "cuda", 2, "cpu:gloo,cuda:nccl", "passed", 1.25),
    DeviceRun("zero", "cuda", 2, "cpu:gloo,cuda:nccl", "failed", 0.5),
    DeviceRun("zero", "device-only", 2, "gloo", "passed", 0.25),
    DeviceRun("comm", "cuda", 4, "cpu:gloo,cuda:nccl", "skipped", 0.0),
]


def test_the_table_has_a_row_for_each_package_device_size_and_backend():
    rows = summarize(RUNS)
    assert rows == [
        DeviceRow("comm", "cuda", 4, "cpu:gloo,cuda:nccl", 0, 0, 1, 0.0),
        DeviceRow("zero", "cuda", 2, "cpu:gloo,cuda:nccl", 1, 1, 0, 1.8),
        DeviceRow("zero", "device-only", 2, "gloo", 1, 0, 0, 0.2),
    ]
    lines = render_table(rows).splitlines()
    assert len({len(line) for line in lines[:5]}) == 1
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "zero", "cuda", "2", "cpu:gloo,cuda:nccl", "1", "1", "0", "1.8",
    ]  # fmt: skip
    assert lines[-1] == "2 passed, 1 failed, 1 skipped in 2 s"
    assert render_table([]) == "no test of a device was selected"


def test_the_record_has_what_ran_on_the_card_and_one_run_a_card():
    facts = {"card": "B", "torch": "2"}
    record = to_record(summarize(RUNS), facts, {4: "NCCL 2.28"}, "2026-01-01")
    assert [row["device"] for row in record["rows"]] == ["cuda", "cuda"]
    assert (record["card"], record["nccl"], record["date"]) == ("B", {"4": "NCCL 2.28"}, "2026-01-01")
    older = [{"card": "B", "date": "2025"}, {"card": "C", "date": "2025"}]
    assert merge_record(older, record) == [record, older[1]]
    assert merge_record(older, {"card": "A"})[0] == {"card": "A"}


def test_a_test_belongs_to_the_package_of_its_path():
    assert package_of("packages/zero/tests/world/test_x.py::test_y[1]") == "zero"
    assert package_of("tools/ds-testing/tests/test_x.py::test_y") == "ds-testing"
    assert package_of("test_x.py::test_y") == "test_x.py"


def test_cases_run_where_they_say(tmp_path, run_pytest, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    record = tmp_path / "devices.json"
    found = run_pytest(tmp_path, SCENARIOS, f"--devices-record={record}", settings=SETTINGS)
    assert {name for name, (kind, _) in found.items() if kind == "passed"} == {
        "test_on_both[1-device-only]", "test_on_both[2-device-only]", "test_on_the_plain_host[cpu]", "test_another_device",
    }  # fmt: skip
    skipped = {name: text for name, (kind, text) in found.items() if kind == "skipped"}
    assert set(skipped) == {
        "test_on_cards_alone", "test_on_both[1-cuda]", "test_on_both[2-cuda]", "test_on_the_plain_host[cuda]", "test_one_card",
    }  # fmt: skip
    assert all(NO_CARD in text for name, text in skipped.items() if name != "test_one_card")
    assert not record.exists()  # of a card only
    table = found.printed
    assert "no card here: nothing is written" in table
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")][:7] for line in table.splitlines() if "| test_w" in line
    ]
    assert rows == [
        ["test_written.py", "cpu", "2", "gloo", "1", "0", "0"],
        ["test_written.py", "cuda", "1", "none", "0", "0", "1"],
        ["test_written.py", "cuda", "2", "gloo", "0", "0", "4"],
        ["test_written.py", "device-only", "2", "gloo", "2", "0", "0"],
    ]


def test_a_record_is_written_where_a_card_was(tmp_path, monkeypatch):
    from ds_testing.device_report import DeviceReport

    class Reporter:
        def __init__(self):
            self.lines = []

        def section(self, title):
            self.lines.append(title)

        def write_line(self, line):
            self.lines.append(line)

    book = CardBook()
    monkeypatch.setattr(CardBook, "facts", lambda self: {"card": "X", "torch": "2", "cuda": "13"})
    monkeypatch.setattr("ds_testing.cards.count_cards", lambda: 1)
    book.answers[2] = NcclAnswer(False, "Duplicate GPU detected")
    report = DeviceReport(book, tmp_path / "deep" / "devices.json")
    report.runs += RUNS
    reporter = Reporter()
    report.pytest_terminal_summary(reporter)
    written = json.loads((tmp_path / "deep" / "devices.json").read_text())
    assert [(record["card"], record["nccl"]) for record in written] == [("X", {"2": "Duplicate GPU detected"})]
    assert "NCCL with 2 ranks on 1 cards: Duplicate GPU detected" in reporter.lines

"""`ds comm debug` over dumps, and `ds comm bench` on two ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ds_comm import cli, sweep
from ds_comm.watch.dumps import compare, dump_name, jobs_in, new_job, read_dumps, render
from ds_comm.watch.stamp_ring import Stamp
from ds_config.errors import CommError

STAMP = Stamp("0", "world", 1, "all_reduce", "layers.0", "float32", (8,), 8, -1, 1.0, 0.0, 2.0, 1)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.register(parser)
    return parser.parse_args(list(words))


def dump(folder: Path, rank: int, stamps: list[Stamp], pid: int = 1) -> None:
    content = {"line": f"rank {rank} says", "code": "comm-hang", "stamps": [asdict(stamp) for stamp in stamps]}
    (folder / f"rank-{rank}-pid-{pid}.json").write_text(json.dumps(content))


def job(folder: Path, name: str, ranks: int, written_s: float) -> None:
    """The dumps of a job whose ranks all came to `name`."""
    for rank in range(ranks):
        content = {"job": name, "line": f"rank {rank} of {name}", "stamps": [asdict(replace(STAMP, unit=name))]}
        path = folder / dump_name(rank, 7, name)
        path.write_text(json.dumps(content))
        os.utime(path, (written_s, written_s))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    same = [replace(STAMP, mark=mark) for mark in range(1, 10)]
    odd = replace(STAMP, mark=10, unit="layers.1", waited_s=1.0, ended_s=0.0)
    dump(tmp_path, 0, [*same, replace(odd, unit="layers.2"), replace(STAMP, mark=0, op="send")])
    dump(tmp_path, 1, [*same[3:], odd])  # its ring forgot the first ones
    dump(tmp_path, 2, same)
    return tmp_path


def test_operations_side_by_side(folder: Path) -> None:
    rows = compare(read_dumps(folder))
    assert [row.mark for row in rows] == list(range(1, 11))
    assert rows[5].agree
    assert not rows[9].agree
    assert rows[9].stamps[2] is None


def test_the_parting_is_shown_with_what_came_before(folder: Path) -> None:
    text = render(read_dumps(folder), before=2)
    assert text.startswith("rank 0 says\nrank 1 says\nrank 2 says\n")
    assert "group 'world': ranks differ at #10" in text
    assert "#8" in text
    assert "#7" not in text
    assert "rank 0: all_reduce[layers.2] float32[8] waits" in text
    assert "rank 2: did not come" in text
    assert "ranks 0, 1, 2: all_reduce[layers.0] float32[8] done" in text


def test_agreement_is_said(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, [replace(STAMP, mark=mark) for mark in (1, 2)])
    assert "all 2 remembered operations agree, up to #2" in render(read_dumps(tmp_path))


def test_groups_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for rank in range(4):
        dump(
            tmp_path,
            rank,
            [replace(STAMP, key=f"pair{rank // 2}", group="data", mark=mark) for mark in (1, 2 + rank // 2)],
        )
    text = render(read_dumps(tmp_path))
    assert "group 'data': all 2 remembered operations agree, up to #2" in text
    assert "group 'data': all 2 remembered operations agree, up to #3" in text


def test_debug(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments("debug", str(folder))) == 0
    assert "differ at #10" in capsys.readouterr().out
    empty = folder / "empty"
    empty.mkdir()
    assert cli.main(arguments("debug", str(empty))) == 1
    assert "comm-no-dump" in capsys.readouterr().err
    with pytest.raises(CommError, match=r"no rank-\*\.json"):
        read_dumps(empty)


def test_debug_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments("debug", str(folder), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    (group,) = told["groups"]
    assert (group["group"], group["differs_at"]) == ("world", 10)
    assert group["operations"][0]["mark"] == 4  # rank 1 remembers no earlier one
    assert group["operations"][-1]["ranks"]["0"]["unit"] == "layers.2"
    assert group["operations"][-1]["ranks"]["2"] is None


def test_the_newest_dump_of_a_rank_counts(folder: Path) -> None:
    dump(folder, 2, [STAMP], pid=7)
    (folder / "rank-2-pid-1.json").touch()
    assert len(read_dumps(folder)[2].stamps) == 9


def test_jobs_in_one_folder_are_not_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.iterdir():  # of a version whose files carry no name
        os.utime(path, (1e9, 1e9))
    job(folder, "early", 4, 1e9 + 20)
    job(folder, "late", 2, 1e9 + 30)
    (folder / "rank-of-nobody.json").write_text("not ours")
    assert [(found.name, list(found.files)) for found in jobs_in(folder)] == [
        ("late", [0, 1]),
        ("early", [0, 1, 2, 3]),
        ("", [0, 1, 2]),
    ]
    assert cli.main(arguments("debug", str(folder))) == 0
    said = capsys.readouterr().out
    assert "all 1 remembered operations agree" in said
    assert "early: ranks 0, 1, 2, 3, written" in said
    assert "without a name: ranks 0, 1, 2, written" in said
    assert "rank 0 of early" not in said
    assert cli.main(arguments("debug", str(folder), "--job", "early")) == 0
    assert capsys.readouterr().out.startswith("rank 0 of early\nrank 1 of early\nrank 2 of early\nrank 3 of early\n\n")
    assert cli.main(arguments("debug", str(folder), "--job", "")) == 0
    assert "ranks differ at #10" in capsys.readouterr().out
    assert cli.main(arguments("debug", str(folder), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"] == "late"
    assert [(other["job"], other["ranks"]) for other in told["others"]] == [("early", [0, 1, 2, 3]), ("", [0, 1, 2])]


def test_a_job_that_left_nothing_is_told_with_those_that_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(folder, "late", 2, 1e9)
    assert cli.main(arguments("debug", str(folder), "--job", "other")) == 1
    said = capsys.readouterr().err
    assert "no dumps of the job 'other'" in said
    assert "late: ranks 0, 1" in said


def test_a_job_alone_lists_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, new_job(), 2, 1e9)
    assert cli.main(arguments("debug", str(tmp_path))) == 0
    assert "--job" not in capsys.readouterr().out


def test_bench_starts_ranks_that_print_a_table_and_write_json(
    forked: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Started:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            assert command[:2] == [sys.executable, "-m"]
            started.append((command[1:], env))

        def wait(self) -> int:
            return 0

    out = tmp_path / "bench.json"
    words = ["bench", "--ops", "all_reduce", "barrier", "--sizes", "1K", "0", "--dtypes", "float32", "bfloat16"]
    with monkeypatch.context() as patch:
        patch.setattr(cli.subprocess, "Popen", Started)
        patch.delenv("RANK", raising=False)
        assert cli.main(arguments(*words, "--seconds", "0.02", "--json", str(out))) == 0
    assert len(started) == 2
    ranks = forked(started)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    lines = ranks[0].output.splitlines()
    assert lines[0].split()[:3] == ["op", "backend", "dtype"]
    assert len(lines) == 1 + 4 + 1
    timings = json.loads(out.read_text())
    assert {timing["case"]["op"] for timing in timings} == {"all_reduce", "barrier"}
    assert all(0 < timing["best_s"] <= timing["median_s"] <= timing["p99_s"] for timing in timings)
    assert all(timing["flow_s"] > 0 and timing["busy_s"] > 0 for timing in timings)


@pytest.mark.slow
def test_bench_as_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments("bench", "--ops", "barrier", "--seconds", "0.02")) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2


def test_bench_as_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments("bench", "--json").json == cli.SCREEN
    assert arguments("bench", "--json", "x.json").json == Path("x.json")


def test_bench_alone_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments("bench", "--nproc", "1")) == 2
    assert "--nproc 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
    ids=["torchrun", "mpich", "openmpi"],
)
def test_bench_under_a_launcher_starts_no_ranks_of_its_own(launcher, monkeypatch) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    ran: list[str] = []
    monkeypatch.setattr(cli, "_start_ranks", lambda args: ran.append("started") or 0)
    monkeypatch.setattr(cli, "_bench", lambda args: ran.append("joined") or 0)
    assert cli.main(arguments("bench")) == 0
    assert ran == ["joined"]


def test_the_commands_own_list_of_operations_is_the_sweeps() -> None:
    assert tuple(sweep.OPERATIONS) == cli.OPERATIONS + cli.TORCH_OPERATIONS


@pytest.mark.parametrize(("text", "expected"), [("12", 12), ("4K", 4096), ("16m", 16 << 20), ("1G", 1 << 30)])
def test_sizes(text: str, expected: int) -> None:
    assert arguments("bench", "--sizes", text).sizes == [expected]


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("bench", "--sizes", "big")
    assert "'big' is no size" in capsys.readouterr().err

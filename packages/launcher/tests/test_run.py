"""`ds run` with real processes: what ranks get, what is shown, how it ends. The scripts import no torch."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.skipif(os.name != "posix", reason="`ds run` needs signals and process groups")


def test_ranks_get_their_place_and_the_scripts_arguments(box: Sandbox) -> None:
    script = box.script("""
        import json, os, sys
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
        with open(f"seen{os.environ['RANK']}.json", "w") as file:
            json.dump([{key: os.environ[key] for key in keys}, sys.argv[1:]], file)
    """)
    done = box.ds("run", "--nproc", "3", script, "--deepspeed_config", "cfg.json", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = [json.loads(box.file(f"seen{rank}.json").read_text()) for rank in range(3)]
    assert [env["RANK"] for env, _ in seen] == [env["LOCAL_RANK"] for env, _ in seen] == ["0", "1", "2"]
    assert {env["WORLD_SIZE"] for env, _ in seen} == {env["LOCAL_SIZE"] for env, _ in seen} == {"3"}
    assert len({env["MASTER_PORT"] for env, _ in seen}) == 1
    assert all(argv == ["--deepspeed_config", "cfg.json", "a b"] for _, argv in seen)


def test_variables_that_are_named_reach_the_ranks_of_this_host_too(box: Sandbox) -> None:
    """They went to other hosts only."""
    script = box.script("import os; print(os.environ['MINE'], os.environ['OMP_NUM_THREADS'])")
    done = box.ds("run", "--nproc", "2", "-x", "MINE=a b", "-x", "OMP_NUM_THREADS=3", script)
    assert sorted(done.stdout.splitlines()) == ["[rank1] a b 3", "a b 3"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_standard_files_that_are_closed_lead_nowhere(box: Sandbox, closed: str) -> None:
    """It was a traceback; and the next file that is opened would have been taken for one of them."""
    script = box.script("import os; print('hello'); open('seen' + os.environ['RANK'], 'w').close()")
    words = [sys.executable, "-P", "-m", "ds_launcher", "run", "--nproc", "2", script]
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(words)} {closed}"],
        cwd=box.folder,
        env=box.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert box.file("seen1").exists()
    assert ("hello" in done.stdout) == closed.startswith(("2", "<"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_ranks_run_on_their_own_cores(box: Sandbox) -> None:
    script = box.script("""
        import os
        with open(f"seen{os.environ['RANK']}", "w") as file:
            file.write(f"{sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']}")
    """)
    cores = sorted(os.sched_getaffinity(0))[:2]
    done = box.ds("run", "--nproc", "2", "--core-list", ",".join(map(str, cores)), script)
    assert (done.returncode, done.stderr) == (0, "")
    seen = [box.file(f"seen{rank}").read_text().rpartition(" ")[0] for rank in range(2)]
    assert seen == [f"[{core}]" for core in cores]


def test_output_comes_in_whole_lines_with_the_rank_before_all_but_the_first(box: Sandbox) -> None:
    script = box.script("""
        import os, sys
        rank = os.environ["RANK"]
        for i in range(200):
            sys.stdout.write("a" * 40); sys.stdout.flush(); sys.stdout.write(f"{rank}-{i}\\n")
        sys.stderr.write(f"error text of {rank}\\n")
        sys.stdout.write(f"no line end {rank}")
    """)
    done = box.ds("run", "--nproc", "3", script)
    lines = done.stdout.splitlines()
    for rank in range(3):
        prefix = f"[rank{rank}] " if rank else ""
        mine = [line for line in lines if line.endswith(f"{rank}-0") or f"{'a' * 40}{rank}-" in line]
        assert mine == [f"{prefix}{'a' * 40}{rank}-{i}" for i in range(200)]
        assert f"{prefix}no line end {rank}" in lines
        assert f"{prefix}error text of {rank}" in done.stderr.splitlines()
    assert len(lines) == 3 * 201


def test_log_files_hold_everything_and_the_screen_rank_0(box: Sandbox) -> None:
    script = box.script("""
        import os, sys
        print("out", os.environ["RANK"]); print("err", os.environ["RANK"], file=sys.stderr)
    """)
    done = box.ds("run", "--nproc", "2", "--log-dir", "deep/logs", script)
    assert (done.stdout, done.stderr) == ("out 0\n", "err 0\n")
    assert sorted(box.file("deep/logs/rank1.log").read_text().splitlines()) == ["err 1", "out 1"]
    assert sorted(box.file("deep/logs/rank0.log").read_text().splitlines()) == ["err 0", "out 0"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full to write to")
def test_a_full_disk_under_the_log_does_not_end_the_job(box: Sandbox) -> None:
    box.file("logs").mkdir()
    box.file("logs/rank1.log").symlink_to("/dev/full")
    script = box.script("import time; print('one'); time.sleep(0.2); print('two'); open('finished', 'w')")
    done = box.ds("run", "--nproc", "2", "--log-dir", "logs", script)
    assert done.returncode == 0
    assert done.stderr == "ds run: no more lines in logs/rank1.log: No space left on device\n"
    assert box.file("finished").exists()
    assert box.file("logs/rank0.log").read_text() == "one\ntwo\n"


def test_rank_0_gets_standard_input_and_the_others_none(box: Sandbox) -> None:
    script = box.script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = box.ds("run", "--nproc", "2", script, stdin="typed")
    assert sorted(done.stdout.splitlines()) == ["0 'typed'", "[rank1] 1 ''"]


FAILS = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        raise ValueError("rank one broke")
    time.sleep(600)
"""


def test_the_failing_ranks_code_and_its_traceback_last(box: Sandbox) -> None:
    done = box.ds("run", "--nproc", "3", box.script(FAILS))
    assert done.returncode == 1
    header, *traceback = done.stderr[done.stderr.index("ds run: ") :].splitlines()
    assert header == "ds run: rank 1 failed first (exit code 1); the others were stopped"
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: rank one broke"


def test_consequences_do_not_take_the_blame(box: Sandbox) -> None:
    # Rank 2 raises first and takes long to end; the others see it go and end at once, with other codes.
    script = box.script("""
        import atexit, os, pathlib, sys, time
        gone = pathlib.Path("gone")
        if os.environ["RANK"] == "2":
            def teardown():
                gone.touch()
                time.sleep(0.5)
            atexit.register(teardown)
            raise RuntimeError("the cause")
        while not gone.exists():
            time.sleep(0.005)
        try:
            raise ConnectionError("peer closed")
        except ConnectionError:
            import traceback
            traceback.print_exc()
            sys.exit(7)
    """)
    done = box.ds("run", "--nproc", "3", script)
    assert done.returncode == 1
    assert "ds run: rank 2 failed first" in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: the cause"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
        ("os._exit(42)", 42, "exit code 42"),
        ("sys.exit('words')", 1, "words"),
    ],
)
def test_exit_status_is_the_first_failing_ranks(box: Sandbox, code: str, status: int, said: str) -> None:
    script = box.script(f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            {code}
        time.sleep(600)
    """)
    done = box.ds("run", "--nproc", "2", script)
    assert done.returncode == status
    assert said in done.stderr


def test_a_job_of_one_rank_is_as_if_run_alone(box: Sandbox) -> None:
    script = box.script("raise ValueError('alone')")
    done = box.ds("run", "--nproc", "1", script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "ValueError: alone"


def test_ranks_that_end_at_different_times_all_finish(box: Sandbox) -> None:
    script = box.script("import os, time; time.sleep(0.3 * int(os.environ['RANK'])); print('done')")
    done = box.ds("run", "--nproc", "3", script)
    assert done.returncode == 0
    assert done.stdout.count("done") == 3


def test_no_python_runs_a_program_and_signals_its_group(box: Sandbox) -> None:
    done = box.ds("run", "--no-python", "--nproc", "2", "sh", "-c", "echo from $RANK; exit $RANK")
    assert done.returncode == 1
    assert "from 0" in done.stdout


def test_a_program_that_cannot_be_started(box: Sandbox) -> None:
    box.file("data.bin").write_text("not a program")
    done = box.ds("run", "--no-python", "--nproc", "2", "./data.bin")
    assert done.returncode == 127
    assert "rank 0 could not be started" in done.stderr


def test_modules_run_as_with_dash_m(box: Sandbox) -> None:
    box.script("print('module', __name__)", "work.py")
    done = box.ds("run", "-m", "work")
    assert done.stdout == "module __main__\n"


def test_a_missing_script_is_said_before_anything_starts(box: Sandbox) -> None:
    box.script("", "train.py")
    done = box.ds("run", "--nproc", "2", "trian.py")
    assert done.returncode == 1
    assert "LaunchError: there is no script trian.py" in done.stderr
    assert "Did you mean train.py?" in done.stderr


def test_dry_run_prints_and_starts_nothing(box: Sandbox) -> None:
    script = box.script("open('started', 'w')")
    done = box.ds("run", "--nproc", "2", "--dry-run", script, "a b")
    assert done.returncode == 0
    assert done.stdout.count("RANK=1 ") >= 1
    assert done.stdout.count("train.py 'a b'") == 2
    assert not box.file("started").exists()


def test_a_reader_that_leaves_does_not_end_the_job(box: Sandbox) -> None:
    script = box.script("""
        for i in range(20000): print("line", i)
        open("finished", "w").close()
    """)
    job = box.start("run", "--nproc", "2", script)
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(timeout=200) == 0
    assert box.file("finished").exists()


def test_a_slow_reader_gets_everything(box: Sandbox) -> None:
    script = box.script("""
        import os, pathlib
        for i in range(100000): print("line", i)
        pathlib.Path("finished" + os.environ["RANK"]).touch()
    """)
    job = box.start("run", "--nproc", "2", script)
    box.wait(lambda: box.file("finished0").exists() and box.file("finished1").exists())
    time.sleep(0.3)  # the ranks are gone; as much as the pipe does not hold is still in the keeper
    out, _ = job.communicate(timeout=200)
    assert job.returncode == 0
    assert out.count("\n") == 200000


def test_twenty_jobs_at_once_get_twenty_ports(box: Sandbox) -> None:
    # Rank 0 listens as a TCP store does, long after the port was chosen, while the other jobs choose theirs.
    script = box.script("""
        import os, pathlib, socket, time
        port = int(os.environ["MASTER_PORT"])
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        pathlib.Path(f"up{port}").touch()
        while len(list(pathlib.Path().glob("up*"))) < 20: time.sleep(0.02)
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
        pathlib.Path(f"listening{port}").touch()
        while len(list(pathlib.Path().glob("listening*"))) < 20: time.sleep(0.02)
    """)
    jobs = [box.start("run", "--nproc", "1", script) for _ in range(20)]
    errors = [job.communicate(timeout=200)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 20, errors
    assert len(list(box.folder.glob("listening*"))) == 20


def test_a_port_in_use_is_refused_before_anything_starts(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = box.ds("run", "--master-port", str(port), box.script("print('no')"))
    assert done.returncode == 1
    assert f"port {port} of this host cannot be used" in done.stderr


def test_a_terminal_stays_a_terminal_for_rank_0(box: Sandbox) -> None:
    script = box.script("import os, sys; print('tty', sys.stdout.isatty(), os.environ['RANK'])")
    reading, terminal = pty.openpty()
    job = box.start("run", "--nproc", "2", script, screen=terminal)
    os.close(terminal)
    shown = b""
    # When the last writer closes a terminal, reading it is an error and not an end.
    with contextlib.suppress(OSError):
        while data := os.read(reading, 4096):
            shown += data
    os.close(reading)
    assert job.wait(timeout=200) == 0
    assert "tty True 0" in shown.decode()
    assert "[rank1] tty False 1" in shown.decode()


def test_the_gloo_world(box: Sandbox) -> None:
    pytest.importorskip("torch")
    script = box.script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        print("sum", value.item(), dist.is_torchelastic_launched())
        dist.destroy_process_group()
    """)
    done = box.ds("run", "--nproc", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank1] sum 3.0 True", "sum 3.0 True"]


def test_restarts_run_on_torchs_elastic_agent(box: Sandbox) -> None:
    pytest.importorskip("torch")
    script = box.script("""
        import os, pathlib, time
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        pathlib.Path(f"attempt{attempt}-{rank}-{os.environ['LOCAL_SIZE']}").touch()
        if rank == "1" and attempt == "0":
            while not pathlib.Path("attempt0-0-2").exists(): time.sleep(0.02)
            raise ValueError("not yet")
        if attempt == "0": time.sleep(60)
    """)
    done = box.ds("run", "--nproc", "2", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in Path(box.folder).glob("attempt*"))
    assert names == ["attempt0-0-2", "attempt0-1-2", "attempt1-0-2", "attempt1-1-2"]


def test_the_last_restarts_failure_is_reported_like_any_other(box: Sandbox) -> None:
    pytest.importorskip("torch")
    script = box.script("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("never works")
        time.sleep(60)
    """)
    done = box.ds("run", "--nproc", "2", "--nnodes", "1", "--rdzv-endpoint", "127.0.0.1:0", script)
    assert done.returncode == 1
    assert "ds run: rank 1 failed first (exit code 1); no restart is left" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: never works"


def test_save_pid_names_the_job_while_it_runs(box: Sandbox) -> None:
    script = box.script("import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(60)\n")
    job = box.start("run", "--save_pid", script, env={"TMPDIR": str(box.folder)})
    box.wait(lambda: box.file("up").exists())
    assert box.file(f"{job.pid}.deepspeed").read_text() == str(job.pid)
    job.terminate()
    assert job.wait(timeout=10) == 143
    assert not box.file(f"{job.pid}.deepspeed").exists()
    job.communicate()


def test_a_file_is_sourced_before_each_rank(box: Sandbox) -> None:
    box.file("env.sh").write_text("export GREETING=hello\n")
    script = box.script("import os\nprint(os.environ['GREETING'])\nraise SystemExit(3)\n")
    done = box.ds("run", "--nproc", "2", "--venv_script", "./env.sh", script)
    assert (done.returncode, "hello" in done.stdout) == (3, True)


def test_a_log_folder_that_cannot_be_made(box: Sandbox) -> None:
    box.file("taken").touch()
    done = box.ds("run", "--log-dir", "taken/logs", box.script("pass"))
    assert done.returncode == 1
    assert "ds explain launch-log-dir" in done.stderr

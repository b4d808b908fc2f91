"""Whatever is killed, nobody is left, and other jobs notice nothing.

Every rank has a child in its session, a child in a session of its own, and a daemon (forked twice); rank 0 ignores SIGTERM.
The marker in the environment finds them all, whoever their parent is by now.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc to see who is left")

STUBBORN = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["RANK"]
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    if rank == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("pid" + rank).write_text(str(os.getpid()))
    time.sleep(600)
"""
PROCESSES = 1 + 1 + 2 * 4  # ds, its keeper, and two ranks with three others each


def job_with_ranks(box: Sandbox, *options: str) -> subprocess.Popen[str]:
    job = box.start("run", "--nproc", "2", "--grace", "0.5", *options, box.script(STUBBORN))
    # A forked pair is one process more for a moment, until its middle one has ended.
    box.wait(lambda: box.told("pid0", "pid1") and len(box.alive()) == PROCESSES)
    return job


def keeper_of(box: Sandbox) -> int:
    return next(pid for pid, command in box.alive().items() if "ds_launcher.keeper" in command)


def rank_pid(box: Sandbox, rank: int) -> int:
    return int(box.file(f"pid{rank}").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_a_rank(box: Sandbox, rank: int) -> None:
    job = job_with_ranks(box)
    os.kill(rank_pid(box, rank), signal.SIGKILL)
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) == 137
    assert job.communicate()[1].splitlines()[-1].startswith(f"ds run: rank {rank} failed first")


def test_a_rank_that_a_signal_stopped_is_named(box: Sandbox) -> None:
    """`ds run` waited for it without a word, and without an end where all others had ended."""
    script = box.script("""
        import os, pathlib, time
        if os.environ["RANK"] == "1":
            pathlib.Path("pid1").write_text(str(os.getpid()))
            while not pathlib.Path("go").exists(): time.sleep(0.02)
    """)
    job = box.start("run", "--nproc", "2", script)
    box.wait(lambda: box.told("pid1"))
    pid = rank_pid(box, 1)
    os.kill(pid, signal.SIGSTOP)
    assert job.stderr is not None
    line = job.stderr.readline()
    assert line.startswith(f"ds run: rank 1 (process {pid}) was stopped by a signal")
    box.file("go").touch()
    os.kill(pid, signal.SIGCONT)
    assert job.wait(timeout=200) == 0
    assert job.communicate() == ("", "")


def test_kill_9_of_the_launcher(box: Sandbox) -> None:
    job = job_with_ranks(box)
    job.kill()
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) == -signal.SIGKILL
    job.communicate()


def test_kill_9_of_the_keeper(box: Sandbox) -> None:
    job = job_with_ranks(box)
    os.kill(keeper_of(box), signal.SIGKILL)
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) == 137
    assert "the keeper process was ended (SIGKILL" in job.communicate()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_the_launcher(box: Sandbox, number: signal.Signals) -> None:
    job = job_with_ranks(box)
    job.send_signal(number)
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) == 128 + number
    assert job.communicate()[1].splitlines()[-1] == f"ds run: stopped by {number.name}"


def test_nohup_is_respected(box: Sandbox) -> None:
    waits = box.script(
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\nprint('finished')"
    )
    job = box.start("run", "--nproc", "2", waits, ignored=(signal.SIGHUP,))
    box.wait(lambda: len([c for c in box.alive().values() if "train.py" in c and "ds_launcher" not in c]) == 2)
    job.send_signal(signal.SIGHUP)
    box.file("go").touch()
    assert job.communicate(timeout=200)[0].count("finished") == 2
    assert job.returncode == 0


def test_a_second_signal_does_not_wait(box: Sandbox) -> None:
    job = job_with_ranks(box, "--grace", "60")
    job.send_signal(signal.SIGINT)
    box.wait(lambda: rank_pid(box, 1) not in box.alive())
    job.send_signal(signal.SIGTERM)  # rank 0 took the first as KeyboardInterrupt or is still ending
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) in (
        130,
        -signal.SIGTERM,
    )  # the latter where both ranks had ended, and the launcher was about to
    job.communicate()


def test_another_job_is_left_alone(box: Sandbox) -> None:
    waits = box.script(
        """
        import os, pathlib, time
        while not pathlib.Path("go").exists(): time.sleep(0.02)
        print("finished")
        """,
        "other.py",
    )
    other = box.start("run", "--nproc", "2", waits, env={"DS_TEST_MARK": box.mark + "-other"})
    job = box.start("run", "--nproc", "2", box.script("import time; time.sleep(600)"))
    box.wait(lambda: len([c for c in box.alive().values() if "train.py" in c and "ds_launcher" not in c]) == 2)
    job.kill()
    job.communicate()
    box.wait(lambda: not box.alive())
    box.file("go").touch()
    assert other.communicate(timeout=200)[0].count("finished") == 2
    assert other.returncode == 0


def test_a_kernel_without_pidfds(box: Sandbox) -> None:
    box.script("import os; del os.pidfd_open", "sitecustomize.py")  # in `ds run`, the keeper and the ranks
    script = box.script(STUBBORN)
    env = {"PYTHONPATH": str(box.folder)}
    job = box.start("run", "--nproc", "2", "--grace", "0.5", script, env=env)
    box.wait(lambda: box.told("pid0", "pid1") and len(box.alive()) == PROCESSES)
    os.kill(rank_pid(box, 1), signal.SIGKILL)
    box.wait(lambda: not box.alive())
    assert job.wait(timeout=200) == 137
    assert job.communicate()[1].splitlines()[-1].startswith("ds run: rank 1 failed first")


def test_ranks_may_end_well_on_a_signal(box: Sandbox) -> None:
    script = box.script("""
        import os, pathlib, signal, sys, time
        def save(number, frame):
            pathlib.Path("saved" + os.environ["RANK"]).touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("pid" + os.environ["RANK"]).touch()
        time.sleep(600)
    """)
    job = box.start("run", "--nproc", "2", script)
    box.wait(lambda: box.file("pid0").exists() and box.file("pid1").exists())
    job.terminate()
    assert job.wait(timeout=200) == 0
    assert box.file("saved0").exists()
    assert box.file("saved1").exists()
    assert job.communicate() == ("", "")


def test_what_a_finished_job_left_running_is_stopped(box: Sandbox) -> None:
    script = box.script("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
    done = box.ds("run", "--nproc", "2", script)
    assert done.returncode == 0
    assert "stopping what they left running: process " in done.stderr
    assert not box.alive()


def test_a_keeper_stuck_on_a_full_screen_still_kills(box: Sandbox) -> None:
    script = box.script("""
        import os
        with open("written" + os.environ["RANK"], "w", buffering=1) as written:
            while True:
                print("x" * 10000)
                print(file=written)
    """)
    job = box.start("run", "--nproc", "2", "--grace", "0.5", script)  # nobody reads its output
    # More than 4 MiB wait in the keeper; then it reads no more, the pipes fill, the ranks stand still.
    box.wait(lambda: box.file("written0").exists() and box.file("written1").exists())
    box.wait(lambda: sum(box.file(f"written{rank}").stat().st_size for rank in range(2)) > 420)
    job.kill()
    box.wait(lambda: not box.alive())
    job.wait(timeout=200)
    for stream in (job.stdout, job.stderr):
        if stream is not None:
            stream.close()


SAVES = """
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]

    def save(number, frame):
        time.sleep(float(sys.argv[1]))
        pathlib.Path("saved" + rank).touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    pathlib.Path("pid" + rank).touch()
    time.sleep(600)
"""


def test_a_save_under_way_is_waited_for(box: Sandbox) -> None:
    """It takes longer than the five seconds that a rank had before."""
    job = box.start("run", "--nproc", "2", box.script(SAVES), "7")
    box.wait(lambda: box.file("pid0").exists() and box.file("pid1").exists())
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=200)[1]
    assert job.returncode == 0
    assert box.file("saved0").exists()
    assert box.file("saved1").exists()
    assert said.count("ds run: waiting up to 30 s for rank 0, rank 1 to end (--grace)") == 1


def test_who_does_not_end_in_time_is_named(box: Sandbox) -> None:
    job = box.start("run", "--nproc", "2", "--grace", "1.5", box.script(SAVES), "600")
    box.wait(lambda: box.file("pid0").exists() and box.file("pid1").exists())
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=200)[1]
    assert job.returncode != 0
    assert "rank 0, rank 1 did not end within 1.5 s and will be killed; --grace gives more time" in said


WARNED = """
    import os, pathlib, signal, subprocess, time
    rank = os.environ["RANK"]
    child = subprocess.Popen(["sleep", "600"])  # knows no such signal, as a worker of a data loader does not

    def warn(number, frame):
        pathlib.Path(f"{signal.Signals(number).name}-{rank}").touch()

    for each in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, warn)
    pathlib.Path("pid" + rank).touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    assert child.poll() is None
    child.kill()
"""


@pytest.mark.parametrize(
    "options", [(), ("--start", "spawn"), ("--max-restarts", "1")], ids=["fork", "spawn", "elastic"]
)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_the_user_reach_the_script(box: Sandbox, number: signal.Signals, options: tuple[str, ...]) -> None:
    if "--max-restarts" in options:
        pytest.importorskip("torch")  # its store
    job = box.start("run", "--nproc", "2", *options, box.script(WARNED))
    box.wait(lambda: box.file("pid0").exists() and box.file("pid1").exists())
    job.send_signal(number)
    box.wait(lambda: box.file(f"{number.name}-0").exists() and box.file(f"{number.name}-1").exists())
    box.file("go").touch()
    job.communicate(timeout=200)
    assert job.returncode == 0


def test_a_signal_of_the_user_during_the_imports_waits(box: Sandbox) -> None:
    """It comes before there is any rank: the job goes on."""
    pytest.importorskip("torch")
    script = box.script("import torch, pathlib\npathlib.Path('here').touch()")
    job = box.start("run", "--nproc", "2", script)
    box.wait(lambda: any("ds_launcher.keeper" in command for command in box.alive().values()))
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=200)
    assert job.returncode == 0
    assert box.file("here").exists()

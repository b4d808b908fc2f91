"""Many hosts, with stand-ins for ssh, pdsh, srun and mpirun that run the command here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.skipif(os.name != "posix", reason="`ds run` needs signals and process groups")

# ssh [options] host line: what sshd does, a shell that gets the line.
SSH = """#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""
# pdsh ... -w hosts ... line: the line on every host, %n is its number, %% a percent sign. Its commands' standard input stays
# open as long as it lives; the exit code is the largest. As pdsh 2.34 does.
PDSH = f"""#!{sys.executable}
import subprocess, sys
hosts = sys.argv[sys.argv.index("-w") + 1].split(",")
lines = [sys.argv[-1].replace("%%", chr(0)).replace("%n", str(n)).replace(chr(0), "%") for n in range(len(hosts))]
running = [subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE) for line in lines]
sys.exit(max(each.wait() for each in running))
"""
# srun/mpirun: the command once per node, which is numbered in the environment.
TASKS = """#!/bin/sh
while [ "$1" != "$MARKER" ]; do shift; done
n=0
while [ $n -lt 2 ]; do
  VARIABLE=$n "$@" &
  pids="$pids $!"
  n=$((n + 1))
done
status=0
for pid in $pids; do wait $pid || status=$?; done
exit $status
"""
SCRIPT = """
    import os, sys
    print(os.environ["RANK"], os.environ["CROSS_RANK"], os.environ["WORLD_SIZE"], os.environ.get("NCCL_DEBUG"),
          os.environ.get("GREETING"), os.getcwd() == os.environ["SANDBOX"], sys.argv[1:])
"""


def tools(box: Sandbox, **programs: str) -> dict[str, str]:
    folder = box.folder / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "NCCL_DEBUG": "INFO", "HOME": str(box.folder)}


def cluster(box: Sandbox) -> str:
    box.file("hosts").write_text("alpha slots=2\nbeta slots=1\n")
    box.file(".deepspeed_env").write_text("GREETING=it's $fine\n")
    return "hosts"


def expected(argument: str = "a b%") -> list[str]:
    return [
        f"{'' if rank == 0 else f'[rank{rank}] '}{rank} {node} 3 INFO it's $fine True ['{argument}']"
        for rank, node in ((0, 0), (1, 0), (2, 1))
    ]


def test_ssh_reaches_every_host(box: Sandbox) -> None:
    env = tools(box, ssh=SSH)
    done = box.ds("run", "--hostfile", cluster(box), box.script(SCRIPT), "a b%", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(expected())


def test_a_secret_reaches_every_host_and_no_command_line(box: Sandbox) -> None:
    spy = SSH.replace("exec sh", 'printf "%s\\n" "$*" >> "$SANDBOX/lines"\nexec sh')
    env = tools(box, ssh=spy) | {"MLFLOW_TRACKING_PASSWORD": "hunter2"}
    script = box.script("""
        import os
        print(os.environ["MLFLOW_TRACKING_PASSWORD"])
        with open("/proc/self/cmdline") as own, open(f"/proc/{os.getppid()}/cmdline") as keeper:
            assert "hunter2" not in own.read() + keeper.read()
    """)
    done = box.ds("run", "--hostfile", cluster(box), script, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["hunter2"] * 3
    lines = box.file("lines").read_text()
    assert lines.count("--secrets-on-stdin") == 2
    assert "hunter2" not in lines


def test_pdsh_reaches_every_host(box: Sandbox) -> None:
    env = tools(box, pdsh=PDSH)
    done = box.ds("run", "--hostfile", cluster(box), "--launcher", "pdsh", box.script(SCRIPT), "a b%", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(expected())


@pytest.mark.parametrize(
    ("launcher", "tool", "variable"),
    [("slurm", "srun", "SLURM_NODEID"), ("openmpi", "mpirun", "OMPI_COMM_WORLD_RANK")],
)
def test_schedulers_number_the_nodes(box: Sandbox, launcher: str, tool: str, variable: str) -> None:
    text = TASKS.replace("VARIABLE", variable).replace("$MARKER", "env")
    env = tools(box, **{tool: text})
    done = box.ds("run", "--hostfile", cluster(box), "--launcher", launcher, box.script(SCRIPT), "a b%", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(expected())


def test_a_failure_on_one_host_ends_the_others_and_is_shown_last(box: Sandbox) -> None:
    env = tools(box, ssh=SSH)
    script = box.script("""
        import os, time
        if os.environ["RANK"] == "2": raise ValueError("beta broke")
        time.sleep(600)
    """)
    done = box.ds("run", "--hostfile", cluster(box), "--grace", "1", script, env=env)
    assert done.returncode == 1
    assert "ds run: host beta failed first" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: beta broke"


def test_a_node_stops_when_the_pipe_to_its_launcher_ends(box: Sandbox) -> None:
    # What ssh and pdsh hold on the far side. Nothing else ties that host to us, and nothing else may: networks break.
    script = box.script("""
        import os, pathlib, time
        pathlib.Path("pid" + os.environ["RANK"]).touch()
        time.sleep(600)
    """)
    reading, writing = os.pipe()
    node = box.start("run", "--nproc", "2", "--grace", "1", "--stop-on-eof", script, stdin=reading)
    os.close(reading)
    box.wait(lambda: box.file("pid0").exists() and box.file("pid1").exists())
    assert node.poll() is None
    os.close(writing)
    box.wait(lambda: not box.alive(), seconds=10)
    assert node.wait(timeout=5) == 143
    node.communicate()


def test_dry_run_shows_everything_that_would_travel(box: Sandbox) -> None:
    env = {"NCCL_DEBUG": "INFO", "SECRET": "s", "HOME": str(box.folder)}
    done = box.ds("run", "--hostfile", cluster(box), "-x", "MORE=1", "--dry-run", "nowhere.py", env=env)
    assert done.returncode == 0
    assert "# host alpha" in done.stdout
    assert "NCCL_DEBUG=INFO" in done.stdout
    assert "MORE=1" in done.stdout
    assert "GREETING=" in done.stdout
    assert "- SECRET" in done.stdout.splitlines()  # the diff: it stays here
    assert "SECRET=s" not in done.stdout
    assert "DS_JOB_SECRET=" not in done.stdout


def test_a_tool_that_is_not_there_is_named(box: Sandbox, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "HOME": str(box.folder)}
    done = box.ds("run", "--hostfile", cluster(box), "--launcher", "pdsh", box.script(SCRIPT), env=env)
    assert done.returncode == 1
    assert "there is no `pdsh` on PATH" in done.stderr
    assert "ds explain launch-tool" in done.stderr

"""Many hosts, with stand-ins for ssh, pdsh, srun and mpirun that run the command here."""

from __future__ import annotations

import os
import signal
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
# pdsh ... -w hosts ... line: the line on every host, %n is its number, %% a percent sign.
PDSH = """#!/bin/sh
hosts=0
while [ $# -gt 1 ]; do
  if [ "$1" = -w ]; then hosts=$(echo "$2" | tr , ' ' | wc -w); fi
  shift
done
n=0
while [ $n -lt $hosts ]; do
  sh -c "$(echo "$1" | sed "s/%n/$n/; s/%%/%/g")" &
  pids="$pids $!"
  n=$((n + 1))
done
status=0
for pid in $pids; do wait $pid || status=$?; done
exit $status
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


def test_killing_the_launcher_ends_the_far_side(box: Sandbox) -> None:
    # This ssh leaves its command behind in another session, with the pipe as the only tie, as a network does.
    detached = SSH.replace('exec sh -c "$last"', 'exec 3<&0; setsid sh -c "$last" <&3 3<&- & wait')
    env = tools(box, ssh=detached)
    script = box.script("""
        import os, pathlib, time
        pathlib.Path("pid" + os.environ["RANK"]).touch()
        time.sleep(600)
    """)
    hosts = cluster(box)
    job = box.start("run", "--hostfile", hosts, "--grace", "1", script, env=env)
    box.wait(lambda: all(box.file(f"pid{rank}").exists() for rank in range(3)))
    job.send_signal(signal.SIGKILL)
    box.wait(lambda: not box.alive(), seconds=10)
    job.communicate()


def test_dry_run_shows_everything_that_would_travel(box: Sandbox) -> None:
    env = {"NCCL_DEBUG": "INFO", "SECRET": "s", "HOME": str(box.folder)}
    done = box.ds("run", "--hostfile", cluster(box), "-x", "MORE=1", "--dry-run", "nowhere.py", env=env)
    assert done.returncode == 0
    assert "# host alpha" in done.stdout
    assert "NCCL_DEBUG=INFO" in done.stdout
    assert "MORE=1" in done.stdout
    assert "GREETING=" in done.stdout
    assert "SECRET" not in done.stdout


def test_a_tool_that_is_not_there_is_named(box: Sandbox, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "HOME": str(box.folder)}
    done = box.ds("run", "--hostfile", cluster(box), "--launcher", "pdsh", box.script(SCRIPT), env=env)
    assert done.returncode == 1
    assert "there is no `pdsh` on PATH" in done.stderr
    assert "errors.md#launch-tool" in done.stderr

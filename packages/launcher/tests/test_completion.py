"""What a shell is offered, and that bash takes the script."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ds_launcher.commands.completion import SCRIPTS, offered


def test_commands_then_options() -> None:
    assert "run" in offered(["r"])
    assert set(offered([])) >= {"env", "hosts", "run", "ssh"}
    assert offered(["run", "--bind"]) == ["--bind-cores", "--bind_core_list", "--bind_cores_to_rank"]
    assert "--world-info" not in offered(["run", "--w"])  # ours alone
    assert offered(["run", "train"]) == []  # a file
    assert offered(["nowhere", "-"]) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_with_it() -> None:
    fake = "ds() { printf '%s\\n' \"$@\"; }\n"
    line = 'COMP_WORDS=(ds run --no); COMP_CWORD=2; _ds; printf "<%s>" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{fake}{SCRIPTS['bash']}{line}"], capture_output=True, text=True, check=True)
    assert done.stdout == "<completion><words><--><run><--no>"

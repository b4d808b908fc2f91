"""What a hostfile, a node list, an environment or a command line may hold: an error that says what to do, at once."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from ds_config.errors import ConfigError
from ds_launcher.backends import BACKENDS, LaunchJob
from ds_launcher.exports import collect, parse_env_file, read_env_files
from ds_launcher.inventory import (
    Host,
    decode,
    expand_nodelist,
    from_slurm,
    parse_filter,
    parse_hostfile,
    read_hostfile,
    slurm_gpus,
)

LONG = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "a slots=300000000",
        f"a slots={LONG}",
        "-oProxyCommand=id slots=1",
        "a,b slots=1",
        "a@b slots=1",
        "\n" * 99_999 + "x",
    ],
)
def test_hostfiles(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text)
    assert caught.value.code == "launch-hostfile"
    assert len(str(caught.value)) < 10_000
    assert time.monotonic() - began < 60  # a hang, not a speed


def test_a_hostfile_of_another_encoding_or_kind(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("knöten slots=1".encode("latin-1"))
    os.mkfifo(tmp_path / "pipe")
    for name in ("latin", "pipe", "."):
        with pytest.raises(ConfigError) as caught:
            read_hostfile(tmp_path / name)
        assert caught.value.code == "launch-hostfile"


@pytest.mark.parametrize(
    "text",
    [
        "n[0-9999999999]",
        "n[0-99999][0-99999]",
        "n[a-b]",
        "n[[1-2]]",
        f"n[{LONG}-{LONG}]",
        "n[5-3]",
        "-x[1-2]",
        "n[1-",
        "n]",
    ],
)
def test_node_lists(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        from_slurm({"SLURM_JOB_NODELIST": text}, 8)
    assert caught.value.code == "launch-hostfile"
    assert time.monotonic() - began < 60  # a hang, not a speed


@pytest.mark.parametrize("text", [f"[0-99999]{LONG}", f"n[1{' ' * 5000}-99999]", f"[{LONG},1][0-9999]{LONG}"])
def test_long_names_of_node_lists_are_not_put_together(text: str) -> None:
    tracemalloc.start()
    with pytest.raises(ConfigError) as caught:
        expand_nodelist(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == "launch-hostfile"
    assert peak < 32 << 20


def test_many_hosts_of_many_slots_and_many_parts_of_a_filter() -> None:
    with pytest.raises(ConfigError, match="at most 1048576"):
        parse_hostfile("".join(f"n{number} slots=65536\n" for number in range(200)))
    hosts = from_slurm({"SLURM_JOB_NODELIST": "n[0-999]"}, 65536)
    assert hosts is not None
    assert len(hosts) == 1000
    assert all(host.slots is hosts[0].slots for host in hosts)  # 2 GB, were each its own
    began = time.process_time()
    assert parse_filter("@".join(f"a:{number}" for number in range(20_000)))["a"] == tuple(range(20_000))
    assert parse_filter("a:1@a@a:2") == {"a": ()}
    assert time.process_time() - began < 60  # a hang, not a speed


def test_node_lists_of_slurm_are_read_as_before() -> None:
    assert expand_nodelist("n[01-03,7],login,a[1-2]b[1-2]") == [
        *("n01", "n02", "n03", "n7", "login"),
        *("a1b1", "a1b2", "a2b1", "a2b2"),
    ]


def test_filters_and_inventories() -> None:
    with pytest.raises(ConfigError):
        parse_filter(f"a:{LONG}")
    for rows in ('[["a", [1e400]]]', '[["-oProxyCommand=id", [0]]]', "[" * 100_000, '[["a", null]]', "{}1"):
        with pytest.raises(ConfigError) as caught:
            decode(base64.urlsafe_b64encode(rows.encode()).decode())
        assert caught.value.code == "launch-filter"
    assert slurm_gpus({"SLURM_GPUS_ON_NODE": LONG}) == 0


@pytest.mark.parametrize("name", ["-Sid", "", "A B", "1A", "A-B"])
def test_names_of_variables(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        collect({name: "1"}, [f"{name}=1"], {})
    assert caught.value.code == "launch-export"
    with pytest.raises(ConfigError):
        parse_env_file(f"{name}=1", "file")


def test_a_name_from_the_environment_that_is_none_does_not_travel() -> None:
    assert collect({"DS_A": "1", "DS_B%%": "() { :; }"}, [], {}) == {"DS_A": "1"}


def test_an_environment_file_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff")
    for home in (tmp_path, None):
        with pytest.raises(ConfigError) as caught:
            read_env_files({}, home, tmp_path)
        assert caught.value.code == "launch-export"


def _job(*command: str, host: str = "n1") -> LaunchJob:
    return LaunchJob((Host(host, (0,)),), "python", "/tmp", (), command, {})


def test_a_host_that_looks_like_an_option_starts_nothing() -> None:
    with pytest.raises(ConfigError):
        _job("train.py", host="-oProxyCommand=touch /tmp/x")


def test_pdsh_leaves_the_scripts_own_arguments_alone() -> None:
    (process,) = BACKENDS["pdsh"].build(_job("train.py", "@NODE-RANK@", "@@NODE-RANK@@"))
    line = process.argv[-1]
    assert line.endswith("train.py @NODE-RANK@ @@NODE-RANK@@")
    assert "--node-rank %n" in line


def _ds(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER")}
    command = [sys.executable, "-m", "ds_launcher", "run", *words]
    return subprocess.run(
        command, cwd=folder, env=clean | env, capture_output=True, text=True, timeout=200, check=False
    )


def test_an_open_quotation_mark(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "train.py").write_text("")
    done = _ds(tmp_path, "--hostfile", "hosts", "--dry-run", "--launcher-args", "'x", "train.py")
    assert done.returncode == 1, done
    assert "launch-options" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_user_without_a_home_and_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, pathlib, sys\n"
        "def no_home(*_):\n    raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = no_home\n"
        "from ds_launcher.cli import main\n"
        "if sys.argv[1] == 'gone':\n    os.rmdir(os.getcwd())\n"
        "sys.exit(main(['run', '--dry-run', '--no-python', 'true']))\n"
    )
    for place, expected in ((tmp_path, 0), (gone, 1)):
        command = [sys.executable, "-c", code, place.name]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == expected, done
        assert "Traceback" not in done.stderr
    assert "launch-cwd" in done.stderr


def test_world_info_that_ds_run_wrote_is_read() -> None:
    rows = base64.urlsafe_b64encode(json.dumps([["n1", [0, 1]]]).encode()).decode()
    assert decode(rows) == (Host("n1", (0, 1)),)


@pytest.mark.parametrize("words", [["explain"], ["explain", "--json"], ["--help"]])
def test_a_reader_that_stops_ends_the_command_without_a_traceback(words: list[str]) -> None:
    """The pipe is closed before anything is written, as `| true` may do."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "ds_launcher", *words]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert done.stderr == ""
    assert done.returncode == 141

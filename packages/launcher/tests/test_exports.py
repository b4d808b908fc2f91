"""Only what is on the list, asked for, or in the file travels."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ds_config.errors import ConfigError, LaunchError
from ds_launcher.exports import changes, collect, is_secret, parse_env_file, read_env_files, read_secrets, write_secrets


def test_secrets_and_host_facts_stay_at_home() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a",
        "MLFLOW_TRACKING_URI": "http://x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "WANDB_API_KEY": "s",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOSTNAME": "here",
        "PATH": "/bin",
    }
    assert set(collect(env, (), {})) == {"NCCL_DEBUG", "PYTHONPATH", "MLFLOW_TRACKING_URI"}


def test_named_wins_over_file_wins_over_environment() -> None:
    env = {"NCCL_A": "env", "NCCL_B": "env", "NCCL_C": "env", "TOKEN": "t=1"}
    found = collect(env, ("NCCL_C=named", "TOKEN"), {"NCCL_B": "file", "NCCL_C": "file", "Z": "file"})
    assert found == {"NCCL_A": "env", "NCCL_B": "file", "NCCL_C": "named", "TOKEN": "t=1", "Z": "file"}
    assert list(found) == sorted(found)


def test_a_named_variable_must_exist() -> None:
    with pytest.raises(ConfigError, match="-x TOKEN: the variable is not set") as caught:
        collect({}, ("TOKEN",), {})
    assert caught.value.code == "launch-export"


def test_file_lines() -> None:
    assert parse_env_file("A=1\n\n# note\nB=x y=z\nC=\n", "f") == {"A": "1", "B": "x y=z", "C": ""}
    with pytest.raises(ConfigError, match="f:2: found 'just words'"):
        parse_env_file("A=1\njust words\n", "f")


def test_the_working_directorys_file_comes_after_the_home_directorys(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=home\nB=home\n"), (here, "B=here\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    assert read_env_files({}, home, here) == {"A": "home", "B": "here"}
    (here / "other").write_text("C=1")
    assert read_env_files({"DS_ENV_FILE": "other"}, home, here) == {"C": "1"}
    assert read_env_files({"DS_ENV_FILE": "missing"}, home, here) == {}


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "my_secret", "SSH_KEY"])  # fmt: skip
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "MLFLOW_TRACKING_URI",
        "NCCL_DEBUG",
        "MONKEY",
        "KEYBOARD",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_read_back_and_nothing_behind_them() -> None:
    reading, writing = os.pipe()
    secrets = {"TOKEN": 'a"\n\u00e9', "KEY_": "x" * 70_000}
    thread = threading.Thread(target=os.write, args=(writing, write_secrets(secrets) + b"rest"))
    thread.start()
    assert read_secrets(reading) == secrets
    thread.join()
    assert os.read(reading, 9) == b"rest"
    os.close(writing)
    with pytest.raises(LaunchError, match="does not begin with the variables"):
        read_secrets(reading)
    os.close(reading)


@pytest.mark.parametrize("text", [b"[]\n", b'{"A": 1}\n', b"nonsense\n", b"{"])
def test_other_lines_are_refused(text: bytes) -> None:
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    with pytest.raises(LaunchError):
        read_secrets(reading)
    os.close(reading)


def test_what_travels_is_a_diff() -> None:
    here = {"NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_NUM_THREADS": "4", "HF_TOKEN": "hunter2"}
    there = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "MORE": "1", "HF_TOKEN": "hunter2"}
    expected = ["  HF_TOKEN=...", "- HOME", "+ MORE=1", "  NCCL_DEBUG=INFO", "~ OMP_NUM_THREADS=2"]
    assert changes(here, there) == expected

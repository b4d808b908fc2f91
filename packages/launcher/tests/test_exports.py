"""Only what is on the list, asked for, or in the file travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_config.errors import ConfigError
from ds_launcher.exports import collect, parse_env_file, read_env_files


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

"""Which environment variables travel to other hosts, and from where. Pure, but for reading the file.

Nothing travels unless it is on the list, named with `-x`, or in the `.deepspeed_env` file: a login shell's environment is
full of what is true on one host only, and of secrets. `ds run --dry-run` prints what would travel.

A *secret* is a variable whose name says so (`..._PASSWORD`, `..._TOKEN`, `..._API_KEY`): its value is never part of a command line, which
every user of a host can read, and never printed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ds_config.errors import ConfigError, LaunchError
from ds_config.regular_file import read_regular_text

__all__ = [
    "ALLOWED",
    "changes",
    "collect",
    "is_secret",
    "parse_env_file",
    "read_env_files",
    "read_secrets",
    "split_secrets",
    "write_secrets",
]

# Prefixes. Not CUDA_VISIBLE_DEVICES and its like: slots say which devices, host by host.
ALLOWED = (
    "DS_", "FI_", "GLOO_", "I_MPI_", "MLFLOW", "MV2", "NCCL_", "OMP_", "PYTHON", "RCCL_", "TORCH_", "UCX",
)  # fmt: skip

_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # what `env` takes for a variable, and no command for an option
_SECRET = re.compile(
    r"PASSW|PASSPHRASE|SECRET|TOKEN(?!IZ)|CREDENTIAL|AUTHORIZATION|(API|ACCESS|PRIVATE|_)_?KEY(_|$)", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds what others must not read."""
    return _SECRET.search(name) is not None


def split_secrets(exports: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the variables into those that may appear on a command line and the secrets."""
    secrets = {name: value for name, value in exports.items() if is_secret(name)}
    return {name: value for name, value in exports.items() if name not in secrets}, secrets


def write_secrets(secrets: Mapping[str, str]) -> bytes:
    """Encode the secrets as one line, for the standard input of a node."""
    return json.dumps(dict(secrets)).encode() + b"\n"


def read_secrets(descriptor: int) -> dict[str, str]:
    """Read the secrets that `write_secrets` wrote; nothing after their line is read.

    Raises:
        LaunchError: the pipe ended, or holds something else ("launch-secrets").
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_BYTES and (byte := os.read(descriptor, 1)):
        line += byte
    try:
        secrets = json.loads(line)
    except ValueError:
        secrets = None
    if not isinstance(secrets, dict) or not all(isinstance(value, str) for value in secrets.values()):
        raise LaunchError(
            f"standard input does not begin with the variables that were promised ({len(line)} bytes)",
            code="launch-secrets",
            fix="Use the same version of ds-launcher on every host.",
        )
    return secrets


def collect(env: Mapping[str, str], named: Iterable[str], file: Mapping[str, str]) -> dict[str, str]:
    """Collect the variables to export, sorted by name.

    `named` (`NAME` or `NAME=value`) overrides the file, and the file overrides `env`.

    Raises:
        ConfigError: `-x NAME` of a variable that is not set, or that no variable is named like ("launch-export").
    """
    chosen = {name: value for name, value in env.items() if name.startswith(ALLOWED) and _NAME.fullmatch(name)}
    chosen.update(file)
    for item in named:
        name, equals, value = item.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"-x {item[:80]}: {name[:80]!r} is no name of a variable",
                code="launch-export",
                fix="Names have letters, digits and _, and do not begin with a digit.",
            )
        if not equals and name not in env:
            raise ConfigError(
                f"-x {name}: the variable is not set here",
                code="launch-export",
                fix=f"Set it, or give its value: -x {name}=...",
            )
        chosen[name] = value if equals else env[name]
    return dict(sorted(chosen.items()))


def changes(env: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """List the variables that other hosts get, as a diff against this environment.

    Marks: ` ` the same, `+` only on the other hosts, `~` changed, `-` stays here.
    """
    lines = []
    for name in sorted({*env, *exports}):
        shown = "..." if is_secret(name) else exports.get(name, "")
        if name not in exports:
            lines.append(f"- {name}")
        else:
            mark = "+" if name not in env else " " if env[name] == exports[name] else "~"
            lines.append(f"{mark} {name}={shown}")
    return lines


def parse_env_file(text: str, source: str) -> dict[str, str]:
    """Read lines `KEY=VALUE`; empty lines and lines that start with `#` are skipped. Values are taken as they stand.

    Raises:
        ConfigError: a line without `=` or without the name of a variable ("launch-export").
    """
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()) or "\0" in value:
            raise ConfigError(
                f"{source}:{number}: found {line[:200]!r}, expected KEY=VALUE",
                code="launch-export",
                fix="Correct the line.",
            )
        values[name.strip()] = value
    return values


def read_env_files(env: Mapping[str, str], home: Path | None, here: Path) -> dict[str, str]:
    """Read `.deepspeed_env` (or the name in DS_ENV_FILE) in `~`, where there is one, then in the working directory.

    Raises:
        ConfigError: a file cannot be read, or see `parse_env_file` ("launch-export").
    """
    values: dict[str, str] = {}
    for folder in (here,) if home is None else (home, here):
        path = folder / env.get("DS_ENV_FILE", ".deepspeed_env")
        try:
            text = read_regular_text(path) if path.exists() else ""
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}",
                code="launch-export",
                fix="Save it as UTF-8 lines KEY=VALUE, or remove it.",
            ) from error
        values.update(parse_env_file(text, str(path)))
    return values

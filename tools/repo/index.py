"""Make uv look where pip looks.

A machine says where packages come from in pip's configuration files and PIP_ variables. uv reads neither. This module
translates what `pip config list` reports, so that the repository itself names no index, folder or certificate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

__all__ = ["parse_pip_config", "uv_environment"]

_LINE = re.compile(r"^(?P<section>[^=]+?)\.(?P<key>[\w-]+)=(?P<value>.*)$")


def parse_pip_config(text: str) -> dict[str, str]:
    """The settings in effect, from the output of `pip config list`; keys without their section, `_` as `-`.

    What pip itself prefers wins: variables (`:env:`) over the `install` section over `global`.
    """
    order = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if match is None or match["section"] not in order:
            continue
        key, rank = match["key"].replace("_", "-"), order[match["section"]]
        if rank >= found.get(key, (-1, ""))[0]:
            found[key] = (rank, _unquoted(match["value"]))
    return {key: value for key, (_, value) in found.items()}


def uv_environment(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for uv that say what `settings` say to pip; those that `environ` has already stay as they are.

    pip takes the best version of all indexes, uv by default that of the first index that has the package: with an extra
    index uv is told to do as pip does.
    """
    made: dict[str, str] = {}
    if links := settings.get("find-links", "").split():
        made["UV_FIND_LINKS"] = ",".join(links)
    if index := settings.get("index-url", ""):
        made["UV_DEFAULT_INDEX"] = index
    if extra := settings.get("extra-index-url", "").split():
        made["UV_INDEX"] = " ".join(extra)
        made["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        made["UV_NO_INDEX"] = "1"
    if hosts := settings.get("trusted-host", "").split():
        made["UV_INSECURE_HOST"] = " ".join(hosts)
    if certificate := settings.get("cert", ""):
        made["SSL_CERT_FILE"] = certificate
    timeout = settings.get("timeout", settings.get("default-timeout", ""))
    if timeout:
        made["UV_HTTP_TIMEOUT"] = timeout
    return {name: value for name, value in made.items() if name not in environ}


def _unquoted(value: str) -> str:
    """`pip config list` prints Python literals; values may span words and lines."""
    try:
        return str(ast.literal_eval(value))
    except (SyntaxError, ValueError):
        return value

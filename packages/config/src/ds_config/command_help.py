"""How every `ds` command shows its help: each option with its default, and all commands grouped by what they are for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["TOPICS", "CommandParser", "DefaultsFormatter", "overview"]

TOPICS: Mapping[str, tuple[str, ...]] = {
    "start a job": ("run", "hosts", "ssh", "rendezvous", "elastic"),
    "choose a configuration": ("config", "plan", "rehearse", "tune", "pipe", "compress"),
    "data and checkpoints": ("data", "ckpt"),
    "use a model": ("chat", "generate", "serve"),
    "see what is wrong": ("doctor", "report", "env", "explain", "comm", "monitor"),
    "measure this machine, set it up": ("bench", "io", "ops", "completion"),
}
"""The commands by topic, in the order in which `ds --help` has them; what others install comes last."""


class DefaultsFormatter(argparse.HelpFormatter):
    """Help with the default of each option that has one and does not say it in its own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not text or not action.option_strings or action.nargs == 0 or "default" in text:
            return text
        if default is None or default is argparse.SUPPRESS or default in ("", [], ()):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """A parser with help as all commands have it; parsers of its subcommands are of this class, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", DefaultsFormatter)
        super().__init__(*args, **options)


def overview(descriptions: Mapping[str, str]) -> str:
    """Return the help of `ds`: the commands by topic, with a line for each.

    Args:
        descriptions: By name of the command.
    """
    width = max(map(len, descriptions), default=0)
    known = {name for names in TOPICS.values() for name in names}
    topics = {**TOPICS, "others": tuple(sorted(descriptions.keys() - known))}
    blocks = [
        f"{topic}:\n" + "\n".join(lines)
        for topic, names in topics.items()
        if (lines := _lines((name for name in names if name in descriptions), descriptions, width))
    ]
    return "\n\n".join(["usage: ds <command> [options]", *blocks, "`ds <command> --help` says more."])


def _lines(names: Iterable[str], descriptions: Mapping[str, str], width: int) -> list[str]:
    return [f"  {name:{width}}  {descriptions[name]}".rstrip() for name in names]

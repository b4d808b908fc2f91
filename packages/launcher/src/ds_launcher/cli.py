"""`ds`: find the command, parse its options, run it. Errors a user can cause are shown without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from ds_config.did_you_mean import nearest
from ds_config.errors import DsError
from ds_config.installed import version_of
from ds_launcher.discovery import ALIASES, commands, help_line, load_command, parser_of

__all__ = ["main"]

_USAGE_ERROR = 2
_CLOSED_PIPE = 141  # what a shell reports of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ds` with `argv` (default: the process's); return the exit status.

    Whoever reads the output may stop (`| head`): that ends the command, and is no error.
    """
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # At exit Python flushes what is left, and would say the same again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else _USAGE_ERROR
    if words[0] == "--version":
        print(f"ds {version_of('ds_launcher')}")
        return 0
    known = commands()
    if words[0] in ALIASES and words[0] not in known:
        words = [*ALIASES[words[0]], *words[1:]]
    name, rest = words[0], words[1:]
    if name not in known:
        hint = "".join(f"; did you mean `ds {near}`?" for near in nearest(name, (*known, *ALIASES)))
        print(f"ds: there is no command `{name}`{hint}  (`ds --help` lists them)", file=sys.stderr)
        return _USAGE_ERROR
    try:
        module = load_command(known[name].module)
        parser = parser_of(name, module)
        words = module.prepare(rest) if hasattr(module, "prepare") else rest
        status: int = module.main(parser.parse_args(words))
        return status
    except DsError as error:
        print(f"ds {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _overview() -> str:
    installed = commands()
    descriptions = {name: help_line(point.module) for name, point in installed.items()}
    descriptions |= {
        name: f"the same as `ds {' '.join(to)}`"
        for name, to in ALIASES.items()
        if to[0] in installed and name not in installed
    }
    width = max((len(name) for name in descriptions), default=0)
    lines = [f"  {name:{width}}  {descriptions[name]}".rstrip() for name in sorted(descriptions)]
    return "\n".join(["usage: ds <command> [options]", "", *lines, "", "`ds <command> --help` says more."])


if __name__ == "__main__":
    sys.exit(main())

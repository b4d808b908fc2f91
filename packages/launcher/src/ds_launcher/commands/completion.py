"""`ds completion SHELL`: what a shell needs to complete `ds` lines. The shell asks `ds completion words ...` at each Tab, so what it
offers is what is installed: commands, their subcommands, their options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from ds_config.command_discovery import ALIASES, commands, parser_of

__all__ = ["HELP", "SCRIPTS", "main", "offered", "register", "subparsers"]

HELP = 'print a script that completes `ds` in bash, zsh or fish: eval "$(ds completion bash)"'

_BASH = """\
_ds() {
    local IFS=$'\\n'
    COMPREPLY=($(ds completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _ds ds
"""
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c ds -a '(ds completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'\n",
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", choices=(*SCRIPTS, "words"), help="whose script to print")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Print the script, or one offer a line."""
    if args.shell in SCRIPTS:
        print(SCRIPTS[args.shell], end="")
        return 0
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    print("\n".join(offered(words)))
    return 0


def offered(words: Sequence[str]) -> list[str]:
    """List the completions of the last of `words` (after `ds`); nothing where files are expected."""
    begun = words[-1] if words else ""
    known = commands()
    if len(words) < 2:
        return _beginning(begun, {*known, *(name for name, to in ALIASES.items() if to[0] in known)})
    if words[0] in ALIASES and words[0] not in known:
        words = [*(word for word in ALIASES[words[0]] if not word.startswith("-")), *words[1:]]
    if words[0] not in known:
        return []
    parser = parser_of(words[0])
    for word in words[1:-1]:
        parser = subparsers(parser).get(word, parser)
    if not begun.startswith("-"):
        return _beginning(begun, subparsers(parser))
    shown = [a for a in parser._actions if a.help is not argparse.SUPPRESS]
    return _beginning(begun, (flag for action in shown for flag in action.option_strings))


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _beginning(begun: str, words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word.startswith(begun))


if __name__ == "__main__":
    import sys

    from ds_config.ds_command import main as ds

    sys.exit(ds(["completion", *sys.argv[1:]]))

"""`ds`: find the command, parse its options, run it. Errors a user can cause are shown without a traceback.

It is in the package that every other one needs, so that each has it; what commands there are follows from what is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from ds_config.command_discovery import ALIASES, commands, help_line, load_command, parser_of
from ds_config.command_help import overview
from ds_config.did_you_mean import nearest
from ds_config.errors import DsError
from ds_config.installed import version_of

__all__ = ["PROVIDERS", "main", "run_package"]

PROVIDERS: Mapping[str, tuple[str, ...]] = {
    "ds-ckpt": ("ckpt",),
    "ds-comm": ("comm", "rehearse"),
    "ds-compress": ("compress",),
    "ds-config": ("explain",),
    "ds-data": ("data",),
    "ds-engine": ("plan", "config", "elastic"),
    "ds-inference": ("chat", "generate", "serve"),
    "ds-launcher": ("run", "hosts", "ssh", "completion", "report", "rendezvous"),
    "ds-monitor": ("monitor",),
    "ds-ops": ("io", "ops"),
    "ds-pipe": ("pipe",),
    "ds-tune": ("tune",),
}
"""Which package brings which commands, for who asks for one that is not installed."""
_USAGE_ERROR = 2
_CLOSED_PIPE = 141  # what a shell reports of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ds` with `argv` (default: the process's); return the exit status.

    Whoever reads the output may stop (`| head`): that ends the command, and is no error. Descriptors that are closed (`>&-`) lead nowhere:
    else the next file that somebody opens is taken for one of them.
    """
    _open_standard()
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # At exit Python flushes what is left, and would say the same again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE


def _open_standard() -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            os.set_inheritable(fd, True)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else _USAGE_ERROR
    if words[0] == "--version":
        print(f"ds {version_of('ds_config')}")
        return 0
    known = commands()
    if words[0] in ALIASES and words[0] not in known:
        words = [*ALIASES[words[0]], *words[1:]]
    name, rest = words[0], words[1:]
    if name not in known:
        hint = "".join(f"; did you mean `ds {near}`?" for near in nearest(name, (*known, *ALIASES)))
        provider = next((package for package, names in PROVIDERS.items() if name in names), None)
        if provider is not None:
            hint = f" in this installation; it comes with {provider}: pip install {provider}"
        print(f"ds: there is no command `{name}`{hint}  (`ds --help` lists those that there are)", file=sys.stderr)
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


def run_package(module: str, argv: Sequence[str] | None = None) -> int:
    """Run `python -m` of a package (`ds_data`): its command, or the one of several that the first word names.

    Of a package without commands, and without words, print what there is.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    names = [name for name, point in commands().items() if point.module.partition(".")[0] == module]
    if words == ["--version"] or not names:
        print(f"{module.replace('_', '-')} {version_of(module)}")
        if not names:
            print("It has no commands of its own; `ds --help` lists those of this installation.")
        return 0 if not words or words == ["--version"] else _USAGE_ERROR
    if len(names) == 1 and words[:1] != names:
        return main([names[0], *words])
    if words and words[0] in names:
        return main(words)
    described = [f"  {name}  {help_line(commands()[name].module)}" for name in names]
    print("\n".join([f"usage: python -m {module} <command> [options], or ds <command>", "", *described]))
    return 0 if not words or words[0] in ("-h", "--help") else _USAGE_ERROR


def _overview() -> str:
    installed = commands()
    descriptions = {name: help_line(point.module) for name, point in installed.items()}
    descriptions |= {
        name: f"the same as `ds {' '.join(to)}`"
        for name, to in ALIASES.items()
        if to[0] in installed and name not in installed
    }
    return overview(descriptions)


if __name__ == "__main__":
    sys.exit(main())

"""All commands of `ds` as they are installed: their help costs nothing, and what they print they print as JSON, too."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

from ds_config.command_discovery import ALIASES, commands, parser_of
from ds_config.command_help import TOPICS, CommandParser
from ds_config.ds_command import main
from ds_launcher.commands.completion import subparsers

HELP_OF_ALL = """
import contextlib, io, json, sys
from ds_launcher.cli import main
from ds_launcher.commands.completion import subparsers
from ds_config.command_discovery import commands, parser_of

HEAVY = ("torch", "numpy", "pydantic", "rich", "matplotlib", "transformers", "yaml")

def paths(parser, words):
    yield words
    for name, child in subparsers(parser).items():
        yield from paths(child, (*words, name))

told = {}
for name in commands():
    for words in paths(parser_of(name), (name,)):
        before, screen = set(sys.modules), io.StringIO()
        try:
            with contextlib.redirect_stdout(screen):
                main([*words, "--help"])
        except SystemExit as end:
            told[" ".join(words)] = [end.code, len(screen.getvalue()), sorted(set(HEAVY) & (set(sys.modules) - before))]
print(json.dumps(told))
"""


def walk(
    parser: argparse.ArgumentParser, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The command lines below a parser, with their parsers; those that only hold others are left out."""
    below = subparsers(parser)
    if not below:
        yield words, parser
    for name, child in below.items():
        yield from walk(child, (*words, name))


def every_command() -> list[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    return [found for name in commands() for found in walk(parser_of(name), (name,))]


def test_the_help_of_every_command_loads_neither_torch_nor_another_large_library():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"run", "ckpt verify", "comm bench", "pipe show schedule", "serve", "tune"} <= set(told)
    assert {name: end for name, end in told.items() if end[0] != 0 or end[1] < 40} == {}
    assert {name: end[2] for name, end in told.items() if end[2]} == {}


def test_every_option_of_every_command_says_what_it_is_and_its_default():
    """Seventeen had no word, and defaults stood where somebody had written them down."""
    silent, hidden = [], []
    for words, parser in every_command():
        shown = parser.format_help()
        assert isinstance(parser, CommandParser), words
        for action in parser._actions:
            if not action.help:
                silent.append((*words, action.dest))
            elif action.help is not argparse.SUPPRESS and action.nargs != 0 and action.option_strings:
                text = parser._get_formatter()._get_help_string(action) or ""
                if action.default not in (None, argparse.SUPPRESS, "", [], ()) and "default" not in text:
                    hidden.append((*words, action.dest))
        assert shown.startswith("usage: ds ")
    assert silent == []
    assert hidden == []


def test_the_help_of_ds_has_every_command_once_below_its_topic(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert sorted(names) == sorted({*commands(), *ALIASES})
    assert "\nothers:" not in text
    assert [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")] == list(TOPICS)


# Commands that print no result: what they start speaks for itself, or they print JSON or a script anyway.
NO_RESULT = {("chat",), ("completion",), ("config", "key"), ("config", "schema"), ("serve",)}


def test_every_command_that_prints_a_result_prints_it_as_json():
    found = every_command()
    without = {words for words, parser in found if "--json" not in parser._option_string_actions}
    assert without == NO_RESULT

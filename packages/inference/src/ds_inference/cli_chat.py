"""`ds chat FOLDER`: a conversation in the terminal. Answers are set as Markdown where the library rich is installed (extra `text`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["HELP", "main", "register"]

HELP = "a conversation in the terminal (`ds chat FOLDER`); /new begins again, /end ends"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    from ds_inference.cli_generate import register_model

    register_model(parser)
    parser.add_argument("--system", help="what the answers shall keep to")
    parser.add_argument("--plain", action="store_true", help="no colours, no Markdown")


def main(args: argparse.Namespace) -> int:
    """Run a chat until /end or the end of input."""
    from ds_inference.cli_generate import read_engine

    engine, how = read_engine(args)
    begin = [{"role": "system", "content": args.system}] if args.system else []
    turns: list[dict[str, Any]] = list(begin)
    ask, answering = _plain() if args.plain else _rich()
    while True:
        try:
            line = ask()
        except (EOFError, KeyboardInterrupt):
            return 0
        if line.strip() in ("/end", "/new"):
            if line.strip() == "/end":
                return 0
            turns = list(begin)
            continue
        if line.strip():
            turns.append({"role": "user", "content": line})
            turns.append(
                {"role": "assistant", "content": _answer(engine, engine.tokenizer.chat(turns), how, answering)}
            )


def _answer(engine: Any, prompt: list[int], how: Any, answering: Any) -> str:
    """Generate an answer and show its text as tokens arrive; when interrupted, return the text so far."""
    from ds_inference.text import TextStream

    text, answer = TextStream(engine.tokenizer), ""
    identities = engine.submit(prompt, how)
    with answering() as show:
        try:
            for event in engine.stream():
                answer += text.push(event.token) + (text.finish() if event.reason else "")
                show(answer)
        except KeyboardInterrupt:
            for identity in identities:
                engine.cancel(identity)
    return answer


def _plain() -> tuple[Callable[[], str], Any]:
    @contextmanager
    def answering() -> Iterator[Callable[[str], None]]:
        shown = 0

        def show(text: str) -> None:
            nonlocal shown
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)

        yield show
        sys.stdout.write("\n")

    return lambda: input("> " if sys.stdin.isatty() else ""), answering


def _rich() -> tuple[Callable[[], str], Any]:
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.markdown import Markdown
    except ImportError:
        return _plain()
    console = Console()
    if not console.is_terminal:
        return _plain()

    @contextmanager
    def answering() -> Iterator[Callable[[str], None]]:
        with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
            yield lambda said: live.update(Markdown(said))

    return lambda: console.input("[bold cyan]> [/]"), answering


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["chat", *sys.argv[1:]]))

"""Tokens to text while they come: nothing is said that a later token could change, and nothing of a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from ds_config.errors import CheckpointError, PlanError
from ds_inference.llm_engine import Tokenizer

__all__ = ["HfTokenizer", "TextStream", "read_tokenizer"]

_UNFINISHED = "\ufffd"
"""What decoders give for bytes that are not a whole character yet."""
_CHARACTER = 4
"""Most tokens of a character: each is a byte of UTF-8."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_LONGEST = 32
"""So many tokens after a whole character, without another one, are not text. A chain of them stays short to decode."""


class TextStream:
    """The text of one answer, in pieces.

    Args:
        tokenizer: Decodes.
        stops: The text ends before the first of these; `stopped` is then true.
    Attributes:
        length: Characters that are certain so far, those included that wait because a stop string may begin with them.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context = 0  # from here tokens are decoded; it lies between characters
        self._settled = 0  # the text of tokens before this one was given out; it lies between characters, too
        self._pending = ""
        self.length = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain now; often empty."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        size = len(self._tokens)
        if not self._decode(self._context, size).endswith(_UNFINISHED):
            return self._past_stops(self._settle(size))
        if size - self._settled <= _LONGEST:
            return ""
        # No character takes so many tokens: these are bytes of no text. What may begin a character at the end waits.
        ends = range(size - _CHARACTER, size - _LONGEST // 2, -1)
        whole = (end for end in ends if not self._decode(self._context, end).endswith(_UNFINISHED))
        return self._past_stops(self._settle(next(whole, size - _CHARACTER)))

    def finish(self) -> str:
        """Return the pending text after the last token; incomplete characters show as a replacement character."""
        if self.stopped:
            return ""
        text = self._past_stops(self._settle(len(self._tokens)))
        pending, self._pending = self._pending, ""
        return text + pending

    def _settle(self, end: int) -> str:
        """Return the text of the tokens up to `end` that was not given out, and move on.

        The tokens before are decoded with them, because what a token says may depend on the one before it (spaces between words), and
        both windows begin between characters, because a decoder may read a run of bytes with half a character as no text at all.
        """
        before, text = self._decode(self._context, self._settled), self._decode(self._context, end)
        # Bytes that are no text took characters back that were given out: the new ones are read alone.
        new = text[len(before) :] if text.startswith(before) else self._decode(self._settled, end)
        self.length += len(new)
        if new or end - self._context > 2 * _LONGEST:  # a token that says nothing (a special one) is no context
            self._context = self._settled
        self._settled = end
        return new

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[begin:end])

    def _past_stops(self, new: str) -> str:
        text = self._pending + new
        at = min((position for stop in self._stops if (position := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.stopped, self._pending = True, ""
            return text[:at]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """With how many characters of its end, fewer than all of them, the text begins a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Map the letters of byte-level tokenizers to bytes: printable bytes are themselves, the others follow from 256 on (Radford 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


class HfTokenizer:
    """A tokenizer of transformers, with its chat template.

    Attributes:
        inner: The tokenizer.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the tokenizer adds at the beginning.

        Raises:
            PlanError: half of a surrogate pair, which no UTF-8 can hold ("inference-request").
        """
        _check_text(text)
        return list(self.inner.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens into text without special tokens; spaces are not cleaned up."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def template(self) -> str:
        """Source of the chat template; empty where there is none."""
        template = getattr(self.inner, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; those of all tokens together are the text, also where one ends in a character."""
        name = self.inner.convert_ids_to_tokens(token)
        if token in self.inner.all_special_ids or not isinstance(name, str):
            return self.decode([token]).encode()
        if "▁" in name:  # how SentencePiece writes spaces; alone, a decoder would leave out the first
            return name.replace("▁", " ").encode()
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        text = self.decode([token])
        if _UNFINISHED not in text:
            return text.encode()
        letters = _bytes_of_letters()  # a byte-level tokenizer writes each byte as a letter
        return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else text.encode()

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Tokenize a conversation up to the beginning of the answer; without a template, as `role: text` lines."""
        if getattr(self.inner, "chat_template", None):
            _check_text("".join(message["content"] for message in messages))
            token_ids = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
            return list(token_ids)
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return self.encode("\n".join([*lines, "assistant:"]))


def _check_text(text: str) -> None:
    half = re.search("[\ud800-\udfff]", text)
    if half is not None:
        raise PlanError(
            f"character {half.start()} of the text is half of a surrogate pair, {half[0]!r}",
            code="inference-request",
            fix="Send whole characters: \\ud83d\\ude00 in JSON is one, either half alone is none.",
        )


def read_tokenizer(folder: str | PathLike[str]) -> HfTokenizer:
    """Read the tokenizer of a folder. Needs transformers (the extra `text`).

    Raises:
        CheckpointError: there is none, or transformers is not installed ("inference-tokenizer").
    """
    try:
        from transformers import AutoTokenizer

        return HfTokenizer(AutoTokenizer.from_pretrained(Path(folder), local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"no tokenizer can be read from {folder}: {error if Path(folder).is_dir() else 'there is no such folder'}",
            code="inference-tokenizer",
            fix="Put tokenizer.json and tokenizer_config.json beside the weights; install ds-inference[text].",
        ) from error

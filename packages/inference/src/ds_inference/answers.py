"""What a generator is given and gives besides requests: a tokenizer, events while tokens come, and whole answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["RequestOutput", "TokenOutput", "Tokenizer", "ends_with_stop"]

_CHARACTER = 4
"""Most tokens of a character: each is a byte of UTF-8."""
_UNFINISHED = "\ufffd"


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit, and `tokenizers.Tokenizer` by a thin wrapper."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one request.

    Attributes:
        request: Identity.
        token: That was chosen.
        logprob: Its log-probability, where it was asked for.
        top: The likeliest tokens and their log-probabilities.
        reason: Why the request is over with it: `"stop"` or `"length"`; None: it goes on.
        version: Of the weights that made it.
    """

    request: int
    token: int
    logprob: float | None = None
    top: Mapping[int, float] | None = None
    reason: Literal["stop", "length"] | None = None
    version: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The result of one request.

    Attributes:
        prompt, tokens: In, and out; a stop string's tokens are out, too.
        text: Decoded and cut at a stop string, where there is a tokenizer.
        reason: `"stop"` or `"length"`.
        logprobs: Of the tokens, where asked for.
        versions: Of the weights, for every token.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    reason: Literal["stop", "length"] = "length"
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[int, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def ends_with_stop(tokenizer: Tokenizer, answer: Sequence[int], stops: Sequence[str]) -> bool:
    """Return whether a stop string ends in the last token of `answer`; call it once a token.

    Only the last tokens are decoded, as many as the longest stop string can have. They may begin inside a character, which some decoders
    read as no text until its bytes end: then from one of the next three tokens before them.
    """
    most = _CHARACTER * (max(map(len, stops)) + 1)
    for back in range(most, most + _CHARACTER):
        text = tokenizer.decode(answer[-back:])
        if any(stop in text for stop in stops):
            return True
        if back >= len(answer) or not text.startswith(_UNFINISHED):
            break
    return False

"""How a request's tokens are chosen, and the seeds of its draws. `batched_sampling` does it."""

from __future__ import annotations

import hashlib
import math
import numbers
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["LARGEST_BIAS", "SamplingParams", "derive_seed", "draw_seed", "prompt_lookup", "separate"]

LARGEST_BIAS: Final = 1e30
"""Biases and penalties reach no further, so that fp32 has room for their sums."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_new_tokens: At most so many.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Only the k likeliest; 0: all.
        top_p: Only the likeliest whose probabilities add up to at least this.
        min_p: Only those at least this times as likely as the likeliest.
        repetition_penalty: Logits of tokens seen (prompt and answer) are divided by it if positive, else multiplied (Keskar et al. 2019).
        presence_penalty, frequency_penalty: Taken from the logits of tokens in the answer, once, and for each time.
        logit_bias: Added to the logits of tokens; finite.
        seed: Of what is drawn; None: every request draws its own. Prompts of one call, and samples of one prompt, have streams of
            their own that are derived from it (`separate`).
        stop: Strings that end the answer; it is cut before them.
        stop_token_ids: Tokens that end the answer, besides the model's own.
        ignore_eos: The model's own end tokens do not end it.
        logprobs: So many likeliest tokens are reported with their log-probabilities, and the chosen one; None: nothing.
        n: Independent answers to one prompt.
        allowed_tokens: Structured output: from the tokens of the answer so far to which may come next, bool [vocab], or None for all. It is
            called once a token, and by `n` for each answer apart; a grammar's matcher (xgrammar, outlines) fits in one line.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    allowed_tokens: Callable[[Sequence[int]], Tensor | None] | None = None

    def __post_init__(self) -> None:
        broken = _broken(self._kinds()) or _broken(self._limits())
        if broken:
            try:
                values = repr(self)
            except ValueError:  # Python does not write integers of thousands of digits
                values = "numbers too long to show"
            raise PlanError(
                f"sampling needs {', '.join(broken)}; got {values}",
                code="inference-sampling",
                fix="Change these values.",
            )

    def _kinds(self) -> dict[str, bool]:
        """Return the rules of types, each with whether it holds."""
        whole = (self.max_new_tokens, self.top_k, self.n, *self.stop_token_ids)
        whole += tuple(value for value in (self.seed, self.logprobs) if value is not None)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        real = (self.temperature, self.top_p, self.min_p, *penalties)
        return {
            "whole numbers in max_new_tokens, top_k, n, seed, logprobs and stop_token_ids": all(
                isinstance(value, numbers.Integral) and not isinstance(value, bool) for value in whole
            ),
            "numbers in temperature, top_p, min_p and penalties": all(
                isinstance(value, numbers.Real) and not isinstance(value, bool) for value in real
            ),
            "several strings in stop, not one": not isinstance(self.stop, str)
            and all(isinstance(stop, str) for stop in self.stop),
            "a mapping in logit_bias": isinstance(self.logit_bias, Mapping),
        }

    def _limits(self) -> dict[str, bool]:
        """Return the rules of values, each with whether it holds."""
        return {
            "max_new_tokens >= 1": 1 <= self.max_new_tokens < 1 << 63,
            "temperature >= 0": 0 <= self.temperature < math.inf,
            "top_k >= 0": self.top_k >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "0 <= min_p <= 1": 0 <= self.min_p <= 1,
            "repetition_penalty > 0": 1 / LARGEST_BIAS <= self.repetition_penalty <= LARGEST_BIAS,
            "a finite presence_penalty": abs(self.presence_penalty) <= LARGEST_BIAS,
            "a finite frequency_penalty": abs(self.frequency_penalty) <= LARGEST_BIAS,
            "tokens >= 0 and finite values in logit_bias": all(
                isinstance(token, int) and token >= 0 and abs(bias) <= LARGEST_BIAS
                for token, bias in self.logit_bias.items()
            ),
            "a seed of 64 bits": self.seed is None or -(1 << 63) <= self.seed < 1 << 64,
            "n >= 1": self.n >= 1,
            "logprobs >= 0": self.logprobs is None or self.logprobs >= 0,
        }

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether logits are taken as they are, but for the temperature."""
        same = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return same and not self.logit_bias and self.allowed_tokens is None

    @property
    def likeliest(self) -> bool:
        """Whether nothing but the likeliest token of the logits is wanted."""
        return self.greedy and self.plain and self.logprobs is None

    @property
    def forgets_answer(self) -> bool:
        """Whether the next token may be chosen before the values of the answer's tokens are known."""
        return self.plain or replace(self, logit_bias={}).plain


def separate(hows: Sequence[SamplingParams], seeds: Sequence[int] | None = None) -> list[SamplingParams]:
    """Give every prompt of one call a stream of its own: of those with equal seeds, the first keeps it, others get derived ones.

    seeds: For those that have none, as many as `hows`; None: drawn.
    """
    fresh = seeds or [draw_seed() for _ in hows]
    before: Counter[int] = Counter()
    found = []
    for how, new in zip(hows, fresh, strict=True):
        seed = new if how.seed is None else derive_seed(how.seed, "prompt", before[how.seed])
        if how.seed is not None:
            before[how.seed] += 1
        found.append(replace(how, seed=seed))
    return found


def _broken(rules: Mapping[str, bool]) -> list[str]:
    return [rule for rule, holds in rules.items() if not holds]


def draw_seed() -> int:
    """Draw a seed that nobody else has, from the system's entropy: `torch.manual_seed` does not make it repeat."""
    return secrets.randbits(63)


def derive_seed(seed: int, kind: str, number: int) -> int:
    """Return the seed of the `number`-th stream of one kind below `seed`; number 0 is `seed` itself."""
    return seed if number == 0 else _hash(f"{seed},{kind},{number}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_lookup(tokens: Sequence[int], count: int, longest: int = 3, back: int = 512) -> Sequence[int]:
    """Propose the tokens that followed the last earlier occurrence of the last tokens (Saxena 2023).

    Args:
        tokens: Known so far.
        count: At most so many are proposed.
        longest: How many of the last tokens are looked for, or fewer.
        back: How far.
    """
    first = max(0, len(tokens) - back)
    for width in range(min(longest, len(tokens) - 1), 0, -1):
        tail = tuple(tokens[-width:])
        for start in range(len(tokens) - width - 1, first - 1, -1):
            if tuple(tokens[start : start + width]) == tail:
                return tokens[start + width : start + width + count]
    return ()

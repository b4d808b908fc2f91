"""Answers that follow a JSON schema: a grammar's matcher (llguidance) says which tokens may come next. Needs the extra `structured`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import PlanError, UnsupportedError

__all__ = ["JsonGrammars"]

_STYLE: Any = {"whitespace_flexible": True, "whitespace_pattern": "[ \\n]{0,6}"}
"""Between the parts of JSON, room for the spaces that models write, and no more: some would go on with them for ever."""
_SEQUENCES = 64  # of one request whose matchers are remembered: its samples, and some more


class JsonGrammars:
    """Makes `SamplingParams.allowed_tokens` callbacks for one model and its tokenizer.

    Args:
        tokenizer: Of transformers, with a Rust backend.
        vocab: Tokens of the model, at least those of the tokenizer.
        eos_ids: Tokens that end an answer; they may come when the text is complete, and nothing else then.
    Raises:
        UnsupportedError: llguidance is not installed, it cannot read this tokenizer, or nothing ends an answer ("inference-structured").
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer

            if not eos_ids:  # it would take token 0 for one
                raise ValueError("the model has no end token")
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=max(vocab, len(tokenizer)), eos_token=list(eos_ids))
        except ImportError as error:
            raise UnsupportedError(
                "answers that follow a JSON schema need llguidance",
                code="inference-structured",
                fix="Install ds-inference[structured].",
            ) from error
        except (ValueError, RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"no answers that follow a JSON schema with this model and tokenizer: {error}",
                code="inference-structured",
                fix="Use a model with a tokenizer.json, and an end token (eos_token_id).",
            ) from error
        self._matcher = llguidance.LLMatcher
        self._vocab = vocab

    def follow(self, schema: Mapping[str, Any]) -> Callable[[Sequence[int]], Tensor | None]:
        """Return the callback of one request whose answers are JSON that follows `schema`.

        Raises:
            PlanError: the schema is wrong, or says what no grammar can ("inference-schema").
        """
        try:
            grammar = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=_STYLE)
            first = self._matcher(self._tokenizer, grammar)
            first.compute_bitmask()  # a schema that describes nothing fails only here
            problem = first.get_error()
        except (ValueError, RuntimeError, TypeError) as error:
            problem = str(error)
        if problem:
            raise _refusal(problem)
        return _Follower(first, self._vocab)


def _refusal(problem: str) -> PlanError:
    return PlanError(
        f"no answer can follow this JSON schema: {problem.partition(chr(10) + '<state>')[0][:500]}",
        code="inference-schema",
        fix="Correct the schema, or leave out what the message names.",
    )


class _Follower:
    """Matchers of the answers of one request, by their tokens: each call goes on where that of the answer's last token ended."""

    def __init__(self, first: Any, vocab: int) -> None:
        self._first, self._vocab = first, vocab
        self._matchers: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, answer: Sequence[int]) -> Tensor:
        """Return which tokens may come next, bool [vocab].

        Raises:
            PlanError: the grammar became too large on the way; the matcher would end the answer where it stands ("inference-schema").
        """
        matcher, tokens = self._matchers.pop(tuple(answer[:-1]), None), list(answer[-1:])
        if matcher is None or not answer:
            matcher, tokens = self._first.deep_copy(), list(answer)
        if tokens and not matcher.is_stopped():
            matcher.consume_tokens(tokens)
        self._matchers[tuple(answer)] = matcher
        while len(self._matchers) > _SEQUENCES:
            self._matchers.popitem(last=False)
        mask = torch.zeros(self._vocab, dtype=torch.bool, device="cpu")
        packed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        bits = ((packed[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1).flatten().bool()
        mask[: min(len(bits), self._vocab)] = bits[: self._vocab]
        return mask

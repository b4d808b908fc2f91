"""Choices of an answer in the protocol's form: text, log-probabilities and their offsets, whole or in parts."""

from __future__ import annotations

from typing import Any

from ds_inference.answers import TokenOutput
from ds_inference.text import HfTokenizer, TextStream

__all__ = ["ChoiceText", "make_choice"]


def make_choice(chat: bool, index: int, part: bool = False, first: bool = True) -> dict[str, Any]:
    """Build an empty choice. `first`: of its parts, which alone names the role."""
    inner: dict[str, Any] = {"role": "assistant", "content": ""} if first or not part else {"content": ""}
    content = {"delta" if part else "message": inner} if chat else {"text": ""}
    return {"index": index, **content, "logprobs": None, "finish_reason": None}


class ChoiceText:
    """The text of one choice while its tokens come.

    Args:
        tokenizer: Decodes.
        stops: The text ends before the first of these.
        chat: Whether log-probabilities have the form of chats.
    """

    def __init__(self, tokenizer: HfTokenizer, stops: tuple[str, ...], chat: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._stream = TextStream(tokenizer, stops)
        self.begun = False  # whether a part of it was sent

    def add(self, choice: dict[str, Any], event: TokenOutput) -> str:
        """Add a token to a choice, and return the text that is certain now."""
        offset = self._stream.length
        text = self._stream.push(event.token)
        if event.reason is not None:
            text += self._stream.finish()
        if self._chat:
            choice["delta" if "delta" in choice else "message"]["content"] += text
        else:
            choice["text"] += text
        choice["finish_reason"] = event.reason
        if event.logprob is not None:
            choice["logprobs"] = (self._chat_entry if self._chat else self._entry)(choice["logprobs"], event, offset)
        return text

    def _chat_entry(self, logprobs: dict[str, Any] | None, event: TokenOutput, offset: int) -> dict[str, Any]:
        del offset
        entry = self._shown(event.token, event.logprob or 0.0)
        entry["top_logprobs"] = [self._shown(token, p) for token, p in (event.top or {}).items()]
        return {"content": [*(logprobs or {}).get("content", []), entry], "refusal": None}

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        content = self._tokenizer.token_bytes(token)
        return {"token": self._tokenizer.decode([token]), "logprob": logprob, "bytes": list(content)}

    def _entry(self, logprobs: dict[str, Any] | None, event: TokenOutput, offset: int) -> dict[str, Any]:
        logprobs = logprobs or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        top = {event.token: event.logprob, **(event.top or {})} if event.top else {}
        named: dict[str, float | None] = {}
        for token, logprob in top.items():
            name = self._name(token)
            if name in named:  # two tokens of one text: a dict has room for both only by their names in the vocabulary
                name = f"{name} (token {token})"
            named[name] = logprob
        logprobs["tokens"].append(self._name(event.token))
        logprobs["token_logprobs"].append(event.logprob)
        logprobs["top_logprobs"].append(named)
        logprobs["text_offset"].append(offset)
        return logprobs

    def _name(self, token: int) -> str:
        """Return the token's text, or its bytes as the protocol writes those of half a character."""
        text = self._tokenizer.decode([token])
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token))

"""The requests of OpenAI's protocol as models: what is not understood is refused, not ignored.

Fields that cannot change an answer are accepted (`NO_EFFECT`, and any field that is null); docs/how-to/serve-a-model.md lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ds_config.errors import PlanError, UnsupportedError
from ds_inference.sampling import SamplingParams

__all__ = ["NO_EFFECT", "ChatMessage", "ChatRequest", "CompletionRequest", "EmbeddingRequest"]

NO_EFFECT: Final = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
"""Fields of the protocol that say nothing about the text of an answer: any value of theirs is accepted."""


def _number(value: Any) -> Any:
    """Pass numbers on: in Python booleans are some, and pydantic reads strings as such."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"should be a number, not {str(value)[:50]!r}")
    return value


_Whole = Annotated[int, BeforeValidator(_number)]
_Real = Annotated[float, BeforeValidator(_number)]
_Stop = Annotated[str, Field(max_length=1000)]
_Flag = Annotated[bool, Field(strict=True)]


class _ResponseFormat(BaseModel):
    """Which texts an answer may be."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer has to follow; None for any text.

        Raises:
            PlanError: `json_schema` without a schema ("inference-schema").
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise PlanError(
                "response_format.json_schema has no schema",
                code="inference-schema",
                fix='Write {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
            )
        return schema


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: _Flag = False
    include_obfuscation: Literal[False] = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = ""
    max_tokens: Annotated[_Whole, Field(ge=1)] | None = None
    temperature: Annotated[_Real, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[_Real, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[_Whole, Field(ge=0)] = 0
    min_p: Annotated[_Real, Field(ge=0, le=1)] = 0.0
    n: Annotated[_Whole, Field(ge=1, le=32)] = 1
    stream: _Flag = False
    stream_options: _StreamOptions = _StreamOptions()
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: Annotated[_Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[_Real, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[_Real, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[_Real, Field(gt=0)] = 1.0
    logit_bias: dict[int, _Real] | None = None
    ignore_eos: _Flag = False
    response_format: _ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, body: Any) -> Any:
        """Drop fields that are null, which is their default, and those that cannot change an answer."""
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None and key not in NO_EFFECT}

    def sampling(self, limit: int, logprobs: int | None) -> SamplingParams:
        """How the answer is chosen. `limit`: of tokens, where the request gives none."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_new_tokens=self.max_tokens or limit,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            stop=tuple(s for s in stops if s),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            n=self.n,
        )

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer has to follow; None for any text."""
        return None if self.response_format is None else self.response_format.schema_of_answer()


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[_Whole] | Annotated[list[str] | list[list[_Whole]], Field(max_length=2048)]
    logprobs: Annotated[_Whole, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the request's prompts, one or several, as a list."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # of an answer that is sent back: empty where this server gave it
    audio: None = None
    function_call: None = None

    def plain(self, template: str) -> dict[str, Any]:
        """Return the message as the chat template gets it: its text in one string, and what else the template reads.

        Args:
            template: Source of the chat template; empty: there is none.
        Raises:
            UnsupportedError: a part that is no text, or a field that the template does not read ("inference-message").
        """
        message: dict[str, Any] = {"role": self.role, "content": self._text()}
        more = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        for key, value in more.items():
            if not value:
                continue
            if key not in template:
                raise UnsupportedError(
                    f"a message of {self.role} with {key}, which this model's chat template does not read",
                    code="inference-message",
                    fix="Leave it out, or say it in the text of the message.",
                )
            message[key] = value
        return message

    def _text(self) -> str:
        if self.content is None and not self.tool_calls:
            raise PlanError(
                f"a message of {self.role} without content", code="inference-message", fix="Give its text as content."
            )
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        foreign = sorted({repr(p.get("type")) for p in self.content if not _is_text(p)})
        if foreign:
            raise UnsupportedError(
                f"a message of {self.role} with parts of type {', '.join(foreign)}; this server reads text only",
                code="inference-message",
                fix='Send parts {"type": "text", "text": ...}.',
            )
        return "".join(part["text"] for part in self.content)


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str) and not part.keys() - {"type", "text"}


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[_Whole, Field(ge=1)] | None = None
    logprobs: _Flag = False
    top_logprobs: Annotated[_Whole, Field(ge=0, le=20)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None

    def check(self) -> None:
        """Refuse what this server does not do.

        Raises:
            UnsupportedError: tools that the answer may call ("inference-tools").
            PlanError: `top_logprobs` without `logprobs` ("inference-request").
        """
        choice = self.tool_choice or "auto"
        if (self.tools and choice != "none") or choice not in ("auto", "none"):
            raise UnsupportedError(
                f"{len(self.tools or ())} tools with tool_choice {choice!r}; this server's answers are text, it reads no calls in them",
                code="inference-tools",
                fix='Leave tools out or send tool_choice "none"; response_format with a JSON schema gives answers that a program can read.',
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PlanError(
                f"top_logprobs {self.top_logprobs} without logprobs",
                code="inference-request",
                fix="Add logprobs: true.",
            )


class EmbeddingRequest(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="forbid")

    input: str | list[_Whole] | Annotated[list[str] | list[list[_Whole]], Field(max_length=2048)]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[_Whole, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None and key not in NO_EFFECT}

    def inputs(self) -> list[str | list[int]]:
        """Return the request's inputs, one or several, as a list."""
        inputs: Any = self.input
        if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
            return [inputs]
        return list(inputs)

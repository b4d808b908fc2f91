"""Records of scheduling: requests and their states, the budget of a step, the plan of one, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ds_config.errors import PlanError
from ds_config.option_checks import check_options

__all__ = ["Request", "RequestState", "ScheduledChunk", "SchedulerConfig", "SchedulerOutput", "StepOutcome"]


class RequestState(Enum):
    """Where a request is, by what it holds."""

    WAITING = auto()  # no blocks
    RUNNING = auto()  # blocks for what is computed
    FINISHED = auto()  # no blocks, all tokens known
    CANCELLED = auto()  # no blocks


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a step may hold at most.

    Attributes:
        max_num_batched_tokens: Computed in one step.
        max_num_seqs: Running at a time; at most `max_num_batched_tokens`, so that each can generate in every step.
        max_prefill_chunk: Of one prompt in one step; None: as much as `max_num_batched_tokens`.
        max_model_len: Tokens of one request, prompt and answer.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_prefill_chunk: int | None = None
    max_model_len: int = 1 << 20

    def __post_init__(self) -> None:
        check_options(self)
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len) < 1 or (
            self.max_prefill_chunk is not None and self.max_prefill_chunk < 1
        ):
            raise PlanError(
                f"a step's budget needs positive numbers, got {self}", code="inference-budget", fix="Use 1 or more."
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise PlanError(
                f"{self.max_num_seqs} requests may run with {self.max_num_batched_tokens} tokens a step: not each could generate",
                code="inference-budget",
                fix=f"Allow at most {self.max_num_batched_tokens} requests, or more tokens a step.",
            )


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way.

    Attributes:
        request_id: Chosen by the caller; unique among requests that are not over.
        tokens: Known: the prompt, then what was sampled.
        num_prompt_tokens: How many of them are the prompt.
        limit: Most tokens that are sampled.
        priority: Lower is more urgent.
        salt: What its keys and values depend on besides tokens (an adapter); blocks are shared only within one salt.
        arrival: Number in the order of arrival.
        num_computed_tokens: Tokens in the cache.
        num_cached_tokens: Of the prompt's tokens, those that were found in the cache when it last began.
        blocks: For the computed tokens, in order.
        num_preemptions: How often it lost its blocks.
        block_hashes: Of its full blocks, as far as they were asked for.
        num_hashed_blocks: Blocks whose content the pool knows.
        num_pending: Newest tokens whose values only the device knows.
    """

    request_id: int
    tokens: list[int]
    limit: int
    priority: int = 0
    salt: bytes = b""
    num_prompt_tokens: int = field(init=False)
    arrival: int = -1
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0
    num_pending: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    def renamed(self, request_id: int) -> Request:
        """Copy the tokens into a request with another identity, not known to any scheduler."""
        copied = Request(request_id, list(self.tokens), self.limit, self.priority, self.salt)
        copied.num_prompt_tokens = self.num_prompt_tokens
        return copied

    @property
    def generates(self) -> bool:
        """Whether only the newest token is not computed."""
        return len(self.tokens) - self.num_computed_tokens == 1

    @property
    def sampled(self) -> Sequence[int]:
        """What was generated."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def sampled_known(self) -> Sequence[int]:
        """Return what was generated as far as the host knows it."""
        return self.tokens[self.num_prompt_tokens : len(self.tokens) - self.num_pending]

    @property
    def complete(self) -> bool:
        """Whether it has as many tokens as it may have; the values of the newest may be unknown."""
        return len(self.tokens) - self.num_prompt_tokens >= self.limit

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return self.priority, self.arrival


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Part of a step.

    Attributes:
        request: Its identity.
        tokens: To compute; drafts are the last of them.
        start: Position of the first in the sequence; keys and values of all before it are in the cache.
        blocks: The request's, for all tokens up to the chunk's end.
        outputs: Of how many of the last tokens the distribution is wanted: 0 within a prompt, else 1 and one for each draft.
    """

    request: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        chunks: At most one a request; those that generate first.
        copies: (from, to): blocks to copy before anything is computed.
        finished: First blocks of sequences that gave theirs back since the last step: their states are not needed after the copies.
        likeliest: Of each row only the likeliest token is wanted; ranks that hold parts of the vocabulary then send that, not logits.
    """

    chunks: tuple[ScheduledChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    finished: tuple[int, ...] = ()
    likeliest: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one chunk that had outputs.

    Attributes:
        tokens: That are known now: the accepted drafts and one more. Never empty.
        finished: Whether the request ends with them, whatever its limit.
    """

    tokens: tuple[int, ...]
    finished: bool = False

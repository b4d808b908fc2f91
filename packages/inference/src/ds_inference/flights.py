"""A step between its launch and its outcome: what was computed, and the tokens that are on their way to the host.

While the device computes step n, the host launches step n + 1, whose newest tokens the host does not know: they are taken where step n
left them on the device. So the host waits once a step, for tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_inference.batched_sampling import (
    SampledRows,
    SampledToken,
    SamplingRow,
    SequencePlace,
    sample_rows,
    sampling_row,
)
from ds_inference.paged_attention import BatchIndices
from ds_inference.requests import Request, ScheduledChunk, SchedulerOutput
from ds_inference.sampling import SamplingParams
from ds_inference.tensor_parallel import LikeliestTokens

__all__ = ["ComputedPart", "PendingTokens", "RowGroup", "StepFlight", "feed_tokens", "point_to_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """The rows of one sequence: its next token after each of its drafts, if these are right.

    Attributes:
        request: With the tokens of the sequence as far as they are known.
        first: Number of the first row of the logits.
        drafts: One row more than these.
    """

    request: Request
    how: SamplingParams
    first: int
    drafts: tuple[int, ...] = ()


class PendingTokens:
    """Tokens of groups of rows, chosen at once; valid on the current stream until they are read.

    Args:
        logits: fp32 [R, vocab], or the likeliest token of each row.
    Attributes:
        failures: Groups whose callback raised, by request, and why.
    """

    def __init__(self, logits: Tensor | LikeliestTokens, groups: Sequence[RowGroup]) -> None:
        self.failures: dict[int, Exception] = {}
        self._logits = logits
        self._vocab = logits.vocab if isinstance(logits, LikeliestTokens) else logits.shape[1]
        self._groups: list[tuple[RowGroup, int]] = []
        rows = []
        for group in groups:
            try:
                fresh = [self._row(group, i) for i in range(1 if group.how.allowed_tokens else 1 + len(group.drafts))]
            except Exception as error:
                self.failures[group.request.request_id] = error
            else:
                rows += fresh
                self._groups.append((group, len(fresh)))
        self._sampled: SampledRows | None = sample_rows(logits, rows) if rows else None

    @property
    def tokens(self) -> Tensor | None:
        """Tokens of all rows, on the device."""
        return None if self._sampled is None else self._sampled.tokens

    def row_of(self) -> dict[int, int]:
        """Return the place in `tokens` of each request that has one row."""
        places, at = {}, 0
        for group, count in self._groups:
            if count == 1:
                places[group.request.request_id] = at
            at += count
        return places

    def read(self, accept: Callable[[RowGroup, SampledToken], bool]) -> None:
        """Wait for the tokens, and hand each group's over one by one, as far as its drafts were right.

        Args:
            accept: Takes a token; whether the sequence goes on after it. What it raises ends the group, see `failures`.
        """
        tokens = [] if self._sampled is None else self._sampled.read()
        at = 0
        for group, count in self._groups:
            try:
                self._hand_over(group, tokens[at : at + count], accept)
            except Exception as error:
                self.failures[group.request.request_id] = error
            at += count

    def _hand_over(
        self, group: RowGroup, tokens: list[SampledToken], accept: Callable[[RowGroup, SampledToken], bool]
    ) -> None:
        for i in range(1 + len(group.drafts)):
            if i == len(tokens):  # a callback is asked only for what follows tokens that came
                tokens += sample_rows(self._logits, [self._row(group, i)]).read()
            if not accept(group, tokens[i]) or i == len(group.drafts) or tokens[i].token != group.drafts[i]:
                return

    def _row(self, group: RowGroup, number: int) -> SamplingRow:
        place = SequencePlace(group.request.tokens, group.request.num_prompt_tokens, group.drafts[:number])
        return sampling_row(group.first + number, group.how, place, self._vocab)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedPart:
    """Chunks that were computed together.

    Attributes:
        order: The chunks in order of their rows.
        logits: fp32 [R, vocab], or the likeliest token of each row.
    """

    order: list[ScheduledChunk]
    logits: Tensor | LikeliestTokens


@dataclass(frozen=True, slots=True, eq=False)
class StepFlight:
    """A step that was launched.

    Attributes:
        failures: Requests whose chunks could not be computed, and why.
        pending: Tokens of each of `parts`.
    """

    plan: SchedulerOutput
    parts: list[ComputedPart]
    pending: list[PendingTokens]
    failures: dict[int, Exception]


def point_to_rows(chunks: Sequence[ScheduledChunk], rows: Mapping[int, int]) -> list[ScheduledChunk]:
    """Write, for a token whose value is not known, where it is: -1 - the row of the step before."""
    return [replace(c, tokens=(-1 - rows[c.request],)) if c.tokens[-1] < 0 else c for c in chunks]


def feed_tokens(batch: BatchIndices, before: Tensor) -> BatchIndices:
    """Put tokens of the step before, int [B] on the device, where the batch points to them; see `point_to_rows`."""
    tokens = batch.tokens
    source = (-1 - tokens).clamp_min_(0)
    return replace(batch, tokens=torch.where(tokens < 0, before.to(tokens.dtype).index_select(0, source), tokens))

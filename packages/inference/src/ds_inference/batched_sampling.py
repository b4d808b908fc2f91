"""From the logits of a step to one token for each row, all rows at once, whatever each asks for; read from the device once.

Noise is Philox (Salmon et al. 2011) of (seed, position, token), the same on every device: what a request draws depends on its own seed
and position, never on what else is in the batch. On a GPU the work is four Triton kernels; the reference is plain torch.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_accel import streams
from ds_config.errors import PlanError
from ds_inference.sampling import LARGEST_BIAS, SamplingParams, draw_seed
from ds_inference.tensor_parallel import LikeliestTokens
from ds_ops.registry import Backend, Op, choose, reference_backend
from ds_ops.triton_kernels.kernel_arguments import PHILOX_ROUNDS, SAMPLING_FIELDS
from ds_ops.triton_kernels.triton_support import triton_obstacle

__all__ = [
    "SAMPLING",
    "SampledRows",
    "SampledToken",
    "SamplingRow",
    "SequencePlace",
    "gumbel_noise",
    "sample_rows",
    "sampling_row",
]

_COUNTERS = 1 << 20  # of noise at once, so that a batch of large vocabularies does not fill the host's memory
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class SequencePlace:
    """Where in a sequence a token is chosen.

    Attributes:
        tokens: As far as they are known; the first `num_prompt_tokens` are the prompt.
        drafts: Tokens that are assumed to follow.
    """

    tokens: Sequence[int]
    num_prompt_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Return the place of the next token in the sequence."""
        return len(self.tokens) + len(self.drafts)

    def answer(self) -> list[int]:
        """Return the tokens after the prompt."""
        return [*self.tokens[self.num_prompt_tokens :], *self.drafts]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """A row of logits, and how a token is chosen from it.

    Attributes:
        row: Number of the row; several may name the same.
        seed: Of the draw; `how` has one or none.
        place: Where the token will stand.
        mask: Which tokens may come, bool [vocab] on the host; None: all.
    """

    row: int
    how: SamplingParams
    seed: int
    place: SequencePlace
    mask: Tensor | None = None

    def entries(self) -> list[tuple[int, float, float, float]]:
        """List the tokens whose logits change: (token, factor, amount, bias), see `adjust_logits`."""
        how, place = self.how, self.place
        if how.plain:
            return []
        repeats, counts = how.repetition_penalty != 1, how.presence_penalty != 0 or how.frequency_penalty != 0
        seen = {*place.tokens, *place.drafts} if repeats else set()
        answer = Counter(place.answer() if counts else ())
        return [
            (
                token,
                how.repetition_penalty if token in seen else 1.0,
                how.presence_penalty + how.frequency_penalty * answer[token] if token in answer else 0.0,
                how.logit_bias.get(token, 0.0),
            )
            for token in sorted(seen.union(answer, how.logit_bias))
        ]


def sampling_row(row: int, how: SamplingParams, place: SequencePlace, vocab: int) -> SamplingRow:
    """Describe how a row is sampled; asks `how.allowed_tokens`, once.

    Raises:
        PlanError: what it returned is no mask of `vocab` tokens that allows one ("inference-mask").
    """
    mask = None if how.allowed_tokens is None else how.allowed_tokens(place.answer())
    if mask is not None and (mask.shape != (vocab,) or mask.dtype != torch.bool or not mask.any()):
        raise PlanError(
            f"the mask of a structured answer is {list(mask.shape)} {mask.dtype} with {int(mask.sum())} tokens allowed; the model"
            f" has {vocab}",
            code="inference-mask",
            fix="Return bool [vocab] that allows at least one token (an end token where the answer is complete), or None.",
        )
    seed = draw_seed() if how.seed is None else how.seed
    return SamplingRow(row, how, seed, place, mask)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row gave.

    Attributes:
        logprob: Log-probability of the token before penalties and temperature; None: not asked for.
        top: The likeliest tokens and their log-probabilities.
    """

    token: int
    logprob: float | None = None
    top: dict[int, float] | None = None


class SampledRows:
    """Tokens of rows, on their way to the host.

    Attributes:
        tokens: int32 or int64 [B], on the device: the inputs of a next step that does not wait for the host.
    """

    def __init__(self, tokens: Tensor, rows: Sequence[SamplingRow], logprobs: _LogProbs | None) -> None:
        self.tokens = tokens
        self._rows, self._logprobs = rows, logprobs
        packed = [tokens.to(torch.int32)]
        if logprobs is not None:
            packed += [part.reshape(-1) for part in logprobs.words()]
        device = tokens.device
        words = packed[0] if len(packed) == 1 else torch.cat(packed)
        self._host = streams.copy_to(words, torch.device("cpu"))
        self._event = streams.record_event(device)

    def read(self) -> list[SampledToken]:
        """Wait for the tokens, and return them in order of the rows. The only wait of a step for its device."""
        self._event.synchronize()
        words = streams.host_memory(self._host)
        found = [SampledToken(token) for token in words[: len(self._rows)].tolist()]
        if self._logprobs is not None:
            for i, chosen, top in self._logprobs.unpack(words[len(self._rows) :]):
                most = self._rows[i].how.logprobs or 0
                found[i] = SampledToken(found[i].token, chosen, dict(top[:most]))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _LogProbs:
    """Log-probabilities of the rows that want them: of the chosen token [L], and of the likeliest ones [L, m]."""

    numbers: list[int]
    chosen: Tensor
    top: Tensor
    top_tokens: Tensor

    def words(self) -> tuple[Tensor, ...]:
        return self.chosen.view(torch.int32), self.top.view(torch.int32), self.top_tokens.to(torch.int32)

    def unpack(self, words: Tensor) -> list[tuple[int, float, list[tuple[int, float]]]]:
        count, most = self.top.shape
        chosen, top, tokens = words.split([count, count * most, count * most])
        values, names = top.view(torch.float32).view(count, most).tolist(), tokens.view(count, most).tolist()
        return [
            (number, one, list(zip(names[i], values[i], strict=True)))
            for i, (number, one) in enumerate(zip(self.numbers, chosen.view(torch.float32).tolist(), strict=True))
        ]


def sample_rows(logits: Tensor | LikeliestTokens, rows: Sequence[SamplingRow]) -> SampledRows:
    """Choose a token for each of `rows`; valid on the current stream, read by `SampledRows.read`.

    Args:
        logits: fp32 [R, vocab]; not changed. Or the likeliest token of each row, where all of `rows` take that one and no more
            (`SamplingParams.likeliest`).
    Cost: where all rows take the likeliest token, one pass over the logits; else see `draw_tokens`. One copy to the device, one back.
    """
    if isinstance(logits, LikeliestTokens):
        numbers, picked = [row.row for row in rows], logits.tokens
        if numbers != list(range(len(picked))):
            picked = picked[streams.copy_to(torch.tensor(numbers, device="cpu"), picked.device)]
        return SampledRows(picked, rows, None)
    numbers, device = [row.row for row in rows], logits.device
    same = numbers == list(range(len(logits)))
    tables = None if all(row.how.greedy and row.how.plain for row in rows) else _tables(rows, not same)
    if tables is not None and device.type != "cpu":
        tables = tables.to(device)
    if same:
        picked = logits
    else:
        at = streams.copy_to(torch.tensor(numbers, device="cpu"), device) if tables is None else tables.numbers
        picked = logits.index_select(0, at)
    if tables is None:
        tokens = picked.argmax(-1)
    else:
        work = picked.clone() if same and (tables.entries.shape[0] or tables.masks is not None) else picked
        tokens = choose(SAMPLING, device.type, logits.dtype).backend.run(work, tables)
    return SampledRows(tokens, rows, _log_probs(logits, rows, tokens))


def _log_probs(logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> _LogProbs | None:
    numbers = [i for i, row in enumerate(rows) if row.how.logprobs is not None]
    if not numbers:
        return None
    most = max(rows[i].how.logprobs or 0 for i in numbers)
    at = streams.copy_to(torch.tensor([[rows[i].row for i in numbers], numbers], device="cpu"), logits.device)
    logs = torch.log_softmax(logits[at[0]], -1)
    top, top_tokens = logs.topk(most)
    return _LogProbs(numbers, logs.gather(1, tokens[at[1], None].long())[:, 0], top, top_tokens)


# ---- what rows ask for, as tensors


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTables:
    """How the rows of a batch are sampled.

    Attributes:
        params: int32 [B, 8], entries: int32 [E, 5]; see `draw_tokens` and `adjust_logits`.
        numbers: int32 [B], the row of the logits that each takes; none where that is its own.
        masks: bool [M, vocab] of the rows `masked`, int64 [M]; None: no row has one.
        drawn: Rows that are not greedy.
        filtered: Of these, the largest top-k; and whether any has a top-p or a min-p.
    """

    params: Tensor
    entries: Tensor
    numbers: Tensor
    masks: Tensor | None
    masked: Tensor | None
    drawn: tuple[int, ...]
    filtered: tuple[int, bool]

    def to(self, device: torch.device) -> SamplingTables:
        """Copy the tables to `device`, the integers all at once; valid on the current stream."""
        count, entries, named = self.params.shape[0], self.entries.shape[0], self.numbers.shape[0]
        words = torch.cat([self.params.flatten(), self.entries.flatten(), self.numbers])
        there = streams.copy_to(streams.pin(words), device)
        params, changes, numbers = there.split([count * SAMPLING_FIELDS, entries * 5, named])
        masks, masked = self.masks, self.masked
        if masks is not None and masked is not None:
            masks, masked = (streams.copy_to(streams.pin(t), device) for t in (masks, masked))
        return SamplingTables(
            params.view(count, -1), changes.view(entries, 5), numbers, masks, masked, self.drawn, self.filtered
        )


def _tables(rows: Sequence[SamplingRow], elsewhere: bool) -> SamplingTables:
    params, entries, masks, masked = bytearray(), bytearray(), [], []
    for i, row in enumerate(rows):
        how = row.how
        temperature = min(max(how.temperature, 1 / LARGEST_BIAS), LARGEST_BIAS)
        low = temperature * math.log(how.min_p) if how.min_p > 0 and not how.greedy else -math.inf
        top_p = max(how.top_p, 1 / LARGEST_BIAS)  # 0 in fp32 would leave no token
        seed, place = row.seed & ((1 << 64) - 1), row.place.position & _MASK
        inverse = 0.0 if how.greedy else 1 / temperature
        params += struct.pack(
            "<iIIIffff",
            min(how.top_k, 0x7FFFFFFF),
            place,
            seed & _MASK,
            seed >> 32,
            inverse,
            top_p,
            low,
            temperature,
        )
        for token, factor, amount, bias in row.entries():
            entries += struct.pack("<iifff", i, token, factor, amount, bias)
        if row.mask is not None:
            masks.append(row.mask)
            masked.append(i)
    hows = [row.how for row in rows if not row.how.greedy]
    return SamplingTables(
        torch.frombuffer(params, dtype=torch.int32).view(-1, SAMPLING_FIELDS),
        torch.frombuffer(entries, dtype=torch.int32).view(-1, 5)
        if entries
        else torch.empty(0, 5, dtype=torch.int32, device="cpu"),
        torch.tensor([row.row for row in rows] if elsewhere else [], dtype=torch.int32, device="cpu"),
        torch.stack(masks) if masks else None,
        torch.tensor(masked, device="cpu") if masks else None,
        tuple(i for i, row in enumerate(rows) if not row.how.greedy),
        (max((h.top_k for h in hows), default=0), any(h.top_p < 1 or h.min_p > 0 for h in hows)),
    )


# ---- backends


def _sample_triton(work: Tensor, tables: SamplingTables) -> Tensor:
    from ds_ops.triton_kernels.triton_sampling import adjust_logits, draw_tokens

    work = work.contiguous()
    adjust_logits(work, tables.entries, LARGEST_BIAS)
    _mask(work, tables)
    return draw_tokens(work, tables.params)


def _sample_torch(work: Tensor, tables: SamplingTables) -> Tensor:
    """Choose a token for each row of `work` [B, vocab], which may be changed."""
    if len(tables.entries):
        row, token = tables.entries[:, 0].long(), tables.entries[:, 1].long()
        factor, amount, bias = tables.entries[:, 2:].contiguous().view(torch.float32).unbind(1)
        x = work[row, token]
        x = torch.where(x > 0, x / factor, x * factor) - amount + bias
        work[row, token] = x.clamp(-LARGEST_BIAS, LARGEST_BIAS)  # beyond fp32 would be NaN in the softmax
    _mask(work, tables)
    if not tables.drawn:
        return work.argmax(-1)
    whole = len(tables.drawn) == len(work)
    at = streams.copy_to(torch.tensor(tables.drawn, device="cpu"), work.device)
    params, x = (tables.params, work) if whole else (tables.params[at], work[at])
    floats = params.view(torch.float32)
    # From the largest on: at the smallest temperatures the others then go to -inf, and no quotient overflows.
    x = (x - x.amax(-1, keepdim=True)) / floats[:, 7:]
    x = _restrict_to_top(x, params, tables.filtered)
    # The largest of log p + Gumbel noise is a draw from p (Gumbel 1954); the noise of each token is the same whatever is kept.
    drawn = torch.cat([(part + gumbel_noise(p, part.shape[1])).argmax(-1) for part, p in _pieces(x, params)])
    return drawn if whole else work.argmax(-1).index_copy(0, at, drawn)


def _mask(work: Tensor, tables: SamplingTables) -> None:
    if tables.masks is not None and tables.masked is not None:
        work[tables.masked] = work[tables.masked].masked_fill(~tables.masks, -torch.inf)


def _restrict_to_top(x: Tensor, params: Tensor, filtered: tuple[int, bool]) -> Tensor:
    """Set to -inf what top-k, top-p and min-p of each row leave out. Tokens of equal logits stay or go together."""
    vocab, floats = x.shape[1], params.view(torch.float32)
    if filtered[0]:
        top_k = params[:, :1].long()
        ordered = x.topk(min(filtered[0], vocab), -1)[0]
        least = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[1] - 1))
        x = x.masked_fill((x < least) & (top_k > 0), -torch.inf)
    if filtered[1]:
        shares, top_p = torch.softmax(x, -1), floats[:, 5:6]
        ordered = shares.sort(-1, descending=True)[0]
        beyond = (ordered.cumsum(-1) - ordered >= top_p) & (top_p < 1)
        least = ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
        x = x.masked_fill((shares < least) | (x * floats[:, 7:] < floats[:, 6:7]), -torch.inf)
    return x


def _pieces(x: Tensor, params: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = max(1, _COUNTERS * 4 // x.shape[1])
    return list(zip(x.split(rows), params.split(rows), strict=True))


def gumbel_noise(params: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise fp32 [B, vocab] of seeds and positions, see `draw_tokens`: Philox 4x32, four tokens a counter."""
    words = params.long() & _MASK
    position, low, high = (words[:, i : i + 1] for i in (1, 2, 3))
    first = torch.arange(-(-vocab // 4), device=params.device).expand(len(params), -1)
    second, third, fourth = position, torch.zeros_like(position), torch.zeros_like(position)
    for _ in range(PHILOX_ROUNDS):
        one, two = first * 0xD2511F53, third * 0xCD9E8D57
        first = ((two >> 32).bitwise_and_(_MASK) ^ second).bitwise_xor_(low)
        third = ((one >> 32).bitwise_and_(_MASK) ^ fourth).bitwise_xor_(high)
        second, fourth = two.bitwise_and_(_MASK), one.bitwise_and_(_MASK)
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    uniform = torch.stack([word.float().expand_as(first) for word in (first, second, third, fourth)], -1)
    uniform = uniform.flatten(1)[:, :vocab]
    uniform = uniform.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


SAMPLING = Op(
    "sample_rows",
    "from rows of logits to tokens, each row in its own way",
    (Backend("triton", _sample_triton, triton_obstacle), reference_backend(_sample_torch)),
)

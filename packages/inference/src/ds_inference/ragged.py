"""The engine for callers that schedule themselves: `put` tokens of sequences, get the logits of their last ones.

This is the face of DeepSpeed-FastGen's engine (`build_hf_engine`). The scheduler of this package is not used: the caller says
what goes into a forward, and asks before whether it fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from os import PathLike
from typing import cast

import psutil
import torch
from torch import Tensor, nn

from ds_accel import streams
from ds_config.errors import PlanError, UnsupportedError
from ds_inference.blocks import BlockPool
from ds_inference.config import RaggedConfig
from ds_inference.decoder_model import Cache, Decoder, Runner
from ds_inference.model_loader import read_decoder
from ds_inference.paged_attention import make_batch
from ds_inference.quantize import QuantizationOptions
from ds_inference.scheduler import ScheduledChunk
from ds_inference.tensor_parallel import ranks_of

__all__ = ["RaggedEngine", "SchedulingError", "SchedulingResult", "build_hf_engine"]

_BLOCK = 128


class SchedulingResult(Enum):
    """Why a batch does not fit; `Success` if it does."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


class SchedulingError(PlanError):
    """A batch was put that does not fit.

    Attributes:
        status: Why.
    """

    def __init__(self, status: SchedulingResult) -> None:
        self.status = status
        super().__init__(
            f"the batch does not fit: {status.name}",
            code="inference-batch",
            fix="Ask can_schedule() first, put fewer tokens, or flush sequences that are over.",
        )


@dataclass(slots=True)
class _Sequence:
    num_seen: int = 0
    blocks: list[int] = field(default_factory=list)


class RaggedEngine:
    """Forwards over ragged batches. Made by `build_hf_engine`.

    Attributes:
        model: The decoder.
        config: Limits.
    """

    def __init__(self, decoder: Runner, config: RaggedConfig) -> None:
        self.model, self.config = decoder, config
        count = _blocks(decoder, config)
        self._pool = BlockPool(count, _BLOCK)
        self._cache = Cache(decoder.spec, count, _BLOCK, decoder.dtype, decoder.device)
        self._known: dict[int, _Sequence] = {}
        self._longest = min(config.state_manager.max_context, decoder.spec.max_seq_len)
        if isinstance(decoder, Decoder):
            decoder.capture(self._cache, config.state_manager.max_ragged_sequence_count, self._longest)

    @property
    def free_blocks(self) -> Tensor:
        """Blocks that no sequence has, int32 [1]."""
        return torch.tensor([self._pool.num_free], dtype=torch.int32, device="cpu")

    @property
    def n_kv_cache_groups(self) -> int:
        """All layers share block numbers: one group."""
        return 1

    def put(self, batch_uids: Iterable[int], batch_tokens: Iterable[Tensor], do_checks: bool = True) -> Tensor:
        """Run a forward in which each sequence's tokens follow its earlier tokens; unknown sequences begin.

        Args:
            batch_tokens: int64 [.] each, prompts, parts of prompts or single tokens.
            do_checks: Whether limits are checked before; without the check, only blocks that are missing are an error.
        Returns: fp32 [sequences, vocab], logits of each sequence's last token.
        Raises:
            SchedulingError: the batch does not fit; nothing was changed.
            PlanError: a sequence occurs twice, or has no tokens ("inference-batch"), or one that the model does not have
                ("inference-request"); nothing was changed.
            Exception: of the forward; the sequences are as they were.
        """
        uids, tokens = list(batch_uids), [t.flatten().tolist() for t in batch_tokens]
        if len(set(uids)) != len(uids) or not all(tokens):
            raise PlanError(
                f"sequences {uids} with {[len(t) for t in tokens]} tokens: each is put once, with at least one token",
                code="inference-batch",
                fix="Put the tokens of a sequence together, and leave sequences without new tokens out.",
            )
        vocab = self.model.spec.vocab
        foreign = [t for new in tokens for t in new if not (isinstance(t, int) and 0 <= t < vocab)]
        if foreign:
            raise PlanError(
                f"tokens {foreign[:4]} for a model of {vocab} tokens",
                code="inference-request",
                fix="Put whole numbers of the model's own tokenizer.",
            )
        status = self.can_schedule(uids, [len(t) for t in tokens]) if do_checks else SchedulingResult.Success
        if status is not SchedulingResult.Success:
            raise SchedulingError(status)
        before = {uid: len(self._known[uid].blocks) for uid in uids if uid in self._known}
        try:
            chunks = []
            for uid, new in zip(uids, tokens, strict=True):
                known = self._known.setdefault(uid, _Sequence())
                missing = self._pool.num_blocks_for(known.num_seen + len(new)) - len(known.blocks)
                new_blocks = self._pool.allocate(max(0, missing))
                if new_blocks is None:
                    raise SchedulingError(SchedulingResult.KVCacheLimitExceeded)
                known.blocks += new_blocks
                chunks.append(ScheduledChunk(uid, tuple(new), known.num_seen, tuple(known.blocks), 1))
            batch, order = make_batch(chunks, _BLOCK, self.model.device)
            logits = cast(
                "Tensor", self.model.forward(batch, self._cache)
            )  # the batch does not ask for likeliest tokens
        except BaseException:
            for uid in uids:
                if uid not in before:
                    self.flush(uid)
                else:
                    blocks = self._known[uid].blocks
                    self._pool.release(reversed(blocks[before[uid] :]))
                    del blocks[before[uid] :]
            raise
        for chunk in chunks:
            self._known[chunk.request].num_seen += len(chunk.tokens)
        row = {chunk.request: i for i, chunk in enumerate(order)}
        rows = torch.tensor([row[uid] for uid in uids], device="cpu")
        return logits.index_select(0, streams.copy_to(rows, logits.device))

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int) -> tuple[int, int]:
        """Return (tokens, blocks) that the sequence could get now, at most the maxima; (0, 0) if no sequence may begin."""
        known = self._known.get(uid)
        if known is None:
            if len(self._known) >= self.config.state_manager.max_tracked_sequences:
                return 0, 0
            known = _Sequence()
        blocks = min(max_request_blocks, self._pool.num_free)
        room = (len(known.blocks) + blocks) * _BLOCK - known.num_seen
        tokens = max(0, min(max_request_tokens, room, self._longest - known.num_seen))
        return tokens, max(0, self._pool.num_blocks_for(known.num_seen + tokens) - len(known.blocks))

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Whether one forward can take so many tokens of these sequences."""
        limits, requests = self.config.state_manager, list(zip(uids, lengths, strict=True))
        new = sum(uid not in self._known for uid, _ in requests)
        if len(self._known) + new > limits.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded
        if len(requests) > limits.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded
        if sum(length for _, length in requests) > limits.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded
        blocks = 0
        for uid, length in requests:
            known = self._known.get(uid, _Sequence())
            if known.num_seen + length > self._longest:
                return SchedulingResult.SequenceTokenLimitExceeded
            blocks += max(0, self._pool.num_blocks_for(known.num_seen + length) - len(known.blocks))
        return SchedulingResult.KVCacheLimitExceeded if blocks > self._pool.num_free else SchedulingResult.Success

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Return the tokens that still fit in the last block of a sequence."""
        known = self._known.get(uid, _Sequence())
        return len(known.blocks) * _BLOCK - known.num_seen

    def flush(self, uid: int) -> None:
        """Free the blocks and states of a sequence that has ended; does nothing for an unknown sequence."""
        known = self._known.pop(uid, None)
        if known is not None:
            self._pool.release(reversed(known.blocks))
            self._cache.states.forget(known.blocks[:1])

    def serialize(self, save_path: str | PathLike[str]) -> None:
        """Raise UnsupportedError: engines are read from the folders of `save_pretrained`, faster than from flattened weights ("inference-folder")."""
        raise UnsupportedError(
            f"serialize({str(save_path)!r}): an engine writes no weights of its own",
            code="inference-folder",
            fix="Keep the folder that save_pretrained wrote, and give it to build_hf_engine.",
        )


def build_hf_engine(
    path: str | PathLike[str] | nn.Module,
    engine_config: RaggedConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> RaggedEngine:
    """Build the ragged engine of a Hugging Face folder or module.

    Args:
        device: Of weights and cache; None: of a folder the accelerator where there is one, of a module where it is.
    Raises:
        UnsupportedError: the model cannot be run ("inference-family", "inference-foreign").
        PlanError: `tp_size` is neither 1 nor the number of ranks ("inference-ranks"). All ranks make the same calls of
        `put`.
    """
    config = engine_config or RaggedConfig()
    group = ranks_of(config.tensor_parallel.tp_size)
    mode = config.quantization.quantization_mode
    how = QuantizationOptions("fp6", group=0) if mode == "wf6af16" else mode
    return RaggedEngine(read_decoder(path, dtype=dtype, device=device, quantize=how, group=group), config)


def _blocks(decoder: Runner, config: RaggedConfig) -> int:
    limits = config.state_manager
    if limits.memory_config.mode == "allocate":
        return limits.memory_config.size
    device = decoder.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    each = Cache.bytes_of(decoder.spec, _BLOCK, decoder.dtype)
    longest = min(limits.max_context, decoder.spec.max_seq_len)
    wanted = limits.max_tracked_sequences * -(-longest // _BLOCK)  # more than this is never used
    count: int = min(wanted, (free - limits.memory_config.size) // each) if each else wanted
    if count < 1:
        raise PlanError(
            f"{free} bytes are free, {limits.memory_config.size} of them reserved: no room for a block of {each} bytes",
            code="inference-cache",
            fix="Reserve less (state_manager.memory_config.size).",
        )
    return count

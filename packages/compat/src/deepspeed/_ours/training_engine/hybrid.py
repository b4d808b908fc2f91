"""`deepspeed.runtime.hybrid_engine` and `deepspeed.runtime.rollout`: an engine that trains and generates, and answers as batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import not_supported
from deepspeed._ours.training_engine.deepspeed_engine import DeepSpeedEngine
from ds_compress import generalized_divergence
from ds_engine.generating import HybridEngine


class DeepSpeedHybridEngine(HybridEngine, DeepSpeedEngine):  # type: ignore[misc]  # upstream's arguments of offload_states
    """Made by `deepspeed.initialize` where `hybrid_engine.enabled`. See `ds_engine.generating`."""


@dataclass
class RolloutConfig:
    """Which engine answers, and how."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """How tokens are drawn; temperature 0 takes the likeliest. top_k -1: all tokens. See `HybridEngineRollout` for the last."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left: [batch, tokens], int64."""

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        if self.prompt_ids.dim() != 2:
            raise ValueError(f"prompt_ids must be 2-D, [batch, tokens]; found {tuple(self.prompt_ids.shape)}")
        _same_shape("prompt_attention_mask", self.prompt_attention_mask, "prompt_ids", self.prompt_ids)


def _same_shape(name: str, mask: Tensor, other: str, ids: Tensor) -> None:
    if mask.shape != ids.shape:
        raise ValueError(f"{name} of shape {tuple(mask.shape)} does not match {other} of shape {tuple(ids.shape)}")


@dataclass
class RolloutBatch:
    """Prompts and answers: [batch x samples, prompt + answer]; answer i begins at `response_start_idx[i]`."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2:
            raise ValueError(f"input_ids must be 2-D, [batch, tokens]; found {tuple(self.input_ids.shape)}")
        _same_shape("attention_mask", self.attention_mask, "input_ids", self.input_ids)
        if self.response_start_idx.shape != (rows := len(self.input_ids),):
            raise ValueError(
                f"response_start_idx must be 1-D of length {rows}; found {tuple(self.response_start_idx.shape)}"
            )

    @property
    def batch_size(self) -> int:
        """Rows."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """Answers prompts by weights that training brings up to date."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer a batch of prompts."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Use the weights as they are after `step`."""

    def shutdown(self) -> None:  # noqa: B027  an engine may hold nothing
        """Do nothing: the base class has no resources to release."""


@dataclass
class HybridEngineRolloutConfig:
    """How `HybridEngineRollout` answers. Everything but the defaults speaks of upstream's own decoding loop, see there."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


class HybridEngineRollout(RolloutEngine):
    """Answers by the engine that trains; its weights are always the present ones. The model's own `generate` decodes.

    Args:
        engine: Made with `hybrid_engine.enabled`.
        tokenizer: Says which tokens pad and end.
        cfg: What it says is kept; `generate` refuses what is about another decoding loop.
    """

    name = "hybrid_engine"

    def __init__(
        self, engine: DeepSpeedHybridEngine, tokenizer: Any, cfg: RolloutConfig | HybridEngineRolloutConfig | None =
        None,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer = engine, tokenizer
        for field in fields(HybridEngineRolloutConfig):
            setattr(self, field.name, getattr(cfg, field.name, field.default))

    def _check(self, sampling: SamplingConfig) -> None:
        unsupported = [field.name for field in fields(HybridEngineRolloutConfig) if getattr(self, field.name)]
        if sampling.continuous_batch_size is not None:
            unsupported.append("continuous_batch_size")
        if unsupported:
            raise not_supported(
                f"HybridEngineRollout with {', '.join(unsupported)}: answers are decoded by the model's own generate",
                "Leave it out; ds_engine.Rollout(engine) batches continuously and shares prefixes by itself.",
            )

    @staticmethod
    def _sample_top_p(logits: Tensor, temperature: float, top_p: float) -> Tensor:
        """Sample a token a row, [rows, 1], from logits [rows, vocabulary] among the likeliest up to `top_p`."""
        likely, order = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
        likely = likely.masked_fill(likely.cumsum(-1) - likely >= top_p, 0)
        return order.gather(-1, torch.multinomial(likely, 1))

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer a batch of prompts. Collective at stage 3.

        Raises:
            UnsupportedError: something of another decoding loop is asked for ("compat-argument").
        """
        self._check(sampling)
        drawn = sampling.temperature > 0
        how: dict[str, Any] = {"do_sample": drawn}
        if drawn:
            how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        end = getattr(self.tokenizer, "eos_token_id", None)
        pad = getattr(self.tokenizer, "pad_token_id", None)
        pad = end if pad is None else pad
        sequences = self.engine.generate(
            input_ids=request.prompt_ids,
            attention_mask=request.prompt_attention_mask,
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.n_samples_per_prompt,
            pad_token_id=pad,
            eos_token_id=end,
            **how,
        )
        start = request.prompt_ids.shape[1]
        prompts = request.prompt_attention_mask.repeat_interleave(sampling.n_samples_per_prompt, 0)
        mask = torch.cat([prompts, _answered(sequences[:, start:], end).to(prompts)], 1)
        return RolloutBatch(sequences, mask, torch.full((len(sequences),), start, device=sequences.device))

    def sync_weights(self, step: int) -> None:
        """Do nothing: training and generation use the same weights."""
        del step

    def shutdown(self) -> None:
        """Do nothing: the rollout has no resources to release."""


def _answered(tokens: Tensor, end: int | None) -> Tensor:
    """Build the mask of answers: 1 for tokens up to and with the end token, 0 after the end token."""
    if end is None:
        return torch.ones_like(tokens)
    ends = tokens == end
    return (ends.cumsum(1) - ends.long() == 0).long()


def build_rollout(
    rollout_cfg: RolloutConfig, student_engine: DeepSpeedHybridEngine | None = None, tokenizer: Any = None, **kwargs:
    Any,
) -> RolloutEngine:  # fmt: skip
    """Build the rollout engine that `rollout_cfg.engine` names.

    Raises:
        ValueError: the engine is not "hybrid_engine", or an argument that it needs is missing.
    """
    del kwargs  # upstream takes and drops them
    if rollout_cfg.engine != "hybrid_engine":
        raise ValueError(f"Unknown rollout engine {rollout_cfg.engine!r}: use 'hybrid_engine', or ds_engine.Rollout")
    if student_engine is None or tokenizer is None:
        raise ValueError("hybrid_engine rollout needs both student_engine and tokenizer")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


# ---- distillation on what was answered


@dataclass(frozen=True)
class ResponseTokenBatch:
    """What logits of a rollout are compared at: logits at i predict `target_ids[:, i]`, which counts by `response_mask[:, i]`."""

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Build a batch whose targets are the answers' tokens; prompts and padding are masked.

        Raises:
            ValueError: tensors on several devices, or starts outside the rows.
        """
        ids, mask, starts = rollout.input_ids, rollout.attention_mask, rollout.response_start_idx
        if {mask.device, starts.device} != {ids.device}:
            raise ValueError(
                f"a rollout's tensors must be on the same device: {ids.device}, {mask.device}, {starts.device}"
            )
        if starts.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"response_start_idx must use an integer dtype, it is {starts.dtype}")
        if bool(((starts < 1) | (starts > ids.shape[1])).any()):
            raise ValueError(f"response_start_idx must be in [1, sequence_length] = [1, {ids.shape[1]}]")
        places = torch.arange(1, ids.shape[1], device=ids.device)
        counted = mask[:, 1:].bool() & (places >= starts.unsqueeze(1))
        return cls(ids, mask, ids[:, 1:], counted)

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Drop the last token's logits, which have no target, from [batch, tokens, vocabulary].

        Raises:
            ValueError: another shape.
        """
        if logits.dim() != 3:
            raise ValueError(f"logits must be 3-D, [batch, tokens, vocabulary]; found {tuple(logits.shape)}")
        if logits.shape[:2] != self.input_ids.shape:
            raise ValueError(f"logits {tuple(logits.shape)} must match input_ids {tuple(self.input_ids.shape)}")
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """A mean, and the sum and the number of tokens that ranks add up."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor, teacher_logits: Tensor, response_mask: Tensor, beta: float = 0.5, temperature: float = 1.0,
    teacher_top_k: int | None = None, pointwise_clip: float | None = None,
) -> JSDLossOutput:  # fmt: skip
    """Compute `ds_compress.generalized_divergence` of the answers' tokens."""
    divergence = generalized_divergence(
        student_logits, teacher_logits, response_mask,
        beta=beta, temperature=temperature, top_k=teacher_top_k, clip=pointwise_clip,
    )  # fmt: skip
    return JSDLossOutput(divergence.mean, divergence.total, divergence.count)

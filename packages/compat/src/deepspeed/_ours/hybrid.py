"""`deepspeed.runtime.hybrid_engine` and `deepspeed.runtime.rollout`: an engine that trains and generates, and answers as batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.engine import DeepSpeedEngine
from ds_config.errors import UnsupportedError
from ds_engine.generating import GeneratingMethods

__all__ = [
    "DeepSpeedHybridEngine",
    "HybridEngineRollout",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]


class DeepSpeedHybridEngine(GeneratingMethods, DeepSpeedEngine):  # type: ignore[misc]  # upstream's arguments of offload_states
    """Made by `deepspeed.initialize` where `hybrid_engine.enabled`. See `ds_engine.generating`."""


@dataclass
class RolloutConfig:
    """Which engine answers, and how."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """How tokens are drawn; temperature 0 takes the likeliest. top_k -1: all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1


@dataclass
class RolloutRequest:
    """Prompts, padded on the left: [batch, tokens], int64."""

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        if self.prompt_ids.dim() != 2:
            raise ValueError(f"prompt_ids has shape {tuple(self.prompt_ids.shape)}; [batch, tokens] is expected")
        if self.prompt_attention_mask.shape != self.prompt_ids.shape:
            raise ValueError(
                f"prompt_attention_mask has shape {tuple(self.prompt_attention_mask.shape)}, prompt_ids "
                f"{tuple(self.prompt_ids.shape)}"
            )


@dataclass
class RolloutBatch:
    """Prompts and answers: [batch x samples, prompt + answer]; the answers begin at `response_start_idx`."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: int

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

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer a batch of prompts."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Use the weights as they are after `step`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Nothing follows."""


class HybridEngineRollout(RolloutEngine):
    """Answers by the engine that trains; its weights are always the present ones.

    Args:
        engine: Made with `hybrid_engine.enabled`.
        tokenizer: Says which tokens pad and end.
    Raises:
        UnsupportedError: graphs are asked for ("compat-argument").
    """

    def __init__(self, engine: DeepSpeedHybridEngine, tokenizer: Any, cfg: RolloutConfig | None = None) -> None:
        self.engine, self.tokenizer, self.cfg = engine, tokenizer, cfg or RolloutConfig()
        if self.cfg.use_graph_capture:
            raise UnsupportedError(
                "RolloutConfig(use_graph_capture=True)",
                code="compat-argument",
                fix="Leave it out; ds_engine.Rollout answers by ds-inference's own loop.",
            )

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer a batch of prompts. Collective at stage 3."""
        drawn = sampling.temperature > 0
        how: dict[str, Any] = {"do_sample": drawn}
        if drawn:
            how |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        end = getattr(self.tokenizer, "eos_token_id", None)
        pad = getattr(self.tokenizer, "pad_token_id", None)
        pad = end if pad is None else pad
        found = self.engine.generate(
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
        return RolloutBatch(found, torch.cat([prompts, _answered(found[:, start:], end).to(prompts)], 1), start)

    def sync_weights(self, step: int) -> None:
        """Nothing: they are the same."""
        del step

    def shutdown(self) -> None:
        """Nothing is held."""


def _answered(tokens: Tensor, end: int | None) -> Tensor:
    """1 for tokens of an answer up to and with its end, 0 for what follows."""
    if end is None:
        return torch.ones_like(tokens)
    ends = tokens == end
    return (ends.cumsum(1) - ends.long() == 0).long()


def build_rollout(engine: DeepSpeedHybridEngine, tokenizer: Any, cfg: RolloutConfig | None = None) -> RolloutEngine:
    """The rollout engine that `cfg` names.

    Raises:
        UnsupportedError: it is not `hybrid_engine` ("compat-argument").
    """
    cfg = cfg or RolloutConfig()
    if cfg.engine != "hybrid_engine":
        raise UnsupportedError(
            f"RolloutConfig(engine={cfg.engine!r})",
            code="compat-argument",
            fix='Use "hybrid_engine", or ds_engine.Rollout.',
        )
    return HybridEngineRollout(engine, tokenizer, cfg)

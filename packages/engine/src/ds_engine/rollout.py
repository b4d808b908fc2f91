"""Answers from the model that is being trained: its weights as they are now, without a copy of the model on another engine.

    rollout = Rollout(engine)
    answers = rollout.generate(prompts, Sampling(max_new_tokens=64, temperature=1.0, logprobs=0))

Each rank answers its own prompts with the whole model, whatever the ZeRO stage; ranks communicate only while weights are brought up to date. An
answer says for every token which *version* of the weights made it: the number of steps the engine had taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError
from ds_engine.engine import Engine
from ds_inference import LLMEngine, RequestOutput, SamplingParams, SchedulerConfig, Tokenizer, load
from ds_inference.model_loader import refresh_weights
from ds_inference.sampling import derive_seed
from ds_zero import GatheredParameters

__all__ = ["Rollout"]


class Rollout:
    """Generation by a training engine's model, a Hugging Face decoder of a declared family.

    Args:
        engine: What trains it.
        dtype: Of the weights that answer; None: as the forward has them.
        cache_tokens: Size of the cache of keys and values, in tokens.
        budget, tokenizer: See `ds_inference.load`.
    Raises:
        PlanError: the model has no configuration that says what it is ("engine-rollout").
        UnsupportedError: its family is not declared.
    Memory: between `sync` and `release` one whole model in `dtype` and one cache, beside what training keeps; while weights are brought up to
        date, the tensors of one role more.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        dtype: torch.dtype | None = None,
        cache_tokens: int = 8192,
        budget: SchedulerConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not hasattr(engine.module, "config"):
            raise PlanError(
                f"a {type(engine.module).__name__} has no `config`, so nobody knows how to generate with it",
                code="engine-rollout",
                fix="Train a transformers model, or generate with the module's own code in GatheredParameters.",
            )
        self.engine = engine
        self._options: dict[str, Any] = {"cache_tokens": cache_tokens, "budget": budget, "tokenizer": tokenizer}
        self._dtype = dtype
        self._generator: LLMEngine | None = None

    @property
    def version(self) -> int | None:
        """Steps the engine had taken when the weights were brought up to date; None: nothing is held."""
        return None if self._generator is None else self._generator.version

    def sync(self) -> int:
        """Bring the weights up to date; the version they have now. Collective; one gather a parameter.

        New values go where the old ones are: the cache, and graphs that were captured, stay. Nothing that older weights computed is used
        afterwards. Where a rank fails in it, weights and cache are given back: they would be of several steps.
        """
        live = _Live(self.engine.module)
        generator, self._generator = self._generator, None
        if generator is None:
            generator = load(self.engine.module, dtype=self._dtype, weights=live, **self._options)
        else:  # requests that are under way go on with the new weights
            refresh_weights(generator.decoder, self.engine.module, live)
        generator.weights_changed(self.engine.counters.steps)
        self._generator = generator
        return generator.version

    def generate(
        self, prompts: Sequence[str | Sequence[int]], how: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers by the engine's present weights. Collective if the engine stepped since the last `sync`; ranks may have
        different prompts, and different numbers of them.

        Equal prompts are drawn for apart from each other, on one rank and over ranks, so that groups of answers to one prompt differ; with
        a seed, the call repeats.
        """
        if self._generator is None or self.version != self.engine.counters.steps:
            self.sync()
        if self._generator is None:
            return []
        hows = [how or SamplingParams()] * len(prompts) if how is None or isinstance(how, SamplingParams) else list(how)
        return self._generator.generate(prompts, [_of_this_rank(one) for one in hows])

    def release(self) -> None:
        """Give back weights and cache; the next `generate` makes them anew. Nothing communicates."""
        self._generator = None


def _of_this_rank(how: SamplingParams) -> SamplingParams:
    """With the stream that this rank has below the seed."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return how if how.seed is None else replace(how, seed=derive_seed(how.seed, "rank", rank))


class _Live(Mapping[str, Tensor]):
    """A sharded module's tensors by name, each whole while it is asked for. Every rank asks in the same order."""

    def __init__(self, module: nn.Module) -> None:
        self._params = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = dict(module.named_buffers(remove_duplicate=False))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._params:
            return self._buffers[name].detach().clone()
        with GatheredParameters([self._params[name]]):
            return self._params[name].detach().clone()

    def __iter__(self) -> Iterator[str]:
        yield from self._params
        yield from self._buffers

    def __len__(self) -> int:
        return len(self._params) + len(self._buffers)

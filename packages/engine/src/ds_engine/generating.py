"""`HybridEngine`: an engine that trains a Hugging Face model and generates with it, for reinforcement learning (`hybrid_engine`).

`generate` is the model's own, on whole weights: they are gathered once a call, not once a token. `ds_engine.Rollout` answers faster, with
ds-inference's scheduler and kernels, for the families that it declares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_engine.engine import Engine
from ds_zero import unwrap_model_for_generation

__all__ = ["HybridEngine"]


class HybridEngine(Engine):
    """Made where the configuration says `hybrid_engine.enabled`."""

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generate with the model's own `generate` and its arguments, without gradients. Collective at stage 3.

        Ranks may have different prompts and end after different numbers of tokens.

        Raises:
            PlanError: the model has no `generate`, or more than `hybrid_engine.max_out_tokens` tokens are asked for
            ("engine-generate").
        Memory: at stage 3 this rank holds the unsharded model in the forward's dtype meanwhile.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise PlanError(
                f"a {type(self.module).__name__} has no `generate`",
                code="engine-generate",
                fix="Train a transformers model, or generate with the module's own code in unwrap_model_for_generation.",
            )
        self._check_room(inputs, options)
        options.pop("synced_gpus", None)  # no rank waits for another's token
        with torch.no_grad(), unwrap_model_for_generation(self.module):
            return generate(*inputs, **options)

    def _check_room(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        prompt = next((t for t in (*inputs, *map(options.get, ("input_ids", "inputs"))) if isinstance(t, Tensor)), None)
        length = 0 if prompt is None or prompt.dim() < 2 else prompt.shape[1]
        settings = options.get("generation_config")
        new = options.get("max_new_tokens", getattr(settings, "max_new_tokens", None))
        whole = options.get("max_length", getattr(settings, "max_length", None)) if new is None else length + new
        room = self.plan.answer_tokens
        if room is not None and max(length, whole or 0) > room:
            raise PlanError(
                f"{max(length, whole or 0)} tokens are asked for, prompt and answer together; "
                f"hybrid_engine.max_out_tokens = {room}",
                code="engine-generate",
                fix="Raise hybrid_engine.max_out_tokens, or ask for fewer tokens.",
            )

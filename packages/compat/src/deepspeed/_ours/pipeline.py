"""`PipelineEngine`: the engine of a model in stages under upstream's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from deepspeed._ours.engine import DeepSpeedEngine
from ds_config.errors import UnsupportedError
from ds_engine.pipelining import StagedMethods

__all__ = ["PipelineEngine"]


class PipelineEngine(StagedMethods, DeepSpeedEngine):
    """Made by `deepspeed.initialize(model=PipelineModule(...))`. Whole steps only."""

    agg_train_loss: Tensor | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]
        """One step of all microbatches. The mean loss over microbatches and copies, on every rank."""
        result = self.train_step(data_iter)
        if result.mean is None:
            raise RuntimeError("a step of a pipeline ended without a loss")
        self.agg_train_loss = result.mean
        return result.mean

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Loss of some microbatches without gradients; with `return_logits` a pair with the last stage's outputs.

        Without `compute_loss` the outputs by microbatch, on the last stage's ranks; with `reduce_output=None` the same.
        """
        if reduce_output not in ("avg", None):
            raise UnsupportedError(
                f"eval_batch(reduce_output={reduce_output!r}): the losses of microbatches are averaged or left alone",
                code="compat-argument",
                fix='Pass "avg", or None and reduce the outputs.',
            )
        loss, logits = self.evaluate(
            data_iter,
            return_logits=return_logits,
            compute_loss=compute_loss and reduce_output is not None,
            share_loss=bcast_loss,
            num_micro_batches=num_micro_batches,
        )
        return (loss, logits) if return_logits else loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Every call of `train_batch` ends a step."""
        return True

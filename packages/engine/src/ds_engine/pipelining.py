"""`PipelineEngine`: an engine whose model is in stages. Whole steps only; data are drawn on the first and the last stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import ds_comm
from ds_comm.metadata import metadata_device
from ds_config.errors import UnsupportedError
from ds_engine.engine import Engine
from ds_engine.loss_total import LossAccumulator
from ds_engine.result import StepResult
from ds_engine.transforms.stages import StagedExecutor
from ds_pipe import StagedModel, split_batch
from ds_pipe.staged import evaluating

__all__ = ["PipelineEngine"]


class PipelineEngine(Engine):
    """Runs a plan on a model in stages. Made by `ds_engine.initialize(model=PipelineModule(...))`."""

    @property
    def stages(self) -> StagedExecutor:
        """Runs the programs of this rank."""
        executor = self._executor
        if not isinstance(executor, StagedExecutor):
            raise TypeError(f"the executor of a pipeline is a StagedExecutor, not {type(executor).__name__}")
        return executor

    @property
    def staged(self) -> StagedModel:
        """The stages of this rank."""
        return self.stages.pipeline.model

    # ---- steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a rank of a pipeline has only some of the layers."""
        del args, kwargs
        raise self._whole_steps("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a pipeline engine runs whole steps (`train_batch`)."""
        del args, kwargs
        raise self._whole_steps("backward")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a pipeline engine runs whole steps (`train_batch`)."""
        del args, kwargs
        raise self._whole_steps("step")

    def _whole_steps(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name}() of a model in stages",
            code="engine-stages",
            fix="Call train_batch() or eval_batch(), which run all microbatches of a step.",
        )

    def train_batch(self, data_iter: Iterator[Any] | Iterable[Any] | None = None) -> StepResult:
        """Run the program: every microbatch of one step on all stages, then the update. Collective; the loss is on all ranks.

        Args:
            data_iter: Yields microbatches, the same on the ranks of the first and of the last stage; by default the engine's loader.
                The other ranks need none, nor do those whose batch function gets its data elsewhere: it is given None.
        """
        if data_iter is None and not self._feed.has_data:
            data_iter = self._without_data()
        return Engine.train_batch(self, data_iter)

    def _without_data(self) -> Iterator[None] | None:
        """Return what is drawn where there are no data; None if data are missing.

        With tensor parallelism the programs of Megatron read data on one rank of each group, and their batch functions broadcast them.
        """
        if not self.stages.needs_data:
            return iter(())
        return None if self.stages.batch_fn is split_batch else itertools.repeat(None)

    @torch.no_grad()
    def evaluate(
        self,
        data_iter: Iterator[Any] | None,
        *,
        return_logits: bool = False,
        compute_loss: bool = True,
        share_loss: bool = True,
        num_micro_batches: int | None = None,
        reduce: bool = True,
    ) -> tuple[Tensor | list[Any] | None, Any]:
        """Forwards of some microbatches in evaluation mode. Collective.

        Args:
            data_iter: As `train_batch`'s; the engine's loader is not read.
            return_logits: Keep the last stage's outputs.
            compute_loss: Else outputs are what is returned.
            share_loss: Have the mean loss over microbatches and data on every rank; else on those of the last stage.
            num_micro_batches: How many; those of a training step by default.
            reduce: Average the losses; else they are returned by microbatch, on ranks of the last stage.
        Returns:
            The mean loss, a float32 scalar (outputs by microbatch without `compute_loss`, None where there are none); and the outputs,
            concatenated along dim 0 if they are tensors, on ranks of the last stage with `return_logits`.
        """
        self._intact("eval_batch")
        count = num_micro_batches or len(self._backwards)
        outputs: dict[int, Any] = {}
        ledger, stages = LossAccumulator(), self.stages
        drawn = (self._without_data() or iter(())) if data_iter is None else data_iter

        def done(microbatch: int, out: Any, labels: Any) -> None:
            outputs[microbatch] = (out, stages.loss(out, labels) if compute_loss else None)

        with evaluating(self.module):
            stages.forwards(count, drawn, self._passes(), done)
        self._telemetry.pause()
        results = [outputs[m][0] for m in sorted(outputs)]
        logits = (_joined(results) if results else None) if return_logits else None
        if not compute_loss or not reduce:
            each = results if not compute_loss else [outputs[m][1] for m in sorted(outputs)]
            return (each or None), logits
        for m in sorted(outputs):
            ledger.add(outputs[m][1])
        totals = ledger.close(self._averaging) if outputs else None
        loss = torch.zeros(1, device="cpu") if totals is None else totals.loss.detach().reshape(1).cpu()
        if share_loss:
            group = self.staged.places.pipe
            loss = loss.to(metadata_device(group))
            ds_comm.broadcast(loss, group=group, group_src=self.staged.rank_of[-1], unit="pipe.loss")
        return (loss[0] if share_loss or outputs else None), logits

    # ---- data

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Draw training microbatches from `loader`, again and again."""
        self._feed.draw_from(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Draw training microbatches from `iterator`."""
        self._feed.draw_from(iter(iterator))

    def set_batch_fn(self, fn: Callable[[Any], tuple[Any, Any]]) -> None:
        """Make inputs and labels of what the data yield with `fn`."""
        self.stages.batch_fn = fn

    # ---- where this rank is

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.staged.first

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.staged.last

    def get_pipeline_parallel_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self.mesh["pipe"].rank

    def get_additional_losses(self) -> Any:
        """Return the losses that the model reports besides its main loss, on the ranks that have them."""
        return getattr(self.module, "get_additional_losses", lambda: None)()

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may change with every microbatch."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: masks, and any other tensor, are sent unchanged."""
        del value


def _joined(outputs: list[Any]) -> Any:
    if all(isinstance(out, Tensor) and out.dim() for out in outputs):
        return torch.cat(outputs)
    return outputs

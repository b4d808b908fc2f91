"""`PipelineEngine`: the engine of a model in stages under upstream's names."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from deepspeed._errors import UnsupportedNameError
from deepspeed._ours.base.raising import also, not_supported, raising
from deepspeed._ours.config.accepted_keys import section_of
from deepspeed._ours.training_engine.accessors import OF_STAGES, add_accessors
from deepspeed._ours.training_engine.activation_checkpointing_api import checkpoint, non_reentrant_checkpoint
from deepspeed._ours.training_engine.deepspeed_engine import DeepSpeedEngine
from deepspeed._ours.training_engine.pipeline_module import PipelineError, PipelineParallelGrid
from ds_comm import Group, all_reduce
from ds_config.errors import DsError
from ds_engine.pipelining import PipelineEngine as StagedEngine


class _NoInstructions:
    """Refuses upstream's table of what each instruction runs, which programs write schedules of their own into."""

    def __get__(self, engine: object, kind: type) -> None:
        raise UnsupportedNameError(
            f"{kind.__name__}._INSTRUCTION_MAP is not here: a schedule is a program of ds-pipe, not classes of instructions",
            code="compat-missing",
            fix="Set pipeline.schedule of the configuration, to zb-h1 for one.",
        )


class PipelineEngine(StagedEngine, DeepSpeedEngine):  # type: ignore[misc]  # upstream's arguments of offload_states
    """Made by `deepspeed.initialize(model=PipelineModule(...))`. Whole steps only."""

    agg_train_loss: Tensor | None = None
    _INSTRUCTION_MAP = _NoInstructions()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spent_s = 0.0
        model: Any = self.module
        asked = section_of(self._config._param_dict, "pipeline").get("use_reentrant", True)
        if not asked and getattr(model, "activation_checkpoint_func", None) is checkpoint:
            model.activation_checkpoint_func = non_reentrant_checkpoint

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the full state dict, as `DeepSpeedEngine.module_state_dict`."""
        return super().module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    def _reentrant_activation_checkpointing(self) -> bool:
        """Whether layers are computed again by a backward inside the backward."""
        model: Any = self.module
        return (
            getattr(model, "activation_checkpoint_func", None) is checkpoint
            and model.activation_checkpoint_interval > 0
        )

    @functools.cached_property
    def grid(self) -> PipelineParallelGrid:
        """The groups of this rank."""
        known = getattr(self.module, "_mpu", None)
        return known if isinstance(known, PipelineParallelGrid) else PipelineParallelGrid(places=self.module.places)  # type: ignore[arg-type]

    def _whole_steps(self, name: str) -> DsError:  # type: ignore[override]
        error = super()._whole_steps(name)
        return also(type(error), PipelineError)(error.message, code=error.code, fix=error.fix)

    @raising(StopIteration, "pipe-data")
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run a step of all microbatches and return the mean loss over microbatches and replicas, on every rank.

        A later call without data goes on with this iterator. Raises "pipe-data", a StopIteration, too, where it ends.
        """
        if isinstance(data_iter, Iterator):
            self._feed.draw_from(data_iter)
        if not self.module.training:
            self.module.train()
        begun = time.perf_counter()
        result = StagedEngine.train_batch(self, data_iter)
        if result.mean is None:
            raise RuntimeError("a step of a pipeline ended without a loss")
        self.agg_train_loss = result.mean
        self._spent_s += time.perf_counter() - begun
        self._print_step()
        return result.mean

    def _print_step(self) -> None:
        """Print upstream's line of a pipeline every `steps_per_print` steps, which programs look for in logs."""
        every = self.plan.telling.every
        if every is None or self.global_steps % every:
            return
        each, self._spent_s = self._spent_s / every, 0.0
        if self.global_rank == 0:
            rate = self.plan.batch.train / each
            print(
                f"steps: {self.global_steps} loss: {self.agg_train_loss:0.4f} iter time (s): {each:0.3f} samples/sec: {rate:0.3f}"
            )

    @raising(StopIteration, "pipe-data")
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute the loss of some microbatches without gradients; with `return_logits` also the last stage's outputs.

        With `reduce_output=None` the losses by microbatch, and without `compute_loss` the outputs, their mean over microbatches and
        replicas or, with `reduce_output=None`, by microbatch: on the last stage's ranks.
        """
        if reduce_output not in ("avg", None):
            raise not_supported(
                f"eval_batch(reduce_output={reduce_output!r}): losses and outputs of microbatches are averaged or left alone",
                'Pass "avg", or None and reduce the outputs.',
            )
        reduce = reduce_output is not None
        result, logits = self.evaluate(
            data_iter,
            return_logits=return_logits,
            compute_loss=compute_loss,
            share_loss=bcast_loss,
            num_micro_batches=num_micro_batches,
            reduce=reduce,
        )
        if not compute_loss and reduce and isinstance(result, list):
            result = _mean(result, self.staged.places.data)
        return (result, logits) if return_logits else result

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True: every call of `train_batch` ends a step."""
        return True


def _mean(outputs: list[Any], replicas: Group) -> Any:
    """Average outputs over microbatches and replicas; what are no tensors stay a list."""
    if not all(isinstance(output, Tensor) for output in outputs):
        return outputs
    mean = sum(outputs) / len(outputs)
    all_reduce(mean, group=replicas, unit="outputs")
    return mean / replicas.size


add_accessors(PipelineEngine, {}, OF_STAGES)

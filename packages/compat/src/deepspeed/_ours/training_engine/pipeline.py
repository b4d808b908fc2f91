"""`PipelineEngine`: the engine of a model in stages under upstream's names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

import ds_pipe
from deepspeed._errors import UnsupportedNameError
from deepspeed._ours.base.raising import not_supported
from deepspeed._ours.base.runtime_utils import prime_factors
from deepspeed._ours.training_engine.accessors import OF_STAGES, add_accessors
from deepspeed._ours.training_engine.deepspeed_engine import DeepSpeedEngine
from ds_comm import as_group, world_group
from ds_engine.pipelining import PipelineEngine as StagedEngine
from ds_pipe.topology import PipelineGroups


class PipelineParallelGrid(ds_pipe.PipelineParallelGrid):
    """`ds_pipe.PipelineParallelGrid` from a topology. Collective over the world.

    Args:
        topology: Ranks by axes; None: data x pipe, as square as the number of ranks allows.
        process_group: None, the world.
        places: Groups that are made already.
    Attributes:
        is_first_stage, is_last_stage: Of this rank's stage.
        pp_group, dp_group: Ranks of the world in this rank's pipeline, and of those that share its batch.
    """

    is_first_stage: bool  # type: ignore[assignment]  # methods of ds-pipe's
    is_last_stage: bool  # type: ignore[assignment]

    def __init__(
        self,
        topology: ds_pipe.ProcessTopology | None = None,
        process_group: Any = None,
        places: PipelineGroups | None = None,
    ) -> None:
        if process_group is not None and as_group(process_group).size != world_group().size:
            raise not_supported(
                "PipelineParallelGrid(process_group=...) of a part of the world",
                "Leave it out, and start as many ranks as the topology has.",
            )
        super().__init__(places or PipelineGroups.build(topology or _squarish(world_group().size)))
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group = list(self._places.pipe.ranks), list(self._places.data.ranks)

    def _is_grid_valid(self) -> bool:
        """Whether the axes multiply to the ranks; others are refused before."""
        return self._topo.world_size() == self.world_size


def _squarish(ranks: int) -> ds_pipe.ProcessTopology:
    pipe = data = 1
    for number, prime in enumerate(prime_factors(ranks)):
        if number % 2:
            data *= prime
        else:
            pipe *= prime
    return ds_pipe.PipeDataParallelTopology(num_pp=pipe, num_dp=data)


class PipelineModule(ds_pipe.PipelineModule):
    """`ds_pipe.PipelineModule`, which builds every layer once to count its parameters, as upstream: later draws come after those."""

    def _partition(self, method: str | Sequence[float], parts: int) -> tuple[int, ...]:
        if isinstance(method, str) and method.lower() == "parameters":
            method = list(map(_trainable, self.specs))
        return super()._partition(method, parts)


def _trainable(layer: Any) -> int:
    built = layer.build() if isinstance(layer, ds_pipe.LayerSpec) else layer
    return sum(p.numel() for p in built.parameters() if p.requires_grad) if isinstance(built, nn.Module) else 0


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

    @functools.cached_property
    def grid(self) -> PipelineParallelGrid:
        """The groups of this rank."""
        return PipelineParallelGrid(places=self.module.places)  # type: ignore[arg-type]

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]
        """Run a step of all microbatches and return the mean loss over microbatches and replicas, on every rank."""
        result = StagedEngine.train_batch(self, data_iter)
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
        """Compute the loss of some microbatches without gradients; with `return_logits` also the last stage's outputs.

        Without `compute_loss` the outputs by microbatch, on the last stage's ranks; with `reduce_output=None` the same.
        """
        if reduce_output not in ("avg", None):
            raise not_supported(
                f"eval_batch(reduce_output={reduce_output!r}): the losses of microbatches are averaged or left alone",
                'Pass "avg", or None and reduce the outputs.',
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
        """Return True: every call of `train_batch` ends a step."""
        return True


add_accessors(PipelineEngine, {}, OF_STAGES)

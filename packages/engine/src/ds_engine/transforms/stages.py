"""Pipeline stages: the model comes cut (`ds_pipe.PipelineModule`); the program is run on the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_engine.executor import Passes
from ds_engine.loss_total import SumLoss, loss_of
from ds_engine.model_sections import PipelineConfig
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_engine.uneven_inputs import WeightedBatch
from ds_pipe import Action, ActionKind, DecoderStages, Pipeline, PipelineModule, PipelineSpec, pipeline, split_batch
from ds_pipe.executor import MicrobatchSource
from ds_pipe.gradient_reduction import StageReduction

__all__ = ["StagedExecutor", "Stages"]


@dataclass(frozen=True, slots=True)
class StageTransform:
    """How the model is cut, and how many layers keep their input only; 0: as the model says."""

    staging: PipelineSpec
    interval: int


class Stages(Transform[StageTransform, Pipeline]):
    """For models that say how they are cut, with one stage, too: their microbatches are inputs and labels."""

    name = "pipeline stages"
    axes = ("pipe",)

    def decide(self, inputs: TransformInput) -> StageTransform | None:
        staging, section = inputs.shapes.staging, inputs.config.pipeline
        _check_expected(section, staging)
        return None if staging is None else StageTransform(staging, section.activation_checkpoint_interval)

    def plan_rows(self, what: StageTransform) -> Mapping[str, str]:
        cut = what.staging
        return {"pipeline": f"{cut.ranks} ranks, schedule {cut.schedule}"}

    def apply(self, what: StageTransform, site: BuildContext) -> Pipeline:
        model = site.model
        if not isinstance(model, PipelineModule | DecoderStages):
            raise PlanError(
                f"a {type(model).__name__} says how it is cut and is no PipelineModule",
                code="engine-stages",
                fix="Cut models with ds_pipe.PipelineModule or ds_pipe.DecoderStages.",
            )
        places = model.staged.places
        if places.pipe.ranks != site.mesh["pipe"].ranks or places.data.ranks != site.mesh["data"].ranks:
            raise PlanError(
                f"the model's pipeline is ranks {places.pipe.ranks} and its copies {places.data.ranks}, the engine's are "
                f"{site.mesh['pipe'].ranks} and {site.mesh['data'].ranks}",
                code="engine-stages",
                fix="Use num_stages=, or a topology with pipe outermost, data next, and the degrees of the configuration; with another order use ds_pipe.pipeline alone.",
            )
        if what.interval:
            model.set_checkpoint_interval(what.interval)
        stage_pipeline = pipeline(model, site.plan.batch.accumulation)
        site.executor = StagedExecutor(stage_pipeline, site.plan.residency.shard_grads)
        return stage_pipeline

    def undo(self, applied: Pipeline) -> None:
        applied.close()


def _check_expected(section: PipelineConfig, staging: PipelineSpec | None) -> None:
    """Check that the configuration expects the stages that the model was built with.

    Raises:
        PlanError: the configuration expects another split ("engine-stages").
    """
    cut = staging or PipelineSpec("", 1)
    wrong = []
    if section.stages not in ("auto", cut.ranks):
        wrong.append(f"pipeline.stages = {section.stages}, the model has {cut.ranks}")
    if section.partition not in ("best", cut.partition):
        wrong.append(
            f"pipeline.partition = {section.partition!r}, the model was cut by {cut.partition or 'another way'!r}"
        )
    if section.seed_layers and staging is not None and not cut.seeded:  # a plain module's layers are there already
        wrong.append("pipeline.seed_layers, the model's layers were made without seeds of their own")
    if wrong:
        raise PlanError(
            "; ".join(wrong),
            code="engine-stages",
            fix="PipelineModule(num_stages=, partition_method=, seed_layers=) cuts the model; make both agree, or leave the keys out.",
        )


class StagedExecutor:
    """The executor of a rank with stages.

    Args:
        stage_pipeline: The stages at work.
        every_backward: Gradients are reduced after each microbatch.
    Attributes:
        batch_fn: Makes inputs and labels of what the data yield.
    """

    def __init__(self, stage_pipeline: Pipeline, every_backward: bool) -> None:
        self.pipeline, self._every = stage_pipeline, every_backward
        self.batch_fn: Callable[[Any], tuple[Any, Any]] = split_batch

    @property
    def needs_data(self) -> bool:
        """Whether this rank draws microbatches: it holds the first or the last stage."""
        return self.pipeline.model.first or self.pipeline.model.last

    def train(self, actions: Sequence[Action], data: Iterator[Any], passes: Passes) -> None:
        """Run a step as `ProgramExecutor.train`; losses are recorded on every rank of the pipeline."""
        losses: dict[int, Tensor | SumLoss] = {}

        def criterion(microbatch: int, out: Any, labels: tuple[Any, WeightedBatch | None]) -> Tensor:
            loss = self._loss(out, labels)
            losses[microbatch] = _detached(loss)
            return passes.start(loss)

        reduction = StageReduction(self.pipeline.model, passes, self._every)
        self._lend(passes)
        self.pipeline.executor.run(actions, self._feed(data, passes), reduction, criterion)
        first = min(a.stage for a in actions if a.op is ActionKind.FORWARD)
        count = sum(1 for a in actions if a.op is ActionKind.FORWARD and a.stage == first)
        for loss in self._everywhere(losses, count):
            if not self.pipeline.model.last:
                passes.start(loss)

    def evaluate(self, count: int, data: Iterator[Any], passes: Passes) -> Iterator[Tensor | SumLoss]:
        """Yield losses as `ProgramExecutor.evaluate`, on every rank of the pipeline."""
        losses: dict[int, Tensor | SumLoss] = {}

        def done(microbatch: int, out: Any, labels: tuple[Any, WeightedBatch | None]) -> None:
            losses[microbatch] = self._loss(out, labels)

        self.forwards(count, data, passes, done)
        yield from self._everywhere(losses, count)

    def forwards(
        self, count: int, data: Iterator[Any], passes: Passes, done: Callable[[int, Any, Any], object]
    ) -> None:
        """Forwards of `count` microbatches; `done` gets number, output and labels at the last stage."""
        self._lend(passes)
        self.pipeline.executor.evaluate(self.pipeline.forwards(count), self._feed(data, passes), done)

    def _lend(self, passes: Passes) -> None:
        for stage in self.pipeline.executor.stages.values():
            stage.backwards.forwards = passes.forward

    def loss(self, out: Any, labels: tuple[Any, WeightedBatch | None]) -> Tensor | SumLoss:
        """Compute the loss from the output and labels that `done` receives."""
        return self._loss(out, labels)

    def _loss(self, out: Any, labels: tuple[Any, WeightedBatch | None]) -> Tensor | SumLoss:
        criterion, (wanted, share) = self.pipeline.model.loss, labels
        loss = loss_of(out if criterion is None else criterion(out, wanted))
        return loss if share is None else share.weigh(loss)

    def _feed(self, data: Iterator[Any], passes: Passes) -> MicrobatchSource:
        def split(batch: Any) -> tuple[Any, tuple[Any, WeightedBatch | None]]:
            share = batch if isinstance(batch, WeightedBatch) else None
            inputs, labels = self.batch_fn(batch if share is None else share.batch)
            return passes.place(inputs, inputs=True), (passes.place(labels, inputs=False), share)

        return MicrobatchSource(data, split, self.pipeline.model.first + self.pipeline.model.last)

    def _everywhere(self, losses: Mapping[int, Tensor | SumLoss], count: int) -> list[Tensor | SumLoss]:
        """Share the losses by microbatch with all ranks of the pipeline. Collective: 24 bytes a microbatch."""
        table = torch.zeros(count, 3, dtype=torch.float64, device="cpu")
        for microbatch, loss in losses.items():
            summed = isinstance(loss, SumLoss)
            total, number = (loss.total, loss.count) if isinstance(loss, SumLoss) else (loss, 1.0)
            table[microbatch] = torch.tensor(
                [float(summed), float(total.detach()), float(number)], dtype=torch.float64, device="cpu"
            )
        rows = self.pipeline.executor.share(table).tolist()
        return [
            SumLoss(torch.tensor(total, device="cpu"), number) if summed else torch.tensor(total, device="cpu")
            for summed, total, number in rows
        ]


def _detached(loss: Tensor | SumLoss) -> Tensor | SumLoss:
    return SumLoss(loss.total.detach(), loss.count) if isinstance(loss, SumLoss) else loss.detach()

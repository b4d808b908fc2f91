"""torch's GradScaler for models in stages: whether a step is skipped is one answer of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm
from ds_pipe._torch import found_inf_of
from ds_pipe.gradient_reduction import HasStages, stages_of
from ds_pipe.staged import StagedModel

__all__ = ["StageGradScaler"]


class StageGradScaler(torch.amp.GradScaler):
    """A GradScaler whose inf checks cover the gradients of all stages and replicas.

    A rank alone sees the overflow of its own stage only; ranks would then skip different steps, and their scales would part.

        scaler = StageGradScaler(model)
        step.scale_with(scaler)
        step(microbatches)                      # gradients are multiplied by the scale
        scaler.unscale_(optimizer)              # if they are clipped, as in torch
        ds_pipe.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        model: A PipelineModule, DecoderStages, TracedStages or StagedModel.
        settings: Those of torch.amp.GradScaler: init_scale, growth_factor, backoff_factor, growth_interval, enabled.
    `unscale_` and `step` are collective over the world.
    """

    def __init__(self, model: StagedModel | HasStages, **settings: Any) -> None:
        self._staged = stages_of(model)
        self._stage_device = next((p.device for p in self._staged.module.parameters()), torch.device("cpu"))
        super().__init__(self._stage_device.type, **settings)
        if self.is_enabled():
            self.scale(
                torch.zeros((), device=self._stage_device)
            )  # makes the scale: a rank without the last stage never scales a loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and agree on whether one of any rank is not finite. Collective."""
        super().unscale_(optimizer)
        if self.is_enabled():
            self._agree(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient of any rank is not finite. Collective where `unscale_` was not called."""
        if self.is_enabled() and not found_inf_of(self, optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _agree(self, optimizer: Optimizer) -> None:
        found = found_inf_of(self, optimizer)
        if not found:  # no gradient on this rank
            found[self._stage_device] = torch.zeros((), dtype=torch.float32, device=self._stage_device)
        worst: Tensor = torch.stack([flag.to(self._stage_device) for flag in found.values()]).max().reshape(1)
        ds_comm.all_reduce(worst, op=ds_comm.ReduceOp.MAX, group=self._staged.places.world, unit="pipe.scaler")
        for flag in found.values():
            flag.fill_(float(worst))

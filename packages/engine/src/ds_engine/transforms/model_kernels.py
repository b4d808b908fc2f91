"""Fused kernels in place of a transformers model's own layers, by the section `kernels`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import get_args

from ds_config.errors import PlanError
from ds_engine.fused_kernels import select_kernels
from ds_engine.fused_layers import FusedLayers, fuse_layers
from ds_engine.model_sections import FusedKind
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput

__all__ = ["Kernels"]

_log = logging.getLogger("ds_engine")


class Kernels(Transform[tuple[FusedKind, ...], FusedLayers]):
    """After layers are cut: what is left of a layer is looked at. Which modules have a known formula is seen when it is applied."""

    name = "kernels"

    def decide(self, inputs: TransformInput) -> tuple[FusedKind, ...] | None:
        value = inputs.config.kernels
        if value == "off" or not value:
            return None
        known: tuple[FusedKind, ...] = get_args(FusedKind)
        return known if value == "auto" else tuple(kind for kind in known if kind in value)

    def plan_rows(self, what: tuple[FusedKind, ...]) -> Mapping[str, str]:
        return {"fused kernels": f"{', '.join(what)}, where the model is of a known family"}

    def apply(self, what: tuple[FusedKind, ...], site: BuildContext) -> FusedLayers:
        kernels = select_kernels(site.device)
        layers = fuse_layers(site.model, what, kernels)
        counts = layers.counts
        absent = [kind for kind, count in counts.items() if not count]
        if absent and site.plan.config.kernels != "auto":
            layers.restore()
            raise PlanError(
                f"kernels = {list(what)}, and no module of {type(site.model).__name__} has a formula of {', '.join(absent)} that is known",
                code="kernels-unknown",
                fix='Leave these names out, or set kernels = "auto", which takes what there is.',
            )
        if site.mesh.rank == 0:
            text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            rest = f"; none of {', '.join(absent)} has a known formula" if absent else ""
            _log.info("fused kernels of %s: %s%s", kernels.name, text or "nothing", rest)
        return layers

    def undo(self, applied: FusedLayers) -> None:
        applied.restore()

"""Activation checkpointing: modules chosen by name compute their forward again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_parallel import ActivationCheckpointing, ActivationPolicy, Checkpointed, checkpoint_modules, match_modules

__all__ = ["Activations"]


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What calls keep of their inputs, and names of the modules whose forward is such a call."""

    keeping: ActivationPolicy
    names: tuple[str, ...]


class Activations(Transform[Checkpointing, Checkpointed]):
    """Always in the plan: calls of `ds_parallel.checkpoint` in the model's own forward follow the same section."""

    name = "activation checkpointing"

    def decide(self, inputs: TransformInput) -> Checkpointing:
        section = inputs.config.activation_checkpointing
        callables = [m.name for m in inputs.shapes.modules if m.callable and m.name]
        return Checkpointing(section.keeping, match_modules(callables, section.modules))

    def plan_rows(self, what: Checkpointing) -> Mapping[str, str]:
        names = what.names
        if not names:
            return {"activations": f"the model's own checkpointing; inputs of checkpointed calls: {what.keeping}"}
        listing = ", ".join(names if len(names) <= 4 else (*names[:2], "...", names[-1]))
        return {"activations": f"{len(names)} modules computed again in backward ({listing}); {what.keeping}"}

    def apply(self, what: Checkpointing, site: BuildContext) -> Checkpointed:
        site.activations = ActivationCheckpointing(what.keeping, site.mesh["tensor"])
        return checkpoint_modules(site.model, what.names, site.activations)

    def undo(self, applied: Checkpointed) -> None:
        applied.remove()

"""Sequence parallelism: attention of the model exchanges heads over the ranks of the sequence axis.

A transformers model's attention function is wrapped in the registry, unless the caller has done so. A model that exchanges by
itself (`DistributedAttention`, or a module that says `shares_sequences = True`) stays as it is. Either way every rank is given its
part of each sequence, and returns the loss of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_config.errors import PlanError, UnsupportedError
from ds_engine.compiling import Shares
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_parallel.sequence.hf_attention import SUPPORTED, UlyssesAttention

__all__ = ["Sequence"]


@dataclass(frozen=True, slots=True)
class SequenceTransform:
    """How attention is shared.

    Attributes:
        degree: Ranks of a sequence.
        attention: transformers' name of the attention function; None: the model exchanges by itself, or its graphs do.
        in_graphs: The compiled model's graphs do (`compile.passes`: autosp).
    """

    degree: int
    attention: str | None
    in_graphs: bool = False


class Sequence(Transform[SequenceTransform, UlyssesAttention | None]):
    """A degree of 1 is not in the plan."""

    name = "sequence parallel"
    axes = ("sequence",)

    def decide(self, inputs: TransformInput) -> SequenceTransform | None:
        degree, facts = inputs.mesh.sequence, inputs.shapes.facts
        if degree == 1:
            return None
        if facts is None or facts.shares_sequences:
            return SequenceTransform(degree, None)
        compiled = inputs.config.compile
        if facts.attention not in SUPPORTED and compiled is not None and compiled.cuts_sequences:
            return SequenceTransform(degree, None, in_graphs=True)
        if facts.attention not in SUPPORTED:
            raise UnsupportedError(
                f"sequence_parallel_size = {degree}, and nothing in the model exchanges over a sequence: its attention is "
                f"{facts.attention or 'its own'}",
                code="sequence-attention",
                fix="Use ds_parallel.sequence.DistributedAttention in it, a transformers model with "
                f'attn_implementation in {", ".join(SUPPORTED)}, or compile it with compile.passes = ["autosp"].',
            )
        return SequenceTransform(degree, facts.attention)

    def plan_rows(self, what: SequenceTransform) -> Mapping[str, str]:
        how = "in the graphs of engine.compile()" if what.in_graphs else "by the model itself"
        how = f"{what.attention} wrapped" if what.attention else how
        return {
            "sequence parallel": f"{what.degree} ranks share a sequence, heads are exchanged around attention ({how})"
        }

    def apply(self, what: SequenceTransform, site: BuildContext) -> UlyssesAttention | None:
        group, compiled = site.mesh["sequence"], site.plan.config.compile
        if compiled is not None and compiled.cuts_sequences:
            site.shares = Shares(group, what.attention, what.in_graphs)
        if what.attention is None:
            return None
        there = UlyssesAttention.registered(what.attention)
        if there is None:
            return UlyssesAttention.register(what.attention, group)
        if there.group.ranks != group.ranks:
            raise PlanError(
                f"attention {what.attention!r} is shared over {there.group}, the engine's sequences are over {group}",
                code="sequence-attention",
                fix="Use one number of ranks, or call remove() on what registered it first.",
            )
        return None

    def undo(self, applied: UlyssesAttention | None) -> None:
        if applied is not None:
            applied.remove()

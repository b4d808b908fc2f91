"""The section `activation_checkpointing`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ds_config import StrictModel
from ds_parallel.keeping import Keeping

__all__ = ["ActivationCheckpointingConfig"]


class ActivationCheckpointingConfig(StrictModel):
    """`activation_checkpointing`: what checkpointed calls keep of their inputs, and where.

    It speaks of the modules named here, and of calls of `ds_parallel.checkpoint` in the model's own forward.
    """

    partition_activations: bool = Field(
        default=False, description="Each tensor-parallel rank keeps 1/N of every input; backward gathers it."
    )
    cpu_checkpointing: bool = Field(default=False, description="Keep inputs in host memory until backward.")
    contiguous_memory_optimization: bool = Field(
        default=False, description="Keep inputs in buffers that are made once; needs number_checkpoints."
    )
    number_checkpoints: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Buffers of contiguous_memory_optimization: checkpointed calls of one forward."
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="Wait for the device before and after every checkpointed call."
    )
    profile: bool = Field(
        default=False, description="Report the times of every checkpointed call: forward, recomputation, backward."
    )
    modules: tuple[str, ...] = Field(
        default=(),
        description="Modules whose forward is checkpointed, by name; `*` is any one part of it (`layers.*`), `**` any number.",
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            raise ValueError("contiguous_memory_optimization needs number_checkpoints: how many buffers to make")
        return self

    @property
    def keeping(self) -> Keeping:
        """The same as what `ActivationCheckpointing` takes."""
        return Keeping(
            slices=self.partition_activations,
            host=self.cpu_checkpointing,
            slots=self.number_checkpoints if self.contiguous_memory_optimization else None,
            synchronize=self.synchronize_checkpoint_boundary,
            profile=self.profile,
        )

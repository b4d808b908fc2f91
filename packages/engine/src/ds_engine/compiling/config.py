"""The section `compile`. Models only; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_config import NoEffect, StrictModel, Unsupported

__all__ = ["CompileConfig"]

Count = Annotated[int, Field(ge=0)]


class CompileConfig(StrictModel):
    """`compile`: what `engine.compile()` does with the graphs of a model."""

    deepcompile: bool = Field(default=False, description="Put gathers, releases and reductions into the graphs.")
    free_activation: bool = Field(default=False, description="Give saved results back right behind their last use.")
    free_activation_threshold: Count = Field(
        default=10 * 2**20, description="Smallest saved result, in bytes, that is."
    )
    offload_activation: bool = Field(
        default=False, description="Keep saved results in host memory between forward and backward, as memory asks for."
    )
    offload_activation_pin_memory: bool = Field(default=True, description="Page-locked, where the device has any.")
    offload_opt_states: bool = Field(
        default=False,
        description="Keep the optimizer's state in host memory while graphs run, as memory asks for; the update is on the device.",
    )
    offload_parameters: bool = Field(
        default=False,
        description="Keep parameters in host memory between uses; graphs bring them before they are gathered. Stage 3.",
    )
    double_buffer: bool = Field(
        default=True, description="Fill one gradient buffer while another one is summed; false waits for each."
    )
    symmetric_memory: Annotated[
        bool, Unsupported("nothing; gathers between ranks of a host go through shared memory where they can")
    ] = False
    autoep_non_moe: Annotated[
        bool, Unsupported("engine.compile(), or torch.compile of the modules that are no experts")
    ] = False
    debug_log: bool = Field(default=False, description="Log every action that is put into a graph.")
    sync_before_reduce: bool = Field(default=False, description="Wait for the device before a reduction begins.")
    sync_after_reduce: bool = Field(default=False, description="Wait for each reduction where it begins.")
    sync_before_allgather: bool = Field(default=False, description="Wait for the device before a gather.")
    sync_after_allgather: bool = Field(default=False, description="Wait for the device after a gather.")
    keep_int_input_tensors: Annotated[bool, NoEffect("graphs are measured while a step runs; no inputs are kept")] = (
        True
    )
    keep_all_input_tensors: Annotated[bool, NoEffect("graphs are measured while a step runs; no inputs are kept")] = (
        False
    )
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = Field(
        default=None,
        description="Which passes; null chooses by the ZeRO stage. autosp: ranks are given whole sequences, and graphs cut them.",
    )

    @property
    def enabled(self) -> bool:
        """Whether it asks for something: every other key speaks of it."""
        return self.deepcompile

    @property
    def cuts_sequences(self) -> bool:
        """Whether compiled runs cut batches themselves."""
        return self.deepcompile and "autosp" in (self.passes or ())

"""The `checkpoint` section of a configuration, and the engine it asks for.

Every key of DeepSpeed's schema is used, replaced, or refused with what to use instead. `saving` is ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ds_ckpt.engines import Asynchronous, Checkpointer, Synchronous
from ds_config import Dead, StrictModel, Unbuilt

__all__ = ["CheckpointConfig", "ParallelWriteConfig", "SavingConfig", "WriterConfig", "make_engine"]


_Validation = Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"]


class ParallelWriteConfig(StrictModel):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Annotated[bool, Dead("what several ranks hold is always shared out among them for writing")] = False


class WriterConfig(StrictModel):
    """`checkpoint.writer`: how DeepSpeed's fast engine writes. `decoupled` is what remains a choice here."""

    type: Annotated[str, Dead("files are always written by threads, past the page cache where possible")] = "fast"
    decoupled: bool = False
    io_buffer_size: Annotated[int, Dead("buffers are slabs of 4 MiB; saving.buffer_bytes bounds their sum")] = (
        64 * 2**20
    )
    io_buffer_double: bool = True
    show_statistics: Annotated[bool, Dead("the spans ckpt.save, ckpt.write and ckpt.commit carry bytes and times")] = (
        False
    )
    data_parallel: Annotated[str | None, Dead("what several ranks hold is always shared out among them")] = None
    io_multiplier: Annotated[int, Dead("each writing rank writes one file")] = 1


class SavingConfig(StrictModel):
    """`checkpoint.saving`: when a save returns, and what stays.

    Attributes:
        asynchronous: Return after copying, and write behind the next steps.
        buffer_bytes: Host memory for copies on each rank; None: as much as one save needs.
        keep: How many checkpoints stay in the directory, newest first; None: all. Removed after a save has succeeded.
    """

    asynchronous: bool = False
    buffer_bytes: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] | None = None


class CheckpointConfig(StrictModel):
    """The `checkpoint` section.

    Attributes:
        tag_validation: Checked and without effect: as if Fail.
        load_universal: Nothing to choose for our checkpoints: every one loads at any world size. Convert DeepSpeed's
            universal checkpoints with `ds ckpt convert --from deepspeed --to ds`.
        layout: "ds", or "deepspeed": DeepSpeed's own files, which need pickle and resume there on as many ranks, at the same
            stage. They are read again here on any number.
        writer: Null, or an object; `decoupled` asks for an asynchronous engine whose files another process writes.
    """

    tag_validation: Annotated[
        _Validation,
        Dead("tags that differ between ranks are always an error, before anything is written"),
    ] = "Warn"
    load_universal: Annotated[
        bool, Dead("every checkpoint loads in any layout; bring others in with `ds ckpt convert --from deepspeed`")
    ] = False
    use_node_local_storage: Annotated[bool, Unbuilt("save to a directory that all nodes share")] = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: Annotated[bool, Dead("files are safetensors; there is no pickle to choose a form of")] = (
        True
    )
    writer: WriterConfig | None = None
    saving: SavingConfig = SavingConfig()
    layout: Literal["ds", "deepspeed"] = Field(
        default="ds", description='"deepspeed" writes DeepSpeed\'s own files, which its loader resumes from.'
    )


def make_engine(config: CheckpointConfig, group: Any = None) -> Checkpointer:
    """The engine that `config` asks for. Collective over `group`."""
    saving, writer = config.saving, config.writer
    decoupled = writer is not None and writer.decoupled
    if saving.asynchronous or decoupled:
        double = writer is not None and writer.io_buffer_double
        return Asynchronous(
            group, buffer_bytes=saving.buffer_bytes, double=double, keep=saving.keep, decoupled=decoupled
        )
    return Synchronous(group, keep=saving.keep)

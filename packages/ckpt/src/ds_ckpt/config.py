"""The `checkpoint` section of a configuration, and the engine it asks for.

Every key of DeepSpeed's schema is used, replaced, or refused with what to use instead. `saving` is ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ds_ckpt.block_packing import SaveOptions
from ds_ckpt.engines import AsyncCheckpointer, Checkpointer, SyncCheckpointer
from ds_ckpt.local_checkpoints import DrainOptions, LocalCheckpointer
from ds_config import NoEffect, StrictModel, Unsupported

__all__ = [
    "CheckpointConfig",
    "LocalCheckpointConfig",
    "ParallelWriteConfig",
    "SavingConfig",
    "WriterConfig",
    "make_engine",
    "make_near",
]


_Validation = Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"]


class ParallelWriteConfig(StrictModel):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Annotated[bool, NoEffect("what several ranks hold is always shared out among them for writing")] = (
        False
    )


class WriterConfig(StrictModel):
    """`checkpoint.writer`: how DeepSpeed's fast engine writes. `decoupled` is what remains a choice here."""

    type: Annotated[str, NoEffect("files are always written by threads, past the page cache where possible")] = "fast"
    decoupled: bool = False
    io_buffer_size: Annotated[int, NoEffect("buffers are slabs of 4 MiB; saving.buffer_bytes bounds their sum")] = (
        64 * 2**20
    )
    io_buffer_double: bool = True
    show_statistics: Annotated[
        bool, NoEffect("the spans ckpt.save, ckpt.write and ckpt.commit carry bytes and times")
    ] = False
    data_parallel: Annotated[str | None, NoEffect("what several ranks hold is always shared out among them")] = None
    io_multiplier: Annotated[int, NoEffect("each writing rank writes one file")] = 1


class SavingConfig(StrictModel):
    """`checkpoint.saving`: when a save returns, and what stays.

    Attributes:
        asynchronous: Return after copying, and write behind the next steps.
        buffer_bytes: Host memory for copies on each rank; None: as much as one save needs.
        keep: How many checkpoints stay in the directory, newest first; None: all. Removed after a save has succeeded.
        incremental: Blocks that a checkpoint of the same directory holds are referred to, not written again.
        codecs: How blocks are stored, by the start of a tensor's name: "zstd", and for what starts with "optim/" also "bf16" and
            "int8", which lose something (`ds_ckpt.block_codecs` says how much, with its certificates).
    """

    asynchronous: bool = False
    buffer_bytes: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] | None = None
    incremental: bool = False
    codecs: dict[str, Literal["zstd", "bf16", "int8"]] = Field(default_factory=dict)

    def recipe(self) -> SaveOptions | None:
        """Build the options of an incremental or encoded save; None where neither is configured.

        Raises:
            CheckpointError: "ckpt-codec".
        """
        return SaveOptions(self.incremental, dict(self.codecs)) if self.incremental or self.codecs else None


class LocalCheckpointConfig(StrictModel):
    """`checkpoint.local`: snapshots on the node and on a neighbour's, drained to where checkpoints are saved.

    Attributes:
        folder: On each node: in memory or on a local disk; runs may not share it.
        every: Steps between snapshots.
        persist_every: Steps between those that go to the directory of checkpoints; a multiple of `every`.
        root: The directory or URL of checkpoints.
    """

    folder: str
    root: str
    every: Annotated[int, Field(ge=1)] = 10
    persist_every: Annotated[int, Field(ge=1)] = 1000


class CheckpointConfig(StrictModel):
    """The `checkpoint` section.

    Attributes:
        tag_validation: Checked and without effect: as if Fail.
        load_universal: Without a tag go on from the checkpoint that `latest_universal` names, where there is such a file. Layouts
            are told apart without it, and all load at any world size.
        layout: "ds", or "deepspeed": DeepSpeed's own files, which need pickle and resume there on as many ranks, at the same
            stage. They are read again here on any number.
        local: Null, or what `load_checkpoint` without a tag goes on from first: copies in the memory or on the disks of the nodes.
        writer: Null, or an object; `decoupled` asks for an asynchronous engine whose files another process writes.
    """

    tag_validation: Annotated[
        _Validation,
        NoEffect("tags that differ between ranks are always an error, before anything is written"),
    ] = "Warn"
    load_universal: bool = False
    use_node_local_storage: Annotated[
        bool, Unsupported("`checkpoint.local` keeps copies on the nodes, and drains them to a directory that all share")
    ] = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: Annotated[
        bool, NoEffect("files are safetensors; there is no pickle to choose a form of")
    ] = True
    writer: WriterConfig | None = None
    saving: SavingConfig = SavingConfig()
    local: LocalCheckpointConfig | None = None
    layout: Literal["ds", "deepspeed"] = Field(
        default="ds", description='"deepspeed" writes DeepSpeed\'s own files, which its loader resumes from.'
    )


def make_engine(config: CheckpointConfig, group: Any = None) -> Checkpointer:
    """Build the asynchronous or synchronous checkpointer that `config` specifies. Collective over `group`."""
    saving, writer = config.saving, config.writer
    decoupled = writer is not None and writer.decoupled
    if saving.asynchronous or decoupled:
        double = writer is not None and writer.io_buffer_double
        return AsyncCheckpointer(
            group,
            buffer_bytes=saving.buffer_bytes,
            double=double,
            keep=saving.keep,
            decoupled=decoupled,
            recipe=saving.recipe(),
        )
    return SyncCheckpointer(group, keep=saving.keep, recipe=saving.recipe())


def make_near(config: CheckpointConfig, group: Any = None) -> LocalCheckpointer | None:
    """Build the local checkpointer that `config` specifies; None where none is configured. Collective over `group`."""
    near, saving = config.local, config.saving
    if near is None:
        return None
    draining = DrainOptions(near.persist_every, saving.keep, saving.recipe())
    return LocalCheckpointer(near.folder, near.root, group, every=near.every, draining=draining)

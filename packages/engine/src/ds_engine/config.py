"""The configuration: DeepSpeed's JSON schema as one strict model, composed of the sections that the packages own.

Every key of the schema is one of: used here; an alias or a deprecated name, moved with one warning; dead (it does nothing
where it comes from, either), accepted with one line; or not built here, which is an error as soon as it is switched on.
No key is accepted and ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_ckpt.config import CheckpointConfig
from ds_config import Alias, Dead, Document, Provenance, Unbuilt, explain, load
from ds_config.checking import Auto
from ds_config.errors import ConfigError
from ds_config.reading import Source
from ds_engine.batch import BatchRequest
from ds_engine.sections import OptimizerSection, SchedulerSection
from ds_monitor.config import MonitorConfig
from ds_zero.config import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig, ZeroConfig

__all__ = ["Config", "explain_config", "load_config", "source_of"]

Section = dict[str, Any] | None
DType = Literal["fp32", "fp16", "bf16"]


class Config(MonitorConfig):
    """What the user wants. Read one with `load_config`; what will be done about it is a `Plan`."""

    # Batch
    train_batch_size: int | None = Field(default=None, description="Samples per step, over all ranks.")
    train_micro_batch_size_per_gpu: int | None = Field(default=None, description="Samples per forward on one rank.")
    gradient_accumulation_steps: int | None = Field(default=None, description="Microbatches per step.")
    dataloader_drop_last: bool = Field(
        default=False, description="Cut every epoch to whole train batches, instead of going on with the next epoch."
    )
    managed_gradient_accumulation: Annotated[
        bool, Unbuilt("true, with gradient_accumulation_steps 1 and no_sync()")
    ] = True

    # Optimization
    optimizer: OptimizerSection | None = Field(default=None, description="Which optimizer; null if you pass one.")
    scheduler: SchedulerSection | None = Field(default=None, description="Which schedule; null is a constant rate.")
    gradient_clipping: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    gradient_allreduce_op: Literal["mean", "sum"] = Field(
        default="mean", description="Whether gradients are averaged over ranks, or added up."
    )
    prescale_gradients: Annotated[bool, Unbuilt("communication_data_type = fp32 if sums over ranks overflow")] = False
    gradient_predivide_factor: Annotated[float, Unbuilt("communication_data_type = fp32 if sums overflow")] = 1.0
    sparse_gradients: Annotated[bool, Unbuilt("false; embedding gradients are reduced as they are")] = False
    progressive_layer_drop: Annotated[
        Section, Unbuilt("drop layers in the model's forward, by engine.global_steps")
    ] = None
    eigenvalue: Annotated[Section, Dead("it cannot be enabled where it comes from, either")] = None

    # State and precision
    zero_optimization: ZeroConfig = ZeroConfig()
    fp16: FP16Config = FP16Config()
    bf16: Annotated[BF16Config, Alias("bfloat16")] = BF16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    amp: Annotated[Section, Unbuilt("bf16 or fp16; apex is no longer maintained")] = None
    communication_data_type: DType | None = Field(
        default=None, description="Format that gradients travel in; null is that of the parameters."
    )
    seq_parallel_communication_data_type: Annotated[str, Unbuilt("communication_data_type")] = "fp32"
    zero_allow_untested_optimizer: Annotated[bool, Dead("every elementwise optimizer is sharded the same way")] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, Dead("every optimizer works with offloaded state")] = True

    # Parallelism
    data_parallel_size: int | None = Field(default=None, ge=1, description="Data-parallel ranks; inferred if null.")
    sequence_parallel_size: Annotated[int, Unbuilt("1; sequence parallelism comes with ds-parallel")] = 1
    tensor_parallel: Annotated[Section, Unbuilt("leave it out; tensor parallelism comes with ds-parallel")] = None
    expert_parallel: Annotated[Section, Unbuilt("leave it out; expert parallelism comes with ds-moe")] = None
    pipeline: Annotated[Section, Unbuilt("leave it out; stages come with a later ds-pipe")] = None
    use_data_before_expert_parallelism: Annotated[bool, Unbuilt("false")] = False
    activation_checkpointing: Annotated[Section, Unbuilt("torch.utils.checkpoint in the model's forward")] = None

    # Saving
    checkpoint: CheckpointConfig = CheckpointConfig()
    nebula: Annotated[Section, Unbuilt("save_checkpoint(); checkpoints are written to any fsspec URL")] = None
    datastates_ckpt: Annotated[Any, Unbuilt("save_checkpoint()")] = None

    # Telling
    steps_per_print: int | None = Field(
        default=None, ge=1, description="Log one INFO line every so many steps on rank 0; null is silent."
    )
    dump_state: bool = Field(default=False, description="Log the configuration and the plan at the start.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        default=None, description="Level of the library's loggers."
    )
    memory_breakdown: Annotated[bool, Unbuilt("print(engine.plan) for expected bytes")] = False
    comms_logger: Annotated[Section, Unbuilt("leave it out; ds_comm reports spans to the monitor")] = None
    flops_profiler: Annotated[Section, Unbuilt("torch.profiler")] = None

    # Features of their own
    curriculum_learning: Annotated[Section, Unbuilt("a sampler of your own, passed as data_iter")] = None
    data_efficiency: Annotated[Section, Unbuilt("a sampler of your own, passed as data_iter")] = None
    compression_training: Annotated[Section, Unbuilt("leave it out; it comes with ds-compress")] = None
    quantize_training: Annotated[Section, Unbuilt("leave it out; it comes with ds-compress")] = None
    weight_quantization: Annotated[Section, Unbuilt("leave it out")] = None
    hybrid_engine: Annotated[Section, Unbuilt("leave it out; rollouts come with ds-inference")] = None
    sparse_attention: Annotated[Section, Dead("the model chooses its attention; nothing applied this section")] = None
    compile: Annotated[Section, Unbuilt("torch.compile on the blocks of the model")] = None
    autotuning: Annotated[Section, Unbuilt("ds plan, which computes what fits")] = None
    elasticity: Annotated[Section, Unbuilt("fixed batch keys; checkpoints resume on any world size")] = None
    aio: Annotated[Section, Unbuilt("leave it out; offload to files is not built")] = None

    # Nothing reads these, here or there
    disable_allgather: Annotated[bool, Dead("parameters are gathered when they are needed")] = False
    graph_harvesting: Annotated[bool, Dead("torch.compile captures graphs")] = False
    vocabulary_size: Annotated[int | None, Dead("it only chose a warning about multiples of 8")] = None
    allgather_size: Annotated[int | None, Dead("zero_optimization.allgather_bucket_size")] = None
    session_params: Annotated[Any, Dead("nothing reads it")] = None

    @property
    def batch(self) -> BatchRequest:
        """The three batch keys as they were given."""
        return BatchRequest(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        )


def load_config(source: Source | Document, *, auto: Auto | None = None, provenance: Provenance | None = None) -> Config:
    """Read and check a configuration.

    Args:
        source: A dict, the path of a JSON or HJSON file, its text, or its text in url-safe base64.
        auto: What "auto" stands for, by dotted path.
        provenance: Filled with the origin of every value, for `explain_config`.
    Raises:
        ConfigError: every problem of the source at once, each with its line and what was probably meant.
        UnsupportedError: nothing is wrong but that it asks for what is not built here.
    """
    return load(Config, source, auto=auto, provenance=provenance)


def explain_config(source: Source | Document) -> str:
    """Every value of a configuration and who set it: a line of the file, a rename, the default."""
    provenance = Provenance()
    return explain(load_config(source, provenance=provenance), provenance)


def source_of(
    config: Source | None,
    config_params: Source | None = None,
    args: argparse.Namespace | Mapping[str, Any] | None = None,
) -> Source:
    """Which configuration `initialize` was given: `config`, its old name `config_params`, or `args.deepspeed_config`.

    Raises:
        ConfigError: none was given, or more than one ("config-source").
    """
    attributes = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    found: dict[str, Any] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": attributes.get("deepspeed_config"),
        "args.deepscale_config": attributes.get("deepscale_config"),
    }
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) != 1:
        told = ", ".join(given) if given else "none of config, config_params, args.deepspeed_config"
        raise ConfigError(
            f"initialize() needs one configuration, got {told}",
            code="config-source",
            fix="Pass config= (a dict or a path), or start the script with --deepspeed_config FILE.",
        )
    source: Source = next(iter(given.values()))
    return source

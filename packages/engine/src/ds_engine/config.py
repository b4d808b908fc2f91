"""The configuration: DeepSpeed's JSON schema as one strict model, composed of the sections that the packages own.

Every key of the schema is one of: used here; an alias or a deprecated name, moved with one warning; dead (it does nothing
where it comes from, either), accepted with one line; or not built here, which is an error as soon as it is switched on.
No key is accepted and ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ds_ckpt.config import CheckpointConfig
from ds_comm.config import CommsLoggerConfig
from ds_compress.config import CompressionConfig, QuantizeTrainingConfig
from ds_config import (
    USE_DEFAULT,
    Alias,
    Document,
    NoEffect,
    Provenance,
    Unsupported,
    dotted,
    examine,
    explain,
    keys,
    validate,
)
from ds_config.config_file import Source, read, read_all
from ds_config.errors import ConfigError
from ds_config.file_check import Auto
from ds_data.config import CurriculumConfig, DataEfficiencyConfig
from ds_engine.autotuning import AutotuningConfig
from ds_engine.batch import BatchRequest
from ds_engine.compiling.config import CompileConfig
from ds_engine.config_sections import OptimizerSection, SchedulerSection
from ds_engine.feature_table import ElasticityConfig, FlopsProfilerConfig, HybridEngineConfig, LayerDropConfig
from ds_engine.model_sections import (
    FusedKind,
    NebulaConfig,
    PipelineConfig,
    SparseAttentionConfig,
    WeightQuantizationConfig,
)
from ds_engine.trial_spec import laid_over, order_here
from ds_moe.config import ExpertParallelConfig
from ds_monitor.config import MonitorConfig
from ds_ops.config import AioConfig
from ds_parallel.config import ActivationCheckpointingConfig, TensorParallelConfig
from ds_zero.config import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig, ZeroConfig

__all__ = ["Config", "default_auto", "examine_config", "explain_config", "load_config", "source_of"]

_log = logging.getLogger("ds_engine")

Section = dict[str, Any] | None
DType = Literal["fp32", "fp16", "bf16"]


def _never(value: object) -> object:
    # What Accelerate writes for "never".
    return None if value == math.inf else value


class Config(MonitorConfig):
    """What the user wants. Read one with `load_config`; what will be done about it is a `Plan`."""

    KEYS_COMMAND: ClassVar[str] = "ds config key"

    # Batch
    train_batch_size: int | None = Field(default=None, description="Samples per step, over all ranks.")
    train_micro_batch_size_per_gpu: int | None = Field(default=None, description="Samples per forward on one rank.")
    gradient_accumulation_steps: int | None = Field(default=None, description="Microbatches per step.")
    dataloader_drop_last: bool = Field(
        default=False, description="Cut every epoch to whole train batches, instead of going on with the next epoch."
    )
    managed_gradient_accumulation: bool = Field(
        default=True,
        description="False leaves it to the loop: backward only accumulates, and every step() reduces and updates.",
    )

    # Optimization
    optimizer: OptimizerSection | None = Field(default=None, description="Which optimizer; null if you pass one.")
    scheduler: SchedulerSection | None = Field(default=None, description="Which schedule; null is a constant rate.")
    gradient_clipping: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    gradient_allreduce_op: Literal["mean", "sum"] = Field(
        default="mean", description="Whether gradients are averaged over ranks, or added up."
    )
    prescale_gradients: bool = Field(
        default=False,
        description="Divide gradients by the ranks before they are added up, so that sums cannot overflow.",
    )
    gradient_predivide_factor: float = Field(
        default=1.0, gt=0, description="Divide gradients by it before they are added up, and by the rest after."
    )
    on_nonfinite: Literal["warn", "skip", "stop"] | None = Field(
        default=None,
        description="A gradient that is not finite: warn once and update, leave such updates out, or stop with an error before the update. null: skip, but warn where `bf16.check_grad_overflow` is false.",
    )
    loss_spike_threshold: float | None = Field(
        default=None,
        gt=0,
        description="Stop when a loss is so many standard deviations above the running mean; null never does.",
    )
    sparse_gradients: bool = Field(
        default=False, description="Send only the rows of embedding gradients that are not zero. At ZeRO stage 0."
    )
    progressive_layer_drop: LayerDropConfig | None = Field(default=None, description="Tell the model to drop layers.")
    eigenvalue: Annotated[Section, NoEffect("it cannot be enabled where it comes from, either")] = None

    # State and precision
    zero_optimization: ZeroConfig = ZeroConfig()
    fp16: FP16Config = FP16Config()
    bf16: Annotated[BF16Config, Alias("bfloat16")] = BF16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    amp: Annotated[Section, Unsupported("bf16 or fp16; apex is no longer maintained")] = None
    communication_data_type: DType | None = Field(
        default=None,
        description="Format that gradients travel in (`reduce_dtype` of FSDP2); null is that of the parameters.",
    )
    seq_parallel_communication_data_type: Annotated[str, Unsupported("communication_data_type")] = "fp32"
    zero_allow_untested_optimizer: Annotated[bool, NoEffect("every elementwise optimizer is sharded the same way")] = (
        False
    )
    zero_force_ds_cpu_optimizer: Annotated[bool, NoEffect("every optimizer works with offloaded state")] = True

    # Parallelism
    data_parallel_size: int | None = Field(default=None, ge=1, description="Data-parallel ranks; inferred if null.")
    sequence_parallel_size: int = Field(default=1, ge=1, description="Ranks that share one sequence.")
    tensor_parallel: TensorParallelConfig | None = None
    expert_parallel: ExpertParallelConfig | None = None
    pipeline: PipelineConfig = PipelineConfig()
    use_data_before_expert_parallelism: bool = Field(
        default=False, description="Ranks with the same experts are neighbours, not those with different ones."
    )
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()

    # Saving
    checkpoint: CheckpointConfig = CheckpointConfig()
    nebula: Annotated[
        NebulaConfig | None,
        Unsupported("checkpoint.saving.asynchronous = true, and save_checkpoint() to any fsspec URL"),
    ] = None
    datastates_ckpt: Annotated[Any, Unsupported("save_checkpoint()")] = None

    # Telling
    steps_per_print: Annotated[int | None, BeforeValidator(_never)] = Field(
        default=None,
        ge=1,
        description="Log step, learning rate, momentum, loss and speed every so many steps, on rank 0; null is silent.",
    )
    disable_python_gc: bool = Field(
        default=False, description="Keep Python's cyclic garbage collector off from the engine's start to its close()."
    )
    dump_state: bool = Field(default=False, description="Log the configuration and the plan at the start.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        default=None, description="Level of the library's loggers."
    )
    memory_breakdown: bool = Field(
        default=False, description="Report and log memory in use after each phase of a step."
    )
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()

    # Features of their own
    curriculum_learning: CurriculumConfig | None = Field(
        default=None, description="Tell the model how long sequences may be."
    )
    data_efficiency: DataEfficiencyConfig = DataEfficiencyConfig()
    compression_training: CompressionConfig = CompressionConfig()
    quantize_training: QuantizeTrainingConfig = QuantizeTrainingConfig()
    weight_quantization: WeightQuantizationConfig | None = Field(
        default=None, description="Keep frozen weights as codes of few bits."
    )
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    sparse_attention: SparseAttentionConfig | None = Field(
        default=None, description="Let a transformers model's attention see some blocks of keys only."
    )
    kernels: Literal["off", "auto"] | tuple[FusedKind, ...] = Field(
        default="off",
        description="Compute these layers of a transformers model by fused kernels; auto: all that have a known formula.",
    )
    compile: CompileConfig = Field(
        default=CompileConfig(),
        description="Put gathers, releases and reductions into the graphs of `engine.compile()`.",
    )
    autotuning: AutotuningConfig | None = Field(
        default=None, description="Measure a few steps and end the process; what `ds tune` and --autotuning look for."
    )
    elasticity: ElasticityConfig = ElasticityConfig()
    aio: AioConfig = AioConfig()

    # Nothing reads these, here or there
    disable_allgather: Annotated[bool, NoEffect("parameters are gathered when they are needed")] = False
    graph_harvesting: Annotated[bool, NoEffect("torch.compile captures graphs")] = False
    vocabulary_size: Annotated[int | None, NoEffect("it only chose a warning about multiples of 8")] = None
    allgather_size: Annotated[int | None, NoEffect("zero_optimization.allgather_bucket_size")] = None
    session_params: Annotated[Any, NoEffect("it names no setting")] = None

    @property
    def batch(self) -> BatchRequest:
        """The three batch keys as they were given; elasticity may give others."""
        return BatchRequest(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        )


def load_config(source: Source | Document, *, auto: Auto | None = None, provenance: Provenance | None = None) -> Config:
    """Read and check a configuration.

    Args:
        source: A dict, the path of a JSON or HJSON file, its text, or its text in url-safe base64.
        auto: What "auto" stands for, by dotted path; see `default_auto` for what needs no answer.
        provenance: Filled with the origin of every value, for `explain_config`.
    Raises:
        ConfigError: every problem of the source at once, each with its line and what was probably meant.
        UnsupportedError: nothing is wrong but that it asks for what is not built here.
    """
    document = read_all(source)
    config = validate(Config, document, auto=_answers(document, auto), provenance=provenance)
    zero = config.zero_optimization
    files = {
        "round_robin_gradients": zero.round_robin_gradients,
        "parameter_alignment": zero.parameter_alignment,
        "sub_group_size": zero.sub_group_size != type(zero).model_fields["sub_group_size"].default,
    }
    for key in [key for key, asked in files.items() if asked and config.checkpoint.layout != "deepspeed"]:
        # DeepSpeed's own templates are full of the one, so it is no warning.
        level = logging.INFO if key == "sub_group_size" else logging.WARNING
        _log.log(
            level, "zero_optimization.%s has no effect: it says how files of checkpoint.layout = deepspeed lie", key
        )
    return config


def examine_config(source: Source | Document, *, auto: Auto | None = None) -> tuple[Config | None, ConfigError | None]:
    """Validate a configuration; return its valid part and the error about the rest. See `ds_config.examine`."""
    document = read_all(source)
    return examine(Config, document, auto=_answers(document, auto))


def _answers(document: Document, auto: Auto | None) -> Auto | None:
    # Without "auto" the schema need not be listed, which takes longer than all the rest.
    return {**default_auto(), **(auto or {})} if _says_auto(document.data) else auto


def _says_auto(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_says_auto, value.values()))
    return any(map(_says_auto, value)) if isinstance(value, list | tuple) else value == "auto"


_AUTO_SECTIONS = ("zero_optimization", "fp16", "bf16", "bfloat16", "activation_checkpointing", "pipeline", "elasticity",
                  "tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler", "timers", "aio",
                  "hybrid_engine", "tensor_parallel", "compile")  # fmt: skip
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@cache
def default_auto() -> Auto:
    """Return the keys where "auto" means the default, or (batch keys) follows from other keys.

    For other keys only the caller knows.
    """
    sections = {dotted(key.path): USE_DEFAULT for key in keys(Config) if key.path[0] in _AUTO_SECTIONS}
    return MappingProxyType(sections | dict.fromkeys(_BATCH, USE_DEFAULT))


def explain_config(source: Source | Document) -> str:
    """Explain every value of a configuration and its origin: a line of the file, a rename, the default."""
    provenance = Provenance()
    return explain(load_config(source, provenance=provenance), provenance)


def source_of(
    config: Source | None,
    config_params: Source | None = None,
    args: Any = None,
) -> Source:
    """Return the configuration that `initialize` was given: `config`, `config_params`, or `args.deepspeed_config`.

    `args` is a mapping or any object: what it has may be a property. `config_params` is the old name of `config`. In a trial of `ds tune` the result is a copy with the trial's changes.

    Raises:
        ConfigError: none was given, or more than one ("config-source").
    """

    def of_args(name: str) -> Any:
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    sources: dict[str, Any] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": of_args("deepspeed_config"),
        "args.deepscale_config": of_args("deepscale_config"),
    }
    provided = {name: value for name, value in sources.items() if value is not None}
    if len(provided) != 1:
        names = ", ".join(provided) if provided else "none of config, config_params, args.deepspeed_config"
        raise ConfigError(
            f"initialize() needs one configuration, got {names}",
            code="config-source",
            fix="Pass config= (a dict or a path), or start the script with --deepspeed_config FILE.",
        )
    source: Source = next(iter(provided.values()))
    order = order_here()
    return source if order is None or not order.changes else laid_over(read(source).data, order.changes)

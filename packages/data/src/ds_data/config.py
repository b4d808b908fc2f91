"""Sections of curricula. Models only; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_config import StrictModel
from ds_config.errors import ConfigError
from ds_config.schema_fields import NoEffect, Unsupported
from ds_data.difficulty_schedules import Schedule, make_schedule

__all__ = [
    "CurriculumConfig",
    "CurriculumMetricConfig",
    "DataEfficiencyConfig",
    "DataRoutingConfig",
    "DataSamplingConfig",
    "DynamicBatchingConfig",
    "RandomLTDConfig",
    "SamplingCurriculumConfig",
]


class CurriculumConfig(StrictModel):
    """`curriculum_learning`: short sequences first. The forward gets `curriculum_seqlen`, and cuts what it is given to it.

    Li, Zhang and He, arXiv:2108.06084.
    """

    enabled: bool = Field(default=False, description="Pass `curriculum_seqlen` to the model's forward.")
    curriculum_type: str = Field(default="seqlen", description="What grows: the length of sequences.")
    min_difficulty: int = Field(default=1, ge=1, description="Length at the beginning, in tokens.")
    max_difficulty: int = Field(default=1, ge=1, description="Length at the end.")
    schedule_type: Literal["fixed_discrete", "fixed_linear", "fixed_root"] = Field(
        default="fixed_linear", description="How it grows; see `ds_data.difficulty_schedules`."
    )
    schedule_config: Mapping[str, Any] = Field(
        default_factory=dict,
        description="`difficulty` and `max_step`, or `total_curriculum_step`, `difficulty_step` and `root_degree`.",
    )

    def schedule(self) -> Schedule:
        """Build the schedule of the sequence length at each step; the first step is 1.

        Raises ConfigError ("data-schedule").
        """
        if self.curriculum_type != "seqlen":
            raise ConfigError(
                f"curriculum_type {self.curriculum_type!r}: only the length of sequences (seqlen) is told to a forward",
                code="data-schedule",
                fix="Use seqlen; what else makes a sample hard is for a sampler, see ds_data.difficulty_schedules.",
            )
        return make_schedule(self.schedule_type, self.min_difficulty, self.max_difficulty, self.schedule_config)


class CurriculumMetricConfig(StrictModel):
    """One of `data_efficiency.data_sampling.curriculum_learning.curriculum_metrics`: what makes a sample hard, and how hard it may be."""

    index_to_sample_path: str | None = Field(
        default=None,
        description="Token file of samples, one item a value of the metric, easy first; see `ds_data.analyzing`.",
    )
    index_to_metric_path: str | None = Field(
        default=None, description="Token file of the values of these items; for `difficulty_type` value."
    )
    difficulty_type: Literal["value", "percentile"] = Field(
        default="value",
        description="Whether a difficulty is a value of the metric, or a share of the samples in `max_difficulty` parts.",
    )
    clustering_type: str = Field(
        default="single_cluster",
        description="single_cluster admits all samples at once (the difficulty is told to the post-processing function); any other "
        "word admits samples as the schedule says.",
    )
    min_difficulty: int = Field(default=1, description="Difficulty at the beginning.")
    max_difficulty: int = Field(default=1, description="Difficulty at the end.")
    schedule_type: Literal["fixed_discrete", "fixed_linear", "fixed_root", "custom"] = Field(
        default="fixed_linear",
        description="How it grows; custom is a function, set_custom_curriculum_learning_schedule.",
    )
    schedule_config: Mapping[str, Any] = Field(
        default_factory=dict,
        description="`difficulty` and `max_step`, or `total_curriculum_step`, `difficulty_step` and `root_degree`.",
    )


class SamplingCurriculumConfig(StrictModel):
    """`data_efficiency.data_sampling.curriculum_learning`."""

    enabled: bool = Field(default=False, description="Choose samples by metrics.")
    data_cluster_path: str | None = Field(
        default=None,
        description="Directory where rank 0 leaves which samples were admitted at which difficulty; null leaves nothing.",
    )
    curriculum_metrics: Mapping[str, CurriculumMetricConfig] = Field(
        default_factory=dict, description="Name -> metric. A sample must be easy enough by all of them."
    )


class DynamicBatchingConfig(StrictModel):
    """`data_efficiency.data_sampling.dynamic_batching`: microbatches of about as many tokens instead of as many samples."""

    enabled: bool = Field(default=False, description="Put samples together by length.")
    metrics_path: str | None = Field(
        default=None, description="Where an analyzer left the metric `seqlen`; else the loader is given the lengths."
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field(
        default="linear",
        description="How the learning rate follows the samples of a batch, relative to train_batch_size.",
    )
    min_batch_size: int = Field(default=1, ge=1, description="Fewest samples of a microbatch.")
    max_batch_size: int | None = Field(
        default=None, ge=1, description="Most samples of a microbatch; null is no limit."
    )
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = Field(
        default="dataloader",
        description="In which order samples are taken: as they are, drawn by the seed, or from short to long.",
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens of a microbatch; required.")
    verbose: bool = Field(default=False, description="Log what was dropped.")


class DataSamplingConfig(StrictModel):
    """`data_efficiency.data_sampling`."""

    enabled: bool = Field(default=True, description="false turns everything in this section off.")
    num_epochs: int = Field(default=1000, ge=1, description="After so many passes the engine's loader ends.")
    num_workers: int = Field(default=0, ge=0, description="Processes that read for the engine's loader.")
    pin_memory: bool = Field(default=False, description="Read into page-locked memory.")
    curriculum_learning: SamplingCurriculumConfig = SamplingCurriculumConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()


class RandomLTDScheduleConfig(StrictModel):
    """`...random_ltd.random_ltd_schedule`: tokens that a routed layer sees."""

    min_value: int | None = Field(default=None, description="At the beginning.")
    max_value: int | None = Field(default=None, description="In the end: the length of sequences.")
    schedule_type: str = Field(default="fixed_linear", description="How the number grows; there is only fixed_linear.")
    schedule_config: Mapping[str, Any] = Field(
        default_factory=dict, description="`require_steps` until all are seen, in multiples of `seq_per_step`."
    )


class LayerTokenScheduleConfig(StrictModel):
    """`...random_ltd.layer_token_lr_schedule`."""

    enabled: Annotated[bool, Unsupported("a schedule by steps; DeepSpeed refuses it, too")] = False
    total_layer_tokens: Annotated[int | None, NoEffect("it belongs to a schedule that nobody built")] = None
    warmup_type: Annotated[str | None, NoEffect("it belongs to a schedule that nobody built")] = None
    warmup_layer_tokens: Annotated[int | None, NoEffect("it belongs to a schedule that nobody built")] = None


class RandomLTDConfig(StrictModel):
    """`data_efficiency.data_routing.random_ltd`: in training, some layers see a random part of the tokens.

    Yao et al., arXiv:2211.11586.
    """

    enabled: bool = Field(default=False, description="Route the layers that convert_to_random_ltd converted.")
    total_layer_num: int | None = Field(default=None, description="Layers of the model.")
    random_ltd_layer_num: int | None = Field(default=None, description="How many are routed.")
    random_ltd_layer_id: tuple[int, ...] = Field(
        default=(), description="Which, counted from 0 among the converted ones."
    )
    model_mask_name: str | None = Field(default=None, description="The layers' keyword for the attention mask.")
    model_type: Literal["encoder", "decoder"] = Field(default="decoder", description="How a mask is cut.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = Field(
        default="batch_seq_dim", description="Dimensions of hidden states."
    )
    random_ltd_schedule: RandomLTDScheduleConfig = RandomLTDScheduleConfig()
    layer_token_lr_schedule: LayerTokenScheduleConfig = LayerTokenScheduleConfig()
    global_batch_size: Annotated[int | None, NoEffect("the engine knows its batch")] = None
    micro_batch_size: Annotated[int | None, NoEffect("the engine knows its batch")] = None


class DataRoutingConfig(StrictModel):
    """`data_efficiency.data_routing`."""

    enabled: bool = Field(default=True, description="false turns everything in this section off.")
    random_ltd: RandomLTDConfig = RandomLTDConfig()


class DataEfficiencyConfig(StrictModel):
    """`data_efficiency`: fewer samples, or fewer tokens of them, for the same result.

    A part acts if its own `enabled` is true and no section around it says false.
    """

    enabled: bool = Field(default=True, description="false turns everything in this section off.")
    seed: int = Field(default=1234, description="Of the order of samples.")
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    data_routing: DataRoutingConfig = DataRoutingConfig()

    @property
    def sampling(self) -> DataSamplingConfig | None:
        """How samples are read; None: as ever."""
        section = self.data_sampling
        configured = "data_sampling" in self.model_fields_set
        return section if configured and self.enabled and section.enabled else None

    @property
    def curriculum(self) -> SamplingCurriculumConfig | None:
        """The curriculum that acts."""
        section = self.sampling
        return None if section is None or not section.curriculum_learning.enabled else section.curriculum_learning

    @property
    def batching(self) -> DynamicBatchingConfig | None:
        """The dynamic batching that acts."""
        section = self.sampling
        return None if section is None or not section.dynamic_batching.enabled else section.dynamic_batching

    @property
    def random_ltd(self) -> RandomLTDConfig | None:
        """The routing that acts."""
        section = self.data_routing.random_ltd
        return section if self.enabled and self.data_routing.enabled and section.enabled else None

"""The sections `compression_training` and `quantize_training`.

A *technique* is what is done to weights or inputs of layers; its `shared_parameters` hold for all layers, `different_groups`
say which layers and how strongly. Steps are optimizer steps that were applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ds_compress.layer_groups import ActivationGroup, Bits, DensityGroup, LayerGroup, Share, WeightGroup, WeightParams
from ds_config import Alias, NoEffect, StrictModel, validate
from ds_config.config_file import Source, read_all
from ds_config.errors import UnsupportedError

__all__ = [
    "ActivationQuantizationConfig",
    "CompressionConfig",
    "CompressionWeightConfig",
    "EigenvalueConfig",
    "HeadPruningConfig",
    "LayerReductionConfig",
    "PruningConfig",
    "QuantizeTrainingConfig",
    "SparsePruningConfig",
    "compression_of",
]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Offset = Annotated[int, Field(ge=0, description="Applied steps before it begins.")]
Symmetry = Literal["symmetric", "asymmetric"]
_KERNEL = "the same quantiser is used on every device"


class MixedConfig(StrictModel):
    """`fp16_mixed_quantize`: forward sees ratio * weight + (1 - ratio) * quantised weight, and the ratio falls from 1 to 0."""

    enabled: bool = Field(default=False, description="Whether quantised weights come in little by little.")
    quantize_change_ratio: float = Field(
        default=0.001, ge=0, le=1, description="By how much the ratio falls each step."
    )


# ---- techniques


class SharedConfig(StrictModel):
    """What all layers of a technique have in common."""

    enabled: bool = Field(default=False, description="Whether the technique is used.")

    @property
    def needs_groups(self) -> bool:
        """Whether it must be said to which layers."""
        return True


class WeightShared(SharedConfig):
    """`weight_quantization.shared_parameters`."""

    schedule_offset: Offset = 0
    quantizer_kernel: Annotated[bool, NoEffect(_KERNEL)] = False
    quantize_groups: Positive = Field(default=1, description="Parts of a weight that have a scale of their own.")
    quantize_verbose: bool = Field(default=False, description="Log when the bits of a layer fall.")
    quantization_type: Symmetry = Field(default="symmetric", description="Whether zero is in the middle of the range.")
    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="How weights are rounded.")
    quantize_weight_in_forward: Annotated[
        bool, NoEffect("forward sees quantised weights, the optimizer whole ones, either way")
    ] = False
    fp16_mixed_quantize: MixedConfig = MixedConfig()


class ActivationShared(SharedConfig):
    """`activation_quantization.shared_parameters`."""

    schedule_offset: Offset = 1000
    quantization_type: Symmetry = Field(default="symmetric", description="Whether zero is in the middle of the range.")
    range_calibration: Literal["dynamic", "static"] = Field(
        default="dynamic", description="A range for each token, or a running one for the layer."
    )


class PruningShared(SharedConfig):
    """`row_pruning` and `channel_pruning`: `shared_parameters`."""

    schedule_offset: Offset = 1000
    method: Literal["l1", "topk"] = Field(
        default="l1", description="Keep what is largest when it begins, or what learnt scores say."
    )


class HeadShared(PruningShared):
    """`head_pruning.shared_parameters`."""

    method: Literal["l1", "topk"] = Field(
        default="topk", description="Keep what is largest when it begins, or what learnt scores say."
    )
    num_heads: Positive | None = Field(default=None, description="Heads of an attention layer; it must be said.")


class SparseShared(SharedConfig):
    """`sparse_pruning.shared_parameters`."""

    schedule_offset: Offset = 1000
    schedule_offset_end: Count | None = Field(
        default=None, description="Step at which snip_momentum has its dense_ratio; null is schedule_offset."
    )
    schedule_offset_stride: Positive = Field(default=1, description="Steps between new masks of snip_momentum.")
    method: Literal["l1", "topk", "snip_momentum", "2:4"] = Field(
        default="l1",
        description="Keep what is largest when it begins, what learnt scores say, what the loss is sensitive to, or the two largest of "
        "every four inputs when it begins.",
    )
    block_pattern: str = Field(
        default="4x1", pattern=r"^[1-9]\d*x[1-9]\d*$", description="Rows x columns of a block of snip_momentum."
    )
    dense_ratio: Share = Field(default=0.1, description="Share of blocks that snip_momentum keeps.")
    excluded_modules: tuple[str, ...] = Field(default=(), description="Layers that are left out, as in `modules`.")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.schedule_offset_end is not None and self.schedule_offset_end < self.schedule_offset:
            raise ValueError(
                f"schedule_offset_end = {self.schedule_offset_end} is before schedule_offset = {self.schedule_offset}"
            )
        return self

    @property
    def needs_groups(self) -> bool:
        return self.method != "snip_momentum"

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, _, columns = self.block_pattern.partition("x")
        return int(rows), int(columns)


class Technique(StrictModel):
    """What layers have in common, and groups of layers."""

    shared_parameters: SharedConfig = SharedConfig()
    different_groups: Mapping[str, LayerGroup] = Field(default_factory=dict)

    @property
    def enabled(self) -> bool:
        """Whether it asks for something."""
        return self.shared_parameters.enabled

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if (
            self.enabled
            and not self.different_groups
            and getattr(self.shared_parameters, "method", "") != "snip_momentum"
        ):
            raise ValueError("it is enabled without different_groups, which say to which layers")
        return self


class CompressionWeightConfig(Technique):
    """`weight_quantization`."""

    shared_parameters: WeightShared = WeightShared()
    different_groups: Mapping[str, WeightGroup] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _symmetric(self) -> Self:
        low = [name for name, group in self.different_groups.items() if group.params.target_bits <= 2]
        if low and self.enabled and self.shared_parameters.quantization_type == "asymmetric":
            raise ValueError(
                f"1 and 2 bits are symmetric only, group {low[0]!r} has them with quantization_type asymmetric"
            )
        return self


class ActivationQuantizationConfig(Technique):
    """`activation_quantization`."""

    shared_parameters: ActivationShared = ActivationShared()
    different_groups: Mapping[str, ActivationGroup] = Field(default_factory=dict)


class SparsePruningConfig(Technique):
    """`sparse_pruning`."""

    shared_parameters: SparseShared = SparseShared()
    different_groups: Mapping[str, DensityGroup] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _half(self) -> Self:
        others = [name for name, group in self.different_groups.items() if group.params.dense_ratio != 0.5]
        if self.enabled and others and self.shared_parameters.method == "2:4":
            raise ValueError(f"method 2:4 keeps half of the weights, dense_ratio of group {others[0]!r} must be 0.5")
        return self


class PruningConfig(Technique):
    """`row_pruning` and `channel_pruning`."""

    shared_parameters: PruningShared = PruningShared()
    different_groups: Mapping[str, DensityGroup] = Field(default_factory=dict)


class HeadPruningConfig(Technique):
    """`head_pruning`."""

    shared_parameters: HeadShared = HeadShared()
    different_groups: Mapping[str, DensityGroup] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _headed(self) -> Self:
        if self.enabled and self.shared_parameters.num_heads is None:
            raise ValueError("shared_parameters.num_heads must be said")
        return self


class LayerReductionConfig(StrictModel):
    """`layer_reduction`: a student with fewer layers starts from some of its teacher's."""

    enabled: bool = Field(default=False, description="Whether init_compression copies layers of a teacher.")
    keep_number_layer: Positive | None = Field(default=None, description="Layers of the student.")
    module_name_prefix: str | None = Field(default=None, description="Name of the list of layers.")
    teacher_layer: tuple[Count, ...] = Field(default=(), description="For each student layer, which of the teacher's.")
    other_module_name: tuple[str, ...] = Field(default=(), description="Modules that are copied as they are.")

    @model_validator(mode="after")
    def _told(self) -> Self:
        if not self.enabled:
            return self
        if self.module_name_prefix is None or not self.teacher_layer:
            raise ValueError("module_name_prefix and teacher_layer must be said")
        if self.keep_number_layer is not None and self.keep_number_layer != len(self.teacher_layer):
            raise ValueError(
                f"keep_number_layer = {self.keep_number_layer}, and teacher_layer has {len(self.teacher_layer)}"
            )
        return self


class CompressionConfig(StrictModel):
    """`compression_training`."""

    weight_quantization: CompressionWeightConfig = CompressionWeightConfig()
    activation_quantization: ActivationQuantizationConfig = ActivationQuantizationConfig()
    sparse_pruning: SparsePruningConfig = SparsePruningConfig()
    row_pruning: PruningConfig = PruningConfig()
    head_pruning: HeadPruningConfig = HeadPruningConfig()
    channel_pruning: PruningConfig = PruningConfig()
    layer_reduction: LayerReductionConfig = LayerReductionConfig()

    @property
    def enabled(self) -> bool:
        """Whether anything is done to layers; layer reduction is done before, by `init_compression`."""
        return any(
            technique.enabled
            for technique in (
                self.weight_quantization,
                self.activation_quantization,
                self.sparse_pruning,
                self.row_pruning,
                self.head_pruning,
                self.channel_pruning,
            )
        )


# ---- quantize_training


class EigenvalueConfig(StrictModel):
    """`eigenvalue`: layers on which the loss curves more lose their bits later."""

    enabled: bool = Field(default=False, description="Whether periods depend on curvature.")
    verbose: bool = Field(default=False, description="Log the eigenvalues.")
    max_iter: Positive = Field(default=100, description="Most power iterations of a layer.")
    tol: float = Field(default=1e-2, gt=0, description="Relative change of the eigenvalue at which they end.")
    stability: float = Field(default=1e-6, ge=0, description="Added to norms that are divided by.")
    gas_boundary_resolution: Positive = Field(default=1, description="Steps between two computations.")
    layer_name: str = Field(default="bert.encoder.layer", description="Name of the list of layers.")
    layer_num: Count = Field(default=0, description="How many of them; 0 is all.")


class AlgorithmConfig(StrictModel):
    """`quantize_algo`."""

    q_type: Symmetry = Field(default="symmetric", description="Whether zero is in the middle of the range.")
    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="How weights are rounded.")


class QuantizeBitsConfig(StrictModel):
    """`quantize_bits`."""

    start_bits: Bits = Field(default=16, description="Bits at first; 16 leaves weights as they are.")
    target_bits: Bits = Field(default=8, description="Bits in the end.")


class QuantizeScheduleConfig(StrictModel):
    """`quantize_schedule`."""

    quantize_period: Positive = Field(default=1000, description="Steps until the first bit falls.")
    schedule_offset: Offset = 1000


class QuantizeTrainingConfig(StrictModel):
    """`quantize_training`: all weights of two and more dims lose bits while they are trained (MoQ)."""

    enabled: bool = Field(default=False, description="Whether weights are quantised.")
    quantize_verbose: bool = Field(default=False, description="Log when the bits of a layer fall.")
    quantizer_kernel: Annotated[bool, NoEffect(_KERNEL)] = False
    quantize_groups: Positive = Field(default=1, description="Parts of a weight that have a scale of their own.")
    quantize_algo: Annotated[AlgorithmConfig, Alias("quantize-algo")] = AlgorithmConfig()
    quantize_bits: QuantizeBitsConfig = QuantizeBitsConfig()
    quantize_schedule: QuantizeScheduleConfig = QuantizeScheduleConfig()
    fp16_mixed_quantize: MixedConfig = MixedConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()

    @model_validator(mode="after")
    def _low(self) -> Self:
        bits = self.quantize_bits
        if bits.target_bits > bits.start_bits:
            raise ValueError(f"target_bits = {bits.target_bits} is more than start_bits = {bits.start_bits}")
        if self.enabled and bits.target_bits <= 2 and self.quantize_algo.q_type == "asymmetric":
            raise ValueError("1 and 2 bits are symmetric only, q_type is asymmetric")
        return self

    def as_compression(self) -> CompressionConfig:
        """Convert this section to an equivalent section `compression_training`."""
        shared = WeightShared(
            enabled=self.enabled,
            schedule_offset=self.quantize_schedule.schedule_offset,
            quantize_groups=self.quantize_groups,
            quantize_verbose=self.quantize_verbose,
            quantization_type=self.quantize_algo.q_type,
            rounding=self.quantize_algo.rounding,
            fp16_mixed_quantize=self.fp16_mixed_quantize,
        )
        params = WeightParams(
            start_bits=self.quantize_bits.start_bits,
            target_bits=self.quantize_bits.target_bits,
            quantization_period=self.quantize_schedule.quantize_period,
        )
        groups = {"all": WeightGroup(params=params)}
        return CompressionConfig(
            weight_quantization=CompressionWeightConfig(shared_parameters=shared, different_groups=groups)
        )


# ---- reading


class _Sections(StrictModel):
    compression_training: CompressionConfig = CompressionConfig()
    quantize_training: QuantizeTrainingConfig = QuantizeTrainingConfig()


def compression_of(source: Source | CompressionConfig) -> CompressionConfig:
    """Read the section `compression_training` of a whole DeepSpeed configuration; its other sections are not read.

    Args:
        source: A dict, the path of a JSON or HJSON file, its text; or the section, checked already.
    Raises:
        ConfigError: every problem of the section at once. Without the section nothing is compressed.
        UnsupportedError: the configuration enables eigenvalues ("compress-eigenvalue").
    """
    if isinstance(source, CompressionConfig):
        return source
    document = read_all(source)
    ours = {
        name: document.data[name] for name in ("compression_training", "quantize_training") if name in document.data
    }
    sections = validate(_Sections, replace(document, data=ours))
    if sections.quantize_training.enabled and sections.quantize_training.eigenvalue.enabled:
        raise UnsupportedError(
            "quantize_training.eigenvalue is enabled: eigenvalues need a loss, which a configuration has not",
            code="compress-eigenvalue",
            fix="Leave it off here, and call ds_compress.Curvature(model, EigenvalueConfig(...)).step(loss) before each schedule's step.",
        )
    if sections.quantize_training.enabled and not sections.compression_training.weight_quantization.enabled:
        weights = sections.quantize_training.as_compression().weight_quantization
        return sections.compression_training.model_copy(update={"weight_quantization": weights})
    return sections.compression_training

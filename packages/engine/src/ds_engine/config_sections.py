"""The sections of the configuration that the engine owns: which optimizer, which schedule. Models only; no torch.

A section is a union over its `type`: each known type has its own parameters, so a mistyped one is found with its line.
Every other type is looked up in torch and gets its parameters as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ds_config import NoEffect, StrictModel, Unsupported
from ds_engine.lr_schedules import SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "AdagradParams",
    "AdagradSection",
    "AdamParams",
    "AdamSection",
    "AdamWSection",
    "LRRangeTestSection",
    "LambParams",
    "LambSection",
    "LionParams",
    "LionSection",
    "MuonParams",
    "MuonSection",
    "OneBitAdamParams",
    "OneBitAdamSection",
    "OneBitLambParams",
    "OneBitLambSection",
    "OneCycleSection",
    "OptimizerSection",
    "SchedulerSection",
    "TorchOptimizerSection",
    "TorchSchedulerSection",
    "WarmupCosineLRSection",
    "WarmupDecayLRSection",
    "WarmupLRSection",
    "ZeroOneAdamParams",
    "ZeroOneAdamSection",
]

Rate = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "lamb", "muon", "onebitadam", "zerooneadam", "onebitlamb")
Steps = Annotated[int, Field(ge=1)]


def _tag(section: Any, known: Collection[str]) -> str:
    """Return the member of a union of sections: its type in lower case, or "torch" for foreign types."""
    name = section.get("type") if isinstance(section, Mapping) else getattr(section, "type", None)
    return name.lower() if isinstance(name, str) and name.lower() in known else "torch"


def _optimizer_tag(section: Any) -> str:
    return _tag(section, _OPTIMIZERS)


def _scheduler_tag(section: Any) -> str:
    return _tag(section, [name.lower() for name in SCHEDULES])


def _spelled(name: str) -> BeforeValidator:
    """Build a validator that accepts `name` in any case."""
    return BeforeValidator(lambda value: name if isinstance(value, str) and value.lower() == name.lower() else value)


class _OptimizerParams(StrictModel):
    max_grad_norm: Annotated[float | None, Unsupported("gradient_clipping, next to the optimizer section")] = None


_AT_ONCE = "all tensors of a group are updated at once"
_DROPPED = "a step drops the gradients that it used"


class _StateParams(_OptimizerParams):
    fp32_optimizer_states: bool = Field(
        default=True, description="Keep state in fp32; false keeps it in the format of the parameters."
    )


class AdamParams(_StateParams):
    """Kingma and Ba, arXiv:1412.6980; with decoupled decay Loshchilov and Hutter, arXiv:1711.05101."""

    lr: Rate = Field(default=1e-3, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Decay of the running means of gradient and its square."
    )
    eps: Rate = Field(default=1e-8, description="Added to the root of the second mean.")
    weight_decay: Rate = Field(default=0.0, description="Decay of the parameters per step, times lr.")
    bias_correction: bool = Field(default=True, description="Correct the means for their start at zero.")
    amsgrad: bool = Field(
        default=False, description="Divide by the largest second mean so far; torch's implementation."
    )
    torch_adam: bool = Field(
        default=False, description="Use torch's implementation, with its default of weight_decay: 0.01 of AdamW."
    )
    fused: bool = Field(
        default=False,
        description="With torch's implementation: its fused one. Ours updates all tensors at once anyway.",
    )
    maximize: bool = Field(default=False, description="Go up the gradient, not down.")
    foreach: Annotated[bool | None, NoEffect(_AT_ONCE)] = None
    set_grad_none: Annotated[bool, NoEffect(_DROPPED)] = True
    adam_w_mode: bool = Field(
        default=True,
        description="Decoupled weight decay (AdamW). True also for the type Adam; false adds the decay to the gradient.",
    )


class AdagradParams(_StateParams):
    """Duchi et al., JMLR 12 (2011)."""

    lr: Rate = Field(default=1e-2, description="Learning rate.")
    eps: Rate = Field(default=1e-10, description="Added to the root of the sum of squares.")
    weight_decay: Rate = Field(default=0.0, description="Added to the gradient, times the parameter.")
    lr_decay: Rate = Field(default=0.0, description="Fall of the rate: lr / (1 + lr_decay t) at step t, from 0.")
    initial_accumulator_value: Rate = Field(default=0.0, description="What the sum of squares starts with.")
    maximize: bool = Field(default=False, description="Go up the gradient, not down.")
    foreach: Annotated[bool | None, NoEffect(_AT_ONCE)] = None
    amsgrad: Annotated[bool, NoEffect("Adagrad has no such variant")] = False


class LionParams(_StateParams):
    """Chen et al., arXiv:2302.06675."""

    lr: Rate = Field(default=1e-3, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Weights of the update and of the momentum.")
    weight_decay: Rate = Field(default=0.0, description="Decay of the parameters per step, times lr.")
    set_grad_none: Annotated[bool, NoEffect(_DROPPED)] = True


class LambParams(_StateParams):
    """You et al., arXiv:1904.00962."""

    lr: Rate = Field(default=1e-3, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Decay of the running means of gradient and its square."
    )
    eps: Rate = Field(default=1e-8, description="Added to the root of the second mean.")
    weight_decay: Rate = Field(default=0.0, description="Decay of the parameters per step, times lr.")
    bias_correction: bool = Field(default=True, description="Correct the means for their start at zero.")
    max_coeff: float = Field(default=10.0, gt=0, description="Largest trust ratio.")
    min_coeff: float = Field(default=0.01, ge=0, description="Smallest trust ratio.")
    eps_inside_sqrt: bool = Field(default=False, description="Add eps to the second mean before its root is taken.")
    amsgrad: Annotated[bool, Unsupported("false; a trust ratio is not defined for a maximum of variances")] = False


class MuonParams(_StateParams):
    """Jordan et al. 2024. Matrices that are neither embedding nor head by their name; AdamW for the rest."""

    lr: Rate | None = Field(default=None, description="Of both kinds, where theirs is not given.")
    muon_lr: Rate | None = Field(default=None, description="Of the matrices; 0.02 if neither is given.")
    adam_lr: Rate | None = Field(default=None, description="Of the rest; 3e-4 if neither is given.")
    momentum: Beta = Field(default=0.95, description="Decay of the matrices' momentum.")
    weight_decay: Rate = Field(default=0.0, description="Decay of the parameters per step, times lr.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's, for the rest.")
    eps: Rate = Field(default=1e-10, description="AdamW's, for the rest.")
    ns_method: Literal["gram", "standard"] = Field(default="gram", description="How matrices are orthogonalized.")
    adam_w_mode: bool = Field(default=True, description="Decoupled decay of the rest; false adds it to the gradient.")
    torch_adam: Annotated[bool, NoEffect("torch's Adam takes the same step")] = False
    per_head_muon: bool = Field(
        default=False, description="Orthogonalize each head of query, key and value projections apart."
    )
    clip_directions: bool = Field(
        default=False,
        description="gradient_clipping limits the norm of the matrices' directions, beside the rest's gradients; false: that of gradients.",
    )


class _OneBitParams(_OptimizerParams):
    # State is fp32 in any case: it is what the signs are relative to.
    lr: Rate = Field(default=1e-3, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Decay of the running means of gradient and its square."
    )
    eps: Rate = Field(default=1e-8, description="Added to the root of the second mean.")
    weight_decay: Rate = Field(default=0.0, description="Decay of the parameters per step, times lr.")
    bias_correction: bool = Field(default=True, description="Correct the means for their start at zero.")
    amsgrad: Annotated[bool, Unsupported("false; a maximum of variances has no frozen phase")] = False
    cuda_aware: Annotated[bool, NoEffect("signs travel in the collectives of the process group")] = False
    comm_backend_name: Annotated[str, NoEffect("signs travel in the collectives of the process group")] = "nccl"


class OneBitAdamParams(_OneBitParams):
    """Tang et al. 2021: Adam, then momentum as signs."""

    freeze_step: Steps = Field(default=100_000, description="Steps with exact gradients, 15 to 20 % of a run.")
    eps_inside_sqrt: bool = Field(default=False, description="Add eps to the second mean before its root is taken.")


class ZeroOneAdamParams(_OneBitParams):
    """Lu et al. 2022: ever rarer updates of the variance, then ever rarer synchronisations."""

    var_freeze_step: Steps = Field(default=100_000, description="Steps in which the variance is learnt.")
    var_update_scaler: Steps = Field(default=16, description="Variance updates until their interval doubles.")
    local_step_scaler: Steps = Field(default=32_678, description="Steps until the interval of local steps doubles.")
    local_step_clipper: Steps = Field(default=16, description="Largest interval of local steps.")


class OneBitLambParams(_OneBitParams):
    """Li et al. 2021: LAMB, then momentum as signs and layer rates that follow the variance."""

    freeze_step: Steps = Field(default=100_000, description="Steps with exact gradients.")
    max_coeff: float = Field(default=10.0, ge=0, description="Largest trust ratio; 0 for no bound.")
    min_coeff: float = Field(default=0.01, ge=0, description="Smallest trust ratio.")
    coeff_beta: Beta = Field(default=0.9, description="Averaging of trust ratios before the freeze.")
    factor_max: float = Field(default=4.0, gt=0, description="Largest factor of a layer's rate after the freeze.")
    factor_min: float = Field(default=0.5, gt=0, description="Smallest factor of a layer's rate after the freeze.")
    factor_threshold: float = Field(default=0.1, gt=0, lt=1, description="Largest relative change of it in a step.")
    eps_inside_sqrt: bool = Field(default=False, description="Add eps to the second mean before its root is taken.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.factor_min > self.factor_max:
            raise ValueError(f"factor_min = {self.factor_min} is more than factor_max = {self.factor_max}")
        return self


class _Optimizer(StrictModel):
    legacy_fusion: Annotated[bool, NoEffect("there is one implementation of each optimizer")] = False


class AdamSection(_Optimizer):
    """Adam; with decoupled weight decay unless `adam_w_mode` is false."""

    type: Annotated[Literal["Adam", "adam"], _spelled("Adam")]
    params: AdamParams = AdamParams()


class AdamWSection(_Optimizer):
    """Adam with decoupled weight decay."""

    type: Annotated[Literal["AdamW", "adamw"], _spelled("AdamW")]
    params: AdamParams = AdamParams()


class AdagradSection(_Optimizer):
    """Adagrad."""

    type: Annotated[Literal["Adagrad", "adagrad"], _spelled("Adagrad")]
    params: AdagradParams = AdagradParams()


class LionSection(_Optimizer):
    """The sign of a momentum."""

    type: Annotated[Literal["Lion", "lion"], _spelled("Lion")]
    params: LionParams = LionParams()


class LambSection(_Optimizer):
    """Adam whose step is scaled to the size of each parameter."""

    type: Annotated[Literal["Lamb", "lamb"], _spelled("Lamb")]
    params: LambParams = LambParams()


class MuonSection(_Optimizer):
    """Momentum whose matrices are made orthogonal."""

    type: Annotated[Literal["Muon", "muon"], _spelled("Muon")]
    params: MuonParams = MuonParams()


class OneBitAdamSection(_Optimizer):
    """Adam that sends one bit an element once its variance is frozen. At ZeRO stage 0."""

    type: Annotated[Literal["OneBitAdam", "onebitadam"], _spelled("OneBitAdam")]
    params: OneBitAdamParams = OneBitAdamParams()


class ZeroOneAdamSection(_Optimizer):
    """Adam that sends one bit an element, at ever fewer steps. At ZeRO stage 0."""

    type: Annotated[Literal["ZeroOneAdam", "zerooneadam"], _spelled("ZeroOneAdam")]
    params: ZeroOneAdamParams = ZeroOneAdamParams()


class OneBitLambSection(_Optimizer):
    """LAMB that sends one bit an element once its variance is frozen. At ZeRO stage 0."""

    type: Annotated[Literal["OneBitLamb", "onebitlamb"], _spelled("OneBitLamb")]
    params: OneBitLambParams = OneBitLambParams()


class TorchOptimizerSection(_Optimizer):
    """Any class of torch.optim, with its own parameters."""

    type: str = Field(description="A class name of torch.optim, such as SGD or RMSprop.")
    params: Mapping[str, Any] = Field(default_factory=dict, description="Keyword arguments of that class.")


OptimizerSection = Annotated[
    Annotated[AdamSection, Tag("adam")]
    | Annotated[AdamWSection, Tag("adamw")]
    | Annotated[AdagradSection, Tag("adagrad")]
    | Annotated[LionSection, Tag("lion")]
    | Annotated[LambSection, Tag("lamb")]
    | Annotated[MuonSection, Tag("muon")]
    | Annotated[OneBitAdamSection, Tag("onebitadam")]
    | Annotated[ZeroOneAdamSection, Tag("zerooneadam")]
    | Annotated[OneBitLambSection, Tag("onebitlamb")]
    | Annotated[TorchOptimizerSection, Tag("torch")],
    Discriminator(_optimizer_tag),
]


class LRRangeTestSection(StrictModel):
    """A growing learning rate, to find the largest that trains."""

    type: Annotated[Literal["LRRangeTest", "lrrangetest"], _spelled("LRRangeTest")]
    params: LRRangeTest = LRRangeTest()


class OneCycleSection(StrictModel):
    """One cycle up and down, then decay."""

    type: Annotated[Literal["OneCycle", "onecycle"], _spelled("OneCycle")]
    params: OneCycle


class WarmupLRSection(StrictModel):
    """Warmup, then constant."""

    type: Annotated[Literal["WarmupLR", "warmuplr"], _spelled("WarmupLR")]
    params: WarmupLR = WarmupLR()


class WarmupDecayLRSection(StrictModel):
    """Warmup, then a straight line down."""

    type: Annotated[Literal["WarmupDecayLR", "warmupdecaylr"], _spelled("WarmupDecayLR")]
    params: WarmupDecayLR


class WarmupCosineLRSection(StrictModel):
    """Warmup, then half a cosine down."""

    type: Annotated[Literal["WarmupCosineLR", "warmupcosinelr"], _spelled("WarmupCosineLR")]
    params: WarmupCosineLR


class TorchSchedulerSection(StrictModel):
    """Any class of torch.optim.lr_scheduler, with its own parameters."""

    type: str = Field(description="A class name of torch.optim.lr_scheduler, such as StepLR.")
    params: Mapping[str, Any] = Field(default_factory=dict, description="Keyword arguments of that class.")


SchedulerSection = Annotated[
    Annotated[LRRangeTestSection, Tag("lrrangetest")]
    | Annotated[OneCycleSection, Tag("onecycle")]
    | Annotated[WarmupLRSection, Tag("warmuplr")]
    | Annotated[WarmupDecayLRSection, Tag("warmupdecaylr")]
    | Annotated[WarmupCosineLRSection, Tag("warmupcosinelr")]
    | Annotated[TorchSchedulerSection, Tag("torch")],
    Discriminator(_scheduler_tag),
]

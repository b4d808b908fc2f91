"""Which number formats a parameter lives, travels, adds up and is updated in; and the scale that keeps fp16 gradients alive.

Words: *param* is the dtype of the full copy that forward and backward use (None: as the model has it); *reduce* the dtype
gradients travel in between ranks (None: as *param*); *accumulate* the dtype micro-batches add up in; *master* the dtype of
the shard that the optimizer updates; *state* that of what it keeps of each element (None: as the optimizer has it). Loss scaling: Micikevicius et al. 2018, section 3.2, with the reference's hysteresis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_zero.layout.units import OUTSIDE

__all__ = ["Dtypes", "LossScale", "Precision", "PrecisionRule", "ScaleState", "next_scale"]


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the loss is scaled. Keys and defaults are those of the `fp16` section.

    Attributes:
        static: A constant scale; None for dynamic.
        initial: The first dynamic scale.
        window: Clean steps before the scale grows.
        minimum: The scale never falls below it.
        hysteresis: Overflows to tolerate before the scale halves.
        consecutive: Refill the hysteresis on every clean step, not only when the scale grows.
        factor: What the scale is divided by after overflows, and multiplied by after a clean window.
    """

    static: float | None = None
    initial: float = 2.0**16
    window: int = 1000
    minimum: float = 1.0
    hysteresis: int = 2
    consecutive: bool = False
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_options(self, static="> 0", initial="> 0", window=">= 1", minimum=">= 0", hysteresis=">= 0", factor="> 1")

    def start(self) -> ScaleState:
        """Return the loss scale state before the first step."""
        return ScaleState(self.initial if self.static is None else self.static, self.hysteresis, 0, -1)


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Where loss scaling stands. The same on every rank.

    Attributes:
        scale: The loss of the next backward is multiplied by it.
        tolerance: Overflows left before the scale halves.
        step: Steps decided so far, skipped ones included.
        last_overflow: The step that overflowed last; -1 for none.
    """

    scale: float
    tolerance: int
    step: int
    last_overflow: int


def next_scale(rule: LossScale, state: ScaleState, overflow: bool) -> ScaleState:
    """Return the loss scale state after one step. Pure; `overflow` must be the same on every rank."""
    step = state.step + 1
    if rule.static is not None:
        return replace(state, step=step, last_overflow=state.step if overflow else state.last_overflow)
    if overflow:
        if state.tolerance > 1:
            return replace(state, tolerance=state.tolerance - 1, step=step, last_overflow=state.step)
        return replace(state, scale=max(state.scale / rule.factor, rule.minimum), step=step, last_overflow=state.step)
    tolerance = rule.hysteresis if rule.consecutive else state.tolerance
    scale = state.scale
    clean = state.step - state.last_overflow - 1
    if clean > 0 and clean % rule.window == 0:
        tolerance, scale = rule.hysteresis, scale * rule.factor
    return ScaleState(scale, tolerance, step, state.last_overflow)


@dataclass(frozen=True)
class Dtypes:
    """The formats of one unit, resolved."""

    param: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
    state: torch.dtype | None = None

    @cached_property
    def same(self) -> bool:
        """Whether the master shard has the full copy's format, so that it can be a part of it."""
        return self.param == self.master

    @property
    def frozen(self) -> Dtypes:
        """The same of parameters that are not trained: they have no gradients, no master and no state."""
        return Dtypes(self.param, self.param, self.param, self.param)


def _check_formats(record: PrecisionRule | Precision) -> None:
    check_options(record)
    formats = {name: getattr(record, name) for name in ("param", "reduce", "accumulate", "master")}
    wrong = [f"{name} is {dtype}" for name, dtype in formats.items() if dtype is not None and not _is_trainable(dtype)]
    if wrong:
        raise PlanError(
            f"{type(record).__name__}: {', '.join(wrong)}, expected floating-point formats of 16 bits or more",
            code="config-option",
            fix="Use torch.float32, bfloat16, float16 or float64. Fewer bits between ranks: quantized_comm; in products: fp8 layers.",
        )


def _is_trainable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


@dataclass(frozen=True, slots=True)
class PrecisionRule:
    """Formats of the parameters whose qualified name matches a glob (`"*.norm?.*"`, `"head.weight"`), or is in a set.

    Attributes:
        names: The glob; `*` matches dots, too. Or the names.
        param, reduce, accumulate, master, state: As in Precision; None: as the rule of all others says.
    """

    names: str | frozenset[str]
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    master: torch.dtype | None = None
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_formats(self)

    @property
    def subject(self) -> str:
        """The glob, or how many names there are."""
        return self.names if isinstance(self.names, str) else f"{len(self.names)} parameters"

    def matches(self, name: str) -> bool:
        """Whether the rule is for parameter `name`."""
        return fnmatchcase(name, self.names) if isinstance(self.names, str) else name in self.names


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a model's parameters; None means: as the model has them (`param`), or as the rule above says.

    Attributes:
        param: Format of the full copy.
        reduce: Format of gradients between ranks; default: that of the parameter.
        accumulate: Format micro-batches add up in; default: fp32, or the parameter's where that is wider.
        master: Format of the shard the optimizer updates; default: fp32, or the parameter's where that is wider.
        scale: Loss scaling; None for none.
        skip_nonfinite: Skip a step whose gradients are not finite. Always so with loss scaling.
        rules: For some parameters; the first that matches counts.
        state: Format of the optimizer's state (fp32, bf16 or fp16), for optimizers that can (ds-ops'); default: as the
            optimizer has it, which for torch's is the master's.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    master: torch.dtype | None = None
    scale: LossScale | None = None
    skip_nonfinite: bool = False
    rules: tuple[PrecisionRule, ...] = ()
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_formats(self)

    @classmethod
    def of(cls, name: str | Precision | None) -> Precision:
        """Return the usual recipe named `"fp32"`, `"bf16"` or `"fp16"`; None keeps the model's dtypes."""
        if isinstance(name, Precision):
            return name
        if name is None:
            return cls()
        if name not in _RECIPES:
            raise PlanError(
                f"precision {name!r} is not known; the recipes are {', '.join(sorted(_RECIPES))}",
                code="precision-unknown",
                fix="Pass one of them, or a ds_zero.Precision(...) with the formats you want.",
            )
        return _RECIPES[name]

    def rule_of(self, name: str) -> int | None:
        """Number of the rule that applies to a parameter; None if none does, -1 for one that is in no module of the model and keeps its format."""
        if name.startswith(OUTSIDE):
            return -1
        return next((i for i, rule in enumerate(self.rules) if rule.matches(name)), None)

    def resolve(self, dtype: torch.dtype, name: str = "") -> Dtypes:
        """Return the dtypes of a parameter whose own dtype is `dtype`. What is no floating-point parameter, or stored in 8 bits, stays unchanged."""
        if not _is_trainable(dtype):
            return Dtypes(dtype, dtype, dtype, dtype)
        number = self.rule_of(name)
        if number == -1:
            rule = PrecisionRule("", param=dtype, reduce=self.reduce or dtype)
        else:
            rule = PrecisionRule("") if number is None else self.rules[number]
        param = rule.param or self.param or dtype
        wide = param if param.itemsize >= 4 else torch.float32
        accumulate = rule.accumulate or self.accumulate or wide
        # A format asked for this parameter is also the one its gradients travel in.
        reduce = rule.reduce or (rule.param if rule.param is not None else self.reduce) or param
        return Dtypes(param, reduce, accumulate, rule.master or self.master or wide, rule.state or self.state)


_RECIPES: Mapping[str, Precision] = {
    "fp32": Precision(param=torch.float32),
    "bf16": Precision(param=torch.bfloat16, skip_nonfinite=True),
    "fp16": Precision(param=torch.float16, scale=LossScale(), skip_nonfinite=True),
}

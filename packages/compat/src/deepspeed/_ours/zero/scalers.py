"""`deepspeed.runtime.fp16.loss_scaler`: loss scales for loops of a program's own. The rule of changing is ds-zero's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.forwarding import reads
from ds_zero.layout.dtypes_plan import LossScale, ScaleState, next_scale


class LossScalerBase:
    """A loss scale.

    Attributes:
        cur_scale: What a loss is multiplied by.
        dynamic: Whether it changes.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    loss_scale = reads("cur_scale", "`cur_scale`.")

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply gradients by the loss scale, as a backward hook of a module."""
        del module, grad_out
        return tuple(self.cur_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step; the base class does nothing.

        `overflow` says whether a gradient was not finite.
        """

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of the scaled loss."""
        (loss * self.cur_scale).backward(retain_graph=retain_graph)

    def has_overflow(self, params: Any) -> bool:
        """Whether a gradient is not finite; a constant scale does not look."""
        del params
        return False


class LossScaler(LossScalerBase):
    """A constant scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A scale that is divided by `scale_factor` after overflows, and multiplied by it after `scale_window` steps without one.

    Attributes:
        cur_iter: Steps so far.
        last_overflow_iter: The step that overflowed last; -1 for none.
        cur_hysteresis: Overflows left before the scale falls.
    """

    dynamic = True

    def __init__(
        self, init_scale: float, scale_window: int = 1000, min_scale: float = 1, delayed_shift: int = 1,
        consecutive_hysteresis: bool = False, raise_error_at_min_scale: bool = True, dtype: torch.dtype = torch.half,
        scale_factor: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__(init_scale)
        self._rule = LossScale(
            None, init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis, scale_factor
        )
        self._state = self._rule.start()
        self.scale_window, self.min_scale, self.delayed_shift = scale_window, min_scale, delayed_shift
        self.consecutive_hysteresis, self.dtype = consecutive_hysteresis, dtype
        self.raise_error_at_min_scale, self.scale_factor = raise_error_at_min_scale, scale_factor

    cur_iter = reads("_state.step", "Steps so far.")
    last_overflow_iter = reads("_state.last_overflow", "The step that overflowed last.")
    cur_hysteresis = reads("_state.tolerance", "Overflows left before the scale halves.")

    def has_overflow(self, params: Any) -> bool:
        return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    has_overflow_serial = has_overflow

    def update_scale(self, overflow: bool) -> None:
        """Move on by one step.

        Raises:
            RuntimeError: an overflow at the smallest scale, unless told to go on.
        """
        if overflow and self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise RuntimeError(
                "the loss scale is at its minimum and a gradient is not finite: look at the loss and the data"
            )
        self._state = next_scale(self._rule, replace(self._state, scale=self.cur_scale), overflow)
        self.cur_scale = self._state.scale


class EngineLossScaler:
    """The loss scale of a sharded optimizer as programs look at it: `optimizer.loss_scaler`, `optimizer.loss_scale_config`."""

    def __init__(self, rule: LossScale | None, state: Callable[[], ScaleState | None]) -> None:
        self._rule, self._state = rule or LossScale(static=1.0), state

    @property
    def _now(self) -> ScaleState:
        return self._state() or self._rule.start()

    cur_scale = reads("_now.scale", "What a loss is multiplied by.")
    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it changes."""
        return self._rule.static is None

    dynamic_loss_scale = dynamic

    cur_iter = reads("_now.step", "Steps so far, skipped ones included.")
    last_overflow_iter = reads("_now.last_overflow", "The step that overflowed last; -1 for none.")
    cur_hysteresis = reads("_now.tolerance", "Overflows left before the scale halves.")

    @property
    def init_scale(self) -> float:
        """The first scale."""
        return self._rule.start().scale

    scale_factor = reads("_rule.factor", "What the scale is multiplied or divided by when it changes.")
    scale_window = reads("_rule.window", "Clean steps before the scale grows.")
    min_scale = reads("_rule.minimum", "The scale never falls below it.")
    min_loss_scale = min_scale

    delayed_shift = reads("_rule.hysteresis", "Overflows to tolerate before the scale halves.")
    consecutive_hysteresis = reads("_rule.consecutive", "Whether every clean step refills `cur_hysteresis`.")


def CreateLossScaler(  # noqa: N802  upstream's spelling
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    """Create the loss scaler for a dtype: dynamic for fp16 with `dynamic_scaling`, static 1 for other dtypes."""
    if dtype is torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {"init_scale": 2.0**32}))
    return LossScaler(static_loss_scale if dtype is torch.half else 1.0)

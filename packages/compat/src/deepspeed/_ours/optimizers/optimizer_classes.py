"""Upstream's optimizer classes: ds-ops' optimizers with upstream's arguments. One class serves CPU and accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from deepspeed._ours.base.raising import refused
from ds_ops.apply_update import update
from ds_ops.optim import Adagrad, Adam, AdamW, Lamb, Lion
from ds_ops.optim.muon import orthogonalize
from ds_ops.optim.optimizer_base import Params
from ds_ops.update_rules import (
    AdamHyper,
    UpdateRule,
    UpdateSpec,
    UpdateTensors,
    adam_coefficients,
    adam_undo_coefficients,
    dither_of,
)


def _states(wide: bool, params: Params) -> torch.dtype:
    """Format of optimizer state: fp32, or that of the parameters."""
    if wide:
        return torch.float32
    first: Any = next(iter(list(params) if isinstance(params, Iterable) else []))
    tensor = next(iter(first["params"])) if isinstance(first, dict) else first
    return tensor.dtype if isinstance(tensor, torch.Tensor) else torch.float32


def _fixed(params: Params) -> Any:
    return params if isinstance(params, list) else list(params)


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    # Configurations give lists.
    first, second = betas
    return first, second


def _no_kept_gradients(name: str, set_grad_none: bool) -> None:
    if not set_grad_none:
        raise refused("kept-gradients", name)


class _Adam(Adam):
    """Adam, or AdamW by argument."""

    def __init__(self, params: Params, *, adamw_mode: bool, **options: Any) -> None:
        self.decoupled = adamw_mode  # type: ignore[misc]
        super().__init__(params, **options)

    @property
    def adam_w_mode(self) -> bool:
        """Whether decay shrinks the parameter, not the gradient."""
        return self.decoupled


class DeepSpeedCPUAdam(_Adam):
    """`ds_ops.optim.Adam` or `AdamW` with upstream's arguments. The dicts of `model_params` stay the same objects.

    Raises:
        UnsupportedError: amsgrad.
    """

    optimizer_id: ClassVar[int] = 0

    def __init__(
        self, model_params: Params, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9,
        0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise refused("amsgrad", "DeepSpeedCPUAdam")
        params = _fixed(model_params)
        super().__init__(
            params,
            adamw_mode=adamw_mode,
            lr=lr,
            bias_correction=bias_correction,
            betas=_pair(betas),
            eps=eps,
            weight_decay=weight_decay,
            state_dtype=_states(fp32_optimizer_states, params),
        )

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> Any:
        """Step what has a gradient with the state of a part of a model, kept as `state[subgroup_id]`, not by parameter.

        Programs that bring one part after another into the same parameter step like this.

        Raises:
            ConfigError: another tensor than before has a gradient, or several ("optimizer-subgroup").
        """
        loss = closure() if closure is not None else None
        for hyper, param in self._of_subgroup(subgroup_id):
            state = self.state[subgroup_id]  # type: ignore[index]
            if not state:
                moments = {name: torch.zeros_like(param, dtype=self.state_dtype) for name in self.state_names}
                state.update(step=0, **moments)
            state["step"] += 1
            number = state["step"]
            _update(
                UpdateSpec(UpdateRule.ADAM, adam_coefficients(hyper, number), dither=dither_of(number)), param, state
            )
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Any = None) -> Any:
        """Take the last `step_subgroup` back, from the same gradient: parameter and moments to rounding, the count exactly.

        Raises:
            RuntimeError: it was not stepped, or every step was taken back.
            UnsupportedError: decay is not decoupled ("optimizer-undo").
        """
        if sub_group_id not in self.state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized"
            )
        if self.state[sub_group_id]["step"] == 0:  # type: ignore[index]
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is 0")
        loss = closure() if closure is not None else None
        for hyper, param in self._of_subgroup(sub_group_id):
            state = self.state[sub_group_id]  # type: ignore[index]
            if hyper.weight_decay and not hyper.decoupled:
                raise refused("rollback-decay")
            _update(UpdateSpec(UpdateRule.ADAM_UNDO, adam_undo_coefficients(hyper, state["step"])), param, state)
            state["step"] -= 1
        return loss

    def _of_subgroup(self, subgroup_id: int) -> list[tuple[AdamHyper, torch.Tensor]]:
        updates = [(self._hyper(g), p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        first_moment = self.state[subgroup_id].get("exp_avg") if subgroup_id in self.state else None  # type: ignore[index]
        if len(updates) > 1 or (updates and first_moment is not None and first_moment.shape != updates[0][1].shape):
            shapes = ", ".join(str(tuple(param.shape)) for _, param in updates)
            raise refused(
                "subgroup",
                subgroup_id,
                "" if first_moment is None else f" of shape {tuple(first_moment.shape)}",
                shapes,
            )
        return updates


def _update(spec: UpdateSpec, param: torch.Tensor, state: dict[str, Any]) -> None:
    moments = ([state["exp_avg"]], [state["exp_avg_sq"]])
    update(spec, UpdateTensors([param.detach()], [param.grad], moments, []))  # type: ignore[list-item]


class FusedAdam(_Adam):
    """`ds_ops.optim.Adam` or `AdamW` with upstream's arguments. `set_grad_none` is the only way here.

    Raises:
        UnsupportedError: amsgrad, or set_grad_none=False.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none:
        bool = True,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise refused("amsgrad", "FusedAdam")
        _no_kept_gradients("FusedAdam", set_grad_none)
        super().__init__(
            _fixed(params),
            adamw_mode=adam_w_mode,
            lr=lr,
            bias_correction=bias_correction,
            betas=_pair(betas),
            eps=eps,
            weight_decay=weight_decay,
        )


class DeepSpeedCPUAdagrad(Adagrad):
    """`ds_ops.optim.Adagrad` with upstream's arguments."""

    def __init__(
        self, model_params: Params, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool =
        False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        del amsgrad  # Adagrad has no such variant; upstream takes the argument and does not read it
        params = _fixed(model_params)
        dtype = _states(fp32_optimizer_states, params)
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, state_dtype=dtype)

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Update the parameters after making sparse gradients dense: rows without a gradient do not change."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
        return super().step(closure, **options)


class DeepSpeedCPULion(Lion):
    """`ds_ops.optim.Lion` with upstream's arguments."""

    def __init__(
        self, model_params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float =
        0.0, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        params = _fixed(model_params)
        dtype = _states(fp32_optimizer_states, params)
        super().__init__(params, lr=lr, betas=_pair(betas), weight_decay=weight_decay, state_dtype=dtype)


class FusedLion(Lion):
    """`ds_ops.optim.Lion` with upstream's arguments. `set_grad_none` is the only way here.

    Raises:
        UnsupportedError: set_grad_none=False.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _no_kept_gradients("FusedLion", set_grad_none)
        super().__init__(_fixed(params), lr=lr, betas=_pair(betas), weight_decay=weight_decay)


class FusedLamb(Lamb):
    """`ds_ops.optim.Lamb` with upstream's arguments.

    Raises:
        UnsupportedError: amsgrad or a max_grad_norm of its own.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
        max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        if amsgrad or max_grad_norm:
            raise refused("lamb-options")
        super().__init__(
            _fixed(params),
            lr=lr,
            betas=_pair(betas),
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )


_ON_HOST: Mapping[type, type[torch.optim.Optimizer]] = {
    Adam: DeepSpeedCPUAdam,
    AdamW: DeepSpeedCPUAdam,
    Lion: DeepSpeedCPULion,
    Adagrad: DeepSpeedCPUAdagrad,
}
_ON_DEVICE: Mapping[type, type[torch.optim.Optimizer]] = {
    Adam: FusedAdam,
    AdamW: FusedAdam,
    Lion: FusedLion,
    Lamb: FusedLamb,
}


def dress_optimizer(optimizer: torch.optim.Optimizer, offloaded: bool) -> None:
    """Let an optimizer that the configuration named have upstream's class; what it does stays."""
    kind = (_ON_HOST if offloaded else _ON_DEVICE).get(type(optimizer))
    if kind is None:
        return
    if isinstance(optimizer, AdamW):
        optimizer.decoupled = optimizer.decoupled  # type: ignore[misc]  # of its present class
    optimizer.__class__ = kind


@torch.no_grad()
def muon_update(
    grad: torch.Tensor, momentum: torch.Tensor, beta: float = 0.95, ns_steps: int = 5, nesterov: bool = True, ns_method:
    str = "gram", is_expert_group: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute the direction of Muon's update: momentum, orthogonalized, times sqrt(max(1, rows / columns)).

    Args:
        grad: [rows, columns], a stack of these, or a convolution's weight, whose last three dims are flattened.
            Overwritten with `nesterov`.
        momentum: Of the shape of `grad`; moved towards `grad`.
        ns_method: "gram" or "standard".
    """
    momentum.lerp_(grad, 1 - beta)
    step = grad.lerp_(momentum, beta) if nesterov else momentum
    if step.dim() == 4 and not is_expert_group:
        step = step.view(len(step), -1)
    direction = orthogonalize(step, steps=ns_steps, method="standard" if ns_method == "standard" else "gram")
    return direction * max(1.0, direction.size(-2) / direction.size(-1)) ** 0.5

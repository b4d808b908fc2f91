"""What 1-bit optimizers share: their settings, exact and compressed means over the ranks, error feedback that is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_comm.codecs.signs import SignErrors, mean_of_signs
from ds_comm.collectives import all_reduce
from ds_comm.groups import GroupLike, as_group
from ds_config.errors import ConfigError, UnsupportedError

__all__ = ["OneBit", "OneBitSettings", "Params", "count", "fraction", "limited"]


Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def limited(default: float, good: Callable[[Any], bool], wanted: str) -> Any:
    """Define a dataclass field whose value must satisfy `good`."""
    return field(default=default, metadata={"good": good, "wanted": wanted})


def count(default: int) -> Any:
    return limited(default, lambda found: found >= 1, "at least 1")


def fraction(default: float) -> Any:
    return limited(default, lambda found: 0 <= found < 1, "in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitSettings:
    """What the optimizers are told by keyword, and what is the same for all parameter groups.

    Raises:
        ConfigError: a value is out of its range ("optimizer-value").
        UnsupportedError: amsgrad ("optimizer-amsgrad").
    """

    bias_correction: bool = True
    amsgrad: bool = False

    def __post_init__(self) -> None:
        if self.amsgrad:
            raise UnsupportedError(
                "a one-bit optimizer with amsgrad=True: its maximum of variances has no frozen phase",
                code="optimizer-amsgrad",
                fix="Use amsgrad=False.",
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.metadata and not each.metadata["good"](value):
                raise _value_error(each.name, value, each.metadata["wanted"])


class OneBit(Optimizer):
    """What the three have in common: flat messages, errors, checks.

    owns_reduction: gradients must reach `step` as each rank computed them.
    elementwise: whether parameters may be given cut up or joined; if not, as they are.
    """

    owns_reduction: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False  # in the groups, of a rank that trains nothing too, so that all save the same
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _settings: ClassVar[type[Any]] = OneBitSettings

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        group: GroupLike = None,
        **settings: Any,
    ) -> None:
        """`group`: ranks whose gradients are averaged; default all. `settings`: see the class."""
        self.settings = self._settings(**settings)
        defaults: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in defaults.items():
            if value < 0:
                raise _value_error(name, value, "at least 0")
        for beta in betas:
            if not 0 <= beta < 1:
                raise _value_error("betas", beta, "in [0, 1)")
        group_defaults = {"bias_correction": self.settings.bias_correction, **self._group_defaults()}
        super().__init__(params, defaults | {"betas": betas} | group_defaults)
        self._group = as_group(group)
        self._errors: dict[str, SignErrors] = {}

    def _group_defaults(self) -> dict[str, Any]:
        """Return the further defaults of a parameter group; a subclass adds its keys here."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict as torch does; errors restart at zero."""
        super().load_state_dict(state_dict)
        self._errors.clear()

    def error_tensors(self) -> dict[str, Tensor]:
        """Return this rank's present error feedback, 1-D fp32, by `worker/<message>` and `server/<message>`.

        Each optimizer step changes these tensors in place.
        """
        workers = {f"worker/{unit}": errors.worker for unit, errors in self._errors.items()}
        return workers | {f"server/{unit}": errors.server for unit, errors in self._errors.items()}

    @property
    def error_numels(self) -> dict[str, int]:
        """Elements of each message, the same on all ranks; what `expect_errors` takes."""
        return {unit: errors.numel for unit, errors in self._errors.items()}

    def expect_errors(self, numels: Mapping[str, int]) -> None:
        """Begin anew with zero errors for these messages, so that `error_tensors` can be filled; {} forgets them."""
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self._errors = {unit: SignErrors.zeros(n, self._group.size, device) for unit, n in numels.items()}

    @property
    def error_bytes(self) -> int:
        """Memory of error feedback."""
        return sum(errors.worker.nbytes + errors.server.nbytes for errors in self._errors.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce and step. Collective over the group. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if params or self.counts_steps:
            self._ensure_state(params)
            self._step(params)
        return loss

    def _step(self, params: Sequence[Tensor]) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} has no step", code="optimizer-rule", fix="Use one of the three classes."
        )

    def _ensure_state(self, params: Sequence[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = 0
                for name in self.state_names:
                    self.state[p][name] = torch.zeros_like(
                        p, dtype=torch.float32, memory_format=torch.contiguous_format
                    )

    def _states(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        return [self.state[p][name] for p in params]

    def _exact_mean(self, tensors: Sequence[Tensor], unit: str) -> None:
        """Replace the tensors by their means over the group."""
        if not tensors:
            return
        flat = _flat(tensors)
        all_reduce(flat, group=self._group, unit=unit)
        _unflat(flat.div_(self._group.size), tensors)

    def _sign_mean(self, tensors: Sequence[Tensor], denominators: Sequence[Tensor], unit: str) -> None:
        """Average `tensors` over the group in place, one bit per element, in units of `denominators`.

        Uses and updates the error feedback of `unit`.
        """
        if not tensors:
            return
        flat, unit_of = _flat(tensors), _flat(denominators)
        flat.div_(unit_of)
        if unit not in self._errors or self._errors[unit].numel != flat.numel():
            self._errors[unit] = SignErrors.zeros(flat.numel(), self._group.size, flat.device)
        mean_of_signs(flat, self._errors[unit], self._group, unit=unit)
        _unflat(flat.mul_(unit_of), tensors)

    def _denominators(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Compute sqrt(v) + eps of each parameter, the same on all ranks."""
        return [
            _denominator(self.state[p]["exp_avg_sq"], 1.0, group["eps"])
            for group, members in self._groups_of(params)
            for p in members
        ]

    def _gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Copy this rank's gradients to fp32; zeros for parameters without a gradient."""
        return [
            torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
            if p.grad is None
            else p.grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for p in params
        ]

    def _groups_of(self, params: Sequence[Tensor]) -> Iterable[tuple[dict[str, Any], list[Tensor]]]:
        """Yield each parameter group with its members that are among `params`."""
        chosen = {id(p) for p in params}
        for group in self.param_groups:
            yield group, [p for p in group["params"] if id(p) in chosen]


def _denominator(variance: Tensor, correction: float, eps: float, inside: bool = False) -> Tensor:
    if inside:
        return (variance / correction).add_(eps).sqrt_()
    return variance.sqrt().div_(correction**0.5).add_(eps)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unflat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _value_error(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{name}: expected a number {wanted}, found {value}.", code="optimizer-value", fix=f"Set {name}."
    )

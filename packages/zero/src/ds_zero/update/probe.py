"""What a foreign optimizer may be given, found out by its movement: tensors are stepped whole and in pieces, and must move alike.

A copy of the optimizer steps small tensors of the shapes that its own parameters have, cut to a bounded size, since some optimizers act
otherwise from a size on. It does so twice, at its own rate in fp64, where a movement of 1e-9 shows beside a weight of 1, and at rate 1 in
fp32. Gradients change their signs from step to step, and the pieces of a tensor differ in scale, so that a norm, a mean or a mask of
the whole tensor shows. What has not been seen to move alike is not proved elementwise, and needs whole tensors.

The optimizer itself, its state and all random streams stay as they are.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from ds_accel import preserve_random_streams
from ds_config.errors import UnsupportedError
from ds_zero._torch import plain_step
from ds_zero.layout.shard_options import OptimizerTraits

__all__ = ["CannotStepError", "Shapes", "ask", "devices_of", "not_shardable", "shapes_of"]

_SMALL, _LEAST = (8, 6, 3, 2), 12
_LARGEST = 150_000  # elements: 387 rows and columns, or 129 channels in and out of a 3 x 3 convolution
_MANY, _FEW = 8, 3  # steps of small and of large tensors
_RATE_OF_ZERO = 1e-2  # a warm-up begins at zero, where nothing moves
_SAME, _NOISE, _SEEN = 1e-4, 8.0, 100.0  # of the movement; ulps of a weight; of the noise


class CannotStepError(UnsupportedError):
    """The optimizer raised when it stepped a tensor of its own parameters' kind."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What to step: a small tensor for each number of dimensions, and a few large ones.

    Attributes:
        small: What most elements belong to comes first.
        large: None of them is small.
    """

    small: tuple[tuple[int, ...], ...]
    large: tuple[tuple[int, ...], ...]


def shapes_of(params: Sequence[Tensor]) -> Shapes:
    """Representatives of the shapes of parameters. Pure.

    Of each number of dimensions the tensor with most elements, and that whose smallest dimension is largest.
    """
    kinds: dict[int, list[tuple[int, ...]]] = {}
    for param in params:
        if param.numel():
            kinds.setdefault(max(param.dim(), 1), []).append(tuple(param.shape) or (1,))
    if not kinds:
        return Shapes((_SMALL[:2],), ())
    listed = sorted(kinds.values(), key=lambda shapes: -sum(map(math.prod, shapes)))[:3]
    small = tuple(_smaller(shapes[0]) for shapes in listed)
    found = [_cut(max(shapes, key=key)) for shapes in listed for key in (math.prod, min)]
    large = tuple(dict.fromkeys(s for s in found if math.prod(s) > max(map(math.prod, small))))
    return Shapes(small, large)


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 1:
        return (math.prod(_SMALL[:2]),)
    bounds = (*_SMALL, *[2] * len(shape))[: len(shape)]
    small = tuple(min(n, bound) for n, bound in zip(shape, bounds, strict=True))
    return small if math.prod(small) >= _LEAST else bounds


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    bound = bisect_right(range(1, max(shape) + 1), _LARGEST, key=lambda most: math.prod(min(n, most) for n in shape))
    return tuple(min(n, bound) for n in shape)


def devices_of(params: Sequence[Tensor]) -> list[torch.device]:
    """Where to step, best first: where the parameters are, if that is a device, and the host."""
    cpu = torch.device("cpu")
    there = {param.device: None for param in params if param.device.type not in ("cpu", "meta")}
    return [*list(there)[:1], cpu]


def ask(optimizer: Optimizer, group: dict[str, Any], shapes: Shapes) -> OptimizerTraits:
    """The layout that an optimizer needs with the settings of one of its groups, and how many tensors an element it keeps.

    Raises:
        CannotStepError: it raised ("zero-optimizer").
        UnsupportedError: the update of a tensor depends on random numbers ("zero-optimizer").
    """
    refused: CannotStepError | None = None
    for device in devices_of(group["params"]):
        with preserve_random_streams([device]):
            try:
                return _Asked(optimizer, group, device).habits(shapes)
            except CannotStepError as error:
                refused = refused or error
    raise refused or RuntimeError("nowhere to step")


@dataclass(frozen=True, slots=True)
class _Trial:
    """At which rate, None for what the group says, and in which format a copy steps, and how often."""

    rate: float | None
    dtype: torch.dtype
    steps: int


@dataclass(frozen=True, slots=True)
class _Stepped:
    """A tensor and its gradients.

    Attributes:
        start: Any shape, fp64.
        grads: [steps, *shape], fp64.
    """

    start: Tensor
    grads: Tensor

    @classmethod
    def of(cls, shape: tuple[int, ...], steps: int, phase: float) -> _Stepped:
        """Spread over [-1, 1], another sign in most steps; gradients grow along the tensor, weights shrink."""
        n = math.prod(shape)
        place = torch.arange(n, dtype=torch.float64, device="cpu")
        turn, along = (place * 0.6180339887 + phase).frac_(), (place + 0.5) / n
        steady = [(turn + 0.43 * step).frac_().mul_(2.0).sub_(1.0) for step in range(steps + 1)]
        grads = torch.stack(steady[1:]).mul_(0.1 + along)
        return cls((steady[0] * (1.1 - along)).view(shape), grads.view(steps, *shape))

    def pieces(self) -> list[_Stepped]:
        """Vectors that have its elements."""
        n = self.start.numel()
        sizes = [n * 5 // 12, n // 8 + 1]
        sizes.append(n - sum(sizes))
        starts, grads = self.start.view(-1).split(sizes), self.grads.flatten(1).split(sizes, 1)
        return [_Stepped(start, grad) for start, grad in zip(starts, grads, strict=True)]


class _Asked:
    """An optimizer with the settings of one of its groups, on one device."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
        self._optimizer, self._group, self._device = optimizer, group, device
        self._step = plain_step(type(optimizer))
        self._states: int | None = None
        self._coupled = False

    def habits(self, shapes: Shapes) -> OptimizerTraits:
        elementwise = all(map(self._small, shapes.small)) and all(map(self._large, shapes.large))
        return OptimizerTraits("flat" if elementwise else "whole", self._states or 0, self._coupled)

    def _small(self, shape: tuple[int, ...]) -> bool:
        whole, seen = _Stepped.of(shape, _MANY, 0.3), False
        for trial in self._trials(_MANY):
            found = self._alike(whole, trial, with_others=True)
            if found is False:
                return False
            seen = seen or bool(found)
        return seen

    def _large(self, shape: tuple[int, ...]) -> bool:
        """At rate 1; where nothing is seen to move so, at its own."""
        whole = _Stepped.of(shape, _FEW, 0.3)
        found = (self._alike(whole, trial, with_others=False) for trial in reversed(self._trials(_FEW)))
        return next((one for one in found if one is not None), False)

    def _alike(self, whole: _Stepped, trial: _Trial, *, with_others: bool) -> bool | None:
        """Whether a tensor moves in pieces as it does whole; None: it was not seen to move."""
        alone = self._alone(whole, trial)
        if alone is None:
            return None
        trial, path = alone
        if with_others and self._depends(whole, trial, path):
            self._coupled = True
            return False
        try:
            pieces = self._run(whole.pieces(), trial)
        except Exception:  # it takes no vectors, so it takes no shards
            return False
        return _alike(path, torch.cat(pieces, 1), trial.dtype)

    def _trials(self, steps: int) -> list[_Trial]:
        rate = self._group.get("lr")
        number = isinstance(rate, Real | Tensor) and not isinstance(rate, bool)
        own = _RATE_OF_ZERO if number and float(rate) == 0.0 else None  # type: ignore[arg-type]
        return [_Trial(own, torch.float64, steps), _Trial(1.0 if number else None, torch.float32, steps)]

    def _alone(self, whole: _Stepped, trial: _Trial) -> tuple[_Trial, Tensor] | None:
        """The path of a tensor that is stepped alone. None: it cannot be at rate 1, which is not its own."""
        for one in (trial, replace(trial, dtype=torch.float32)):
            before = torch.get_rng_state()
            try:
                path = self._run([whole], one)[0]
            except Exception as error:  # whatever a foreign optimizer raises is the reason to give
                reason = error
                continue
            if not torch.equal(before, torch.get_rng_state()):
                raise not_shardable(self._optimizer, "it draws random numbers, of which every rank has its own")
            return one, path
        if trial.rate == 1.0:
            return None
        shape = tuple(whole.start.shape)
        raise CannotStepError(
            f"{type(self._optimizer).__name__} cannot be sharded: it cannot step a tensor of shape {shape}: {reason}",
            code="zero-optimizer",
            fix='Use another optimizer. If it steps only what the model really has, say what it needs: layout="whole", or "flat" where it '
            "treats elements independently.",
        ) from reason

    def _depends(self, whole: _Stepped, trial: _Trial, path: Tensor) -> bool:
        """Whether a tensor moves otherwise beside another one."""
        shape = tuple(whole.start.shape)
        other = _Stepped.of(shape[::-1], trial.steps, 1.7)
        together = self._run([whole, replace(other, grads=other.grads * 3.0)], trial)[0]
        return _alike(path, together, trial.dtype) is False

    def _run(self, stepped: Sequence[_Stepped], trial: _Trial) -> list[Tensor]:
        """[steps + 1, n] of each tensor: where it is before the first step, and after each."""
        params = [Parameter(one.start.to(self._device, trial.dtype, copy=True)) for one in stepped]
        grads = [one.grads.to(self._device, trial.dtype, copy=True) for one in stepped]
        twin = _Twins(self._group, params, trial.rate).of(self._optimizer)
        path = [[param.detach().flatten().clone()] for param in params]
        for step in range(trial.steps):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad[step]
            self._step(twin)
            for positions, param in zip(path, params, strict=True):
                positions.append(param.detach().flatten().clone())
        if self._states is None:
            kept = twin.state.get(params[0], {}).values()
            self._states = sum(isinstance(v, Tensor) and v.shape == params[0].shape for v in kept)
        return [torch.stack(positions) for positions in path]


def _alike(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool | None:
    """Whether two paths [steps + 1, n] make the same movements; None: nothing was seen to move, or all of it to infinity."""
    if not a.isfinite().all():
        return None if not b.isfinite().all() else False
    moved, other = a.diff(dim=0), b.diff(dim=0)
    most = moved.abs().amax(1, keepdim=True)
    noise = _NOISE * torch.finfo(dtype).eps * a.abs().amax()
    # Not all: where an update is the sign of what should be zero, the last bit decides.
    apart = ((moved - other).abs() <= _SAME * most + noise).logical_not_()
    if int(apart.sum(1).amax()) > a.shape[1] // 10_000:
        return False
    return True if bool((most > _SEEN * noise).any()) else None


class _Twins:
    """Copies of an optimizer, and of those that it wraps, over other parameters. Shares nothing that a step would change.

    Args:
        group: Whose settings and parameters stand for those of all.
        params: Instead of the group's.
        rate: Instead of the group's; None: as it is.
    """

    def __init__(self, group: dict[str, Any], params: Sequence[Parameter], rate: float | None) -> None:
        self._params, self._rate = params, rate
        self._ids = {id(param) for param in group["params"]}
        self._group = group
        self._copies: dict[int, Any] = {}

    def of(self, optimizer: Optimizer) -> Optimizer:
        twin = object.__new__(type(optimizer))
        self._copies[id(optimizer)] = twin
        own = vars(optimizer)
        if "state" in own:
            self._copies.setdefault(id(own["state"]), defaultdict(dict))
        if "param_groups" in own and id(own["param_groups"]) not in self._copies:
            groups = [group for group in own["param_groups"] if self._meant(group)]
            self._copies[id(own["param_groups"])] = [self._settings(group) for group in groups]
        for key, value in own.items():
            if key.startswith("_optimizer_") and isinstance(value, dict):  # hooks see real steps only
                vars(twin)[key] = OrderedDict[Any, Any]()
            elif not (callable(value) and hasattr(type(optimizer), key)):  # schedulers put a `step` there that is bound
                vars(twin)[key] = self._copy(value)
        return twin

    def _meant(self, group: dict[str, Any]) -> bool:
        return group is self._group or any(id(param) in self._ids for param in group["params"])

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        settings = {key: self._copy(value) for key, value in group.items() if key != "params"}
        if self._rate is not None and "lr" in settings:
            rate = settings["lr"]
            settings["lr"] = torch.full_like(rate, self._rate) if isinstance(rate, Tensor) else self._rate
        return {**settings, "params": list(self._params)}

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        made = value
        if isinstance(value, Optimizer):
            return self.of(value)
        if isinstance(value, torch.Generator):
            made = value.clone_state()
        elif isinstance(value, Tensor) and not isinstance(value, Parameter):
            made = value.detach().clone()
        elif isinstance(value, dict):
            made = self._copies[id(value)] = copy.copy(value)
            for key, item in list(made.items()):
                made[key] = self._copy(item)
        elif isinstance(value, list):
            made = self._copies[id(value)] = copy.copy(value)
            made[:] = map(self._copy, value)
        elif type(value) is tuple:
            made = tuple(map(self._copy, value))
        elif isinstance(value, set | deque):
            made = copy.copy(value)
        self._copies[id(value)] = made
        return made


def not_shardable(optimizer: Optimizer, why: str) -> UnsupportedError:
    """Build the error of an optimizer that no layout suits."""
    return UnsupportedError(
        f"{type(optimizer).__name__} cannot be sharded: {why}",
        code="zero-optimizer",
        fix="Use an optimizer that treats elements, or at least parameters, independently of each other.",
    )

"""Optimizers that send one bit per element: 1-bit Adam, 0/1 Adam and 1-bit LAMB.

They own the reduction of gradients: every rank calls `backward` and `step` on its own gradients (no DDP, no all-reduce
before), and parameters are the same bits on all ranks after a step that synchronises, which all steps do but the local
ones of 0/1 Adam. Absent gradients count as zeros, so that ranks which took different paths still call the same collectives.

    optimizer = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=2000, group=mesh["data"])
    loss.backward(); optimizer.step(); optimizer.zero_grad()

Phases. Adaptive optimizers cannot use one-bit gradients: the variance would see the error squared. So variance is learnt
with exact means first, then frozen, and what travels from then on is linear in the gradient and corrected by error feedback
(`ds_comm.codecs.signs`). All masters and states are fp32 of the parameters' shape. Errors belong to a rank and a number of
ranks: `error_tensors` hands them out to be saved, `expect_errors` allocates them; after any other load they start at zero, as
in the papers' own code.

Where formulas leave a choice: bias correction is applied as in Adam, with the variance's factor frozen together with it;
weight decay is decoupled; magnitudes are per block of 2048 elements, where the papers have one per tensor. And what travels
is divided by the frozen denominator sqrt(v) + eps first: in these units all elements are of one size, as the one magnitude
of a block wants it. Sent as it is, momentum diverges where variances differ a lot within a block: an element with a
small variance would take a step of its block's mean momentum over its own denominator. (1-bit LAMB's scaling per layer is
a coarse form of this.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_comm.optim.onebit_base import OneBit, OneBitSettings, _denominator, _value_error, count, fraction, limited

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdamSettings(OneBitSettings):
    freeze_step: int = count(100_000)
    eps_inside_sqrt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ZeroOneSettings(OneBitSettings):
    var_freeze_step: int = count(100_000)
    var_update_scaler: int = count(16)
    local_step_scaler: int = count(32_678)
    local_step_clipper: int = count(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LambSettings(_AdamSettings):
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = fraction(0.9)
    factor_max: float = 4.0
    factor_min: float = limited(0.5, lambda found: found > 0, "positive")
    factor_threshold: float = limited(0.1, lambda found: 0 < found < 1, "in (0, 1)")

    def __post_init__(self) -> None:
        _AdamSettings.__post_init__(self)
        if self.factor_min > self.factor_max:
            raise _value_error("factor_min", self.factor_min, f"at most factor_max, {self.factor_max}")


class OnebitAdam(OneBit):
    """1-bit Adam (Tang et al. 2021): Adam until `freeze_step`; then the variance is frozen and momentum travels as signs.

    After the freeze: m = mean over ranks of signs(b1 m + (1 - b1) g); p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p).

    Settings:
        freeze_step: Steps with exact gradients. Until the variance is stable: the paper finds some 15 to 20 % of a run; of
            some hundred steps half were needed (docs/benchmarks/comm.md).
        eps_inside_sqrt: sqrt(v / c2 + eps) as the denominator.
        bias_correction: As in Adam. (amsgrad is refused.)

    A parameter group may have `non_freeze=True` (always exact; for parameters that begin to be trained late) and
    `exp_avg_mask` (a tensor, or one per parameter, that momentum is multiplied with: zeros where gradients are always zero,
    because signs know no zero).

    Cost: fp32 gradients once per step until the freeze, 1/31 of it then. State: 8 bytes an element, and 4 (1 + 1/N) of errors.
    """

    _settings = _AdamSettings
    settings: _AdamSettings

    def _group_defaults(self) -> dict[str, Any]:
        return {"non_freeze": False, "exp_avg_mask": None}

    def _step(self, params: Sequence[Tensor]) -> None:
        warm = [p for group, members in self._groups_of(params) for p in members if self._is_warm(group, p)]
        keep = {id(p) for p in warm}
        cold = [p for p in params if id(p) not in keep]
        gradients = dict(zip(map(id, params), self._gradients(params), strict=True))
        if warm:
            exact = [gradients[id(p)] for p in warm]
            self._exact_mean(exact, "onebit/gradient")
        for group, members in self._groups_of(params):
            b1, b2 = group["betas"]
            for p in members:
                state, grad = self.state[p], gradients[id(p)]
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                if id(p) in keep:
                    state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        if cold:
            self._sign_mean(self._states(cold, "exp_avg"), self._denominators(cold), "onebit/momentum")
        for group, members in self._groups_of(params):
            for index, p in enumerate(members):
                self._update(group, p, _mask(group, index), id(p) in keep)

    def _is_warm(self, group: dict[str, Any], p: Tensor) -> bool:
        return bool(group["non_freeze"]) or self.state[p]["step"] < self.settings.freeze_step

    def _update(self, group: dict[str, Any], p: Tensor, mask: Tensor | None, warm: bool) -> None:
        state = self.state[p]
        if mask is not None:
            state["exp_avg"].mul_(mask)
        c1 = c2 = 1.0
        if group["bias_correction"]:
            b1, b2 = group["betas"]
            c1 = 1 - b1 ** state["step"]
            c2 = 1 - b2 ** (state["step"] if warm else self.settings.freeze_step)
        denominator = _denominator(state["exp_avg_sq"], c2, group["eps"], self.settings.eps_inside_sqrt)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["exp_avg"] / denominator).to(p.dtype), alpha=-group["lr"] / c1)


class ZeroOneAdam(OneBit):
    """0/1 Adam (Lu et al. 2022): the variance is updated ever more rarely, then never, and ranks step alone between ever
    rarer synchronisations.

    Until `var_freeze_step`: at every `var_interval`-th step exact gradients update momentum and variance; at the others
    momentum takes one-bit gradients. The interval begins at 1 and doubles after every `var_update_scaler` updates.
    After it: each rank steps with its own gradients; every `local_interval`-th step takes the local steps back, averages
    their sum times the denominator as signs, and makes that one step for all. The interval begins at 1 and doubles every
    `local_step_scaler` steps up to `local_step_clipper`.

    Between synchronisations ranks differ: save, evaluate and compare at steps where `synchronised` is true. Weight decay
    acts at synchronisations, with the sum of the rates since the last one.

    Cost: per synchronisation, or step before the freeze, one bit an element. State: 16 bytes an element, and errors.
    """

    counts_steps: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "moved", "start")

    _settings = _ZeroOneSettings
    settings: _ZeroOneSettings

    def _group_defaults(self) -> dict[str, Any]:
        # The counters are values of the groups, so that they are saved and loaded with everything else.
        return {"step": 0, "var_interval": 1, "var_updates": 0, "local_interval": 1, "rates": 0.0}

    @property
    def synchronised(self) -> bool:
        """Whether parameters are the same on all ranks now."""
        return all(group["rates"] == 0.0 for group in self.param_groups)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Make the ranks equal now, as the next synchronisation would; nothing to do where they are. Collective.

        Before a save or a comparison. The steps that follow are those of a run that synchronised here, too.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not self.synchronised:
            self._synchronise(params)

    def _step(self, params: Sequence[Tensor]) -> None:
        for group in self.param_groups:
            group["step"] += 1
        lead = self.param_groups[0]
        if lead["step"] <= self.settings.var_freeze_step:
            self._learn_variance(params, lead["step"] % lead["var_interval"] == 0)
        else:
            if lead["step"] == self.settings.var_freeze_step + 1:
                self._errors.clear()  # the messages mean something else from now on
            self._step_alone(params)
            if lead["step"] % lead["local_interval"] == 0:
                self._synchronise(params)
            past = lead["step"] - self.settings.var_freeze_step
            if past % self.settings.local_step_scaler == 0:
                for group in self.param_groups:
                    group["local_interval"] = min(group["local_interval"] * 2, self.settings.local_step_clipper)

    def _learn_variance(self, params: Sequence[Tensor], exact: bool) -> None:
        gradients = self._gradients(params)
        if exact:
            self._exact_mean(gradients, "zeroone/gradient")
        else:
            self._sign_mean(gradients, self._denominators(params), "zeroone/signs")
        mean = dict(zip(map(id, params), gradients, strict=True))
        for group, members in self._groups_of(params):
            b1, b2 = group["betas"]
            if exact:
                group["var_updates"] += 1
            c1, c2 = self._corrections(group)
            for p in members:
                state, grad = self.state[p], mean[id(p)]
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                if exact:
                    state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                step = state["exp_avg"] / _denominator(state["exp_avg_sq"], c2, group["eps"])
                p.add_(step.to(p.dtype), alpha=-group["lr"] / c1)
            if exact and group["var_updates"] % self.settings.var_update_scaler == 0:
                group["var_interval"] *= 2

    def _step_alone(self, params: Sequence[Tensor]) -> None:
        gradients = dict(zip(map(id, params), self._gradients(params), strict=True))
        for group, members in self._groups_of(params):
            b1 = group["betas"][0]
            c1, c2 = self._corrections(group)
            rate, fresh = group["lr"] / c1, group["rates"] == 0.0
            group["rates"] += rate
            for p in members:
                state = self.state[p]
                if fresh:
                    state["start"].copy_(p)
                state["exp_avg"].mul_(b1).add_(gradients[id(p)], alpha=1 - b1)
                state["moved"].add_(state["exp_avg"], alpha=-rate)  # in units of the denominator, which is frozen
                p.copy_(state["start"] + state["moved"] / _denominator(state["exp_avg_sq"], c2, group["eps"]))

    def _synchronise(self, params: Sequence[Tensor]) -> None:
        self._sign_mean(self._states(params, "moved"), self._denominators(params), "zeroone/moved")
        for group, members in self._groups_of(params):
            _, c2 = self._corrections(group)
            for p in members:
                state = self.state[p]
                if group["rates"] > 0:
                    state["exp_avg"].copy_(state["moved"]).div_(-group["rates"])
                start = state["start"].mul_(1 - group["rates"] * group["weight_decay"])
                p.copy_(start + state["moved"] / _denominator(state["exp_avg_sq"], c2, group["eps"]))
                state["moved"].zero_()
            group["rates"] = 0.0

    def _corrections(self, group: dict[str, Any]) -> tuple[float, float]:
        if not group["bias_correction"]:
            return 1.0, 1.0
        b1, b2 = group["betas"]
        return 1 - b1 ** group["step"], 1 - b2 ** group["var_updates"]


class OnebitLamb(OneBit):
    """1-bit LAMB (Li et al. 2021): LAMB until `freeze_step`; then variance and layer rates are frozen, momentum travels as
    signs, and each layer's rate follows how its variance goes on.

    After the freeze, per parameter: m as in 1-bit Adam; the
    gradient that momentum implies, (m - b1 m_old) / (1 - b1), updates a second variance; the rate is lr x coefficient x
    factor, where factor = max over elements of frozen / second denominator, within [factor_min, factor_max] and within
    `factor_threshold` of its last value.

    Settings:
        coeff_beta: Averaging of layer rates during the warm-up.
        max_coeff, min_coeff: Bounds of a layer's rate |p| / |update|; 0 for no bound.

    Cost: as 1-bit Adam. State: 12 bytes an element, and errors.
    """

    elementwise: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    _settings = _LambSettings
    settings: _LambSettings

    def _group_defaults(self) -> dict[str, Any]:
        return {"max_coeff": self.settings.max_coeff, "min_coeff": self.settings.min_coeff}

    def lamb_coefficients(self) -> list[float]:
        """Return the rate of each parameter at the last step, relative to lr, in the order of the groups."""
        return [float(self.state[p].get("rate", 1.0)) for group in self.param_groups for p in group["params"]]

    def _ensure_state(self, params: Sequence[Tensor]) -> None:
        super()._ensure_state(params)
        for p in params:
            self.state[p].setdefault("coefficient", 0.0)
            self.state[p].setdefault("factor", 1.0)

    def _step(self, params: Sequence[Tensor]) -> None:
        gradients = self._gradients(params)
        if self.state[params[0]]["step"] < self.settings.freeze_step:
            self._exact_mean(gradients, "onebit/gradient")
            self._warm(params, gradients)
            if self.state[params[0]]["step"] == self.settings.freeze_step:
                for p in params:
                    self.state[p]["exp_avg_sq_fresh"].copy_(self.state[p]["exp_avg_sq"])
        else:
            self._compressed(params, gradients)

    def _warm(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        mean = dict(zip(map(id, params), gradients, strict=True))
        norms: list[Tensor] = []
        for group, members in self._groups_of(params):
            b1, b2 = group["betas"]
            for p in members:
                state, grad = self.state[p], mean[id(p)]
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                update = self._direction(group, p)
                norms += (_norm(p), _norm(update))
                # The gradient has done its work: its memory keeps the update until all norms are read.
                grad.copy_(update)
        numbers = iter(_numbers(norms))
        for group, members in self._groups_of(params):
            for p in members:
                state, update = self.state[p], mean[id(p)]
                rate = _trust(next(numbers), next(numbers), group)
                if rate != 1.0:
                    average, beta = state["coefficient"], self.settings.coeff_beta
                    state["coefficient"] = rate if average == 0.0 else beta * average + (1 - beta) * rate
                state["rate"] = rate
                p.add_(update.to(p.dtype), alpha=-group["lr"] * rate)

    def _compressed(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        local = dict(zip(map(id, params), gradients, strict=True))
        before = {id(p): self.state[p]["exp_avg"].clone() for p in params}
        measures: list[Tensor] = []
        for group, members in self._groups_of(params):
            b1 = group["betas"][0]
            for p in members:
                state = self.state[p]
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(local[id(p)], alpha=1 - b1)
        self._sign_mean(self._states(params, "exp_avg"), self._denominators(params), "onebit/momentum")
        for group, members in self._groups_of(params):
            b1, b2 = group["betas"]
            for p in members:
                state = self.state[p]
                implied = (state["exp_avg"] - b1 * before[id(p)]).div_(1 - b1)
                state["exp_avg_sq_fresh"].mul_(b2).addcmul_(implied, implied, value=1 - b2)
                update = self._direction(group, p)
                measures += self._measures(group, p, update)
                local[id(p)].copy_(update)  # as in the warm-up
        numbers = iter(_numbers(measures))
        for group, members in self._groups_of(params):
            for p in members:
                state, update = self.state[p], local[id(p)]
                factor = self._factor(group, p, next(numbers), next(numbers), next(numbers))
                state["rate"] = (state["coefficient"] or 1.0) * factor
                p.add_(update.to(p.dtype), alpha=-group["lr"] * state["rate"])

    def _direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        state = self.state[p]
        c1, c2 = self._corrections(group, state["step"])
        denominator = _denominator(state["exp_avg_sq"], c2, group["eps"], self.settings.eps_inside_sqrt)
        update: Tensor = (state["exp_avg"] / denominator).div_(c1)
        return update.add_(p, alpha=group["weight_decay"]) if group["weight_decay"] else update

    def _measures(self, group: dict[str, Any], p: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the factor depends on: frozen over fresh denominators, and the norms of the update without decay and with it."""
        state = self.state[p]
        _, c2 = self._corrections(group, state["step"])
        frozen = _denominator(state["exp_avg_sq"], c2, group["eps"], self.settings.eps_inside_sqrt)
        fresh = _denominator(state["exp_avg_sq_fresh"], c2, group["eps"], self.settings.eps_inside_sqrt)
        ratio = (frozen / fresh).max() if p.numel() else torch.ones((), device=p.device)
        if not group["weight_decay"]:
            one = torch.ones_like(ratio)
            return ratio, one, one
        return ratio, _norm(update.sub(p, alpha=group["weight_decay"])), _norm(update)

    def _factor(self, group: dict[str, Any], p: Tensor, ratio: float, without: float, norm: float) -> float:
        state, low_high = self.state[p], (self.settings.factor_min, self.settings.factor_max)
        factor = ratio
        if group["weight_decay"]:  # decay has no variance: only the rest of the update follows it
            share = min(1.0, without / max(norm, 1e-30))
            factor = factor * share + 1.0 - share
        factor = min(max(factor, low_high[0]), low_high[1])
        last, slack = state["factor"], self.settings.factor_threshold
        state["factor"] = factor = min(max(factor, last * (1 - slack)), last * (1 + slack))
        return factor

    def _corrections(self, group: dict[str, Any], step: int) -> tuple[float, float]:
        if not group["bias_correction"]:
            return 1.0, 1.0
        b1, b2 = group["betas"]
        return 1 - b1**step, 1 - b2 ** min(step, self.settings.freeze_step)


def _norm(tensor: Tensor) -> Tensor:
    # In fp32 torch's norm of 50 M elements on a CPU is off by 4e-3.
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    # One wait for each device, not for each number.
    places: dict[torch.device, list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault(scalar.device, []).append(place)
    numbers = [0.0] * len(scalars)
    for rows in places.values():
        for place, number in zip(rows, torch.stack([scalars[row].double() for row in rows]).tolist(), strict=True):
            numbers[place] = number
    return numbers


def _trust(weights: float, update: float, group: dict[str, Any]) -> float:
    if weights == 0.0 or update == 0.0:
        return 1.0
    rate = weights / update
    if group["max_coeff"] > 0:
        rate = min(rate, group["max_coeff"])
    return max(rate, group["min_coeff"])


def _mask(group: dict[str, Any], index: int) -> Tensor | None:
    mask = group["exp_avg_mask"]
    return mask[index] if isinstance(mask, (list, tuple)) else mask

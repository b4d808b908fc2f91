"""Updates split by importance (ZenFlow): a few columns of each matrix are stepped in every step, all others now and then.

The *chosen* columns of a matrix are those whose gradients are largest; what is no matrix (biases, norms) is *always* chosen. Chosen
elements are stepped in every step, with moments and a step count that begin when they are chosen. The gradients of all others add up,
and their mean is stepped at the end of every *interval*.

    warm-up      everything in every step
    choose       the first step after it, and every so many steps: columns by the sum of |g| over ranks
    end          after so many steps, or, "auto", when the others' gradients have outgrown the chosen ones'; and before columns are chosen

Which columns, and when an interval ends, follows from sums over the ranks: all decide alike. `Calendar` and `Votes` are the rules,
pure; `ZenFlowUpdater` follows them. Where a step asks nobody, its updates may begin during backward (`update/overlap_plan.py`). Reference: Lan et al. 2025, arXiv:2505.12242.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm as comm
from ds_comm.metadata import on_group
from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_ops.apply_update import update
from ds_ops.optim import FusedOps, OpsOptimizer
from ds_ops.update_rules import UpdateSpec, UpdateTensors, dither_of
from ds_zero.layout.units import DENSE
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.unit import OptimizerSlice, Unit
from ds_zero.update.apply_step import Updater
from ds_zero.update.wrapped_optimizer import WAITING, group_of

__all__ = ["Calendar", "Votes", "ZenFlowOptions", "ZenFlowStep", "ZenFlowUpdater", "bad", "columns_of", "top_columns"]


@dataclass(frozen=True, slots=True)
class ZenFlowOptions:
    """How updates are split.

    Attributes:
        ratio: Share of a matrix's columns that are stepped in every step; at least one.
        choose_every: Steps until columns are chosen anew; 0: never.
        interval: Steps of an interval; 0: found out, see `auto_ratio`.
        auto_ratio: Share of the matrices whose other columns must have grown large for an interval to end.
        warm_up: Steps at the beginning in which everything is stepped.
    Raises:
        PlanError: numbers that say nothing ("zero-zenflow").
    """

    states: ClassVar[int] = 1  # what of the gradients waits for its update

    ratio: float = 0.1
    choose_every: int = 0
    interval: int = 4
    auto_ratio: float = 0.99
    warm_up: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if not (
            0 < self.ratio <= 1
            and 0 <= self.auto_ratio <= 1
            and min(self.choose_every, self.interval, self.warm_up) >= 0
        ):
            raise bad(f"{self}", "Give a ratio in (0, 1], and steps of 0 or more.")
        if 0 < self.choose_every < self.interval:
            raise bad(
                f"columns are chosen anew every {self.choose_every} steps, within intervals of {self.interval}",
                "Choose no more often than intervals end.",
            )

    def start(self, inner: Optimizer, sharding: ShardedModel) -> ZenFlowUpdater:
        """Split the updates of `inner` from now on."""
        return ZenFlowUpdater(self, sharding, inner)


@dataclass(frozen=True, slots=True)
class ZenFlowStep:
    """What one step does.

    Attributes:
        whole: Everything is stepped.
        choose: Columns are chosen first.
        end: The others are stepped, too.
    """

    whole: bool = False
    choose: bool = False
    end: bool = False


@dataclass(slots=True)
class Calendar:
    """Counts steps. Pure.

    Attributes:
        options: The rules.
        step: Steps made.
        since: Of them, those since the others were stepped last.
        fast: Of them, those since columns were chosen.
    """

    options: ZenFlowOptions
    step: int = 0
    since: int = 0
    fast: int = 0

    def chooses(self) -> bool:
        """Whether the coming step chooses columns."""
        after, every = self.step - self.options.warm_up, self.options.choose_every
        return after == 0 or (after > 0 and every > 0 and after % every == 0)

    def next(self, *, voted: bool = False) -> ZenFlowStep:
        """Go one step on.

        Args:
            voted: Whether the others have grown large; asked where intervals have no length.
        """
        if self.step < self.options.warm_up:
            self.step += 1
            return ZenFlowStep(whole=True)
        choose = self.chooses()
        self.step, self.since, self.fast = self.step + 1, self.since + 1, 1 if choose else self.fast + 1
        end = self.chooses() or (voted if self.options.interval == 0 else self.since >= self.options.interval)
        return ZenFlowStep(choose=choose, end=end)

    def ended(self) -> None:
        """Reset the step counter of the interval after its last step."""
        self.since = 0


@dataclass(slots=True)
class Votes:
    """Of one matrix: whether the other columns' gradients have outgrown the chosen ones'. Pure."""

    mean: float = 0.0
    others: float = 0.0

    def add(self, chosen: float, total: float, steps: int, ratio: float) -> bool:
        """Take one step's sums of |g|; `steps` is how many the interval has, with this one. Whether it votes for the end."""
        self.mean = (self.mean * (steps - 1) + chosen) / steps / (ratio * 10)
        if ratio < 1:
            self.others += (total - chosen) / ((1 - ratio) * 10)
        return self.others >= self.mean


def columns_of(values: Tensor, begin: int, columns: int) -> Tensor:
    """Sum absolute values by column: [n] consecutive elements of a matrix, from element `begin` -> [columns]."""
    out = values.new_zeros(columns)
    head = min(-begin % columns, values.numel())
    body = (values.numel() - head) // columns * columns
    for at, part in ((begin % columns, values[:head]), (0, values[head + body :])):
        out[at : at + part.numel()] += part.abs()
    return out if body == 0 else out + values[head : head + body].view(-1, columns).abs().sum(0)


def top_columns(sums: Tensor, ratio: float) -> Tensor:
    """Select the k columns with the largest sums: [columns] -> int64 [k], ascending.

    k is the share `ratio` of the columns, and at least 1.
    """
    return sums.topk(max(1, int(sums.numel() * ratio))).indices.sort().values


def bad(what: str, fix: str) -> PlanError:
    """Build the error for an update that ZenFlow cannot split as configured."""
    return PlanError(what, code="zero-zenflow", fix=fix)


@dataclass(slots=True)
class _Places:
    """Where chosen elements of a part are: positions in it, int64."""

    always: Tensor
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class _Now:
    """A step, and the counters in it."""

    step: ZenFlowStep
    calendar: Calendar


_Kept = tuple[Tensor, Tensor, Tensor]
"""A flat tensor, positions in it, and the values there."""


class ZenFlowUpdater(Updater):
    """Splits the updates of a sharded optimizer.

    Args:
        options: How.
        sharding: The units.
        inner: An optimizer of ds_ops that treats elements apart.
    Raises:
        PlanError: another optimizer, or units of other families than the dense one ("zero-zenflow").
    """

    def __init__(self, options: ZenFlowOptions, sharding: ShardedModel, inner: Optimizer) -> None:
        super().__init__(inner)
        if not isinstance(inner, OpsOptimizer) or not inner.elementwise:
            raise bad(
                f"updates split by importance with {type(inner).__name__}",
                "Use Adam or AdamW of the configuration, without torch_adam.",
            )
        trained = [unit for unit in sharding.units if unit.spec.trained]
        families = {unit.spec.family for unit in trained} - {DENSE}
        if families:
            raise bad(f"parameters of {sorted(families)} beside dense ones", "Train models without experts so.")
        cut = [p.name for unit in trained for p in unit.spec.params if not sharding.logical[p.name].whole]
        if cut:
            raise bad(f"columns of {', '.join(cut[:3])}, which tensor parallelism has cut", "Leave one of the two out.")
        self.options, self.sharding = options, sharding
        self._calendar, self._step = Calendar(options), ZenFlowStep()
        self._columns: dict[str, Tensor] = {}  # by parameter
        self._places: dict[int, tuple[Any, _Places]] = {}  # by id of a part's tensor
        self._votes: dict[str, Votes] = {}

    def moved(self, sharding: ShardedModel) -> None:
        self.sharding = sharding

    # ---- what a step does

    def begin(self, units: Sequence[Unit]) -> None:
        """Decide what this step does. Collective where something is to be summed; gradients are final."""
        calendar, auto = self._calendar, self.options.interval == 0
        if self.foresees():
            self._step = calendar.next()
            return
        sums = self._sums(units)
        if calendar.chooses():
            self._columns = {
                name: top_columns(column_sums, self.options.ratio).cpu() for name, column_sums in sums.items()
            }
            self._places.clear()
        voted = auto and self._vote(sums)
        self._step = calendar.next(voted=voted)
        if self._step.end:
            self._votes.clear()

    def foresees(self) -> bool:
        """Return whether the next step is known without the gradients of all ranks.

        False where columns are selected or an interval ends by votes: both need all gradients.
        """
        asks = self._calendar.chooses() or self.options.interval == 0
        return self._calendar.step < self.options.warm_up or not asks

    def reads_host_gradients(self, unit: Unit) -> bool:
        """Return False: gradients are multiplied and cut up, in the format in which they add up."""
        return False

    def writes_copies(self) -> bool:
        """Return False: what the optimizer writes is restored in part."""
        return False

    def early(self, unit: Unit, grads: Mapping[Tensor, Tensor], factor: float) -> None:
        calendar, inner = replace(self._calendar), self.inner
        plan = calendar.next()
        if plan.whole or not isinstance(inner, OpsOptimizer):
            super().early(unit, grads, factor)
            return
        group, preserved = group_of(inner, unit), list[_Kept]()
        means: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            for part in unit.parts:
                more, mean = self._part(unit, part, group, grads[part.tensor] * factor, _Now(plan, calendar))
                preserved += more
                if mean is not None:
                    means[part.tensor] = mean
            if plan.end:
                inner.step_group(group, FusedOps(grads=means))
            self._settle([unit], preserved, plan)

    def update(self, units: Mapping[Unit, set[int]], factor: float) -> None:
        plan, inner = self._step, self.inner
        if plan.whole or not isinstance(inner, OpsOptimizer):
            super().update(units, factor)
            return
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        preserved: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for unit in units:
                for part in unit.parts:
                    if part.tensor.grad is not None:
                        grad, now = part.tensor.grad.mul_(factor), _Now(plan, self._calendar)
                        more, part.tensor.grad = self._part(unit, part, groups[id(part.tensor)], grad, now)
                        preserved += more
                    else:
                        preserved += self._unused(unit, part, groups[id(part.tensor)])
            if plan.end:
                inner.step()
            self._settle(units, preserved, plan)

    def _settle(self, units: Iterable[Unit], preserved: Sequence[_Kept], plan: ZenFlowStep) -> None:
        """Restore the values that the update of the unimportant elements must not change, and clear applied sums."""
        for flat, places, values in preserved:
            flat[places] = values
        for part in (part for unit in units for part in unit.parts if plan.end):
            if (waiting := self.inner.state[part.tensor].get(WAITING)) is not None:
                waiting.zero_()

    def _part(
        self, unit: Unit, part: OptimizerSlice, group: dict[str, Any], grad: Tensor, now: _Now
    ) -> tuple[list[_Kept], Tensor | None]:
        """Step what is chosen of a part. Where the interval ends: what the update of the others is not to change, and the mean that is its
        gradient."""
        inner: Any = self.inner
        inner.ensure_state(group, [part.tensor])
        state, value, grad = inner.state[part.tensor], part.tensor.detach().view(-1), grad.view(-1)
        moments = [state[name].view(-1) for name in inner.states_of(group, part.tensor)]
        if WAITING not in state:
            state[WAITING] = torch.zeros_like(part.tensor, requires_grad=False)
        waiting = state[WAITING].view(-1)
        places = self._places_of(unit, part)
        self._begin(moments, places, now.step)
        waiting += grad
        sign = -1.0 if group.get("maximize") else 1.0
        preserved = []
        for where, count in ((places.always, now.calendar.step), (places.chosen, now.calendar.fast)):
            if not where.numel():
                continue
            values, states = value[where], [moment[where] for moment in moments]
            spec = inner.spec(group, count)
            update_spec = UpdateSpec(spec.rule, spec.coefficients, sign, False, dither_of(count))
            update(update_spec, UpdateTensors([values], [grad[where]], tuple([s] for s in states)))
            value[where] = values
            for moment, new in zip(moments, states, strict=True):
                moment[where] = new
            waiting[where] = 0
            if now.step.end:
                preserved += [(value, where, values), *((m, where, s) for m, s in zip(moments, states, strict=True))]
        return preserved, (waiting / now.calendar.since).view_as(part.tensor) if now.step.end else None

    def _unused(self, unit: Unit, part: OptimizerSlice, group: dict[str, Any]) -> list[_Kept]:
        """Handle a part that had no gradient in this step, as `_part`.

        Gradients of earlier steps may wait for the update; selected elements stay unchanged.
        """
        inner: Any = self.inner
        state, value = inner.state.get(part.tensor, {}), part.tensor.detach().view(-1)
        moments = [state[name].view(-1) for name in inner.states_of(group, part.tensor) if name in state]
        places = self._places_of(unit, part)
        self._begin(moments, places, self._step)
        if not self._step.end or WAITING not in state or not state[WAITING].any():
            return []
        part.tensor.grad = (state[WAITING] / self._calendar.since).view_as(part.tensor)
        selections = (places.always, places.chosen)
        return [(tensor, where, tensor[where]) for where in selections for tensor in (value, *moments) if where.numel()]

    def _begin(self, moments: Sequence[Tensor], places: _Places, plan: ZenFlowStep) -> None:
        for moment in moments if plan.choose else ():
            moment[places.chosen] = 0

    def finish(self) -> None:
        if self._step.end:
            self._calendar.ended()

    # ---- which columns

    def _sums(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        """Sum |g| of every matrix over rows and ranks: [columns] each. Collective: an all-reduce of 4 bytes a column."""
        device = units[0].shard.device if units else torch.device("cpu")
        shapes = {p.name: p.shape for u in units for p in u.spec.params if len(p.shape) == 2}
        totals = {name: torch.zeros(shape[1], dtype=torch.float32, device=device) for name, shape in shapes.items()}
        for unit in units:
            for piece in (piece for piece in self.sharding.pieces(unit) if len(piece.shape) == 2):
                grad = unit.gradients.view(piece.start, piece.stop)
                if grad is not None and grad.numel():
                    sums = columns_of(grad.view(-1), piece.interval.start, piece.shape[1])
                    totals[piece.name] += sums.to(device, torch.float32)
        if totals:
            together = on_group(torch.cat(list(totals.values())), self.sharding.group)
            comm.all_reduce(together, group=self.sharding.group, unit="importance")
            together = together.to(device)
            totals = dict(zip(totals, together.split([s.numel() for s in totals.values()]), strict=True))
        return totals

    def _vote(self, sums: Mapping[str, Tensor]) -> bool:
        steps, ratio, votes = self._calendar.since + 1, self.options.ratio, 0
        for name, column_sums in sums.items():
            chosen = float(column_sums[self._columns[name].to(column_sums.device)].sum())
            votes += self._votes.setdefault(name, Votes()).add(chosen, float(column_sums.sum()), steps, ratio)
        everyone, voters = self.sharding.everyone, len(sums)
        if everyone.ranks != self.sharding.group.ranks:  # other ranks have other matrices: stages of a pipeline
            gathered = comm.all_gather_json([votes, voters], everyone, unit="importance")
            votes, voters = (sum(column) for column in zip(*gathered, strict=True))
        return votes >= int(self.options.auto_ratio * voters)

    def _places_of(self, unit: Unit, part: OptimizerSlice) -> _Places:
        known = self._places.get(id(part.tensor))
        if known is not None and known[0] is part.tensor:
            return known[1]
        always, chosen = [], []
        for piece in self.sharding.pieces(unit):
            if not part.start <= piece.start < part.stop:
                continue
            indices = torch.arange(piece.interval.numel, device="cpu")
            at = piece.start - part.start
            if len(piece.shape) != 2:
                always.append(indices + at)
                continue
            inside = torch.zeros(piece.shape[1], dtype=torch.bool, device="cpu")
            inside[self._columns[piece.name]] = True
            chosen.append(indices[inside[(indices + piece.interval.start) % piece.shape[1]]] + at)
        device, none = part.tensor.device, torch.zeros(0, dtype=torch.int64, device="cpu")
        places = _Places(torch.cat([none, *always]).to(device), torch.cat([none, *chosen]).to(device))
        self._places[id(part.tensor)] = part.tensor, places
        return places

    # ---- what is kept

    def state_dict(self) -> dict[str, Any]:
        """Return counters and columns for a checkpoint. JSON-able and the same on every rank. Collective.

        The gradient sums are part of the optimizer state.
        """
        calendar, known = self._calendar, self.sharding.logical
        columns: dict[str, list[int]] = {known[name].name: entries.tolist() for name, entries in self._columns.items()}
        votes = {known[name].name: [v.mean, v.others] for name, v in self._votes.items()}
        if self.sharding.everyone.ranks != self.sharding.group.ranks:
            for other, other_votes in comm.all_gather_json([columns, votes], self.sharding.everyone, unit="state_dict"):
                columns, votes = columns | other, votes | other_votes
        counted = {"step": calendar.step, "since": calendar.since, "fast": calendar.fast}
        entries = {**counted, "columns": dict(sorted(columns.items())), "votes": dict(sorted(votes.items()))}
        return {"importance": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, also of another stage or number of ranks."""
        saved = state.get("importance")
        if saved is None:
            return
        names = {logical.name: name for name, logical in self.sharding.logical.items()}
        counted = self._calendar
        counted.step, counted.since, counted.fast = int(saved["step"]), int(saved["since"]), int(saved["fast"])
        self._columns = {
            names[k]: torch.tensor(v, dtype=torch.int64, device="cpu")
            for k, v in saved["columns"].items()
            if k in names
        }
        self._votes = {names[k]: Votes(*v) for k, v in saved["votes"].items() if k in names}
        self._places.clear()

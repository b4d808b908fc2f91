"""Follows the rules of `importance.py`: steps the chosen elements of a sharded optimizer, adds up the gradients of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm as comm
from ds_ops.optim import OpsOptimizer
from ds_ops.rules import UpdateSpec, UpdateTensors
from ds_ops.updating import update
from ds_zero.layout.elements import Piece
from ds_zero.layout.units import DENSE
from ds_zero.policies.importance import Calendar, Importance, Turn, Votes, bad, columns_of, top_columns
from ds_zero.runtime.sharding import Sharding
from ds_zero.runtime.unit import Part, Unit
from ds_zero.update.inner import step_with

__all__ = ["SUM", "Split"]

SUM = "zenflow_sum"  # gradients of the rest since their last update; a state of the optimizer, saved with it


@dataclass(slots=True)
class _Places:
    """Where chosen elements of a part are: positions in it, int64."""

    always: Tensor
    chosen: Tensor


@dataclass
class Split:
    """Splits the updates of a sharded optimizer.

    Args:
        told: How.
        sharding: The units.
        inner: An optimizer of ds_ops that treats elements apart.
    Raises:
        PlanError: another optimizer, or units of other families than the dense one ("zero-importance").
    """

    told: Importance
    sharding: Sharding
    inner: Optimizer
    _columns: dict[str, Tensor] = field(default_factory=dict)  # by parameter
    _places: dict[int, tuple[Any, _Places]] = field(default_factory=dict)  # by id of a part's tensor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, OpsOptimizer) or not self.inner.elementwise:
            raise bad(
                f"updates split by importance with {type(self.inner).__name__}",
                "Use Adam or AdamW of the configuration, without torch_adam.",
            )
        families = {unit.spec.family for unit in self.sharding.units if unit.spec.trained} - {DENSE}
        if families:
            raise bad(f"parameters of {sorted(families)} beside dense ones", "Train models without experts so.")
        trained = [p.name for unit in self.sharding.units if unit.spec.trained for p in unit.spec.params]
        cut = [name for name in trained if not self.sharding.logical[name].whole]
        if cut:
            raise bad(f"columns of {', '.join(cut[:3])}, which tensor parallelism has cut", "Leave one of the two out.")
        self._calendar, self._turn = Calendar(self.told), Turn()
        self._votes: dict[str, Votes] = {}

    # ---- what a step does

    def begin(self, units: Sequence[Unit]) -> None:
        """Decide what this step does. Collective where something is to be summed; gradients are final."""
        calendar, auto = self._calendar, self.told.interval == 0
        after = calendar.step >= self.told.warm_up
        if not after or not (calendar.chooses() or auto):
            self._turn = calendar.next()
            return
        sums = self._sums(units)
        if calendar.chooses():
            self._columns = {name: top_columns(found, self.told.ratio).cpu() for name, found in sums.items()}
            self._places.clear()
        voted = auto and self._vote(sums)
        self._turn = calendar.next(voted=voted)
        if self._turn.end:
            self._votes.clear()

    def update(self, units: Mapping[Unit, set[int]], factor: float) -> None:
        """Step the parts of units that have a gradient, which is multiplied by `factor`. Gradients may be changed."""
        told, inner = self._turn, self.inner
        if told.whole or not isinstance(inner, OpsOptimizer):
            step_with(inner, [grad for u in units for grad in u.gradients.sums or ()], factor)
            return
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for unit in units:
                for part in unit.parts:
                    if part.tensor.grad is not None:
                        kept += self._part(unit, part, groups[id(part.tensor)], factor)
                    else:
                        kept += self._unused(unit, part, groups[id(part.tensor)])
            if told.end:
                inner.step()
            for flat, places, values in kept:
                flat[places] = values
        if told.end:
            for unit in units:
                for part in unit.parts:
                    if (rest := inner.state[part.tensor].get(SUM)) is not None:
                        rest.zero_()

    def _part(
        self, unit: Unit, part: Part, group: dict[str, Any], factor: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Step what is chosen of a part. Where the interval ends, leave the rest's mean as its gradient; returns what that update is not to change."""
        inner: Any = self.inner
        inner.ensure_state(group, [part.tensor])
        state, value = inner.state[part.tensor], part.tensor.detach().view(-1)
        grad = part.tensor.grad.view(-1).mul_(factor)  # type: ignore[union-attr]
        moments = [state[name].view(-1) for name in inner.states_of(group, part.tensor)]
        if SUM not in state:
            state[SUM] = torch.zeros_like(part.tensor, requires_grad=False)
        rest = state[SUM].view(-1)
        places = self._places_of(unit, part)
        if self._turn.choose:
            for moment in moments:
                moment[places.chosen] = 0
        rest += grad
        sign = -1.0 if group.get("maximize") else 1.0
        kept = []
        for where, count in ((places.always, self._calendar.step), (places.chosen, self._calendar.fast)):
            if not where.numel():
                continue
            own, states = value[where], [moment[where] for moment in moments]
            spec = inner.spec(group, count)
            told = UpdateSpec(spec.rule, spec.coefficients, sign, False)
            update(told, UpdateTensors([own], [grad[where]], tuple([s] for s in states)))
            value[where] = own
            for moment, new in zip(moments, states, strict=True):
                moment[where] = new
            rest[where] = 0
            if self._turn.end:
                kept += [(value, where, own), *((m, where, s) for m, s in zip(moments, states, strict=True))]
        part.tensor.grad = (rest / self._calendar.since).view_as(part.tensor) if self._turn.end else None
        return kept

    def _unused(self, unit: Unit, part: Part, group: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """As `_part`, where nobody used the part in this step: gradients of earlier ones may wait, what is chosen stays as it is."""
        inner: Any = self.inner
        state, value = inner.state.get(part.tensor, {}), part.tensor.detach().view(-1)
        moments = [state[name].view(-1) for name in inner.states_of(group, part.tensor) if name in state]
        places = self._places_of(unit, part)
        if self._turn.choose:
            for moment in moments:
                moment[places.chosen] = 0
        if not self._turn.end or SUM not in state or not state[SUM].any():
            return []
        part.tensor.grad = (state[SUM] / self._calendar.since).view_as(part.tensor)
        found = (places.always, places.chosen)
        return [(held, where, held[where]) for where in found for held in (value, *moments) if where.numel()]

    def finish(self) -> None:
        """All units were stepped."""
        if self._turn.end:
            self._calendar.ended()

    # ---- which columns

    def _matrices(self, unit: Unit) -> list[Piece]:
        return [piece for piece in self.sharding.pieces(unit) if len(piece.shape) == 2]

    def _sums(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        """[columns] of every matrix: sums of |g| over rows and ranks. Collective: one all-reduce of 4 bytes a column."""
        device = units[0].shard.device if units else torch.device("cpu")
        shapes = {p.name: p.shape for u in units for p in u.spec.params if len(p.shape) == 2}
        found = {name: torch.zeros(shape[1], dtype=torch.float32, device=device) for name, shape in shapes.items()}
        for unit in units:
            for piece in self._matrices(unit):
                grad = unit.gradients.view(piece.start, piece.stop)
                if grad is not None and grad.numel():
                    sums = columns_of(grad.view(-1), piece.interval.start, piece.shape[1])
                    found[piece.name] += sums.to(device, torch.float32)
        if found:
            together = torch.cat(list(found.values()))
            comm.all_reduce(together, group=self.sharding.group, unit="importance")
            found = dict(zip(found, together.split([s.numel() for s in found.values()]), strict=True))
        return found

    def _vote(self, sums: Mapping[str, Tensor]) -> bool:
        steps, ratio, votes = self._calendar.since + 1, self.told.ratio, 0
        for name, found in sums.items():
            chosen = float(found[self._columns[name].to(found.device)].sum())
            votes += self._votes.setdefault(name, Votes()).add(chosen, float(found.sum()), steps, ratio)
        everyone, asked = self.sharding.everyone, len(sums)
        if everyone.ranks != self.sharding.group.ranks:  # other ranks have other matrices: stages of a pipeline
            told = comm.all_gather_json([votes, asked], everyone, unit="importance")
            votes, asked = (sum(column) for column in zip(*told, strict=True))
        return votes >= int(self.told.auto_ratio * asked)

    def _places_of(self, unit: Unit, part: Part) -> _Places:
        known = self._places.get(id(part.tensor))
        if known is not None and known[0] is part.tensor:
            return known[1]
        always, chosen = [], []
        for piece in self.sharding.pieces(unit):
            if not part.start <= piece.start < part.stop:
                continue
            own = torch.arange(piece.interval.numel)
            at = piece.start - part.start
            if len(piece.shape) != 2:
                always.append(own + at)
                continue
            inside = torch.zeros(piece.shape[1], dtype=torch.bool)
            inside[self._columns[piece.name]] = True
            chosen.append(own[inside[(own + piece.interval.start) % piece.shape[1]]] + at)
        device, none = part.tensor.device, torch.zeros(0, dtype=torch.int64)
        found = _Places(torch.cat([none, *always]).to(device), torch.cat([none, *chosen]).to(device))
        self._places[id(part.tensor)] = part.tensor, found
        return found

    # ---- what is kept

    def state_dict(self) -> dict[str, Any]:
        """Counters and columns. JSON-able, the same on every rank; sums are states of the optimizer. Collective."""
        calendar, known = self._calendar, self.sharding.logical
        columns: dict[str, list[int]] = {known[name].name: found.tolist() for name, found in self._columns.items()}
        votes = {known[name].name: [v.mean, v.rest] for name, v in self._votes.items()}
        if self.sharding.everyone.ranks != self.sharding.group.ranks:
            for other, theirs in comm.all_gather_json([columns, votes], self.sharding.everyone, unit="state_dict"):
                columns, votes = columns | other, votes | theirs
        counted = {"step": calendar.step, "since": calendar.since, "fast": calendar.fast}
        return {**counted, "columns": dict(sorted(columns.items())), "votes": dict(sorted(votes.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, also of another stage or number of ranks."""
        names = {logical.name: name for name, logical in self.sharding.logical.items()}
        counted = self._calendar
        counted.step, counted.since, counted.fast = int(state["step"]), int(state["since"]), int(state["fast"])
        self._columns = {
            names[k]: torch.tensor(v, dtype=torch.int64) for k, v in state["columns"].items() if k in names
        }
        self._votes = {names[k]: Votes(*v) for k, v in state["votes"].items() if k in names}
        self._places.clear()

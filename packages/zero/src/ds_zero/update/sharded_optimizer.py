"""The wrapped optimizer keeps its groups, and updates shards instead of parameters.

Words: the *inner* optimizer is the one the user made; its groups (dicts, rates, order) are also ours, so schedulers and
edits between steps work. Each of its parameter lists now holds *parts* of shards. A part is a whole unit as long as the
parameters of the unit have the same history; the first step in which only some of them were used cuts it up, so that each
has its own state and step count, exactly as if it had never been joined.

An inner optimizer with `owns_reduction = True` (1-bit Adam) averages gradients itself: at stage 0 it gets each rank's own.

`step` consumes gradients, or leaves them until `zero_grad` where `param.grad` shows them. The averaged gradient is sum / (divisor of the family x loss scale x divisor); that factor and
clipping are one factor, see `apply_step.py`. Names in what is kept are those of logical tensors, see `reduction_groups.py`.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ds_comm as comm
from ds_comm import LocalShard
from ds_comm.metadata import metadata_device
from ds_config.errors import PlanError
from ds_ops.optim import Muon
from ds_zero.layout.dtypes_plan import ScaleState, next_scale
from ds_zero.layout.model_members import drop_outside, named_members, set_outside
from ds_zero.layout.shard_options import OptimizerTraits, ShardOptions
from ds_zero.layout.units import DENSE
from ds_zero.runtime.gradient_norms import GradientAccess, GradientAgreement
from ds_zero.runtime.sharded_model import ShardedModel, group_for
from ds_zero.runtime.suspend import KINDS
from ds_zero.runtime.unit import Unit
from ds_zero.runtime.zero_grad import ZeroGrad
from ds_zero.update.apply_step import StepGuard, Updater, apply, due_of, make_directions, scale_in_place
from ds_zero.update.optimizer_state import OptimizerState, PartStates
from ds_zero.update.overlap_plan import Outlook
from ds_zero.update.overlapped_update import Ahead
from ds_zero.update.rank_agreement import (
    StepSettings,
    agree,
    check_differences,
    first_nonfinite,
    option_settings,
    square_of,
    weight_of,
)
from ds_zero.update.state_dict import OptimizerStateDict, state_before
from ds_zero.update.weight_views import WeightViews, not_published
from ds_zero.update.wrapped_optimizer import (
    check_coupled,
    check_inner,
    check_members,
    owns_reduction,
    tell_parts,
    traits_of,
)

__all__ = ["ShardedOptimizer", "StepReport"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. The same on every rank.

    Attributes:
        norm: Global norm of the averaged gradient before clipping, or of what is clipped in its stead (`Muon.clip_directions`); None where nothing
            asked for it.
        skipped: Whether the update was left out because a gradient was not finite.
        scale: The loss scale the step's gradients were made with.
        nonfinite: The first parameter, in registration order, whose gradient is not finite; None where the norm is.
        extra: Sums over the ranks of what `ShardedOptimizer.extra` was.
    """

    norm: float | None
    skipped: bool
    scale: float
    nonfinite: str | None = None
    extra: tuple[float, ...] = ()


class ShardedOptimizer(Optimizer):
    """A torch optimizer over the shards of a model. Made by `shard`.

    Attributes:
        divisor: Gradients of the next step are divided by it; 1.0 unless the caller averages over something of its own.
        gain: Averages are multiplied by it, in every step and wherever gradients are read or set: the ranks, for sums over them.
        backwards: How many have begun on this rank since the last step.
        judge: Asked on every rank before an update from a gradient that is not finite, with the name of the first such parameter:
            whether to leave the update out. Not asked about the overflows of a dynamic loss scale. None: `Precision` alone decides.
        last: What the last step did; None before the first.
        extra: Numbers that the next step sums over the ranks, in the message in which they agree anyway (a loss costs none of
            its own then); as many on every rank.
        sharding: The model's units.
        ahead: Updates that begin during backward.
        updating: Whether the inner optimizer is stepped.
        before_update: Called before a step first writes to what `shards` gives, which may be in a backward.
    """

    def __init__(self, model: nn.Module, inner: Optimizer, options: ShardOptions) -> None:
        self._groups = {id(p): n for n, group in enumerate(inner.param_groups) for p in group["params"]}
        check_differences(option_settings(options, inner), group_for(options), "shard")
        check_members(model, params := [p for group in inner.param_groups for p in group["params"]])
        self._outside = set_outside(model, params)
        check_inner(model, inner, options)
        names = {id(p): name for name, p in named_members(model).items()}
        self._names = [[names[id(p)] for p in group["params"]] for group in inner.param_groups]
        self.inner, self.divisor, self.gain = inner, 1.0, 1.0
        self._settings = StepSettings(inner)
        self.last: StepReport | None = None
        self.extra: tuple[float, ...] = ()
        self.judge: Callable[[str | None], bool] | None = None
        self.before_update: Callable[[], None] = lambda: None
        self._scaled, self.backwards, self.updating = 0, 0, False
        self._guard = inner.register_step_pre_hook(StepGuard(self))
        self._shows: bool | None = None
        self._habits = self._traits(model, options)
        self._scale: ScaleState | None = None
        self.updater = Updater(inner)
        before = state_before(inner)
        self._cut(model, options, self._habits)
        if options.layout is None:
            logical = self.sharding.logical
            members = [(self._groups[id(p)], logical[names[id(p)]]) for p in params if p.requires_grad]
            tell_parts(inner, self._habits, members)
        if self.sharding.precision.scale:
            self._scale = self.sharding.precision.scale.start()
        # A rank may own nothing (few whole matrices, many ranks), and torch refuses to make an optimizer of nothing.
        owned = any(g["params"] for g in inner.param_groups)
        super().__init__(
            inner.param_groups if owned else [torch.nn.Parameter(torch.empty(0, device="cpu"))], inner.defaults
        )
        for group in inner.param_groups:  # as torch has done where this rank owns something
            for key, value in inner.defaults.items():
                group.setdefault(key, value)
        inner.state = PartStates(inner.state, self._is_sharded)
        self.param_groups, self.state = inner.param_groups, inner.state
        if options.updates is not None:
            self.updater = options.updates.start(inner, self.sharding)
        self.ahead = Ahead(self.sharding, self, Outlook())
        self._views = WeightViews(inner, self._bring_back, self.refresh)
        vars(self).update(self._views.switches)
        if before["state"]:
            self.load_state_dict(before)

    def _traits(self, model: nn.Module, options: ShardOptions) -> dict[int, OptimizerTraits]:
        more = 0 if options.updates is None else options.updates.states
        traits = traits_of(self.inner, options.layout)
        check_coupled(model, self.inner, options, traits)
        return {n: replace(habits, states=habits.states + more) for n, habits in traits.items()}

    def _is_sharded(self, param: object) -> bool:
        """Whether this is a parameter of the model, whose state is that of parts."""
        return isinstance(param, Tensor) and self.sharding.find(param) is not None

    def _bring_back(self) -> None:
        """Bring shards and their state to where the optimizer can write to them."""
        self.ahead.take_back_all()
        self.sharding.arrivals.finish()
        self.sharding.quiet("publish_weights")  # shards that ranks share are written while nobody reads them
        for unit in self.sharding.units:
            unit.state_store.fetch()
            unit.state_store.fetch_state()

    def _cut(self, model: nn.Module, options: ShardOptions, habits: Mapping[int, OptimizerTraits]) -> None:
        """Make the units, and give their parts to the inner optimizer."""
        inner = self.inner
        self._frozen = {id(p): p for p in named_members(model).values() if not p.requires_grad}
        self.sharding = ShardedModel(model, self._groups, options, habits)
        if owns_reduction(inner):
            self.sharding.keep_gradients_local()
        self._divisor = self.sharding.families[DENSE].divisor  # the ranks that the batch is split over
        self.sharding.end = self.close
        self.sharding.runtime.begun = self._begin_backward
        self._zero_grad = ZeroGrad(model, self.zero_grad)
        self._zero_grad.attach()
        self.sharding.grad_factor = self._remaining
        if self._shows is not None:
            self.show_gradients(sharded=self._shows)
        self.state_store = OptimizerState(inner, self.sharding)
        self.sharding.state_of = self.state_store.of
        for unit in self.sharding.units:
            unit.state_store.states = self.sharding.state_of
        for number, group in enumerate(inner.param_groups):
            units = [u for u in self.sharding.units if u.spec.params[0].group == number]
            group["params"] = [part.tensor for unit in units for part in unit.parts]
        inner.state.clear()
        self.updater.moved(self.sharding)

    # ---- one step

    def average(self, divisor: float) -> float:
        """Return the factor that turns a summed gradient into the averaged one, times `gain` and divided by `divisor`.

        In some reduction groups there is another weight besides.
        """
        scale = 1.0 if self._scale is None else self._scale.scale
        return self.gain / (self._divisor * scale * divisor)

    def _remaining(self, unit: Unit) -> float:
        """Return what the sums of a unit, as they are, are to be multiplied by to be the averaged gradient."""
        return self.average(self.divisor) * weight_of(unit, self._divisor) / unit.gradients.applied

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply `loss` by the loss scale; return the loss unchanged without a scale."""
        self._scaled += 1
        return loss if self._scale is None else loss * self._scale.scale

    def _check_trainable(self) -> None:
        for unit in self.sharding.units:
            if not unit.spec.trained and any(p.grad is not None for p in unit.params):
                found = zip(unit.spec.params, unit.params, strict=True)
                names = [i.name for i, p in found if p.grad is not None and id(p) in self._frozen]
                if names:
                    raise PlanError(
                        f"{', '.join(names[:5])} got a gradient, and was frozen when the model was sharded",
                        code="zero-requires-grad-changed",
                        fix="Call optimizer.replan() after changing requires_grad.",
                    )

    def replan(self) -> None:
        """Plan the units anew after `requires_grad` of parameters has changed. Collective, between steps.

        Parameters that were thawed get optimizer state in the next step, the state of frozen ones is dropped, the state of
        all others stays. Gradients that were not stepped are dropped. Only parameters that the optimizer was made with can be
        trained. Cost: every rank holds the whole model and its share of the state twice for a moment, and sees the state of one
        parameter at a time whole.
        """
        self.ahead.close()
        fragments, scalars = self.state_store.fragments(), self.common_state_dict()
        self.zero_grad()
        model, options = self.sharding.model, self.sharding.options
        for unit in self.sharding.units:
            unit.gradients.clear()  # also those of units that were not trained
        self._zero_grad.detach()
        self.sharding.close()
        self.inner.state.clear()
        self._cut(model, options, self._habits)
        members = named_members(model).items()
        dropped = {self.sharding.logical[n].name for n, p in members if not p.requires_grad}
        scalars["scalars"] = {
            k: {n: v for n, v in of.items() if n not in dropped} for k, of in scalars["scalars"].items()
        }
        self._saved.load(scalars)
        self.state_store.carry(fragments, {n for n, p in members if p.requires_grad})
        self.ahead = Ahead(self.sharding, self, self.ahead.outlook)

    @property
    def may_thaw(self) -> bool:
        """Whether a parameter of the groups was frozen when the model was sharded."""
        return not self._frozen.keys().isdisjoint(self._groups)

    def follow_requires_grad(self, anywhere: Callable[[bool], bool] = bool) -> None:
        """Train what was thawed since the model was sharded, from this step on; collective where that is something.

        As with a plain optimizer: parameters that are frozen meanwhile keep their state, and thawed ones that are in no group are left
        alone. Does nothing where a backward of the step has begun: `step` says then what got a gradient.

        Args:
            anywhere: Tells whether something is so on some rank of the model, for ranks that have other parameters.
        """
        if self.backwards:
            return
        more = self.param_groups[len(self._names) :]  # added to the inner optimizer, which the program still has
        del self.param_groups[len(self._names) :]
        for group in more:
            self.add_param_group(group)
        thawed = [param for param in self._frozen.values() if param.requires_grad]
        if anywhere(any(id(param) in self._groups for param in thawed)):
            self._replan_with(())
            return
        for param in thawed:
            del self._frozen[id(param)]
            if (place := self.sharding.find(param)) is not None:
                self.sharding.runtime.reducing.leave_out(*place)

    def keep_state_of(self, names: Collection[str], anywhere: Callable[[bool], bool] = bool) -> None:
        """Have frozen parameters of the groups state all the same, as a plain optimizer that loads it; collective where there are such.

        Args:
            names: Logical names; others in it are no matter.
            anywhere: As of `follow_requires_grad`.
        """
        more: list[Tensor] = []
        for param in self._frozen.values():
            place = self.sharding.find(param) if id(param) in self._groups else None
            if place is not None and self.sharding.logical[place[0].spec.params[place[1]].name].name in names:
                more.append(param)
        if anywhere(bool(more)):
            self._replan_with(more)

    def _replan_with(self, more: Iterable[Tensor]) -> None:
        """Plan anew, with `more` parameters, and those that are frozen for a while, among the trained ones."""
        trained = (param for unit in self.sharding.units if unit.spec.trained for param in unit.params)
        resting = [param for param in (*trained, *more) if not param.requires_grad]
        for param in resting:
            param.requires_grad_(True)
        try:
            self.replan()
        finally:
            for param in resting:
                param.requires_grad_(False)

    def suspend(self, kinds: Collection[str] = KINDS, *, pin_memory: bool = True) -> dict[str, int]:
        """Suspend the sharded model together with the optimizer state, as `ShardedModel.suspend`."""
        self.sharding.runtime.reducing.drain()  # where a sum comes, an update may begin
        self.ahead.take_back_all()
        state = [v for of in self.inner.state.values() for v in of.values() if isinstance(v, Tensor)]
        return self.sharding.suspend(kinds, pin_memory=pin_memory, state=state)

    def resume(self) -> None:
        """Resume the sharded model and optimizer state, as `ShardedModel.resume`."""
        self.sharding.resume()

    def publish_weights(self) -> AbstractContextManager[None]:
        """Bring every copy of the weights up to date after the block, in which the optimizer's shards may be written. Collective.

        For methods of the optimizer's own that write weights (`optimizer.inner.swap()`), and loops over `param_groups`.
        """
        return self._views.publishing()

    def _check_published(self, *, stepping: bool) -> None:
        """Take over what was written to shards by way of the optimizer's groups, or raise if forward has used the old values.

        Args:
            stepping: Between the last backward and the update, which publishes what it makes of the shards.
        Raises:
            UnsupportedError: copies of the old values are, or may have been, in use ("zero-unpublished-weights").
        """
        for unit in self.sharding.units:
            if not unit.spec.trained or unit.plan.early or not unit.unpublished:
                continue
            if unit.plan.aliased and unit.layout.world == 1:
                unit.note_published()  # the memory that forward uses
            elif stepping and not unit.edited and not (unit.plan.aliased and unit.storage.common):
                unit.mark_updated()
            else:
                raise not_published(f"a loop over param_groups, or a hook, wrote (unit {unit.spec.name})")

    def _begin_backward(self) -> None:
        self._check_published(stepping=False)
        self.backwards += 1
        if self._scale is not None and not self._scaled and self.sharding.runtime.reducing.adds:
            raise PlanError(
                f"backward of a loss that was not scaled, with loss scale {self._scale.scale:g}: `step` would divide by it",
                code="loss-not-scaled",
                fix="Call `optimizer.scale(loss).backward()`.",
            )
        for unit in self.sharding.units:  # as many as there are buffers: files are read while gradients are computed
            if unit.spec.trained and unit.state_store.alone:
                unit.state_store.begin_fetch()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish every reduction, clip, update the shards, start to gather the new weights (`weight_arrivals.py`). Collective.

        Gradients stay until `zero_grad` where `param.grad` shows them (`show_gradients`), as torch's do; else they are consumed. Returns
        the closure's result. Costs one small all-reduce besides the gathers.

        Raises:
            PlanError: on all ranks, if they have different values in their groups: a rate, a weight decay ("zero-ranks-differ").
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self.sharding.runtime
        self.sharding.check_here()
        self._check_trainable()
        if len(self.param_groups) != len(self._names):
            raise PlanError(
                f"the optimizer that was given to `shard` has {len(self.param_groups)} groups now, and had {len(self._names)}",
                code="zero-add-group",
                fix="Call add_param_group of the optimizer that `shard` returned.",
            )
        runtime.reducing.close(rests=True)
        runtime.settle(self.sharding.group)
        error = self.ahead.finish() if self.ahead.units else None
        units = [u for u in self.sharding.units if u.spec.trained]
        scale = 1.0 if self._scale is None else self._scale.scale
        average = self.average(self.divisor)
        wants = (
            self.sharding.precision.skip_nonfinite or self._scale is not None or self.sharding.options.clip is not None
        )
        raised, runtime.reducing.raised = runtime.reducing.raised, 0
        self._settings.read({"divisor": self.divisor / self.gain, "backwards that raised": raised})
        facts = agree(self.sharding, self._settings, wants_norm=wants, extra=self.extra, failed=error is not None)
        if facts.failed:
            raise self.ahead.failed(facts.failed, error)
        norm = None if facts.square is None else math.sqrt(facts.square) * average if facts.square >= 0 else math.nan
        finite = norm is None or math.isfinite(norm)
        culprit = None if finite else first_nonfinite(self.sharding, units)
        skipped = not finite and self._skips(culprit)
        if not skipped and norm is not None and isinstance(self.inner, Muon) and self.inner.clip_directions:
            make_directions(units, self._remaining, facts.unused, self.inner)
            norm = self._measure(units) * average
        clip = self._clip(norm)
        attributes = runtime.reducing.attributes
        stay = attributes.keeps
        if not skipped:
            divided = stay and scale_in_place(units, clip, self._remaining, attributes, self.updater)
            due = due_of(units, self.sharding.grad_factor, average, 1.0 if stay else clip, facts.unused)
            self._check_published(stepping=True)
            self.updating = True
            try:
                with self._views.stepping() if self._views.methods else nullcontext():
                    apply(due, self.state_store, self.updater, self.ahead.settle if self.ahead.units else None)
            finally:
                self.updating = False
            for unit in units if divided else ():
                attributes.averaged(unit)
        if self.ahead.units:
            self.ahead.outlook.stepped(self.backwards, self.divisor, altered=skipped or clip != 1.0)
        for unit in units:  # either takes back what was made of them early, where the step was skipped
            unit.gradients.change() if stay else unit.gradients.clear()
        runtime.stepped(keep_gradients=stay)
        if not skipped:
            self.sharding.gather_kept()
        if self._scale is not None and self.sharding.precision.scale is not None:
            self._scale = next_scale(self.sharding.precision.scale, self._scale, skipped)
        factor = 0.0 if skipped else 1.0 if self._scale is None else self._scale.scale / scale
        for unit in units if factor != 1.0 else ():
            unit.gradients.way.rescale(factor)
        self.last = StepReport(norm, skipped, scale, culprit, facts.extra)
        self.divisor, self._scaled, self.backwards, self.extra = 1.0, 0, 0, ()
        if stay:
            for unit in units:  # the next loss scale is another one, the gradients that stay are the same
                unit.gradients.applied *= self.average(1.0) / average
            attributes.put()
        return loss

    def _skips(self, culprit: str | None) -> bool:
        """Whether a step whose gradient is not finite leaves its update out."""
        rule = self.sharding.precision.scale
        judged = self.judge is not None and (rule is None or rule.static is not None) and self.judge(culprit)
        return judged or self.sharding.precision.skip_nonfinite or self._scale is not None

    def _measure(self, units: Sequence[Unit]) -> float:
        """Return the norm of what gradients are now, as summed over the ranks. Collective."""
        everyone, square = self.sharding.everyone, square_of(units, self._divisor)
        if everyone.size > 1:
            message = torch.tensor([square], dtype=torch.float64, device=metadata_device(everyone))
            comm.all_reduce(message, group=everyone, unit="norm")
            square = message.item()
        return math.sqrt(square) if square >= 0 else math.nan

    def _clip(self, norm: float | None) -> float:
        clip = self.sharding.options.clip
        if clip is None or norm is None or clip == math.inf:
            return 1.0
        return min(1.0, clip / (norm + 1e-6))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. The model's own `zero_grad` does it, too.

        Args:
            set_to_none: False: parameters that have a gradient keep one of zeros, and are stepped with it, where `param.grad`
                shows gradients.
        """
        reducing = self.sharding.runtime.reducing
        if set_to_none or not reducing.attributes.keeps:
            reducing.forget()
        else:
            reducing.zero()

    def reduction(self, now: bool) -> AbstractContextManager[None]:
        """Whether backwards inside reduce their gradients at once. Contexts combine with *and*.

        Without reduction a rank holds the gradients of all its parameters, in the accumulate format, until `step`.
        """
        self.sharding.check_open("backward")
        return self.sharding.runtime.reducing.reduction(now)

    def reduce(self) -> None:
        """Reduce what backwards without reduction have left, and wait for it. Collective, between backwards.

        `step` does it, too; a pipeline does it earlier, while other stages still compute. What is tied over stages waits for `step`.
        """
        reducing = self.sharding.runtime.reducing
        reducing.close(apart=False)
        # Stages of a pipeline reduce one after the other: a measurement over all of them would wait in the middle of a step.
        reducing.attributes.take()
        reducing.measure_after_backward()
        reducing.attributes.put()

    def measure_gradients(self) -> None:
        """Measure the norms of all gradients again, after writes that were no factors. Collective, between backwards.

        Cost: that of the end of a backward, see `show_gradients`.
        """
        reducing = self.sharding.runtime.reducing
        reducing.attributes.take()
        reducing.measure()
        reducing.attributes.put()

    @property
    def keeps_gradients(self) -> bool:
        """Whether `step` leaves gradients for `zero_grad`, as torch's optimizers do: those that `param.grad` shows."""
        return self.sharding.runtime.reducing.attributes.keeps

    def show_gradients(self, *, sharded: bool = True) -> None:
        """Set `param.grad` to the averaged gradient from the end of a backward to `zero_grad`, from now on. Collective.

        At stage 0 it is a plain tensor where gradients are summed in the parameter's dtype, a `ShardedGradient` elsewhere.

        Args:
            sharded: False: gradients of which this rank has a part stay None, nothing is measured, and `step` consumes gradients.
        Cost, of a backward that reduces: a wait for its reductions; 24 bytes a parameter in one all-gather (in two all-reduces from nine
        ranks on); two reads of this rank's gradients on a device, one on a CPU, and none where the sum over the ranks has measured them. At
        stage 0 a write of the gradients, and one all-reduce of 8 bytes a parameter.
        """
        self._shows = sharded
        sharding, residency = self.sharding, self.sharding.plan.residency
        dense = sharding.families.keys() == {DENSE} and sharding.everyone.ranks == sharding.group.ranks
        whole = not residency.shard_optim and (dense or not sharded)
        agreement = GradientAgreement.between(sharding.units, sharding.logical, sharding.everyone) if sharded else None
        access = GradientAccess(self._remaining, agreement, whole, sharding.everyone.ranks == sharding.group.ranks)
        sharding.runtime.reducing.attributes.attach(access)

    def no_sync(self) -> AbstractContextManager[None]:
        """Disable gradient reduction, while inside: `reduction(False)`."""
        return self.reduction(False)

    # ---- what is kept

    def shards(self) -> list[LocalShard]:
        """Return this rank's part of every parameter and of its optimizer state, as writable 1-D views."""
        return self.sharding.param_shards() + self.state_store.shards()

    def materialize(self, stored: Mapping[str, Sequence[int]]) -> Callable[[], None]:
        """Create the optimizer state that a checkpoint has, for a load to fill, and drop all other state.

        Args:
            stored: Shapes of its tensors by name (`optim/<parameter>/<state>`); other names are passed over. Scalars come
                with `load_state_dict`.
        Returns: Gives the state of before back, for a load that fails before it has written anything.
        """
        self.ahead.take_back_all()
        return self.state_store.materialize(stored)

    def is_saved_class(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether `state_dict` is of an optimizer of this class; a dict that does not say is taken for one."""
        return self._saved.is_class(state_dict)

    def synchronise(self) -> None:
        """End differences between the ranks' parameters that the optimizer allows for a while (0/1 Adam). Collective.

        Before anything that saves or compares them. Nothing to do with every other optimizer.
        """
        if owns_reduction(self.inner) and hasattr(self.inner, "synchronise"):
            self.inner.synchronise()
            self.state_store.clear_gaps(u for u in self.sharding.units if u.spec.trained)
            self.sharding.refresh()

    def refresh(self) -> None:
        """Refresh every copy of the shards after they were written, for example by a load. Collective."""
        self.sharding.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's has, with this rank's elements, and `common_state_dict`. Collective.

        `state` is that of the parameters by their place in the groups: whole tensors where this rank has all elements, else 1-D ones, and
        `intervals` says which. They are the optimizer's own memory until its next step: copy them to keep them. For a number of ranks, a
        stage or groups that are others at the load, save `shards` with ds-ckpt.
        """
        return {**self.common_state_dict(), **self._saved.entries()}

    def common_state_dict(self) -> dict[str, Any]:
        """Groups, scalars and the loss scale: everything that is not a tensor of a parameter's elements. JSON-able. Collective."""
        self.sharding.check_open("state_dict()")
        self.ahead.take_back_all()
        return {**self._saved.common(), "loss_scale": None if self._scale is None else asdict(self._scale)}

    @property
    def _saved(self) -> OptimizerStateDict:
        return OptimizerStateDict(self.state_store, self.updater, self._names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` or a plain optimizer's `state_dict` gave, or `common_state_dict`: at any world size or stage; tensors come through `shards`, before.

        Sums of gradients that a policy of updates has left are dropped where there is none. Collective where parameters that are frozen
        have state in it.

        Raises:
            CheckpointError: it is of an optimizer of another class ("optimizer-class"), or has another number of groups
                ("optimizer-groups"), or state of other tensors ("zero-state-dict"), or the tensors of that optimizer's state were not
                loaded ("zero-state-missing"); nothing is changed then.
        """
        self.sharding.check_open("load_state_dict()")
        self.ahead.take_back_all()
        saved = self._saved
        saved.check(state_dict)
        if saved.has_tensors(state_dict):
            self.keep_state_of(saved.names_in(state_dict))
            saved = self._saved  # planned anew, perhaps
        saved.load(state_dict)
        if state_dict.get("loss_scale") is not None and self._scale is not None:
            self._scale = ScaleState(**state_dict["loss_scale"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which are in none, and plan the units anew. Collective, between steps; cost: as `replan`.

        Raises:
            PlanError: parameters of another sharded model ("zero-foreign-parameters"), or a backward has begun since the last step
                ("zero-add-group").
            ValueError: a parameter is in a group.
        """
        if "state_store" not in self.__dict__ or self.state is not self.inner.state:
            # torch's decorator around it imports the compiler, which costs more than everything else at start.
            inspect.unwrap(Optimizer.add_param_group)(self, param_group)
            return
        if self.backwards:
            raise PlanError(
                f"a parameter group was added after {self.backwards} backwards of a step, whose gradients would be dropped",
                code="zero-add-group",
                fix="Add it between step() and the next backward.",
            )
        model, number, given = self.sharding.model, len(self.param_groups), param_group["params"]
        entries = [given] if isinstance(given, Tensor) else list(given)
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        check_members(model, params, added=True)
        if any(id(param) in self._groups for param in params):
            raise ValueError("some parameters appear in more than one parameter group")
        self.inner.add_param_group({**param_group, "params": params})
        self._outside = set_outside(model, chain(named_members(model).values(), params))
        self._habits[number] = self._traits(model, self.sharding.options)[number]
        names = {id(param): name for name, param in named_members(model).items()}
        self._groups.update((id(param), number) for param in params)
        self._names.append([names[id(param)] for param in params])
        self.replan()

    def close(self) -> None:
        """Give the model back whole and free everything. The optimizer is not usable afterwards. Collective."""
        self.ahead.close()
        self._guard.remove()
        self._views.detach()
        self._zero_grad.detach()
        self.sharding.close()
        self.inner.state = defaultdict(dict)
        drop_outside(self.sharding.model, self._outside)
        for group in self.param_groups:
            group["params"] = []

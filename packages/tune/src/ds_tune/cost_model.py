"""How long a step of a candidate takes and how much memory it needs, part by part. Pure.

Memory is the plan's: every unit's bytes by category are counted there, but for gradients that are summed where autograd made them: how long
those live depends on the microbatches of a step. Beside it stands what was measured: the process itself, and what a forward keeps for
backward of one sample. Time is computation (measured once per size of a microbatch), messages (bytes of
the plan over the measured links), the update (measured once per element), and what a pipeline waits (its program, simulated).

A trial of another structure corrects what is said of that structure: its *difference* to the prediction, by setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds_engine import Plan
from ds_engine.trial_results import LinkCost, TrialResult
from ds_pipe import verify
from ds_tune.space import CHECKPOINTED, Candidate

__all__ = ["Calibration", "Difference", "Prediction", "Trial", "calibrate", "predict", "traffic_of"]

_RECOMPUTED = 1 / 3  # of forward and backward, where nobody measured a forward


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate and what was measured of it."""

    candidate: Candidate
    measured: TrialResult


@dataclass(frozen=True, slots=True)
class Prediction:
    """Parts that add up; bytes of one rank and seconds of one step."""

    memory: Mapping[str, float]
    time: Mapping[str, float]

    @property
    def peak_bytes(self) -> float:
        """Most memory of one rank."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """One step."""
        return sum(self.time.values())


@dataclass(frozen=True, slots=True)
class Difference:
    """What one setting adds to what is predicted without it."""

    step_s: float = 0.0
    microbatch_s: float = 0.0
    sample_s: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, as numbers that any candidate's plan can be multiplied with.

    Attributes:
        reference: The structure of the trials that these numbers come from.
        compute: Seconds of forward and backward of one microbatch, by its size.
        update_s: Of one element of an optimizer's shard.
        links: By collective.
        process_bytes: What a rank takes beside model states and what forward keeps.
        sample_bytes: What forward keeps of one sample, and what comes and goes with it.
        layer_bytes: The share of it that checkpointing the layers of a pattern gives back, of one sample.
        forward_share: Of a microbatch's time, what the forwards of those layers take.
        differences: By setting.
        on_host: Whether ranks compute on the host, whose memory is then the device's.
    """

    reference: Mapping[str, Any]
    compute: tuple[tuple[int, float], ...]
    update_s: float
    links: Mapping[str, LinkCost]
    process_bytes: float
    sample_bytes: float
    layer_bytes: Mapping[str, float] = field(default_factory=dict)
    forward_share: Mapping[str, float] = field(default_factory=dict)
    differences: Mapping[tuple[str, str], Difference] = field(default_factory=dict)
    on_host: bool = True


# ---- what a plan sends


def traffic_of(plan: Plan) -> dict[str, tuple[float, float]]:
    """Return data-parallel messages and bytes in one step of one rank, by collective."""
    stage, accumulation = plan.residency, plan.batch.accumulation
    ranks = plan.mesh.data * plan.mesh.sequence
    if ranks == 1:
        return {}
    units = plan.units
    share = (ranks - 1) / ranks
    trained = [(u.numel * u.dtypes.reduce.itemsize, u.numel * u.dtypes.param.itemsize) for u in units if u.spec.trained]
    reduced, gathered = sum(r for r, _ in trained), sum(u.numel * u.dtypes.param.itemsize for u in units)
    count = len(trained)
    if not stage.shard_optim:
        return {"all_reduce": (count, 2 * share * reduced)}
    reductions = accumulation if stage.shard_grads else 1
    gathers = 2 * accumulation if stage.shard_params else 1
    moved = gathered if stage.shard_params else sum(p for _, p in trained)
    return {
        "reduce_scatter": (count * reductions, share * reduced * reductions),
        "all_gather": (len(units) * gathers, share * moved * gathers),
    }


def _message_s(traffic: Mapping[str, tuple[float, float]], links: Mapping[str, LinkCost]) -> float:
    return sum(
        count * links[op].latency_s + nbytes / links[op].bytes_per_s
        for op, (count, nbytes) in traffic.items()
        if op in links
    )


def _updated(plan: Plan) -> float:
    return float(sum(u.layout.shard_numel for u in plan.units if u.spec.trained))


def _in_place(plan: Plan, on_host: bool) -> tuple[float, float]:
    """Return the bytes of gradients whose sums stay in the memory of a term: this rank's shards, and the whole.

    This applies where ranks compute on hosts and share optimizer state, whatever carries their messages.
    """
    if not on_host or not plan.residency.shard_optim:
        return 0.0, 0.0
    units = [u for u in plan.units if u.spec.trained and u.layout.world > 1 and not u.wire.codes_sums]
    whole = sum(u.numel * u.dtypes.accumulate.itemsize for u in units)
    return float(sum(u.bytes.grads for u in units)), float(whole)


def _made_anew(plan: Plan, on_host: bool, activations: float) -> float:
    """Return the bytes of the last microbatch's gradients that do not reuse memory freed by backward."""
    return max(0.0, _in_place(plan, on_host)[1] - activations)


def _states(plan: Plan, on_host: bool) -> dict[str, float]:
    memory = plan.memory
    # Such a sum keeps the whole gradient that it lies in, through the forwards that follow; those of one microbatch come when activations go.
    shards, whole = _in_place(plan, on_host)
    whole_sums = whole if plan.batch.accumulation > 1 else 0.0
    offloaded: dict[str, float] = {"offloaded": memory.host_bytes} if on_host and memory.host_bytes else {}
    return offloaded | {
        "parameters": memory.params_bytes,
        "gradients": memory.grads_bytes - shards + whole_sums,
        "masters": memory.master_bytes,
        "optimizer": memory.optimizer_bytes,
        "passing": memory.passing_bytes,
    }


# ---- from trials to numbers


def calibrate(trials: Sequence[Trial]) -> Calibration:
    """Numbers from trials: the first one's structure is the reference, the others of its structure differ in the microbatch.

    Args:
        trials: At least one; the first was made with `TrialSpec.detail`.
    """
    first = trials[0]
    same = [t for t in trials if t.candidate.structure == first.candidate.structure]
    links = first.measured.links
    update_s = max(0.0, first.measured.update_s - _gathers_s(first, links)) / max(1.0, _updated(first.candidate.plan))
    compute = {}
    for trial in same:
        plan, measured = trial.candidate.plan, trial.measured
        rest = measured.step_s - _message_s(traffic_of(plan), links) - update_s * _updated(plan)
        compute[measured.micro] = max(1e-9, rest / measured.accumulation / (1 + _bubble(plan)))
    process, sample = _memory_of(same)
    layers, shares = _layers_of(first.measured)
    plain = Calibration(
        first.candidate.structure,
        tuple(sorted(compute.items())),
        update_s,
        links,
        process,
        sample,
        layers,
        shares,
        on_host=first.measured.device == "cpu",
    )
    differences: dict[tuple[str, str], Difference] = {}
    for trial in trials:
        other = _differing(trial.candidate, plain.reference)
        if len(other) == 1 and next(iter(other)) not in differences:
            differences[next(iter(other))] = _difference(trial, plain)
    return replace(plain, differences=differences)


def _gathers_s(trial: Trial, links: Mapping[str, LinkCost]) -> float:
    traffic = traffic_of(trial.candidate.plan)
    after_update = not trial.candidate.plan.residency.shard_params and "all_gather" in traffic
    return _message_s({"all_gather": traffic["all_gather"]}, links) if after_update else 0.0


def _memory_of(same: Sequence[Trial]) -> tuple[float, float]:
    """Fit the bytes of the process and of one sample: a line through the smallest and the largest microbatch."""
    sample_bytes = max(t.measured.saved_bytes / t.measured.micro for t in same)

    def beside(trial: Trial) -> float:
        plan, measured, on_host = trial.candidate.plan, trial.measured, trial.measured.device == "cpu"
        states = sum(_states(plan, on_host).values())
        return measured.peak_bytes - states - _made_anew(plan, on_host, sample_bytes * measured.micro)

    rests = sorted((t.measured.micro, beside(t)) for t in same)
    (low, small), (high, large) = rests[0], rests[-1]
    sample = max(sample_bytes, (large - small) / (high - low)) if high > low else sample_bytes
    return small - sample * low, sample


def _layers_of(measured: TrialResult) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes per sample that checkpointing the layers of each pattern saves, and the recomputed share."""
    saved, shares = {}, {}
    whole = (measured.forward_s + measured.backward_s) / measured.accumulation
    for layer in measured.layers:
        kept_again = layer.input_bytes + layer.saved_bytes / layer.count
        saved[layer.pattern] = max(0.0, layer.saved_bytes - kept_again) / measured.micro
        forward = measured.forward_s / measured.accumulation
        shares[layer.pattern] = min(_RECOMPUTED, forward / whole if whole else _RECOMPUTED)
    return saved, shares


def _differing(candidate: Candidate, reference: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    structure = candidate.structure
    keys = [*structure, *(key for key in reference if key not in structure)]
    return {
        (key, repr(structure.get(key))): structure.get(key) for key in keys if structure.get(key) != reference.get(key)
    }


def _difference(trial: Trial, plain: Calibration) -> Difference:
    prediction, plan, measured = predict(trial.candidate, plain), trial.candidate.plan, trial.measured
    more, more_bytes = measured.step_s - prediction.step_s, measured.peak_bytes - prediction.peak_bytes
    if CHECKPOINTED in dict(_differing(trial.candidate, plain.reference)):
        return Difference(sample_s=more / (measured.micro * measured.accumulation), bytes=more_bytes)
    if plan.residency.shard_grads:
        return Difference(microbatch_s=more / measured.accumulation, bytes=more_bytes)
    return Difference(step_s=more, bytes=more_bytes)


# ---- from numbers to a candidate


def predict(candidate: Candidate, numbers: Calibration) -> Prediction:
    """Predict the memory and time of a candidate, part by part."""
    plan = candidate.plan
    batch = plan.batch
    cut = plan.mesh.tensor * plan.mesh.sequence
    microbatch_s = _at(numbers.compute, batch.micro) / cut
    activations = {"process": numbers.process_bytes, "activations": numbers.sample_bytes * batch.micro / cut}
    time = {"forward and backward": microbatch_s * batch.accumulation}
    for pattern in _patterns(candidate):
        if pattern in numbers.layer_bytes:
            activations["activations"] -= numbers.layer_bytes[pattern] * batch.micro / cut
            time["computed again"] = numbers.forward_share[pattern] * time["forward and backward"]
    time["messages"] = _message_s(traffic_of(plan), numbers.links)
    time["update"] = numbers.update_s * _updated(plan)
    if bubble := _bubble(plan):
        time["pipeline waits"] = bubble * time["forward and backward"]
    memory: dict[str, float] = {**activations, **_states(plan, numbers.on_host)}
    memory["gradients"] += _made_anew(plan, numbers.on_host, activations["activations"])
    for key, value in _differing(candidate, numbers.reference):
        if (more := numbers.differences.get((key, value))) is not None:
            rows = batch.micro * batch.accumulation
            seconds = more.step_s + more.microbatch_s * batch.accumulation + more.sample_s * rows
            time[f"{key.rsplit('.', 1)[-1]} {value}, as measured"] = seconds
            memory[f"{key.rsplit('.', 1)[-1]} {value}, as measured"] = more.bytes
    if sum(time.values()) <= 0:  # a difference that was measured at other sizes may be larger than all of a small step
        time = {name: value for name, value in time.items() if value > 0}
    return Prediction(memory, time)


def _patterns(candidate: Candidate) -> tuple[str, ...]:
    return tuple(candidate.structure.get(CHECKPOINTED) or ())


def _at(points: Sequence[tuple[int, float]], micro: int) -> float:
    """Interpolate linearly between measured sizes; never shrinking.

    Beyond the sizes, extend the last line, or scale in proportion where there is a single point.
    """
    if len(points) == 1:
        size, seconds = points[0]
        return seconds * micro / size
    right = next((i for i, (size, _) in enumerate(points) if size >= micro and i), len(points) - 1)
    (low, small), (high, large) = points[right - 1], points[right]
    value = small + (large - small) * (micro - low) / (high - low)
    return max(value, min(small, large) * min(1.0, micro / high))


def _bubble(plan: Plan) -> float:
    """Return the pipeline bubble as a fraction of the compute time; 0 for a model without stages."""
    if plan.mesh.pipe == 1:
        return 0.0
    idle = min(0.99, verify(plan.program).bubble)
    return idle / (1 - idle)

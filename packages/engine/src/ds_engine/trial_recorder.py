"""A trial: the engine measures some of its own steps, writes what it saw, and ends the process. The script stays as it is.

The watch follows the updates of a run. It is a sink, too: phases and collectives tell it their times. In the first forward it
looks at what autograd keeps, layer by layer; that step is never among those that are measured.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ds_monitor
from ds_accel.accelerator import Accelerator
from ds_comm import Group, Mesh, all_gather_object
from ds_comm.sweep import BenchCase, measure
from ds_config.errors import ConfigError
from ds_config.rehearsing import is_rehearsal
from ds_engine.autotuning import AutotuningConfig
from ds_engine.flops import Operations
from ds_engine.plan import Plan, Shapes
from ds_engine.trial_results import LayerFacts, LinkCost, TrialResult, write_json
from ds_engine.trial_spec import TrialSpec, order_here
from ds_monitor import Measurement, RecordKind

__all__ = ["TrialSetup", "TrialWatch", "layer_groups", "metrics_of", "order_of", "watch_of"]

_SWEPT = (1 << 16, 1 << 22)
_OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Where a trial runs, and the shapes of its model as they were."""

    mesh: Mesh
    device: Accelerator
    shapes: Shapes


def order_of(section: AutotuningConfig | None) -> TrialSpec | None:
    """Return the trial specification of `ds tune` or of the configuration; None outside of a trial.

    Raises:
        ConfigError: the last step comes before the first ("trial-steps").
    """
    order = order_here()
    if order is None and section is not None:
        order = TrialSpec(
            start_step=section.start_profile_step,
            end_step=section.end_profile_step,
            metric_path=section.metric_path or "autotuning_metric.json",
            model_info_path=(section.model_info_path or "autotuning_model_info.json")
            if section.model_info.profile
            else "",
        )
    if order is not None and not 1 <= order.start_step <= order.end_step:
        raise ConfigError(
            f"a trial measures from step {order.start_step} to step {order.end_step}",
            code="trial-steps",
            fix="Give autotuning.start_profile_step >= 1 and end_profile_step >= start_profile_step.",
        )
    return order


def watch_of(plan: Plan, model: nn.Module, place: Callable[[], TrialSetup]) -> TrialWatch | None:
    """Build the recorder of a run that is a trial, before the model is changed; None for other runs."""
    order = order_of(plan.tuning)
    return None if order is None else TrialWatch(order, plan, model, place())


def layer_groups(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Group layers of one class and shape in a numbered list, by the pattern of their names. Skips nested lists."""
    groups: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(pattern[:-1]) for pattern in groups)
        if inside or not name or not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        children = list(module)
        signs = {(type(c), tuple((n, tuple(p.shape)) for n, p in c.named_parameters())) for c in children}
        if len(signs) == 1 and next(iter(signs))[1]:
            groups[f"{name}.*"] = children
    return groups


class _SavedActivations:
    """What one forward keeps for backward, by layer; hooks that take themselves away after it."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self.groups = layer_groups(model)
        self.bytes, self.inputs = dict.fromkeys(self.groups, 0), dict.fromkeys(self.groups, 0)
        self.seconds = dict.fromkeys(self.groups, 0.0)
        self.flops = 0
        self._open: list[str] = []
        self._counted: set[tuple[int, int]] = set()
        self._stack = ExitStack()
        self._thread = threading.get_ident()
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for pattern, layers in self.groups.items():
            for layer in layers:
                self._handles += self._around(pattern, layer)

    def _around(self, pattern: str, layer: nn.Module) -> list[Any]:
        began: list[float] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            began.append(time.perf_counter())
            self._open.append(pattern)
            self.inputs[pattern] += sum(a.nbytes for a in args if isinstance(a, Tensor))

        def after(*_: Any) -> None:
            if began:
                self.seconds[pattern] += time.perf_counter() - began.pop()
                self._open.pop()

        return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]

    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self._handles:
            self._stack.enter_context(Operations(self._count))
            self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))

    def _count(self, flops: int) -> None:
        self.flops += flops

    def _end(self, *_: Any) -> None:
        self._stack.close()
        if self.total:
            self.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        of_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if not of_parameter and key not in self._counted:
            self._counted.add(key)
            self.total += storage.nbytes()
            if self._open:
                self.bytes[self._open[-1]] += storage.nbytes()
        return tensor

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def facts(self) -> tuple[LayerFacts, ...]:
        """Return the facts of the layers by name pattern."""
        return tuple(
            LayerFacts(p, len(layers), self.bytes[p], self.inputs[p], self.seconds[p])
            for p, layers in self.groups.items()
        )


class TrialWatch:
    """Follows the updates of one engine, and listens to its spans."""

    def __init__(self, order: TrialSpec, plan: Plan, model: nn.Module, place: TrialSetup) -> None:
        self._order, self._plan, self._place = order, plan, place
        self._model_bytes = sum(p.nbytes for p in model.parameters())
        self._trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._start = place.device.memory().allocated
        self._saved = _SavedActivations(model)
        self._steps, self._ends = 0, [0.0]
        self._sums: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        if order.memory_bytes:
            _limit(order.memory_bytes)

    # ---- a sink

    def write(self, record: Measurement) -> None:
        """Add up spans by name."""
        if record.kind is RecordKind.SPAN:
            name = "comm" if record.name.startswith("comm/") else record.name
            self._now[name] = self._now.get(name, 0.0) + record.value

    def end_step(self, step: int) -> None:
        """Do nothing: a trial writes nothing per step."""

    def close(self) -> None:
        """Do nothing: a trial keeps no open resource."""

    # ---- a follower

    def resume(self, steps: int) -> None:
        """Do nothing: a trial counts its own steps."""

    def step(self) -> None:
        """Count an applied update; after the last measured step, write the results and exit on all ranks."""
        self._place.device.synchronize()
        self._steps += 1
        order = self._order
        if self._steps == 1 and order.model_info_path:
            self._tell_model()
        if self._steps >= order.start_step:
            self._sums.append(self._now)
        self._now = {}
        if self._steps >= order.end_step:
            # The clock of the last step is read first: what follows is not part of it.
            self._ends.append(time.perf_counter())
            self._finish()
        elif self._steps >= order.start_step - 1:
            self._ends.append(time.perf_counter())

    def began(self) -> None:
        """Start the clock of the first measured step when the engine is ready."""
        self._ends[0] = time.perf_counter()

    # ---- inside

    def _phase(self, name: str) -> float:
        # The span of the last step ends after its update, so that of the step before stands in the next sum.
        values = [sums.get(name, 0.0) for sums in self._sums]
        return statistics.median(values) if values else 0.0

    def _finish(self) -> None:
        mesh, device, order = self._place.mesh, self._place.device, self._order
        world = mesh["world"]
        count = order.end_step - order.start_step + 1
        ends = self._ends[-count - 1 :]
        steps = [b - a for a, b in itertools.pairwise(ends)]
        peak = max(device.memory().peak, device.memory().allocated)
        phases = [self._phase(f"engine/{name}") for name in ("forward", "backward", "step")]
        numbers = [*steps, *phases, self._phase("comm"), float(peak), float(self._start), float(self._saved.total)]
        numbers = _largest(numbers, world)
        links = _links(mesh["gradient"]) if order.detail and mesh["gradient"].size > 1 else {}
        batch = self._plan.batch
        measured = TrialResult(
            world=world.size,
            micro=batch.micro,
            accumulation=batch.accumulation,
            steps_s=tuple(numbers[:count]),
            forward_s=numbers[count],
            backward_s=numbers[count + 1],
            update_s=numbers[count + 2],
            comm_s=numbers[count + 3],
            peak_bytes=int(numbers[count + 4]),
            start_bytes=int(numbers[count + 5]),
            model_bytes=self._model_bytes,
            device=torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu",  # type: ignore[union-attr]
            saved_bytes=int(numbers[count + 6]),
            layers=self._saved.facts() if order.detail else (),
            links=links,
            shapes=self._place.shapes if order.detail else None,
            flops=self._saved.flops,
            rehearsed=is_rehearsal(),
        )
        if world.rank == 0:
            self._write(measured)
        _largest([0.0], world)  # nobody ends before the file is there: the others' ends would look like failures
        ds_monitor.shutdown()
        raise SystemExit(0)

    def _write(self, measured: TrialResult) -> None:
        order = self._order
        if order.out:
            write_json(Path(order.out), measured)
        if order.metric_path:
            write_json(Path(order.metric_path), metrics_of(measured, self._plan.batch.train))

    def _tell_model(self) -> None:
        """Write DeepSpeed's facts of the model and exit."""
        world = self._place.mesh["world"]
        saved = int(_largest([float(self._saved.total)], world)[0])
        if world.rank == 0:
            numel = self._place.shapes.numel
            facts = {
                "num_params": numel,
                "trainable_num_params": self._trained,
                "activation_mem_per_gpu": saved,
                "rank": 0,
            }
            write_json(Path(self._order.model_info_path), facts)
        _largest([0.0], world)
        raise SystemExit(0)


def metrics_of(measured: TrialResult, samples: int) -> dict[str, float]:
    """Return DeepSpeed's metrics of a trial: milliseconds of a step, samples/s, operations/s of one rank."""
    step_s = measured.step_s
    return {
        "latency": step_s * 1e3,
        "throughput": samples / step_s,
        "FLOPS_per_gpu": 3 * measured.flops * measured.accumulation / step_s,
        "forward": measured.forward_s * 1e3,
        "backward": measured.backward_s * 1e3,
        "step": measured.update_s * 1e3,
    }


def _largest(numbers: list[float], group: Group) -> list[float]:
    """Reduce each number to its largest value over the ranks. Collective."""
    gathered: list[Any] = [None] * group.size
    all_gather_object(gathered, numbers, group)
    return [max(column) for column in zip(*gathered, strict=True)]


def _links(group: Group) -> Mapping[str, LinkCost]:
    """Measure latency and bandwidth of training's collectives by a small and a large message. Collective."""
    backend = "training"
    links = {}
    for op in _OPS:
        small, large = (
            measure({backend: group}, [BenchCase(op, backend, torch.float32, size)], 0.1)[0].median_s for size in _SWEPT
        )
        rate = (_SWEPT[1] - _SWEPT[0]) / max(large - small, 1e-9)
        links[op] = LinkCost(max(0.0, small - _SWEPT[0] / rate), rate)
    return links


def _limit(nbytes: int) -> None:
    """Limit this process to `nbytes` of memory: further allocations fail."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))

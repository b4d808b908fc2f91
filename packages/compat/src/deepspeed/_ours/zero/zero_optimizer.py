"""The sharded optimizer with the names that clients look for on upstream's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
import ds_zero
from deepspeed._ours.base.forwarding import answers, reads
from deepspeed._ours.base.raising import refused
from deepspeed._ours.base.runtime_utils import total_norm
from deepspeed._ours.config.section_models import OffloadStateTypeEnum
from deepspeed._ours.zero.module_marks import external_of
from deepspeed._ours.zero.params import mark
from deepspeed._ours.zero.scalers import EngineLossScaler
from ds_accel import get_accelerator
from ds_zero import (
    ShardedModel,
    ShardedOptimizer,
    ShardOptions,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
)

_KINDS = {
    "optim_states": "optimizer",
    "hp_params": "masters",
    "lp_params": "parameters",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": "gradients",
}


def kinds_of(include: Collection[Any] | None, device: Any) -> frozenset[str]:
    """Return ds-zero's names of the states that `offload_states` is to move.

    Args:
        include: Of `OffloadStateTypeEnum`, or their values; None is all.
        device: The host; files are not supported.
    Raises:
        ConfigError: another device, or a state of no such name ("compat-offload").
    """
    target = str(getattr(device, "value", device))
    if target != "cpu":
        raise refused("offload-device", target)
    selected = _KINDS if include is None else {str(getattr(kind, "value", kind)) for kind in include}
    unknown = sorted(set(selected) - set(_KINDS))
    if unknown:
        raise refused("offload-states", unknown, ", ".join(_KINDS))
    return frozenset(_KINDS[kind] for kind in selected)


class OffloadsStates:
    """`offload_states` and `reload_states` with upstream's arguments, for the engine and for its optimizer."""

    def _holder(self) -> ShardedOptimizer | ShardedModel:
        """Return the owner of the state: the optimizer, or the sharded model where there is none."""
        raise TypeError(f"{type(self).__name__} does not say what holds its state")

    def offload_states(
        self, include: Collection[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool =
        False,
    ) -> None:  # fmt: skip
        """Move state to the host until `reload_states`. See `kinds_of`."""
        del non_blocking
        holder = self._holder()
        away = holder.away if isinstance(holder, ShardedModel) else holder.sharding.away
        holder.suspend(kinds_of(include, device) - {gone.kind for gone in away}, pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved."""
        del non_blocking
        self._holder().resume()


class DeepSpeedZeroOptimizer(OffloadsStates, ShardedOptimizer):
    """`ds_zero.ShardedOptimizer` under upstream's names: one class for every stage and format.

    Attributes:
        parameter_offload: At stage 3, what clients take the forward hooks away with; there is none at other stages.
        loss_scaler, loss_scale_config: The loss scale, and the rule by which it changes.
        external_loss_scale: What `override_loss_scale` was given; None before.
    """

    external_loss_scale: float | None = None
    _cut_state: EvenState | None = None

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer | None = None,
        options: ShardOptions | None = None,
        **upstreams: object,
    ) -> None:
        if inner is None or not isinstance(options, ShardOptions) or upstreams:
            raise refused("optimizer-made", type(model).__name__)
        super().__init__(model, inner, options)
        if options.residency.shard_params:
            self.parameter_offload = ParameterOffload(self)
        self.loss_scaler = EngineLossScaler(self.sharding.precision.scale, lambda: self._scale)
        self.loss_scale_config = self.loss_scaler
        trained = [unit.dtypes.param for unit in self.sharding.units if unit.spec.trained]
        if not options.residency.shard_optim and self._scale is None and set(trained) <= {torch.float32}:
            self._is_inner = True

    def replan(self) -> None:
        """Plan the units anew, see `ShardedOptimizer.replan`; attributes of parameters follow."""
        super().replan()
        mark(self.sharding)

    @property
    def __class__(self) -> type:
        """What `isinstance` is told besides the truth: of plain fp32 training upstream returns the optimizer itself."""
        return type(self.inner) if "_is_inner" in vars(self) else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__setattr__(self, "__class__", kind)

    def __eq__(self, other: object) -> bool:
        return other is self or ("_is_inner" in vars(self) and other is self.inner)

    __hash__ = object.__hash__

    def _holder(self) -> ShardedOptimizer:
        return self

    @property
    def optimizer(self) -> Any:
        """The optimizer that was wrapped; its state alone after `_set_fp32_optimizer_param_groups` at stage 3."""
        return self._cut_state or self.inner

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.last is not None and self.last.skipped

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 without fp16, where setting it changes nothing. A dynamic scale goes on from what is set, between two steps."""
        return 1.0 if self._scale is None else self._scale.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._scale is None or float(value) == self._scale.scale:
            return
        if self.backwards:
            raise refused("scale-mid-step", value, self.backwards)
        for unit in self.sharding.units:
            if unit.spec.trained:
                unit.gradients.way.rescale(float(value) / self._scale.scale)
        self._scale = replace(self._scale, scale=float(value))

    cur_scale = loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Multiply losses by this from now on, whatever overflows: the program keeps the scale. Between two steps."""
        self.external_loss_scale = float(loss_scale)
        precision = self.sharding.precision
        if self._scale is None or precision.scale is None:
            return
        self.sharding.precision = replace(precision, scale=replace(precision.scale, static=self.external_loss_scale))
        self.loss_scale = self.external_loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return self.sharding.precision.scale is not None and self.sharding.precision.scale.static is None

    @property
    def _global_grad_norm(self) -> Any:
        """The norm of the last update's averaged gradient before clipping. inf for a skipped one, also where the gradients have a nan.

        A tensor where ZeRO cuts something, as upstream's: programs call `item`.
        """
        if self.last is None or self.last.skipped:
            return None if self.last is None else math.inf
        cut = self.sharding.options.residency.shard_optim and self.last.norm is not None
        return torch.tensor(self.last.norm, dtype=torch.float64, device="cpu") if cut else self.last.norm

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's shard of every unit, in master format: what `optimizer` trains, and has the state of, where it has the shard in one piece."""
        trained = [unit for unit in self.sharding.units if unit.spec.trained]
        for unit in trained:
            unit.state_store.fetch()
        return [unit.parts[0].tensor if len(unit.parts) == 1 else unit.shard for unit in trained]

    @property
    def fp32_groups_gradients_flat(self) -> list[Tensor]:
        """The averaged gradients of each unit's parameters, whole and end to end, in fp32: copies. Collective.

        Raises:
            AttributeError: gradients are sharded, as upstream has it.
        """
        if self.sharding.options.residency.shard_grads:
            raise AttributeError("fp32_groups_gradients_flat: gradients are sharded")
        trained = [unit.params for unit in self.sharding.units if unit.spec.trained]
        grads = [[grad for grad in map(safe_get_full_grad, params) if grad is not None] for params in trained]
        return [torch.cat([grad.flatten().float() for grad in of]) for of in grads if of]

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, Tensor]:
        """This rank's elements of the gradients so far, by number of the parameter, where state is offloaded; copies.

        Raises:
            AttributeError: it is not, as upstream has it.
        """
        trained = [unit for unit in self.sharding.units if unit.spec.trained]
        if not self._offloads():
            raise AttributeError("accumulated_grads_in_cpu: optimizer state is not offloaded")
        numbered = enumerate(safe_get_local_grad(param) for unit in trained for param in unit.params)
        return {number: grad for number, grad in numbered if grad is not None}

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """The tensors that the model's trained parameters are views of.

        Raises:
            AttributeError: parameters are sharded, as upstream has it.
        """
        if self.sharding.options.residency.shard_params:
            raise AttributeError("bit16_groups_flat: parameters are sharded")
        self.sharding.arrivals.finish()  # of the last update, which would overwrite what the caller writes
        return [unit.full for unit in self.sharding.units if unit.spec.trained]

    nccl_start_alignment_factor = 2
    """Elements that the parts of `bit16_groups_flat` begin at a multiple of."""

    allgather_bucket_size = 500_000_000
    """Upstream's default, for callers of `all_gather_dp_groups`, which gathers each tensor at once."""

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """The parts of `bit16_groups_flat` whose state each rank has: views, rank by rank."""
        ranks = [unit.groups.shard_group.size for unit in self.sharding.units if unit.spec.trained]
        return [list(flat.chunk(size)) for flat, size in zip(self.bit16_groups_flat, ranks, strict=True)]

    @property
    def real_dp_process_group(self) -> list[Any]:
        """torch's group of the ranks that have the parts of each tensor of `bit16_groups_flat`."""
        return [unit.groups.shard_group.pg for unit in self.sharding.units if unit.spec.trained]

    def refresh_fp32_params(self) -> None:
        """Copy weights that every rank wrote into the model's parameters to the masters. Collective. The next update would do it, too."""
        self.sharding.adopt_edits()
        self.refresh()

    def update_lp_params(self) -> None:
        """Copy the masters to the model's parameters, after a program wrote into them. Collective."""
        self.refresh()

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """This rank's elements of the gradients so far, by number of the parameter group; copies. Empty where `accumulated_grads_in_cpu` has them."""
        if not self.sharding.options.residency.shard_optim or self._offloads():
            return {}
        found: dict[int, list[Tensor]] = {}
        for param in self.sharding.model.parameters():
            grad = safe_get_local_grad(param) if param.requires_grad else None
            if grad is not None:
                found.setdefault(self._groups.get(id(param), 0), []).append(grad)
        return found

    @property
    def grad_partitions_flat_buffer(self) -> Tensor:
        """This rank's elements of the gradients so far, in one tensor: a copy."""
        of = chain.from_iterable(unit.params for unit in self.sharding.units if unit.spec.trained)
        grads = [grad for grad in map(safe_get_local_grad, of) if grad is not None]
        return (
            torch.cat(grads)
            if grads
            else torch.empty(0, device="cpu" if self._offloads() else get_accelerator().device())
        )

    def _offloads(self) -> bool:
        trained = [unit for unit in self.sharding.units if unit.spec.trained]
        return any(unit.plan.offload_optimizer != "device" for unit in trained)

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of the gradients so far of each group of parameters that a backward handles at once. Collective."""
        of = [unit.params for unit in self.sharding.units if unit.spec.trained]
        parts = [[grad for grad in map(safe_get_local_grad, params) if grad is not None] for params in of]
        squares = torch.tensor([float(total_norm(grads, 2)) ** 2 for grads in parts], device=get_accelerator().device())
        if self.sharding.options.residency.shard_optim:
            ds_comm.all_reduce(squares, group=self.sharding.group)
        return list(squares.sqrt())

    single_partition_of_fp32_groups = reads(
        "fp32_partitioned_groups_flat", "`fp32_partitioned_groups_flat`, under its name at stages 1 and 2."
    )

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's trained parameters, unit by unit."""
        return [list(unit.params) for unit in self.sharding.units if unit.spec.trained]

    bit16_groups = fp16_groups

    quantize_nontrainable_params = answers(
        None, "Do nothing: what is frozen is known when the engine is made, and travels as the configuration says."
    )

    @property
    def persistent_parameters(self) -> list[nn.Parameter]:
        """None: parameters that stay whole need no gathering, for which programs ask."""
        return []

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Let `optimizer` show its state as upstream cuts it at stage 3, until `_clear_fp32_optimizer_param_groups`. Collective."""
        if self.sharding.options.residency.shard_params:
            self._cut_state = EvenState(self)

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Let `optimizer` be the one that was wrapped."""
        self._cut_state = None

    def needs_scaler(self) -> bool:
        """Whether a loss must go through `engine.scale` before a plain `backward()`."""
        return self.sharding.precision.scale is not None

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Give every parameter group this learning rate."""
        for group in self.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False) -> None:
        """`scale(loss).backward()`."""
        self.scale(loss).backward(retain_graph=retain_graph or None, create_graph=create_graph)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int | None = None,
    allgather_bucket_size: int | None = None,
) -> None:
    """Give every rank the others' parts of `bit16_groups_flat`, after each has written its own. Collective.

    Args:
        partitioned_param_groups: `parallel_partitioned_bit16_groups`, views of `groups_flat`.
        dp_process_group: `real_dp_process_group`.
    """
    del groups_flat, start_alignment_factor, allgather_bucket_size  # each tensor is gathered at once
    for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        own = parts[ds_comm.as_group(group).rank].detach()
        ds_comm.all_gather([part.detach() for part in parts], own.clone(), group=group)


class EvenState:
    """State of the inner optimizer as upstream cuts it at stage 3: a copy, of each unit one tensor with this rank's even part of every parameter.

    Parts are padded with zeros to the same number of elements on all ranks. Collective: the state of one parameter at a time is gathered.
    """

    def __init__(self, owner: DeepSpeedZeroOptimizer) -> None:
        group, inner = owner.sharding.group, owner.inner
        self.param_groups, self.state = inner.param_groups, {}
        for number, unit in enumerate(unit for unit in owner.sharding.units if unit.spec.trained):
            known = inner.state.get(unit.parts[0].tensor, {}) if unit.parts else {}
            self.state[number] = {key: value for key, value in known.items() if not is_elements(value)}
            every: list[Any] = group.size * [None]
            ds_comm.all_gather_object(
                every, [key for key, value in known.items() if is_elements(value)], group=group
            )  # a rank may own nothing of a unit
            for key in sorted({key for keys in every for key in keys}):
                whole = (safe_get_full_optimizer_state(param, key) for param in unit.params)
                parts = [_even_part(value, group) for value in whole if value is not None]
                self.state[number][key] = torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by number of the unit, and the groups without parameters."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": self.state, "param_groups": groups}


def is_elements(value: object) -> bool:
    """Whether a state has a number for each element; others are scalars."""
    return isinstance(value, Tensor) and value.dim() > 0


def _even_part(value: Tensor, group: ds_comm.Group) -> Tensor:
    flat = value.detach().flatten()
    each = -(-flat.numel() // group.size)
    part = flat.new_zeros(each)
    own = flat[group.rank * each : (group.rank + 1) * each]
    part[: own.numel()] = own
    return part


class ParameterOffload:
    """How clients run a stage 3 model without hooks: they remove `forward_hooks` and later register the module again.

    It is done while every parameter is gathered (`GatheredParameters` around it), so nothing is lost by it.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._runtime = optimizer.sharding.runtime
        self.module = ModuleView(optimizer.sharding.model)
        self.backward_hooks: list[Any] = []
        self._register_deepspeed_module(self.module)

    def _register_deepspeed_module(self, module: object) -> None:
        """Put back the hooks that `remove` took away."""
        del module
        for hook in getattr(self, "_given", ()):
            hook.back()
        self.forward_hooks: list[Any] = [_Hooks(self._runtime.paused)]
        self._original_hooks = tuple(self.forward_hooks)  # clients reassign the list after removing


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Unwrap a model with `ds_zero.unwrap_model_for_generation`.

    Inside the context an engine's optimizer shows no forward hooks.
    """
    shown = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    hooks: list[Any] = [] if shown is None else shown.forward_hooks
    with ds_zero.unwrap_model_for_generation(model) as plain:
        if shown is not None:
            shown.forward_hooks = []
        try:
            yield plain
        finally:
            if shown is not None:
                shown.forward_hooks = hooks


class ModuleView:
    """The model as upstream's coordinator shows it: its parameters, and the external ones that were registered with it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        """Iterate over the model's parameters with their names, as a module does."""
        return self._model.named_parameters(prefix, recurse)

    def ds_external_parameters(self) -> Any:
        """Iterate over what was registered with the model itself; a parameter used outside its module is gathered on access."""
        return iter(external_of(self._model))

    def parameters(self, recurse: bool = True) -> Any:
        """Iterate over the model's parameters, as a module does."""
        return (param for _, param in chain(self.named_parameters(recurse=recurse), self.ds_external_parameters()))


class _Hooks:
    """All hooks of a model as one handle."""

    def __init__(self, paused: Any) -> None:
        self._paused = paused
        self._stack: ExitStack | None = None

    def remove(self) -> None:
        """Take them away, until `back`."""
        if self._stack is None:
            self._stack = ExitStack()
            context: AbstractContextManager[Any] = self._paused()
            self._stack.enter_context(context)

    def back(self) -> None:
        """Put them back."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices of a kind of an engine's state; an empty set while the state is moved away."""
    if state.value == "lp_grads":  # upstream keeps their memory where there are none, too
        return {model.optimizer.grad_partitions_flat_buffer.device}
    params = [param for param in model.module.parameters() if param.requires_grad]
    reads_of: Mapping[str, Callable[[nn.Parameter], Sequence[Any]]] = {
        "lp_params": lambda param: [param.data],
        "hp_params": lambda param: [safe_get_local_fp32_param(param)],
        "optim_states": lambda param: [safe_get_local_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")],
    }
    tensors_of = reads_of.get(state.value, lambda param: [safe_get_local_grad(param)])
    return {tensor.device for param in params for tensor in tensors_of(param) if isinstance(tensor, Tensor)}

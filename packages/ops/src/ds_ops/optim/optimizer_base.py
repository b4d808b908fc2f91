"""What every optimizer here has in common: state, grouping into lists, the fused pass, loading.

A subclass says what its states are and what one step does to a bucket of tensors (`UpdateSpec`); this class collects
parameters into buckets that share a spec and dtypes, and steps each bucket with one call.

Words: *state* is a tensor per parameter; *fusion* is what else the pass does while the data is in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_ops._call as _call
from ds_config.errors import CheckpointError, ConfigError, UnsupportedError
from ds_ops.apply_update import Prepared, prepare, update_by
from ds_ops.host_arena import make_huge, zeros_huge
from ds_ops.optim.step_options import StepOptions, check_options, kernel_of, round_stochastically
from ds_ops.paged_memory import zeros_paged
from ds_ops.reference.update import update as reference_update
from ds_ops.update_rules import UpdateSpec, UpdateTensors, dither_of

__all__ = ["NO_FUSION", "FusedOps", "Group", "OpsOptimizer", "Params", "fused_spec", "require_rate"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FusedOps:
    """What a step does besides stepping, in the same pass over memory.

    grad_scale: multiplies every gradient first (1/loss_scale x clipping coefficient). As a tensor (fp32, one element, on the
        gradients' device) it is not read on the host: `ds_ops.stream.clip_scale` makes one of gradients.
    zero_grads: leave zeros in the gradients instead of their values.
    grads: gradients to use instead of `.grad`, by parameter; may be bf16 or fp16 beside fp32 parameters.
    copies: tensors that receive the new parameters in their own dtype, by parameter.
    """

    grad_scale: float | Tensor = 1.0
    zero_grads: bool = False
    grads: Mapping[Tensor, Tensor] = field(default_factory=dict)
    copies: Mapping[Tensor, Tensor] = field(default_factory=dict)

    def grad_of(self, p: Tensor) -> Tensor | None:
        """Return the gradient that this step uses for `p`; None if `p` is not stepped."""
        grad = self.grads.get(p)
        return p.grad if grad is None else grad


NO_FUSION = FusedOps()
_NATIVE_STATES = 2


@dataclass(slots=True)
class _Bucket:
    """Parameters that one call steps: one spec, one device, one dtype per stream."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)  # the parameters as the optimizer's state knows them

    def tensors(self) -> UpdateTensors:
        return UpdateTensors(self.params, self.grads, tuple(self.states), self.copies)


@dataclass(frozen=True, slots=True)
class _Repeat:
    """The call that stepped all of a group last time, to be made again while nothing has moved."""

    owners: list[Tensor]
    names: tuple[str, ...]
    prepared: Prepared


def signed(scale: float | Tensor, group: Group) -> float | Tensor:
    """Return the factor of gradients, negative where the objective is maximized."""
    return -scale if group.get("maximize") else scale


def fused_spec(spec: UpdateSpec, group: Group, fusion: FusedOps, step: int) -> UpdateSpec:
    """Return `spec` with what else the pass of step number `step` does."""
    scale = signed(fusion.grad_scale, group)
    return UpdateSpec(spec.rule, spec.coefficients, scale, fusion.zero_grads, dither_of(step))


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """Undo torch's decoration of an Optimizer method: its first call would import torch's compiler (over a second)."""
    return getattr(method, "__wrapped__", method)


def require_rate(name: str, value: Any, *, below: float | None = None) -> None:
    """Refuse a hyperparameter that is negative, or not below `below`."""
    number = float(value)
    if not number >= 0.0 or (below is not None and not number < below):
        limit = "at least 0" if below is None else f"in [0, {below:g})"
        raise ConfigError(
            f"{name}: expected a number {limit}, found {value}.", code="optimizer-value", fix=f"Set {name}."
        )


class OpsOptimizer(Optimizer):
    """Base of the optimizers of ds_ops; a drop-in `torch.optim.Optimizer`.

    elementwise: each element's update depends only on that element, so a sharder may cut tensors anywhere. If False,
        `needs_whole()` says which parameters must not be cut.
    state_names: the tensors kept per parameter, each shaped like it; beside them `step`, an int.
    """

    elementwise: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ()

    step_options: StepOptions = {}  # noqa: RUF012  # for optimizers pickled before there were any

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype = torch.float32,
        options: StepOptions | None = None,
    ) -> None:
        """state_dtype: fp32, bf16 or fp16; the dtype of every state tensor (fp64 parameters keep fp64), unless a parameter has an
        attribute of that name: `p.state_dtype = torch.bfloat16`. A second moment in 16 bits is dithered (`ds_ops.update_rules.dither_of`):
        rounded to nearest it would stay where it is, because its changes are smaller than its spacing.
        """
        if state_dtype not in _call.DTYPES:
            raise ConfigError(
                f"state_dtype: expected one of {[str(d) for d in _call.DTYPES]}, found {state_dtype}.",
                code="optimizer-value",
                fix="Set state_dtype=torch.float32.",
            )
        self.state_dtype = state_dtype
        self.step_options = check_options(type(self).__name__, options or {})
        self._repeats: dict[int, _Repeat] = {}
        super().__init__(params, defaults)

    def needs_whole(self, group: Group, p: Tensor) -> bool:
        """Whether `p` must be stepped as one tensor, on one rank."""
        return not self.elementwise

    def states_of(self, group: Group, p: Tensor) -> tuple[str, ...]:
        """Return the names of the state tensors that `p` has in `group`."""
        return self.state_names

    def spec(self, group: Group, step: int) -> UpdateSpec:
        """Return the update of step number `step` (from 1) for the parameters of `group`. Pure."""
        raise UnsupportedError(
            f"{type(self).__name__} defines no elementwise rule.",
            code="optimizer-rule",
            fix="Override spec() or step_bucket().",
        )

    def step_bucket(self, group: Group, spec: UpdateSpec, tensors: UpdateTensors) -> None:
        """Step one bucket. Override for rules that need more than one pass."""
        kernel = kernel_of(self.step_options)
        if all(p.is_contiguous() for p in tensors.params):
            update_by(kernel, spec, tensors)
        elif kernel == "fused":
            raise UnsupportedError(
                "fused=True: kernels that make one pass need contiguous parameters; found another memory order.",
                code="optimizer-fused",
                fix="Leave fused out, or call contiguous() on the parameters.",
            )
        else:
            reference_update(spec, tensors)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether a step rounds parameters of `dtype` stochastically."""
        return bool(self.step_options.get("stochastic_rounding")) and dtype == torch.bfloat16

    def step_tensors(self, group: Group, spec: UpdateSpec, tensors: UpdateTensors, draw: tuple[int, int]) -> None:
        """Step one bucket, and round its parameters as the options say.

        Stochastic rounding steps fp32 copies of the parameters: 8 bytes an element for a while, and random bits.

        Args:
            draw: the step's number and the first place of the random numbers, see `round_stochastically`.
        """
        if not self.rounds(tensors.params[0].dtype):
            return self.step_bucket(group, spec, tensors)
        new = [p.float() for p in tensors.params]
        self.step_bucket(group, spec, UpdateTensors(new, tensors.grads, tensors.states))
        round_stochastically(tensors.params, new, draw)
        for copy, p in zip(tensors.copies, tensors.params, strict=False):
            copy.copy_(p)
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, fusion: FusedOps = NO_FUSION) -> Any:
        """Update every parameter that has a gradient, and return the result of `closure`.

        Raises:
            UnsupportedError: "optimizer-sparse" for a sparse gradient; "optimizer-dtensor" and "optimizer-part" for a part of a parameter
                that must be whole.
            KernelError: "kernel-argument" for gradients or copies that do not fit their parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group, fusion)
        return loss

    def step_group(self, group: Group, fusion: FusedOps = NO_FUSION) -> None:
        """Step one parameter group."""
        if self._repeat(group, fusion):
            return
        params = [p for p in group["params"] if fusion.grad_of(p) is not None]
        self.ensure_state(group, params)
        for (number, *_), bucket in self._buckets(group, params, fusion).items():
            spec = self.spec(group, number)
            fused = fused_spec(spec, group, fusion, number)
            if bucket.params:
                self.step_tensors(group, fused, bucket.tensors(), (number, 0))
            for p in bucket.owners:  # a refused call has changed nothing, not even the step number
                self.state[p]["step"] = number
            if (
                len(bucket.owners) == len(group["params"])
                and not fusion.grads
                and not any(map(_is_dtensor, bucket.owners))
            ):
                self._remember(group, bucket)

    def _remember(self, group: Group, bucket: _Bucket) -> None:
        names = self.states_of(group, bucket.owners[0])
        native = type(self).step_bucket is OpsOptimizer.step_bucket and len(names) <= _NATIVE_STATES
        native = (
            native and kernel_of(self.step_options) in ("best", "fused") and not self.rounds(bucket.params[0].dtype)
        )
        prepared = prepare(bucket.tensors()) if native else None
        if prepared is not None:
            self._repeats[id(group)] = _Repeat(bucket.owners, names, prepared)

    def _repeat(self, group: Group, fusion: FusedOps) -> bool:
        """Step the group by its last call, if that is still the same one in all but the numbers."""
        last = self._repeats.get(id(group))
        if last is None or fusion.grads or fusion.copies or len(last.owners) != len(group["params"]):
            return False
        states = [self.state[p] for p in last.owners]
        number = states[0].get("step")
        grads = [p.grad for p in last.owners]
        if (
            not all(map(operator.is_, last.owners, group["params"]))
            or number is None
            or any(g is None for g in grads)
            or any(s.get("step") != number or any(n not in s for n in last.names) for s in states)
            or self.states_of(group, last.owners[0]) != last.names
        ):
            return False
        tensors = UpdateTensors(last.owners, grads, tuple([s[n] for s in states] for n in last.names))  # type: ignore[arg-type]
        spec = self.spec(group, number + 1)
        fused = fused_spec(spec, group, fusion, number + 1)
        if not last.prepared.run(fused, tensors):
            fresh = prepare(tensors) if _alike(grads) else None
            if fresh is None or not fresh.run(fused, tensors):
                return False
            self._repeats[id(group)] = _Repeat(last.owners, last.names, fresh)
        for s in states:
            s["step"] = number + 1
        return True

    def ensure_state(self, group: Group, params: Sequence[Tensor]) -> list[Tensor]:
        """Create the missing states of `params`: zeros, on the CPU in huge pages, where the parameters go too.

        Returns the parameters that had no state.
        """
        fresh = [p for p in params if "step" not in self.state[p]]
        for p in fresh:
            _refuse_part(self, group, p)
            self.state[p]["step"] = 0
            make_huge(_local(p.detach()))
        missing: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            for i, name in enumerate(self.states_of(group, p)):
                if name not in self.state[p]:
                    missing.setdefault((i, name, p.device, self.state_dtype_for(p, name)), []).append(p)
        for (i, name, *_), some in missing.items():
            for p, t in zip(some, self._empty_states(group, some, i + 1, name), strict=True):
                self.state[p][name] = t
        return fresh

    def state_shape(self, group: Group, p: Tensor, name: str) -> tuple[int, ...] | None:
        """Return the shape of a state that has not its parameter's elements; None: shaped and strided like `p`."""
        return None

    def state_dtype_for(self, p: Tensor, name: str) -> torch.dtype:
        """Return the dtype of the state `name` of `p`."""
        return self.state_dtype_of(p)

    def _empty_states(self, group: Group, params: Sequence[Tensor], stream: int, name: str) -> list[Tensor]:
        """Allocate zeros for the state `name` of parameters of one device and one dtype of states."""
        device, dtype = params[0].device, self.state_dtype_for(params[0], name)
        shapes = [self.state_shape(group, p, name) for p in params]
        paged = self.step_options.get("paged", False)
        if paged:
            return _zeros_in_file(params, shapes, dtype, paged)
        if all(shape is None for shape in shapes):
            return _zeros(params, device, dtype, stream=stream)
        return [
            torch.zeros_like(p, dtype=dtype) if shape is None else torch.zeros(shape, dtype=dtype, device=device)
            for p, shape in zip(params, shapes, strict=True)
        ]

    def state_dtype_of(self, p: Tensor) -> torch.dtype:
        """Return the dtype of the states of `p`: its attribute `state_dtype` if set, else the optimizer's."""
        dtype: torch.dtype = getattr(p, "state_dtype", self.state_dtype)
        return torch.float64 if p.dtype == torch.float64 else dtype

    @staticmethod
    def keeps(param: torch.dtype, state: torch.dtype) -> bool:
        """Whether states in dtype `state` are possible beside parameters in dtype `param`."""
        return state == torch.float64 if param == torch.float64 else state in _call.DTYPES

    def _buckets(self, group: Group, params: Sequence[Tensor], fusion: FusedOps) -> dict[tuple[Any, ...], _Bucket]:
        """Sort parameters by what one native call must share: the number of the coming step comes first."""
        buckets: dict[tuple[Any, ...], _Bucket] = {}
        for p in params:
            state, grad, copy = self.state[p], fusion.grad_of(p), fusion.copies.get(p)
            if grad is None:
                continue
            self._require_dense(p, grad)
            self._require_whole(group, p, grad)
            names = self.states_of(group, p)
            tensors, local = [_local(state[name]) for name in names], _local(p)
            dtypes = (p.dtype, grad.dtype, copy.dtype if copy is not None else None, *(s.dtype for s in tensors))
            key = (int(state["step"]) + 1, p.device, local.is_contiguous(), names, *dtypes)
            bucket = buckets.setdefault(key, _Bucket(states=[[] for _ in tensors]))
            bucket.owners.append(p)
            if _is_dtensor(p) and not local.numel():
                continue  # this rank has no element of it
            bucket.params.append(local)
            bucket.grads.append(_like(local, _local_grad(p, grad)))
            for row, s in zip(bucket.states, tensors, strict=True):
                row.append(s)
            if copy is not None:
                bucket.copies.append(copy)
        return buckets

    def _require_whole(self, group: Group, p: Tensor, grad: Tensor) -> None:
        """Refuse a part of a tensor that another package has cut over ranks (its gradient says so) where the rule needs the whole."""
        if getattr(grad, "whole", True) is False and self.needs_whole(group, p):
            raise UnsupportedError(
                f"{type(self).__name__} steps whole parameters; {_call.describe(p)} is one part of a tensor whose other parts are on other ranks.",
                code="optimizer-part",
                fix="Cut the model with ds_parallel.tensor.dtensor_params.parallelize_module, whose DTensors it steps as one, or use an optimizer that steps "
                "elements (AdamW, Lion).",
            )

    def _require_dense(self, p: Tensor, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{type(self).__name__} takes dense gradients; found layout {grad.layout} for {_call.describe(p)}.",
                code="optimizer-sparse",
                fix="Use nn.Embedding(sparse=False), or grad.to_dense().",
            )

    def dense_grad(self, p: Tensor, fusion: FusedOps) -> Tensor:
        """Return the gradient that a step uses for `p`.

        Raises:
            UnsupportedError: it is sparse ("optimizer-sparse").
        """
        grad = fusion.grad_of(p)
        if grad is None:
            raise KeyError("a parameter without a gradient is not stepped")
        self._require_dense(p, grad)
        return grad

    def add_param_group(self, param_group: Group) -> None:
        _plain(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _plain(Optimizer.zero_grad)(self, set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "state_dtype": self.state_dtype,
            "step_options": self.step_options,
            "_repeats": {},
        }

    def state_dict(self) -> dict[str, Any]:
        return _plain(Optimizer.state_dict)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of its torch.optim counterpart; states keep `state_dtype`."""
        self._repeats.clear()
        _plain(Optimizer.load_state_dict)(self, state_dict)
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        ours = [(g, p) for g in self.param_groups for p in g["params"]]
        for index, (group, p) in zip(saved, ours, strict=True):
            if index in state_dict["state"]:
                self._adopt(group, p, state_dict["state"][index])

    def _adopt(self, group: Group, p: Tensor, values: Mapping[str, Any]) -> None:
        names = self.states_of(group, p)
        moments = [
            k for k, v in values.items() if (isinstance(v, Tensor) and v.dim() and v.numel()) or isinstance(v, Mapping)
        ]
        if names and moments and not set(names) & set(values):
            raise CheckpointError(
                f"the saved state of a parameter of shape {list(p.shape)} has {moments}, and {type(self).__name__} expects {list(names)}.",
                code="optimizer-state",
                fix="Load it into an optimizer of the class that saved it.",
            )
        # torch casts loaded states to the parameter's dtype; fp32 moments of a bf16 parameter must not lose bits there.
        state = self.state[p] = {"step": 0}
        for i, name in enumerate(names):
            (fresh,) = self._empty_states(group, [p], i + 1, name)
            if values.get(name) is not None:
                fresh.copy_(values[name])
            state[name] = fresh
        state["step"] = int(values.get("step", 0))


def _is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is one of torch's DTensors: FSDP2's parameters, `parallelize_module`'s. Their module is not imported for that."""
    return hasattr(tensor, "device_mesh")


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a DTensor, in its memory; another tensor as it is."""
    return tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def _local_grad(p: Tensor, grad: Tensor) -> Tensor:
    """Return the elements of a gradient that its parameter has on this rank; a gradient that is not summed yet is."""
    if _is_dtensor(p) and _is_dtensor(grad):
        parts: Any = p
        there: Any = grad
        if there.placements != parts.placements:
            there = there.redistribute(parts.device_mesh, parts.placements)
        return _local(there)
    return grad


def _refuse_part(optimizer: OpsOptimizer, group: Group, p: Tensor) -> None:
    if _is_dtensor(p) and optimizer.needs_whole(group, p) and tuple(_local(p).shape) != tuple(p.shape):
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps whole parameters; found a part {tuple(_local(p).shape)} of a DTensor of shape {tuple(p.shape)}.",
            code="optimizer-dtensor",
            fix="Use ds_zero.shard(model, optimizer, stage=...), which keeps such parameters whole, or an optimizer that steps elements (AdamW, Lion).",
        )


def _zeros(params: Sequence[Tensor], device: torch.device, dtype: torch.dtype, *, stream: int) -> list[Tensor]:
    """Zeros shaped and strided like each of `params`."""
    if device.type != "cpu" or not all(p.is_contiguous() and not _is_dtensor(p) for p in params):
        return [torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format) for p in params]
    flat = zeros_huge([p.numel() for p in params], dtype, stream=stream)
    return [t.view(p.shape) for t, p in zip(flat, params, strict=True)]


def _zeros_in_file(
    params: Sequence[Tensor], shapes: Sequence[tuple[int, ...] | None], dtype: torch.dtype, paged: bool | str
) -> list[Tensor]:
    """Allocate zeros in a mapped file: of these shapes, or like the parameter where there is none.

    Raises:
        UnsupportedError: the parameters are on a device, or are DTensors ("optimizer-paged").
    """
    if any(p.device.type != "cpu" or _is_dtensor(p) for p in params):
        raise UnsupportedError(
            f"paged states are files mapped to the host's memory; found parameters that are DTensors or on {params[0].device}.",
            code="optimizer-paged",
            fix="Use ds_zero.shard(model, optimizer, ..., offload_optimizer=...), which holds states on the host or on a disk.",
        )
    like = [
        torch.empty_like(p, device="meta") if shape is None else torch.empty(shape, device="meta")
        for p, shape in zip(params, shapes, strict=True)
    ]
    flat = zeros_paged([t.numel() for t in like], dtype, paged if isinstance(paged, str) else None)
    return [t.as_strided(m.shape, m.stride()) for t, m in zip(flat, like, strict=True)]


def _alike(grads: Sequence[Tensor | None]) -> bool:
    """Whether every gradient is dense, contiguous and of one dtype: what a prepared call needs."""
    first = grads[0]
    return first is not None and all(
        g is not None and g.layout is torch.strided and g.dtype is first.dtype and g.is_contiguous() for g in grads
    )


def _like(p: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient in its parameter's memory order.

    Autograd may give another order (an expanded or transposed view).
    """
    return grad.contiguous() if p.is_contiguous() and not grad.is_contiguous() else grad

"""Activation checkpointing: a call keeps its inputs only, and is computed again in backward.

Chen et al., arXiv:1604.06174. The recomputation itself is torch.utils.checkpoint; what is added here is what becomes of the
inputs (`activation_store.py`), the named random states (`rng_tracker.py`), nested arguments and keywords in both forms, times, and which
of several policies a model's forward means.

Two forms. The *plain* one notes what autograd saves and stops recomputing when it has it; it takes any arguments, nests,
and can keep results of chosen operations. The *reentrant* one runs a backward inside the backward; it needs an input that
requires a gradient, gives none to `torch.autograd.grad`, and is what programs written for DeepSpeed expect.

A policy is an object. `with policy.active():` makes it the one that `checkpoint(...)` in the model's forward means; an engine
does this around its forwards, so several engines in one process do not disturb each other. Inside a recomputation its own policy is active.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

import ds_monitor
from ds_accel import Accelerator
from ds_comm import Group
from ds_config.errors import PlanError
from ds_parallel.activation_store import ActivationMemory, ActivationPolicy, ActivationStore
from ds_parallel.rng_tracker import RngTracker
from ds_parallel.trees import flatten, tensors_in

__all__ = ["ActivationCheckpointing", "checkpoint", "checkpoint_reentrant", "current_checkpointing"]

_log = logging.getLogger("ds_parallel")
_active: ContextVar[ActivationCheckpointing | None] = ContextVar("ds_parallel.checkpointing", default=None)

_HELD = ActivationPolicy()
"""Inputs are held as they are."""


class ActivationCheckpointing:
    """How calls are checkpointed.

    Args:
        keeping: What is kept of their inputs, and where.
        group: The tensor-parallel ranks, for `keeping.slices`; None is a group of one.
        tracker: Named random states that a recomputation starts from as the call did; a new one by default.
        save_ops: Operations (`torch.ops.aten.mm.default`) whose results are kept rather than computed again; plain form only.
        accelerator: The device; the process's own by default.
    Attributes:
        calls: Checkpointed calls so far.
    """

    def __init__(
        self,
        keeping: ActivationPolicy | None = None,
        group: Group | None = None,
        *,
        tracker: RngTracker | None = None,
        save_ops: Collection[Any] = (),
        accelerator: Accelerator | None = None,
    ) -> None:
        self.keeping = keeping or _HELD
        self.tracker = tracker or RngTracker(accelerator)
        self.save_ops = tuple(save_ops)
        self.calls = 0
        self._keeper = ActivationStore(self.keeping, group, accelerator)
        self._unused_told = False

    def __repr__(self) -> str:
        return f"ActivationCheckpointing({self.keeping})"

    @property
    def account(self) -> ActivationMemory:
        """Bytes of pieces that are kept now, and most at once."""
        return self._keeper.account

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` and recompute its activations in backward.

        Tensors may be in lists, tuples and dicts, at any depth.

        Raises:
            PlanError: see `ActivationStore.pack` and `ActivationStore.unpack`.
        Cost: a second forward of `function` in backward. Collective in backward where inputs are partitioned.
        """
        saves = partial(torch_checkpoint.create_selective_checkpoint_contexts, list(self.save_ops))
        context: dict[str, Any] = {"context_fn": saves} if self.save_ops else {}
        if torch.compiler.is_compiling() and self.keeping == _HELD:
            # torch's compiler knows this very call, keeps its inputs and replays its random numbers itself.
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **context, **kwargs)
        return self._run(partial(torch_checkpoint.checkpoint, use_reentrant=False, **context), function, args, kwargs)

    def checkpoint_reentrant(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` with reentrant activation checkpointing.

        Tensors may be in lists, tuples and dicts, at any depth, those that are returned too. Where no tensor needs a gradient (the ids of an
        embedding), this is `checkpoint`: the reentrant form would give what `function` trains none.

        Raises:
            PlanError: as `checkpoint`; also when results of operations are to be saved ("activations-form").
        """
        if self.save_ops:
            raise PlanError(
                f"the reentrant form was asked for with save_ops = {self.save_ops}, and keeps no results",
                code="activations-form",
                fix="Use checkpoint(), which can.",
            )
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in flatten((args, kwargs))[0]):
            return self.checkpoint(function, *args, **kwargs)
        builders: list[Callable[[Sequence[Tensor]], Any]] = []

        def flat(*inner: Any, **options: Any) -> tuple[Tensor, ...]:
            # Torch's function gives gradients to tensors of a tuple, and to none inside anything else.
            tensors, build = flatten(function(*inner, **options))
            builders[:] = [build]
            return tuple(tensors)

        results = self._run(partial(torch_checkpoint.checkpoint, use_reentrant=True), flat, args, kwargs)
        return builders[0](results)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this policy active: `checkpoint` and `checkpoint_reentrant` of this module use the policy.

        Applies to the calling thread, inside the context.
        """
        token = _active.set(self)
        try:
            yield
            self._check_used()
        finally:
            _active.reset(token)

    # ---- inside

    def _check_used(self) -> None:
        """Warn, once, if calls were to be treated in another way and a forward made none."""
        if self.calls == 0 and self.keeping != _HELD and torch.is_grad_enabled() and not self._unused_told:
            self._unused_told = True
            _log.warning(
                "activation_checkpointing asks for %s, and the model's forward made no checkpointed call: name modules in "
                "activation_checkpointing.modules, or call ds_parallel.checkpoint in the forward",
                self.keeping,
            )

    def _run(self, form: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        self.calls += 1
        tensors, rebuild = flatten((args, kwargs))
        positions = {id(tensor): at for at, tensor in enumerate(tensors)}
        call = _Call(self, function, rebuild)
        hooks = nullcontext() if not self.keeping.moves else self._hooks(positions)
        if not self.keeping.profile or not torch.is_grad_enabled():
            with hooks:
                return form(call, *tensors)
        # Aliases stand for this call alone, so that their gradients mark its end.
        tensors = [t.view_as(t) if t.requires_grad and self._keeper.eligible(t) else t for t in tensors]
        positions.update({id(tensor): at for at, tensor in enumerate(tensors)})
        with hooks:
            result = form(call, *tensors)
        self._time_backward(tensors_in(result), tensors)
        return result

    def _hooks(self, positions: dict[int, int]) -> saved_tensors_hooks:
        keeper = self._keeper

        def pack(tensor: Tensor) -> Any:
            at = positions.get(id(tensor))
            return tensor if at is None else keeper.pack(tensor, at)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else keeper.unpack(packed)

        return saved_tensors_hooks(pack, unpack)

    def _time_backward(self, results: list[Tensor], inputs: list[Tensor]) -> None:
        """Time from the first gradient of a result to the last gradient of an input, recomputation included."""
        waiting = {at for at, tensor in enumerate(inputs) if tensor.requires_grad}
        stack = ExitStack()
        begun: list[bool] = []

        def begin(_: Tensor) -> None:
            if not begun and waiting:
                begun.append(True)
                self.boundary()
                stack.enter_context(ds_monitor.span("activations/backward"))

        def end(at: int, _: Tensor) -> None:
            waiting.discard(at)
            handles.pop(at).remove()  # an input may be a leaf, which outlives the graph
            if not waiting:
                self.boundary()
                stack.close()

        for tensor in results:
            if tensor.requires_grad:
                tensor.register_hook(begin)
        handles = {at: inputs[at].register_hook(partial(end, at)) for at in tuple(waiting)}

    def boundary(self) -> None:
        """Wait for the device, if calls are timed one by one."""
        if self.keeping.synchronize:
            self._keeper.accelerator.synchronize()


class _Call:
    """One checkpointed call: runs once in forward, and again from the same named random states in backward."""

    __slots__ = ("function", "policy", "rebuild", "states")

    def __init__(
        self, policy: ActivationCheckpointing, function: Callable[..., Any], rebuild: Callable[..., Any]
    ) -> None:
        self.policy, self.function, self.rebuild = policy, function, rebuild
        self.states: dict[str, Tensor] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        policy = self.policy
        args, kwargs = self.rebuild(tensors)
        policy.boundary()
        if self.states is None:
            self.states = policy.tracker.states()
            with self._timed("activations/forward"):
                return self.function(*args, **kwargs)
        with policy.tracker.replayed(self.states), policy.active(), self._timed("activations/recompute"):
            return self.function(*args, **kwargs)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with ds_monitor.span(name) if self.policy.keeping.profile else nullcontext():
            yield
            self.policy.boundary()


def current_checkpointing() -> ActivationCheckpointing:
    """Return the active policy; a default policy, which saves inputs unchanged, where none is active."""
    return _active.get() or ActivationCheckpointing()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)` with the active policy's checkpointing, for use in a model's forward."""
    return current_checkpointing().checkpoint(function, *args, **kwargs)


def checkpoint_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)` with the active policy's checkpointing in the reentrant form."""
    return current_checkpointing().checkpoint_reentrant(function, *args, **kwargs)

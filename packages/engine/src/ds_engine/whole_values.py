"""While one rank saves a model whose parameters are sharded: what the model's own methods see of them.

A method that saves a model asks it for `state_dict()`, or calls a part of it (PEFT's prompt encoders). Inside `whole_values` both
find the whole tensors that this rank knows. A tensor that it does not know is an error as soon as somebody reads it, so nothing empty is
ever written.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import ShardedAccessError
from ds_engine.full_state import names_of_wholes
from ds_zero.runtime.sharded_parameter import Placeholder, ShardedParameter

__all__ = ["KnownState", "UnreadableWeights", "whole_values"]

_METADATA = {"shape", "dtype", "device", "requires_grad", "layout", "is_meta", "ndim", "dim", "is_floating_point"}


class UnreadableWeights(Tensor):
    """Stands in a state dict for weights of which this rank has a shard only; reading it raises.

    Attributes:
        weights: Their name.
    """

    weights: str

    @classmethod
    def of(cls, name: str, like: Tensor) -> UnreadableWeights:
        """Build the stand-in for the parameter `name`."""
        stand_in: UnreadableWeights = torch.empty(0, dtype=like.dtype, device="cpu").as_subclass(cls)
        stand_in.weights = name
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = next((value for value in args if isinstance(value, UnreadableWeights)), None)
        raise _unreadable("weights of the model" if first is None else first.weights)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unreadable(self.weights)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadableWeights({self.weights!r})"


def _unreadable(name: str) -> ShardedAccessError:
    return ShardedAccessError(
        f"{name} was to be saved by this rank, which has only its shard of it",
        code="sharded-access",
        fix="Save inside `with GatheredParameters(model):`, or call save_pretrained() on every rank outside of such a context.",
    )


class KnownState:
    """The last full state dict that this rank was given, as long as its caller keeps it and no weight has changed."""

    def __init__(self) -> None:
        self._values: dict[str, weakref.ref[Tensor]] = {}
        self._versions: tuple[int, ...] = ()

    def remember(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Refer to the tensors of `state`, which is that of `module` now; they are not kept alive."""
        self._values = {name: weakref.ref(value) for name, value in state.items() if isinstance(value, Tensor)}
        self._versions = _versions(module)

    def of(self, module: nn.Module, part: nn.Module) -> dict[str, Tensor] | None:
        """Return the state dict of `part` of `module`; None where this rank does not know all of it."""
        if not self._values or self._versions != _versions(module):
            return None
        prefix = next(f"{name}." if name else "" for name, inner in module.named_modules() if inner is part)
        alive = {name: value() for name, value in self._values.items() if name.startswith(prefix)}
        known = {name.removeprefix(prefix): value for name, value in alive.items() if value is not None}
        wanted = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        return known if wanted <= known.keys() else None


def _versions(module: nn.Module) -> tuple[int, ...]:
    return tuple(param._version for param in module.parameters())


@contextmanager
def whole_values(model: nn.Module, known: Mapping[str, Tensor]) -> Iterator[None]:
    """Serve the state dicts of `model` and of its parts, and the calls of its prompt encoders, from whole tensors.

    Args:
        known: By their names in `model`, as it was before it was cut. What is not sharded, or gathered at the moment, needs no entry.
    """
    wholes = names_of_wholes(model)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if module._parameters:
                handle = module.register_state_dict_post_hook(_filled(f"{path}." if path else "", known, wholes))
                stack.callback(handle.remove)
        stack.enter_context(_whole_encoders(model, known))
        yield


def _filled(path: str, known: Mapping[str, Tensor], wholes: Mapping[str, str]) -> Callable[..., None]:
    """Return a hook that puts whole tensors into a state dict, or stand-ins that refuse to be read.

    Args:
        wholes: Of parameters that are shards of larger tensors those tensors' names.
    """

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del metadata
        for leaf in module._parameters:
            value = state.get(prefix + leaf)
            name = wholes.get(path + leaf)
            if value is None or not (name or isinstance(value, Placeholder) or type(value) is ShardedParameter):
                continue
            name = name or path + leaf
            if name != path + leaf:
                del state[prefix + leaf]
            whole = known[name] if name in known else UnreadableWeights.of(name, value)
            state[prefix + name.removeprefix(path)] = whole

    return fill


@contextmanager
def _whole_encoders(model: nn.Module, known: Mapping[str, Tensor]) -> Iterator[None]:
    """Put copies with whole weights in the place of the encoders that PEFT calls while it saves a prompt."""
    encoders = getattr(model, "prompt_encoder", None)
    before = dict(encoders.items()) if isinstance(encoders, nn.ModuleDict) else {}
    for name, encoder in before.items():
        prefix = f"prompt_encoder.{name}."
        # The hooks of the encoder itself would gather, even what a context has gathered already, and the other ranks are not here.
        values = {
            key: param.detach() for key, param in encoder.named_parameters() if type(param) is not ShardedParameter
        }
        values |= {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}
        if {key for key, _ in encoder.named_parameters()} <= values.keys():
            plain = copy.deepcopy(encoder)
            plain.load_state_dict(values, strict=False, assign=True)
            encoders[name] = plain  # type: ignore[index]
        else:
            raise _unreadable(f"prompt_encoder.{name}")
    try:
        yield
    finally:
        for name, encoder in before.items():
            encoders[name] = encoder  # type: ignore[index]

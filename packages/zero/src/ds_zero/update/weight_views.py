"""What an optimizer writes to weights outside of `step`: `eval()` and `train()` of schedule-free ones, `sync_lookahead()`, `swap_swa_sgd()`.

Such methods write to the shards. Those that are known by name publish what they wrote: copies of the shards are brought up to date after the
call, on every rank, whether the program calls the optimizer it made or the sharded one. Any other method of a class that is not torch's is
watched: a write that nobody publishes is an error which names the method, since forward would use other weights on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_config.errors import UnsupportedError

__all__ = ["WeightViews", "not_published"]

_SWITCHES = {
    "eval", "train",  # schedule-free
    "sync", "sync_lookahead", "backup_and_load_cache", "clear_and_load_backup", "_backup_and_load_cache", "_clear_and_load_backup",  # Lookahead
    "swap_swa_sgd", "swap_swa_params", "swap_ema_weights", "switch_main_parameter_weights", "swap_parameters", "swap_weights", "swap",
    "apply_shadow", "store", "restore", "copy_to",
}  # fmt: skip
_LIBRARIES = ("torch.", "ds_ops.", "ds_comm.", "builtins")


class WeightViews:
    """The methods of one optimizer that write weights while its model is sharded. An optimizer of torch's stays as it is.

    Args:
        inner: Whose they are.
        before: Brings back what a switch will write to.
        after: Brings copies of the shards up to date. Collective.
    Attributes:
        switches: By name, those that publish.
        methods: By name, all that may write: those, and the watched ones.
    """

    def __init__(self, inner: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._inner, self._before, self._after = inner, before, after
        self._publishing = 0
        names = _methods_of(type(inner))
        self.switches: dict[str, Callable[..., Any]] = {n: partial(self._switch, n) for n in names if n in _SWITCHES}
        watched = {n: partial(self._watch, n) for n in names if n not in _SWITCHES and not n.startswith("_")}
        self.methods: dict[str, Callable[..., Any]] = self.switches | watched
        vars(inner).update(self.methods)

    def _switch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self.publishing():
            result = getattr(type(self._inner), name)(self._inner, *args, **kwargs)
        return _PublishingContext(result, self.publishing) if hasattr(result, "__exit__") else result

    def _watch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self._inner), name)
        if self._publishing:
            return method(self._inner, *args, **kwargs)
        before = self._digests()
        result = method(self._inner, *args, **kwargs)
        if before != self._digests():
            raise not_published(f"{type(self._inner).__name__}.{name}() wrote")
        return result

    def _digests(self) -> list[tuple[int, int]]:
        return [(id(part), _digest(part)) for group in self._inner.param_groups for part in group["params"]]

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Bring copies of the shards up to date after the block. Collective."""
        if self._publishing:
            yield
            return
        self._before()
        with self.stepping():
            yield
        self._after()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let methods write inside: who called will publish it."""
        self._publishing += 1
        try:
            yield
        finally:
            self._publishing -= 1

    def detach(self) -> None:
        """Give the optimizer its own methods back."""
        for name, method in self.methods.items():
            if vars(self._inner).get(name) is method:
                del vars(self._inner)[name]
        self.switches.clear()
        self.methods.clear()


class _PublishingContext:
    """A context manager of an optimizer whose entry and exit write weights (`with optimizer.swap_ema_weights():`)."""

    def __init__(self, context: Any, publishing: Callable[[], Any]) -> None:
        self._context, self._publishing = context, publishing

    def __enter__(self) -> Any:
        with self._publishing():
            return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        with self._publishing():
            return self._context.__exit__(*error)


def _methods_of(kind: type[Optimizer]) -> Sequence[str]:
    """Return the names of the methods that classes other than torch's and ds-ops' define, without those every optimizer has."""
    foreign = [one for one in kind.__mro__ if not one.__module__.startswith(_LIBRARIES)]
    known = set(dir(Optimizer))
    names = {
        name: None for one in foreign for name, value in vars(one).items() if callable(value) and name not in known
    }
    return [
        name
        for name in names
        if not name.startswith("__") and not isinstance(_attribute_of(kind, name), staticmethod | classmethod | type)
    ]


def _attribute_of(kind: type, name: str) -> Any:
    """Return a class attribute as it was defined, without binding."""
    return next(vars(one)[name] for one in kind.__mro__ if name in vars(one))


def _digest(tensor: Tensor) -> int:
    """Sum the bits of a tensor, as whole numbers; a write of other values changes the sum."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return int(tensor.detach().reshape(-1).view(kinds.get(tensor.itemsize, torch.int64)).sum(dtype=torch.int64))


def not_published(what: str) -> UnsupportedError:
    """Build the error of weights that were written to this rank's shards and brought to no other rank."""
    return UnsupportedError(
        f"{what} to weights outside of step(): these are shards here, and the copies that forward uses have the old values",
        code="zero-unpublished-weights",
        fix="Do it inside `with optimizer.publish_weights():` on all ranks, or write to the model's parameters inside "
        "GatheredParameters(params, write=True).",
    )

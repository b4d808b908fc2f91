"""`model.save_pretrained(folder)` of a model whose parameters are cut: it writes whole weights, as before the model was cut.

transformers, PEFT, diffusers and sentence-transformers give models this method. It takes `state_dict=` from a caller that has gathered one, or
asks the model for its own, which here holds parts. Programs call it on all ranks, on one with a state dict, on all with a state dict on
one, or on one inside `GatheredParameters`. Where this rank has or knows all weights, it goes on at once. Else no rank knows how the
others call it, so each leaves a word about its call. One that has a state dict goes on; one that has none waits for the words of all, and
then either all gather the weights, or those that have none leave the writing to those that have.
"""

from __future__ import annotations

import inspect
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn

from ds_ckpt.coordinator import TRANSFER_S
from ds_comm import Mesh, collect_notices, extend_timeout, post_notice
from ds_config.errors import ShardedAccessError
from ds_engine.all_or_nothing import all_or_nothing
from ds_engine.whole_values import whole_values

__all__ = ["ExportedModel", "SavesWhole"]

_NAME = "save_pretrained"
_WAIT_S = 600.0
_GIVEN, _KNOWN, _IDLE = "given", "known", "idle"
_OTHERS = {_GIVEN, _KNOWN}  # words of a rank that writes without the others


class ExportedModel(Protocol):
    """An engine, as far as its model is saved."""

    mesh: Mesh
    module: nn.Module

    @property
    def global_steps(self) -> int:
        """Updates so far."""

    @property
    def micro_steps(self) -> int:
        """Backwards so far."""

    def whole_state_of(self, module: nn.Module, *, lead: bool) -> dict[str, Tensor]:
        """Return the full state dict of a module inside the model, where `lead` says so. Collective."""

    def known_state_of(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Return the full state dict of a module, if this rank was given it and still has it; None else. Not collective."""

    def is_gathered(self, module: nn.Module) -> bool:
        """Whether a context keeps parameters of a module whole on this rank."""


class SavesWhole:
    """Stands in a model for its `save_pretrained`, until `close` or until the engine is freed.

    Raises:
        ShardedAccessError: when called, some ranks have not called it after ten minutes, and none has a state dict ("sharded-access").
    """

    wait_s = _WAIT_S

    def __init__(self, model: nn.Module, engine: ExportedModel, running: set[str] | None = None) -> None:
        self._model, self._engine = weakref.ref(model), weakref.ref(engine)
        self._running: set[str] = set() if running is None else running  # folders, of all wrappers of an engine
        vars(model)[_NAME] = self

    @classmethod
    def all_in(cls, engine: ExportedModel) -> list[SavesWhole]:
        """Build a wrapper for each module in the engine's model that has the method."""
        running: set[str] = set()
        return [cls(module, engine, running) for module in engine.module.modules() if hasattr(type(module), _NAME)]

    def close(self) -> None:
        """Restore the model's own method."""
        model = self._model()
        if model is not None and vars(model).get(_NAME) is self:
            del vars(model)[_NAME]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._model())]  # the copy of a model is no engine's
        return getattr(type(copied), _NAME).__get__(copied)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model, engine = cast(nn.Module, self._model()), self._engine()  # who calls it has the model
        save = getattr(type(model), _NAME).__get__(model)
        if engine is None or self._running:  # of a model whose own method saves its parts
            return save(*args, **options)
        call = inspect.signature(save).bind(*args, **options)
        arguments = {**call.arguments, **options}
        folder, main = _folder_of(arguments), bool(arguments.get("is_main_process", True))
        state: Mapping[str, Tensor] | None = arguments.get("state_dict")
        if state is None and engine.is_gathered(model):
            return self._save(model, folder, {}, partial(save, *args, **options))
        word = _GIVEN
        if state is None and main and (state := engine.known_state_of(model)) is not None:
            word = _KNOWN
        topic = f"{_NAME}/{engine.global_steps}.{engine.micro_steps}/{folder}"
        if state is not None:
            several = engine.mesh["world"].size > 1
            try:
                if several:
                    post_notice(topic, word)
                return self._save(model, folder, state, partial(save, *args, **options))
            finally:
                if several and word == _KNOWN:
                    post_notice(f"{topic}/saved", word)
        writes = self._writes(engine, topic, folder, main)
        if writes is None:
            return None
        state = engine.whole_state_of(model, lead=writes)

        def write() -> Any:
            with extend_timeout(TRANSFER_S):
                return self._save(model, folder, state, _with_state(save, call, state)) if writes else None

        return all_or_nothing(engine.mesh["world"], write)

    def _save(self, model: nn.Module, folder: str, state: Mapping[str, Tensor], save: Callable[[], Any]) -> Any:
        """Call the model's own method, which finds whole weights wherever it looks for them."""
        self._running.add(folder)
        try:
            with whole_values(model, state):
                return save()
        finally:
            self._running.discard(folder)

    def _writes(self, engine: ExportedModel, topic: str, folder: str, main: bool) -> bool | None:
        """Whether this rank writes what all gather: the first of those on a host that would write; None: no rank gathers."""
        world = engine.mesh["world"]
        if world.size == 1:
            return main
        notice = socket.gethostname() if main else _IDLE
        post_notice(topic, notice)
        words = collect_notices(topic, self.wait_s, lambda heard: not _OTHERS.isdisjoint(heard.values()))
        if _KNOWN in words.values():  # this rank returns when the folder is there, as if it had gathered
            collect_notices(f"{topic}/saved", self.wait_s, bool)
        if not _OTHERS.isdisjoint(words.values()):
            return None
        if len(words) < world.size:
            absent = sorted(set(range(world.size)) - set(words))
            raise ShardedAccessError(
                f"{_NAME}({folder!r}) without a state dict was called on ranks {sorted(words)} of {world.size}, and ranks {absent}, "
                f"which have parts of the weights, did not call it within {self.wait_s:.0f} s",
                code="sharded-access",
                fix="Call it on every rank, or inside GatheredParameters, or pass state_dict=, of full_state_dict() of the engine, which "
                "every rank calls.",
            )
        return main and world.rank == min(rank for rank, word in words.items() if word == notice)


def _with_state(
    save: Callable[..., Any], call: inspect.BoundArguments, state: Mapping[str, Tensor]
) -> Callable[[], Any]:
    """Return a call of the method with a state dict, if it takes one."""
    parameters = call.signature.parameters.values()
    if "state_dict" in call.signature.parameters:
        call.arguments["state_dict"] = state
        return partial(save, *call.args, **call.kwargs)
    takes = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return partial(save, *call.args, **{**call.kwargs, **({"state_dict": state} if takes else {})})


def _folder_of(arguments: Mapping[str, Any]) -> str:
    """Return the folder that a call names: `save_directory`, or whatever the method calls its first argument."""
    return os.path.abspath(str(arguments.get("save_directory", next(iter(arguments.values()), ""))))

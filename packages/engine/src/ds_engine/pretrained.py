"""`model.save_pretrained(folder)` of a model whose parameters are cut: it writes whole weights, as before the model was cut.

transformers, PEFT and diffusers give models this method. It takes `state_dict=` from a caller that has gathered one, or asks the model for its own,
which here holds parts. Programs call it on all ranks, on one with a state dict, or on all with a state dict on one: no rank knows which
it is. So each leaves a word about its call. One that has a state dict goes on at once; one that has none waits for the words of all, and
then either all gather the weights, or those that have none leave the writing to those that have.
"""

from __future__ import annotations

import inspect
import os
import socket
import weakref
from typing import Any, Protocol, cast

from torch import Tensor, nn

from ds_comm import Mesh, barrier, collect_notices, post_notice
from ds_config.errors import ShardedAccessError

__all__ = ["ExportedModel", "SavesWhole"]

_NAME = "save_pretrained"
_WAIT_S = 600.0
_GIVEN, _IDLE = "given", "idle"


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


class SavesWhole:
    """Stands in a model for its `save_pretrained`, until `close` or until the engine is freed.

    Raises:
        ShardedAccessError: when called, some ranks have not called it after ten minutes, and none has a state dict ("sharded-access").
    """

    wait_s = _WAIT_S

    def __init__(self, model: nn.Module, engine: ExportedModel) -> None:
        self._model, self._engine = weakref.ref(model), weakref.ref(engine)
        vars(model)[_NAME] = self

    @classmethod
    def all_in(cls, engine: ExportedModel) -> list[SavesWhole]:
        """Build a wrapper for each module in the engine's model that has the method."""
        return [cls(module, engine) for module in engine.module.modules() if hasattr(type(module), _NAME)]

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
        if engine is None:
            return save(*args, **options)
        call = inspect.signature(save).bind(*args, **options)
        arguments = {**call.arguments, **options}
        has = arguments.get("state_dict") is not None
        writes = self._writes(
            engine, os.path.abspath(arguments["save_directory"]), has, arguments.get("is_main_process", True)
        )
        if has:
            return save(*args, **options)
        if writes is None:
            return None
        state = engine.whole_state_of(model, lead=writes)
        try:
            if writes and "state_dict" in call.arguments:
                call.arguments["state_dict"] = state
                return save(*call.args, **call.kwargs)
            return save(*args, **{**options, "state_dict": state}) if writes else None
        finally:
            barrier(engine.mesh["world"])

    def _writes(self, engine: ExportedModel, folder: str, has: bool, main: bool) -> bool | None:
        """Whether this rank writes what all gather: the first of those on a host that would write; None: no rank gathers."""
        world = engine.mesh["world"]
        if world.size == 1:
            return not has and bool(main)
        topic = f"{_NAME}/{engine.global_steps}.{engine.micro_steps}/{folder}"
        notice = _GIVEN if has else socket.gethostname() if main else _IDLE
        post_notice(topic, notice)
        words = {} if has else collect_notices(topic, self.wait_s, lambda heard: _GIVEN in heard.values())
        if has or _GIVEN in words.values():
            return None
        if len(words) < world.size:
            absent = sorted(set(range(world.size)) - set(words))
            raise ShardedAccessError(
                f"{_NAME}({folder!r}) without a state dict was called on ranks {sorted(words)} of {world.size}, and ranks {absent}, "
                f"which have parts of the weights, did not call it within {self.wait_s:.0f} s",
                code="sharded-access",
                fix="Call it on every rank, or pass state_dict=, of full_state_dict() of the engine, which every rank calls.",
            )
        return bool(main) and world.rank == min(rank for rank, word in words.items() if word == notice)

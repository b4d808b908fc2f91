"""What an engine holds of compiled training: the passes it knows, and the session once `compile` was called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ds_comm import Group
from ds_config.errors import PlanError
from ds_engine.compiling.backends import CUTS, Compiling, Shares
from ds_engine.compiling.schedule_passes import BUILTIN, Contract, Pass, resolve
from ds_zero import ShardedModel

__all__ = ["CompiledRun"]

_log = logging.getLogger("ds_engine")


class CompiledRun:
    """Absent until `compile` is called; then one `session.Session`, or torch's own compilation where the plan has no passes.

    Printed, it is the passes of the next step, and each action in each graph with the node that it comes before.

    Args:
        model: Whose forward is compiled.
        sharding: Its units.
        plan: Which passes; None where the configuration asks for none.
        everyone: Ranks that decide alike.
        shares: How sequences are shared, where graphs cut them.
    Attributes:
        passes: By name, those of users as well.
        session: What is compiled with passes.
        plain: Whether the model was compiled by torch alone.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: ShardedModel,
        plan: Compiling | None,
        everyone: Group,
        shares: Shares | None = None,
    ) -> None:
        self.model, self.sharding, self.plan, self.everyone, self.shares = model, sharding, plan, everyone, shares
        self.passes: dict[str, Pass] = dict(BUILTIN)
        self.session: Any = None
        self.plain = False
        self._logged = plan is None

    def __str__(self) -> str:
        if self.session is not None:
            return str(self.session)
        return "compiled by torch, without passes" if self.plain else "not compiled"

    @property
    def active(self) -> bool:
        """Whether the model runs compiled."""
        return self.session is not None or self.plain

    def register(self, name: str, edit: Callable[..., Any], contract: Contract | None = None) -> None:
        """Add a pass that edits graphs; see `Engine.register_compile_pass`."""
        if name in BUILTIN or self.session is not None:
            raise PlanError(
                f"a pass {name!r} was registered"
                + (" after compile()" if name not in BUILTIN else ", which is built in"),
                code="compile-register",
                fix="Give it another name, and register it before compile().",
            )
        self.passes[name] = Pass(name, "a function of the caller", contract or Contract(), edit=edit)

    def compile(
        self,
        backend: str,
        kwargs: Mapping[str, Any],
        schedule: Sequence[tuple[int, Sequence[Any]]] | None,
        budget: int | None,
    ) -> None:
        """Compile the model's forward in place, once."""
        if self.active:
            raise PlanError(
                "compile() was called twice",
                code="compile-twice",
                fix="Call it once, before the first forward that counts.",
            )
        if self.plan is None:
            if schedule is not None:
                raise PlanError(
                    "compile() got a schedule of passes, and compile.deepcompile is off",
                    code="compile-schedule",
                    fix="Set compile.deepcompile = true in the configuration.",
                )
            self.model.compile(backend=backend, **kwargs)
            self.plain = True
            return
        # torch's compiler takes a second to import; a run that is not compiled does without.
        from ds_engine.compiling.sequence_sharding import SharedBatch
        from ds_engine.compiling.session import CompileSettings, Session

        plan = self.plan if schedule is None else replace(self.plan, schedule=resolve(schedule, self.passes))
        _check_cuts(plan)
        self.session = Session(self.model, self.sharding, plan, CompileSettings(backend, kwargs, budget), self.everyone)
        self.session.start(None if self.shares is None else SharedBatch(self.model, self.shares))

    def called(self) -> None:
        """Warn once, before the model runs, if compilation is configured but `compile()` was not called."""
        if not self._logged and not self.active:
            self._logged = True
            _log.warning("compile.deepcompile is on, and engine.compile() was not called: the model runs eagerly")

    def stepped(self) -> None:
        """Advance the session after a step. Collective where other passes are due."""
        if self.session is not None:
            self.session.stepped()

    def close(self) -> None:
        """Restore the model's eager execution and stop the session."""
        if self.session is not None:
            self.session.stop()
        if self.plain:
            self.model._compiled_call_impl = None
        self.session, self.plain = None, False


def _check_cuts(plan: Compiling) -> None:
    """Raise PlanError for a schedule with passes that cut what this run does not cut ("compile-cuts")."""
    vain = sorted({each.name for entry in plan.schedule for each in entry.passes} & (set(CUTS) - plan.cuts))
    if vain:
        raise PlanError(
            f"a schedule names {', '.join(vain)}, and nothing is cut: compile.passes does not have it, or there is one rank to cut over",
            code="compile-cuts",
            fix=f"Set {' and '.join(CUTS[name] for name in vain)}, and name the pass in compile.passes.",
        )

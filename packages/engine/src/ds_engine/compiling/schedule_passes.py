"""Passes: what each one does, needs and excludes, and which of them run at which step. Pure; no torch.

A *contract* names capabilities: what must have been done in the same list before (`requires`), what is done (`provides`), and
passes that cannot be in the same list (`conflicts`, either way round). A *schedule* is a list of (step, passes): from that step on
these passes, and no others, are applied to the graphs as they were captured, so each entry names all it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ds_engine.compiling.pass_choice as pass_choice
from ds_config.errors import PlanError
from ds_engine.compiling.graph import Graph, PassInputs

__all__ = [
    "BUILTIN",
    "Contract",
    "Pass",
    "PassEntry",
    "check_schedule",
    "default_schedule",
    "named",
    "resolve",
    "schedule_text",
]

Decide = Callable[[Graph, PassInputs], Graph]


@dataclass(frozen=True, slots=True)
class Contract:
    """What a pass asks of the others in its list.

    Attributes:
        requires: Capabilities that passes before it provide.
        provides: Capabilities of its own.
        conflicts: Names of passes that cannot be in the same list.
    """

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass.

    Attributes:
        name: As schedules and logs say it.
        what: What it does, in a line.
        contract: See above.
        decide: Its deciding part; None for a pass that only edits the graph.
        edit: Edits the torch.fx graph itself, after all deciding parts; for passes of users. What our own do to a graph is in `graph_split.py`.
        measured: Whether it needs times and bytes of a step.
    """

    name: str
    what: str
    contract: Contract = Contract()
    decide: Decide | None = None
    edit: Callable[..., Any] | None = None
    measured: bool = False


@dataclass(frozen=True, slots=True)
class PassEntry:
    """Passes from a step on."""

    step: int
    passes: tuple[Pass, ...]

    @property
    def measured(self) -> bool:
        """Whether a pass needs measurements of the step before."""
        return any(each.measured for each in self.passes)

    def has(self, name: str) -> bool:
        """Whether a pass of that name is in it."""
        return any(each.name == name for each in self.passes)


_GATHERS, _REDUCES = frozenset({"gathers"}), frozenset({"reduces"})
_RESULTS = frozenset({"offload_activation", "offload_activation_all"})
_STATES = frozenset({"offload_opt_states", "offload_opt_states_all"})
_PARAMETERS = frozenset({"offload_parameters"})
# Each of these moves something else to the host for the same budget, and would count what another one has moved.

_ALL = (
    Pass(
        "reduce", "hand each unit's gradients over behind the last of them",
        Contract(provides=_REDUCES), pass_choice.reduce,
    ),
    Pass(
        "autotp", "add the gradients that layers cut over ranks have of one input before they are summed",
        Contract(requires=_REDUCES, provides=frozenset({"cuts layers"})),
    ),
    Pass(
        "autosp", "cut sequences over ranks, and exchange heads around attention",
        Contract(provides=frozenset({"cuts sequences"})),
    ),
    Pass(
        "bucket", "sum the gradients of several small units by one message",
        Contract(requires=_REDUCES), pass_choice.bucket,
    ),
    Pass(
        "gather", "gather each unit before its first use, release it behind the last one",
        Contract(provides=_GATHERS), pass_choice.insert,
    ),
    Pass(
        "prefetch", "begin gathers early, as far as measured memory and time go",
        Contract(requires=_GATHERS), pass_choice.prefetch, measured=True,
    ),
    Pass(
        "keep", "keep the units with the most expensive gathers per byte gathered, as far as measured memory goes",
        Contract(requires=_GATHERS), pass_choice.keep, measured=True,
    ),
    Pass(
        "offload_parameters", "bring what gathers send from host memory to the device before they begin",
        Contract(requires=_GATHERS, conflicts=_RESULTS | _STATES), pass_choice.load,
    ),
    Pass(
        "offload_opt_states_all", "keep the optimizer's state in host memory while graphs run",
        Contract(provides=frozenset({"parks"}), conflicts=_RESULTS | _PARAMETERS | {"offload_opt_states"}), pass_choice.park_all,
    ),
    Pass(
        "offload_opt_states", "keep as much of the optimizer's state in host memory as measured memory asks for",
        Contract(provides=frozenset({"parks"}), conflicts=_RESULTS | _PARAMETERS), pass_choice.park, measured=True,
    ),
    Pass(
        "free_activation", "give saved results back behind their last use",
        Contract(provides=frozenset({"frees"})), pass_choice.free,
    ),
    Pass(
        "offload_activation_all", "keep saved results in host memory between forward and backward",
        Contract(provides=frozenset({"stores"}), conflicts=frozenset({"offload_activation", "free_activation"})), pass_choice.store_all,
    ),
    Pass(
        "offload_activation", "keep as few saved results in host memory as measured memory asks for",
        Contract(provides=frozenset({"stores"}), conflicts=frozenset({"free_activation"})), pass_choice.store, measured=True,
    ),
)  # fmt: skip

BUILTIN: Mapping[str, Pass] = {each.name: each for each in _ALL}


def default_schedule(
    stage: int,
    *,
    frees: bool = False,
    offloads: bool = False,
    states: bool = False,
    params: bool = False,
    cuts: Sequence[str] = (),
) -> tuple[PassEntry, ...]:
    """Passes of a ZeRO stage. The first five steps run without those that need measurements.

    Args:
        stage: ZeRO stage.
        frees, offloads: Saved results.
        states, params: The optimizer's state, parameters, that rest in host memory.
        cuts: Names of passes that cut layers or sequences.
    """
    base = ["reduce", *(["gather"] if stage == 3 else []), *cuts]
    enabled = {
        "offload_parameters": params,
        "offload_opt_states": states,
        "offload_activation": offloads,
        "free_activation": frees,
    }
    more = [name for name, on in enabled.items() if on]
    first = base + [name if f"{name}_all" not in BUILTIN else f"{name}_all" for name in more]
    # What was gathered stays only where it is not memory that is wanted.
    later = base + (["prefetch", *([] if params else ["keep"])] if stage == 3 else []) + more
    entries = [PassEntry(0, tuple(BUILTIN[name] for name in first))]
    if later != first:
        entries.append(PassEntry(5, tuple(BUILTIN[name] for name in later)))
    return tuple(entries)


def check_schedule(entries: Sequence[PassEntry]) -> None:
    """Raise PlanError for every broken contract at once ("compile-contract"), or for steps that do not grow ("compile-schedule")."""
    steps = [entry.step for entry in entries]
    if not steps or steps != sorted(set(steps)) or steps[0] < 0:
        raise PlanError(
            f"a schedule of passes has the steps {steps}",
            code="compile-schedule",
            fix="Give at least one entry, and steps that grow from 0 on.",
        )
    problems = [f"step {entry.step}: {text}" for entry in entries for text in _broken(entry.passes)]
    if problems:
        raise PlanError(
            "passes do not go together: " + "; ".join(problems),
            code="compile-contract",
            fix="Each entry of a schedule names all of its passes, providers first; see docs/how-to/compile-a-run.md.",
        )


def _broken(passes: Sequence[Pass]) -> list[str]:
    names, have, problems = [each.name for each in passes], set[str](), []
    for each in passes:
        missing = sorted(each.contract.requires - have)
        if missing:
            problems.append(f"{each.name} requires {', '.join(missing)}, which no pass before it provides")
        against = sorted(each.contract.conflicts.intersection(names))
        problems += [f"{each.name} conflicts with {other}" for other in against]
        have |= each.contract.provides
    problems += [f"{name} is in it twice" for name in sorted({n for n in names if names.count(n) > 1})]
    return problems


def resolve(schedule: Sequence[tuple[int, Sequence[Any]]], known: Mapping[str, Pass]) -> tuple[PassEntry, ...]:
    """Resolve a schedule of (step, names, passes or functions) by looking up every pass. The result is checked.

    Raises:
        PlanError: a name is unknown ("compile-pass"), or see `check_schedule`.
    """
    entries = tuple(PassEntry(int(step), tuple(named(each, known) for each in passes)) for step, passes in schedule)
    check_schedule(entries)
    return entries


def named(each: Any, known: Mapping[str, Pass]) -> Pass:
    """Return the pass of a name or a function. An unregistered function is a pass without a contract."""
    if isinstance(each, Pass):
        return each
    if callable(each):
        same = [one for one in known.values() if each in (one.edit, one.decide)]
        if len(same) > 1:
            names = ", ".join(one.name for one in same)
            raise PlanError(
                f"{each!r} is registered under multiple names: {names}",
                code="compile-pass",
                fix="Write its name instead.",
            )
        return same[0] if same else Pass(getattr(each, "__name__", repr(each)), "a function of the caller", edit=each)
    if each in known:
        return known[each]
    raise PlanError(
        f"there is no pass {each!r}",
        code="compile-pass",
        fix=f"Use one of {', '.join(known)}, or register_compile_pass().",
    )


def schedule_text(entries: Sequence[PassEntry]) -> str:
    """Describe the passes of each step in one line."""
    return "; ".join(f"from step {e.step}: {' -> '.join(p.name for p in e.passes)}" for e in entries)

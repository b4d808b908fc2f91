"""What a checkpoint and a run do not have in common: named in one line for each kind, or refused.

A parameter that was never trained has no optimizer state, and needs none. What the model has and the checkpoint lacks begins
as it is; what the checkpoint has and nothing in the run asks for is left unread. `strict` of `load_checkpoint` chooses which of
these are errors.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_ckpt.coordinator import Coordinator
from ds_comm import Group
from ds_config.errors import CheckpointError

__all__ = ["LoadDifferences", "compare", "refuse_or_name"]

_log = logging.getLogger("ds_engine")

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class LoadDifferences:
    """The same on every rank.

    Attributes:
        new: Tensors of the model that the checkpoint lacks.
        fresh: Trained parameters that the checkpoint has, without optimizer state.
        unused: Tensors of the checkpoint that no rank asks for.
        common: Whether any parameter is in both.
        further: Tensors of copies that another cut of the model has, where this one has the first alone.
    """

    new: Sequence[str]
    fresh: Sequence[str]
    unused: Sequence[str]
    common: bool
    further: Sequence[str] = ()


def compare(group: Group, stored: Collection[str], local: Iterable[str], fresh: Iterable[str]) -> LoadDifferences:
    """Compare the tensor names of a checkpoint with those that the ranks ask for. Collective.

    Args:
        stored: Names in the checkpoint that this load is about, the same on every rank.
        local: Names that this rank asks for.
        fresh: Of this rank, see `LoadDifferences`.
    Cost: ceil(log2 N) messages of a bit for each stored name.
    """
    order, asked = sorted(stored), set(local)
    mask = sum(1 << i for i, name in enumerate(order) if name in asked)

    def union(mine: Any, theirs: Any) -> Any:
        names = [sorted({*a, *b}) for a, b in zip(mine[:2], theirs[:2], strict=True)]
        return [*names, f"{int(mine[2], 16) | int(theirs[2], 16):x}"]

    value: Any = [sorted(asked.difference(order)), sorted(fresh), f"{mask:x}"]
    new, without, merged = Coordinator.of(group).spread(value, union)
    bits = f"{int(merged, 16):b}"[::-1]  # up to the last name that is asked for; "0" of no names
    used = {name for name, bit in zip(order, bits, strict=False) if bit == "1"}
    unused = [name for name in order if name not in used]
    return LoadDifferences(new, without, unused, any(name.startswith("param/") for name in used))


def refuse_or_name(
    path: str, found: LoadDifferences, stored: Collection[str], parts: Collection[str], *, lead: bool
) -> None:
    """Raise what `parts` asks to be an error, and name the rest in one line for each kind.

    Args:
        stored: As for `compare`.
        parts: "exact": everything in one and not in the other is an error; "model": parameters and buffers are.
        lead: Whether this rank writes the lines.
    Raises:
        CheckpointError: on every rank ("ckpt-mismatch"); also where no parameter is in both.
    """
    kinds = ("",) if "exact" in parts or not found.common else ("param/", "buffer/") if "model" in parts else ()
    missing = [name for name in found.new if name.startswith(kinds)] if kinds else []
    unexpected = [name for name in found.unused if name.startswith(kinds)] if kinds else []
    if missing or unexpected:
        problems = [f"missing {name!r}{_nearest(name, stored)}" for name in missing[:_SHOWN]]
        problems += [f"unexpected {name!r}" for name in unexpected[:_SHOWN]]
        more = len(missing) + len(unexpected) - len(problems)
        raise CheckpointError(
            f"{path} does not match the run:\n  " + "\n  ".join(problems) + (f"\n  and {more} more" if more else ""),
            code="ckpt-mismatch",
            fix="Build the model that was saved, or leave `strict` out to go on with what both have in common."
            if found.common
            else "Build the model that was saved; not one of its parameters is in the checkpoint.",
        )
    lines: Mapping[str, Sequence[str]] = {
        "has no values for %d tensors of the model, which stay as they are: %s": found.new,
        "has no optimizer state of %d trained parameters, which begin without: %s": found.fresh,
        "has %d tensors that nothing here asks for, which are not used: %s": found.unused,
        "has %d further copies of untied parts of tied layers, of which the first are used: %s": found.further,
    }
    for text, names in lines.items() if lead else ():
        if names:
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            _log.warning(f"%s {text}", path, len(names), shown)


def _nearest(name: str, stored: Collection[str]) -> str:
    near = difflib.get_close_matches(name, stored, n=1, cutoff=0.6) if len(stored) <= 20000 else []
    return f" (nearest: {near[0]!r})" if near else ""

"""Does a checkpoint hold what is asked of it? No tensor, no file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ds_ckpt.records import Manifest
from ds_ckpt.save_plan import SHOWN, more
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError
from ds_config.option_checks import check_options

__all__ = ["LoadOptions", "check_load"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load may leave out or change. The default: everything there is, as it is.

    Attributes:
        prefixes: Names that this load is about; others in the checkpoint are ignored (`("param/",)`: weights only).
        strict: Tensors in the checkpoint (under the prefixes) that no rank asked for are an error.
        cast: Fill a shard of another floating-point dtype by conversion, instead of an error.
        begins: Is called before the first tensor changes, when only damage within the data can still be found.
    """

    prefixes: tuple[str, ...] = ("",)
    strict: bool = True
    cast: bool = False
    begins: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        check_options(self)


def check_load(
    shards: Sequence[TensorShard], requested: Collection[str], manifest: Manifest, options: LoadOptions
) -> None:
    """Refuse, with every reason at once, what the checkpoint cannot fill exactly.

    Args:
        shards: This rank's.
        requested: Names that any rank asked for.

    A tensor without elements may be missing or unexpected.

    Raises:
        CheckpointError: "ckpt-mismatch": missing names (with the nearest stored ones), unexpected names, shapes or
            dtypes that differ.
    """
    known = {**{name: name for name in manifest.tensors}, **manifest.aliases}
    # Tensors without elements say nothing: whether one is there depends on the layout that wrote it.
    missing = sorted({s.name for s in shards if math.prod(s.shape)} - known.keys())
    problems = []
    for name in missing[:SHOWN]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) if len(known) <= 20000 else []
        problems.append(f"missing {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    problems += more(missing)
    if options.strict:
        served = {known[name] for name in requested if name in known}
        unexpected = sorted(
            n for n, t in manifest.tensors.items() if n not in served and n.startswith(options.prefixes) and t.nbytes
        )
        problems += [f"unexpected {name!r}" for name in unexpected[:SHOWN]] + more(unexpected)
    wrong = []
    for shard in shards:
        if shard.name not in known:
            continue
        record = manifest.tensors[known[shard.name]]
        castable = options.cast and _castable(record.dtype) and _castable(shard.dtype)
        if shard.shape != record.shape or (shard.dtype != record.dtype and not castable):
            stored, wanted = f"{record.dtype}{list(record.shape)}", f"{shard.dtype}{list(shard.shape)}"
            wrong.append(f"{shard.name!r} is stored as {stored}, asked for as {wanted}")
    problems += wrong[:SHOWN] + more(wrong)
    if problems:
        raise CheckpointError(
            "the checkpoint does not match what is loaded into:\n  " + "\n  ".join(problems),
            code="ckpt-mismatch",
            fix="Use LoadOptions(prefixes=..., strict=False, cast=True) for a load that is meant to be partial.",
        )


def _castable(dtype: str) -> bool:
    return "float" in dtype

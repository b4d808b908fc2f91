"""Whose the files of a DeepSpeed checkpoint are: by pipeline stage, tensor-parallel rank and data-parallel rank.

Files are numbered by model-parallel rank: `stage * degree + tensor rank`, where `degree` ranks have a part of each layer. Of a pipeline
the layers have files of their own, which are numbered by layer and tensor rank; experts have theirs, which every such rank reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_ckpt.convert.module_states import split_state
from ds_config.errors import CheckpointError

__all__ = ["TIED", "RankFiles"]

TIED = "tied_modules."
"""What the names begin with that every stage of a pipeline has whole."""

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(.*)model_states\.pt")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one checkpoint by their owners.

    Args:
        models: By model-parallel rank, in the order of data-parallel ranks; those of the optimizer in `optims` so, too.
        layers: Layer, text that tells the tensor rank (empty of files from before there was one), file.
    """

    models: Mapping[int, list[Path]]
    optims: Mapping[int, list[Path]]
    layers: list[tuple[int, str, Path]]
    experts: list[Path]

    @staticmethod
    def among(paths: Iterable[Path]) -> RankFiles:
        """Sort the files of a folder by their names; those that are nobody's are left out."""
        found = sorted(paths)
        layers = [(int(match[1]), match[2], path) for path in found if (match := _LAYER.fullmatch(path.name))]
        experts = [path for path in found if _EXPERT.fullmatch(path.name)]
        return RankFiles(_by_rank(found, _MODEL), _by_rank(found, _OPTIM), layers, experts)

    def degree(self, states: Mapping[int, Mapping[str, Any]]) -> int:
        """Return how many ranks have a part of each layer.

        Args:
            states: What the first model file of each model-parallel rank holds.
        Raises:
            CheckpointError: files of some of the ranks are missing ("ckpt-foreign").
        """
        said = states[min(states)].get("checkpoint_parallel_dimensions") or {}
        # Of a stage of a pipeline that is cut, the files of a layer are numbered: model_00 alone is the whole layer.
        numbers = [int(number) for _, text, _ in self.layers for number in re.findall(r"_(\d+)-", text)]
        degree = max(int(said.get("tp_degree") or 1), max(numbers, default=0) + 1)
        if degree == 1 and not numbers and _share_names(states.values()):
            degree = len(states)
        if len(states) % degree:
            raise CheckpointError(
                f"the checkpoint is of {degree} tensor-parallel ranks, and has files of {len(states)} model-parallel ranks",
                code="ckpt-foreign",
                fix="Complete the checkpoint.",
            )
        return degree

    def stages_of(self, rank: int, degree: int) -> list[int]:
        """List the model-parallel ranks that tensor rank `rank` of `degree` is, one per stage, in order."""
        return [mp for mp in sorted(self.models) if mp % degree == rank]

    def parts_of(self, rank: int, degree: int) -> Iterator[tuple[str, Path]]:
        """Yield the files of layers, then of experts, that tensor rank `rank` of `degree` has, with what precedes the names in them."""
        for layer, text, path in self.layers:
            if degree == 1 or f"model_{rank:02d}-" in text:
                yield f"{layer}.", path
        for path in self.experts:
            yield "", path


def _by_rank(paths: Iterable[Path], pattern: re.Pattern[str]) -> dict[int, list[Path]]:
    found = [(int(m[2]), int(m[1] or 0), path) for path in paths if (m := pattern.fullmatch(path.name))]
    out: dict[int, list[Path]] = {}
    for mp, _, path in sorted(found):
        out.setdefault(mp, []).append(path)
    return out


def _share_names(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether two ranks have parameters of the same name, which stages of a pipeline do not."""
    seen: set[str] = set()
    for state in states:
        named = state.get("param_shapes") or [split_state(state.get("module"))[0]]  # without ZeRO no shapes are said
        own = {name for group in named for name in group if not name.startswith(TIED)}
        if seen & own:
            return True
        seen |= own
    return False

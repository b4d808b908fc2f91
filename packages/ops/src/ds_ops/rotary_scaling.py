"""Frequencies of rotary embedding for contexts longer than a model was trained on: linear, dynamic, YaRN, longrope, llama3.

Words: dim features are rotated in dim / 2 pairs; pair i is rotated by `frequency[i]` a position, base^(-2i / dim) unscaled. *Trained*
is the number of positions the unscaled model saw. Keys and formulas are those of Hugging Face's `rope_parameters`
(`rope_scaling` before), so a model's configuration is passed as it stands. All of it is computed on the host in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import UnsupportedError

__all__ = ["Frequencies", "RotarySpec", "rotary_frequencies"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """A rotary embedding without scaling, and what scales it.

    Attributes:
        dim: Rotated features, even.
        base: "rope_theta".
        scaling: "rope_parameters" of a model's configuration; "rope_type" (or "type") says which. Empty: none.
        max_positions: "max_position_embeddings"; stands in for "original_max_position_embeddings" where that is absent.
    """

    dim: int
    base: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    max_positions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """angles: fp64 [dim / 2], radians a position; magnitude: what cos and sin are multiplied with."""

    angles: Tensor
    magnitude: float = 1.0


def rotary_frequencies(rope: RotarySpec, length: int = 0) -> Frequencies:
    """Compute each pair's angle per position, and the factor of the tables.

    Args:
        length: positions in use, which "dynamic" and "longrope" depend on. 0: at most those trained on.

    Raises:
        UnsupportedError: "rotary-scaling" for a type that is not known.
        KernelError: "kernel-argument" for a missing, wrong or superfluous number, all of them at once.
    Source: Su et al. 2021; linear: Chen et al. 2023; YaRN: Peng et al. 2023; longrope: Ding et al. 2024.
    """
    scaling = dict(rope.scaling or {})
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if rope.dim < 2 or rope.dim % 2:
        raise _call.refuse(f"dim {rope.dim} is not a positive even number.", "Turn whole pairs.")
    if kind not in _KINDS:
        raise UnsupportedError(
            f"rope_type {kind!r} is not known.",
            code="rotary-scaling",
            fix=f"Use one of {', '.join(sorted(_KINDS))}.",
        )
    needs, make = _KINDS[kind]
    missing = [key for key in needs if scaling.get(key) is None and not (key == _TRAINED and rope.max_positions)]
    numbers = {k: v for k, v in scaling.items() if k in _NUMBERS and v is not None}
    wrong = [
        f"{k} = {v!r}"
        for k, v in numbers.items()
        if isinstance(v, bool) or not isinstance(v, int | float) or v < 0 or (v == 0 and not k.startswith("mscale"))
    ]
    if missing or wrong:
        problems = [f"{', '.join(missing)} missing"] if missing else []
        raise _call.refuse(
            f"rope_type {kind!r}: {'; '.join(problems + wrong)}.", "Give positive numbers for all of its keys."
        )
    return make(rope, scaling, length)


def _plain(dim: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _trained(rope: RotarySpec, scaling: Mapping[str, Any]) -> int:
    return int(scaling.get(_TRAINED) or rope.max_positions)


def _default(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    return Frequencies(_plain(rope.dim, rope.base))


def _linear(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    return Frequencies(_plain(rope.dim, rope.base) / scaling["factor"])


def _dynamic(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    """Increase the base with the length: the slowest pair is stretched by the factor, the fastest not at all."""
    factor, trained = scaling["factor"], rope.max_positions or _trained(rope, scaling)
    stretch = factor * max(length, trained) / trained - (factor - 1)
    exponent = rope.dim / (rope.dim - 2) if rope.dim > 2 else 1.0
    return Frequencies(_plain(rope.dim, rope.base * stretch**exponent))


def _yarn(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    """Scale the frequencies of pairs with few rotations within the trained length, keep those with many.

    Pairs between are interpolated.
    """
    factor, trained = scaling["factor"], _trained(rope, scaling)

    def pair_of(turns: float) -> float:
        """Return the pair (a real number) that makes `turns` rotations within the trained length."""
        return rope.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu") - first) / width).clamp(0, 1)
    plain = _plain(rope.dim, rope.base)
    return Frequencies(plain * (1 - stretched) + plain / factor * stretched, _yarn_magnitude(scaling, factor))


def _yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(above) / of(below) if above and below else of(1.0)


def _longrope(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    """Scale each pair by a factor of the configuration: one set for trained lengths, another for longer lengths."""
    trained = _trained(rope, scaling)
    key = "long_factor" if length > trained else "short_factor"
    stretch = torch.tensor(scaling[key], dtype=torch.float64, device="cpu")
    if stretch.shape != (rope.dim // 2,):
        raise _call.refuse(
            f"{key}: expected {rope.dim // 2} numbers, one a pair; found {list(stretch.shape)}.", "Check head_dim."
        )
    factor = scaling.get("factor") or (rope.max_positions or trained) / trained
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return Frequencies(_plain(rope.dim, rope.base) / stretch, float(magnitude))


def _llama3(rope: RotarySpec, scaling: Mapping[str, Any], length: int) -> Frequencies:
    """Scale waves much longer than the trained length by the factor, and keep much shorter waves.

    Waves between are interpolated by their number of rotations.
    """
    plain, trained = _plain(rope.dim, rope.base), _trained(rope, scaling)
    slow, fast = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if slow >= fast:
        raise _call.refuse(f"low_freq_factor {slow} is not below high_freq_factor {fast}.", "Swap or correct them.")
    turns = trained * plain / (2 * math.pi)
    weight = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return Frequencies(plain * weight + plain / scaling["factor"] * (1 - weight))


_TRAINED = "original_max_position_embeddings"
_NUMBERS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
    _TRAINED,
)
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[RotarySpec, Mapping[str, Any], int], Frequencies]]] = {
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "dynamic": (("factor", _TRAINED), _dynamic),
    "yarn": (("factor", _TRAINED), _yarn),
    "longrope": (("long_factor", "short_factor", _TRAINED), _longrope),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED), _llama3),
}

"""Which layers a technique of compression is for, and how strongly: the schema of `different_groups`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from ds_config import StrictModel

__all__ = [
    "ActivationGroup",
    "ActivationParams",
    "Bits",
    "DensityGroup",
    "DensityParams",
    "LayerGroup",
    "Share",
    "WeightGroup",
    "WeightParams",
]

Share = Annotated[float, Field(gt=0, le=1)]
Bits = Annotated[int, Field(ge=1, le=16)]
InputBits = Annotated[int, Field(ge=3, le=16)]


class LayerGroup(StrictModel):
    """One of `different_groups`: which layers."""

    modules: tuple[str, ...] = Field(
        default=("*",), min_length=1, description='Layers: "*" for all, or regular expressions found in their names.'
    )
    related_modules: tuple[tuple[str, ...], ...] | None = Field(
        default=None, description="For each of `modules`, layers that shrink with it when the model is cleaned."
    )

    @field_validator("modules")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            _compiled(pattern)
        return value

    @field_validator("related_modules", mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        # One list of names is written for one entry of `modules`, too.
        if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
            return [list(value)]
        return value

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if self.related_modules is not None:
            if len(self.related_modules) != len(self.modules):
                raise ValueError(
                    f"related_modules has {len(self.related_modules)} lists for {len(self.modules)} entries of modules"
                )
            for pattern in (p for row in self.related_modules for p in row):
                _compiled(pattern)
        return self


def _compiled(pattern: str) -> None:
    if pattern == "*":
        return
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


class WeightParams(StrictModel):
    """How many bits weights have."""

    start_bits: Bits = Field(description="Bits at first; 16 leaves weights as they are.")
    target_bits: Bits = Field(description="Bits in the end.")
    quantization_period: int = Field(
        default=1,
        ge=0,
        description="Steps until the first bit falls; the next one takes twice as many; 0: all fall at once.",
    )

    @model_validator(mode="after")
    def _falling(self) -> Self:
        if self.target_bits > self.start_bits:
            raise ValueError(f"target_bits = {self.target_bits} is more than start_bits = {self.start_bits}")
        return self


class WeightGroup(LayerGroup):
    """Layers whose weights have the same bits."""

    params: WeightParams


class ActivationParams(StrictModel):
    """How many bits inputs have."""

    bits: InputBits = Field(description="Bits of a layer's input.")


class ActivationGroup(LayerGroup):
    """Layers whose inputs have the same bits."""

    params: ActivationParams


class DensityParams(StrictModel):
    """How much is kept."""

    dense_ratio: Share = Field(description="Share of weights, rows, heads or channels that is kept.")


class DensityGroup(LayerGroup):
    """Layers that keep the same share."""

    params: DensityParams

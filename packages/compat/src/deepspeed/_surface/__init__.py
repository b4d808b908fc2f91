"""The surface: what each public name of DeepSpeed 0.19.8 is here.

A row is `"module:attribute"` (`"module:"` for the module itself), `ConstantRow`, or `Missing` with the reason and what to use.
The modules of this package are made from this table (`deepspeed._finder`); docs/reference/deepspeed-surface.md is made
from it. A name of DeepSpeed without a row is refused for the reason of the part it is in (`upstream_names`). `ConstantRow` is plain
data: names of configuration keys and of checkpoint entries, and their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed._surface.core import CORE
from deepspeed._surface.feature_rows import FEATURES
from deepspeed._surface.refusals import MISSING_ATTRIBUTES
from deepspeed._surface.surface_rows import ConstantRow, Missing, Rows

__all__ = ["MISSING_ATTRIBUTES", "SURFACE", "ConstantRow", "Missing", "Rows"]

SURFACE: Mapping[str, Rows] = {**CORE, **FEATURES}

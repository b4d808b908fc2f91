"""Which number in an index file is which format. Two tables exist, and they disagree from 6 on.

    code          1   2   3    4    5    6    7    8
    megatron      u8  i8  i16  i32  i64  f64  f32  u16
    deepspeed     u8  i8  i16  i32  i64  u16  u32  u64

An index does not say which table it was written by. `choose` decides by what fits the file: an item of n values ends
where the next begins. Both readings of 7 take 4 bytes; it is read as u32, since tokens are integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ds_config.errors import ConfigError

__all__ = ["TABLES", "DType", "Table", "choose", "code_of", "smallest_int_dtype"]

DType = np.dtype[Any]
Table = Literal["megatron", "deepspeed"]

_SHARED = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8"}
TABLES: Mapping[Table, Mapping[int, DType]] = {
    "megatron": {c: np.dtype(n) for c, n in {**_SHARED, 6: "<f8", 7: "<f4", 8: "<u2"}.items()},
    "deepspeed": {c: np.dtype(n) for c, n in {**_SHARED, 6: "<u2", 7: "<u4", 8: "<u8"}.items()},
}
# What a code most probably means when nothing else decides: tokens are integers, and 16 bits hold most vocabularies.
_LIKELY = {6: "deepspeed", 7: "deepspeed", 8: "megatron"}


def choose(code: int, table: Table | None, fits: Callable[[DType], bool]) -> DType | None:
    """Choose the dtype of `code`; None when no table has the code.

    Args:
        table: The table to use; None tries all tables, the likeliest first, and prefers a dtype that fits.
        fits: Whether the index agrees with values of this dtype.
    """
    if table is not None:
        return TABLES[table].get(code)
    first = _LIKELY.get(code, "megatron")
    order = sorted(TABLES, key=lambda name: name != first)
    candidates = [TABLES[name][code] for name in order if code in TABLES[name]]
    return next(filter(fits, candidates), candidates[0] if candidates else None)


def code_of(dtype: DType, table: Table) -> int:
    """Return the code of a dtype in a table.

    Raises:
        ConfigError: the table has none ("data-dtype").
    """
    for code, known in TABLES[table].items():
        if known == dtype:
            return code
    raise ConfigError(
        f"{table} index files have no code for {dtype}",
        code="data-dtype",
        fix=f"Use one of {', '.join(str(known) for known in TABLES[table].values())}.",
    )


def smallest_int_dtype(low: int, high: int) -> DType:
    """Return the smallest integer dtype that can represent `low` and `high`; unsigned where nothing is negative."""
    names = ("<u1", "<u2", "<u4", "<u8") if low >= 0 else ("<i1", "<i2", "<i4", "<i8")
    for name in names:
        span = np.iinfo(name)
        if span.min <= low and high <= span.max:
            return np.dtype(name)
    raise ConfigError(f"no integer format holds {low} to {high}", code="data-dtype", fix="Use smaller numbers.")

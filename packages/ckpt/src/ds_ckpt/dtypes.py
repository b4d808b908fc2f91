"""Element types a checkpoint can hold: torch's name, safetensors' code, bytes per element. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["BY_CODE", "CODE", "ITEMSIZE"]

# Names are torch's without the prefix. Sub-byte types are left out: a range of elements would not start at a byte.
CODE: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
BY_CODE: Final[Mapping[str, str]] = {code: name for name, code in CODE.items()}
ITEMSIZE: Final[Mapping[str, int]] = {
    name: 8 if name.endswith("64") else 4 if name.endswith("32") else 2 if name.endswith("16") else 1 for name in CODE
}

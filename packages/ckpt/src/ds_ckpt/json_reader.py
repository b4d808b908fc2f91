"""Typed access to what a manifest says: every failure names the file and the place. What could not be read back has no name here."""

from __future__ import annotations

import re
from typing import Final

from ds_ckpt.jsontext import Json
from ds_config.errors import CheckpointError

__all__ = ["CRC", "FILE_NAME", "LINE", "MAX_DIMS", "MAX_NUMEL", "Reader", "damaged", "invalid"]

MAX_DIMS: Final = 64
MAX_NUMEL: Final = 2**60
CRC: Final = re.compile(r"[0-9a-f]{8}")
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LINE: Final = re.compile(r"[^\x00-\x1f]{0,200}")


class Reader:
    """Typed access to parsed JSON; every failure names the file and the place."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fields(self, value: Json, path: str, names: tuple[str, ...]) -> list[Json]:
        if type(value) is not dict or set(value) != set(names):
            present = sorted(value)[:12] if type(value) is dict else type(value).__name__
            raise invalid(
                self.where, f"{path} must have exactly the fields {', '.join(names)}; found {str(present)[:200]}"
            )
        return [value[name] for name in names]

    def integer(self, value: Json, path: str, low: int = 0, high: int = MAX_NUMEL) -> int:
        if type(value) is not int or not low <= value <= high:
            raise invalid(self.where, f"{path} must be an integer in {low}..{high}, found {str(value)[:80]}")
        return value

    def text(self, value: Json, path: str, pattern: re.Pattern[str]) -> str:
        if type(value) is not str or not pattern.fullmatch(value):
            raise invalid(self.where, f"{path} must match {pattern.pattern}, found {str(value)[:80]!r}")
        return value

    def items(self, value: Json, path: str, limit: int) -> list[Json]:
        if type(value) is not list or len(value) > limit:
            raise invalid(self.where, f"{path} must be a list of at most {limit} items")
        return value

    def mapping(self, value: Json, path: str) -> dict[str, Json]:
        if type(value) is not dict:
            raise invalid(self.where, f"{path} must be an object, found {type(value).__name__}")
        return value

    def shape(self, value: Json, path: str) -> tuple[int, ...]:
        return tuple(self.integer(n, path) for n in self.items(value, path, MAX_DIMS))


def invalid(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not consistent: {what}",
        code="ckpt-manifest-invalid",
        fix="The file is damaged or was not written by this program; use another checkpoint.",
    )


def damaged(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {what}",
        code="ckpt-manifest-damaged",
        fix="Use another checkpoint; `ds_ckpt.find_latest(dir)` skips this one.",
    )

"""JSON files that others wrote: a value of the kind that was asked for, or an error of the caller's that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_config.regular_file import read_regular_text

__all__ = ["read_json", "read_weight_map"]


def read_json(path: str | os.PathLike[str], wrong: Callable[[str], Exception], kind: type = dict) -> Any:
    """Return the JSON value of this kind that a regular file holds; `wrong` makes the error of a sentence that names the file."""
    try:
        value = json.loads(read_regular_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f"{path} cannot be read as JSON: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, kind):
        raise wrong(f"{path} holds a {type(value).__name__}, not a {kind.__name__}")
    return value


def read_weight_map(folder: Path, wrong: Callable[[str], Exception]) -> dict[str, Path] | None:
    """Return which file of a folder has each tensor, by its `model.safetensors.index.json`; None where it has none. `wrong` is as in `read_json`."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    names = read_json(index, wrong).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise wrong(f"{index} has no weight_map from names to files")
    return {name: folder / file for name, file in names.items()}

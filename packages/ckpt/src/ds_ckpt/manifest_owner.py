"""Whose a `manifest.json` is: programs put files of that name of their own beside those of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from ds_ckpt.format import MANIFEST
from ds_config.errors import CheckpointError
from ds_config.regular_file import read_regular

__all__ = ["has_manifest", "is_foreign", "refuse_foreign"]

_HEAD: Final = b'{"format":"ds-ckpt",'
_LIMIT: Final = 2**24  # of what is parsed to tell; what is larger and does not begin like ours is foreign


def has_manifest(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a manifest of this package. A damaged one counts; one that cannot be read does, too."""
    path = os.path.join(folder, MANIFEST)
    try:
        return not is_foreign(partial(read_regular, path))
    except OSError:
        return os.path.isfile(path)


def is_foreign(read: Callable[[int], bytes]) -> bool:
    """Whether a manifest is another program's: JSON that names another format, or none.

    Args:
        read: Gives at most so many of its first bytes.
    """
    if read(len(_HEAD)) == _HEAD:
        return False
    data = read(_LIMIT + 1)
    try:
        value = None if len(data) > _LIMIT else json.loads(data)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, dict) or value.get("format") != "ds-ckpt"


def refuse_foreign(where: str, read: Callable[[int], bytes]) -> None:
    """Refuse to save where another program has its `manifest.json`.

    Raises:
        CheckpointError: "ckpt-target-exists".
    """
    if is_foreign(read):
        raise CheckpointError(
            f"{where}/{MANIFEST} is another program's, and a checkpoint has a file of that name",
            code="ckpt-target-exists",
            fix="Save under another tag or in DeepSpeed's layout, or give that file another name.",
        )

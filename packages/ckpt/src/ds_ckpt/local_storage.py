"""Which storage a path means, and which tag in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ds_ckpt.local import LocalStorage
from ds_ckpt.protocols import CheckpointStorage
from ds_ckpt.python_objects import ObjectStorage
from ds_config.errors import CheckpointError

__all__ = ["CheckpointRef", "locate", "open_storage"]

_TAG = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,127}")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A tag in a storage object: what `save` and `load` take where a path does not say enough."""

    storage: CheckpointStorage
    tag: str


def open_storage(root: str | os.PathLike[str] | CheckpointStorage) -> CheckpointStorage:
    """Open the storage of a directory or URL; a storage object is returned unchanged."""
    if not isinstance(root, str | os.PathLike):
        return root
    text = os.fspath(root)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return ObjectStorage(text) if _URL.match(text) else LocalStorage(text)


def locate(path: str | os.PathLike[str] | CheckpointRef) -> CheckpointRef:
    """Split `<root>/<tag>` into a storage and a tag.

    Raises:
        CheckpointError: "ckpt-tag": the last component cannot be a tag (empty, hidden, control characters, too long).
    """
    if isinstance(path, CheckpointRef):
        at = path
    else:
        text = os.fspath(path).rstrip("/")
        if _URL.match(text):
            root, _, tag = text.rpartition("/")
        else:
            root, tag = os.path.split(os.path.abspath(text))
        at = CheckpointRef(open_storage(root), tag)
    if not _TAG.fullmatch(at.tag) or len(at.tag.encode()) > 200:
        raise CheckpointError(
            f"{at.tag!r} cannot be the name of a checkpoint",
            code="ckpt-tag",
            fix="Use 1 to 128 characters, no slash or control character, no dot in front.",
        )
    return at

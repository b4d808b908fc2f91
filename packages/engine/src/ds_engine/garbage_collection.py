"""`disable_python_gc`: Python's cyclic collector is off while an engine that asks for it lives, because a pause of one rank is one of all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import RLock

__all__ = ["pause_collector"]

_lock = RLock()
_owners = 0
_was_enabled = False


def pause_collector(owner: object, wanted: bool) -> Callable[[], object]:
    """Collect once and turn Python's collector off; nothing if it is not `wanted`, or off already.

    Returns: What ends the pause, once however often it is called; called by itself when `owner` is gone. The collector is turned on again
    after the last owner, unless it was off before the first.
    """
    global _owners, _was_enabled
    if not wanted:
        return lambda: None
    with _lock:
        if _owners == 0:
            _was_enabled = gc.isenabled()
            gc.collect()
            gc.disable()
        _owners += 1
    return weakref.finalize(owner, _resume)


def _resume() -> None:
    global _owners
    with _lock:
        _owners -= 1
        if _owners == 0 and _was_enabled:
            gc.enable()

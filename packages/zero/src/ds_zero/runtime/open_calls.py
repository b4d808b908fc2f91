"""Calls of modules whose forward runs now, and how those are noticed that ended without their forward hook.

torch runs a module's forward hooks after an exception, but not after what is no `Exception`: Ctrl-C, SystemExit, a cancelled task. Such a
call is known by its Python frame: the frame is on the stack of a thread exactly as long as the call runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from torch.nn.modules import module as torch_module

from ds_zero.runtime.autograd import ForwardCall

__all__ = ["OpenCall", "OpenCalls"]

_CALLER = torch_module.__file__


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call of a module between its two hooks.

    Attributes:
        key: Identifies the pair of hooks.
        numbers: Units of the module.
        frame: Of torch's function that called the first hook; None where there is no such frame, and so no way to see the call's end.
        error: What is handled where the call began; another one at its end means that the call raised.
        counted: The call is part of a forward phase; a recomputation in backward is not.
        watched: What autograd saves in the call; None where nothing is watched.
    """

    key: object
    numbers: tuple[int, ...]
    frame: FrameType | None
    error: BaseException | None
    counted: bool = False
    watched: ForwardCall | None = None

    @property
    def raised(self) -> bool:
        """Whether the call ends with an exception; asked in its forward hook."""
        return sys.exc_info()[1] is not self.error


class OpenCalls:
    """The stacks of one model's open calls, one for each thread: a layer may run its half batches in two."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[OpenCall]] = {}

    def begin(self, key: object, numbers: tuple[int, ...]) -> OpenCall:
        """Open a call, in the forward pre-hook of its module."""
        call = OpenCall(key, numbers, _calling_frame(), sys.exc_info()[1])
        self._stacks.setdefault(threading.get_ident(), []).append(call)
        return call

    def end(self, key: object) -> tuple[OpenCall | None, list[OpenCall]]:
        """Close this thread's innermost call with this pair of hooks.

        Returns:
            The call, None where its first hook did not run because a hook before that raised; and the calls inside, innermost first,
            that ended without their second hook.
        """
        calls = self._stacks.get(threading.get_ident(), [])
        place = next((i for i in reversed(range(len(calls))) if calls[i].key is key), None)
        if place is None:
            return None, []
        call, inside = calls[place], calls[place + 1 :]
        del calls[place:]
        return call, inside[::-1]

    def take_ended(self) -> list[OpenCall]:
        """Close the calls that do not run any more, innermost first. Cost: a look at the few frames since the last open call."""
        ended = []
        for thread, calls in list(self._stacks.items()):
            while calls and not _is_running(calls[-1].frame):
                ended.append(calls.pop())
            if not calls:
                del self._stacks[thread]
        return ended


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calling_frame() -> FrameType | None:
    """Return the frame of torch's function that calls this thread's hook; between them is at most what wraps the hook."""
    near = zip(range(12), _callers(sys._getframe(2)), strict=False)
    return next((frame for _, frame in near if frame.f_code.co_filename == _CALLER), None)


def _is_running(frame: FrameType | None) -> bool:
    if frame is None or any(caller is frame for caller in _callers(sys._getframe(1))):
        return True
    others = sys._current_frames().values()  # a module may be called in one thread inside the forward of another
    return any(caller is frame for other in others for caller in _callers(other))

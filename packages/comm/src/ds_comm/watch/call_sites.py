"""Where a thread's own code is: the innermost frame that is not torch's, ours or the standard library's."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from ds_monitor.logs import PACKAGES

__all__ = ["error_place", "user_frame"]

_LIBRARIES = {"torch", "deepspeed", *PACKAGES, *sys.stdlib_module_names}


def user_frame(thread: int | None = None) -> str:
    """`train.py:88 in step` for the thread of this identity; for the main thread when that one runs library code only."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    candidates = [frames.get(thread or 0), main]
    frame_shown = next((frame for start in candidates if (frame := _innermost_user(start)) is not None), main)
    return "no Python frame" if frame_shown is None else _text(frame_shown, frame_shown.f_lineno)


def error_place(error: BaseException) -> str:
    """Return where an exception was raised or, if that is library code, where user code called the library."""
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append((step.tb_frame, step.tb_lineno))
        step = step.tb_next
    users = [(frame, line) for frame, line in frames if not _library(frame)]
    return _text(*(users or frames)[-1]) if frames else "no Python frame"


def _innermost_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _library(frame):
        frame = frame.f_back
    return frame


def _library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


def _text(frame: FrameType, line: int) -> str:
    return f"{_shortened(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"


def _shortened(path: str) -> str:
    try:
        base = os.getcwd() + os.sep
    except OSError:  # the job's folder was removed while it runs; where the code is must be known all the same
        return path
    return path.removeprefix(base)

"""Training steps as programs: printable actions, passes, a verifier and a small runner.

    >>> print(mark_reduce(accumulation(3), every_backward=False))
    0F0 0B0 0F1 0B1 0F2 0B2*

Order of the files: actions, programs and passes, verify, runner. None of them needs torch or a process group.
"""

from ds_pipe.actions import Action, Op, Program
from ds_pipe.passes import add_comms, mark_reduce
from ds_pipe.programs import accumulation, gpipe, one_f_one_b
from ds_pipe.runner import Handler, run
from ds_pipe.verify import Report, ScheduleError, verify

__all__ = [
    "Action",
    "Handler",
    "Op",
    "Program",
    "Report",
    "ScheduleError",
    "accumulation",
    "add_comms",
    "gpipe",
    "mark_reduce",
    "one_f_one_b",
    "run",
    "verify",
]

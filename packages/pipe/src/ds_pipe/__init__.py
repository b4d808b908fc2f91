"""Training steps as programs, and models in stages.

    >>> print(mark_reduce(accumulation(3), every_backward=False))
    0F0 0B0 0F1 0B1 0F2 0B2*

Order of the files: actions, costs and placement; the generator (`listing`), its schedules by name (`programs`) and the clock
they are compared by (`timing`); passes, verify, runner. None of these needs torch or a process group.
"""

from ds_pipe.actions import Action, Op, Program
from ds_pipe.costs import Costs
from ds_pipe.passes import add_comms, add_gathers, add_reduces, mark_reduce
from ds_pipe.placement import looped, vee
from ds_pipe.programs import (
    SCHEDULES,
    accumulation,
    dualpipe_v,
    gpipe,
    inference,
    interleaved,
    listed,
    make_program,
    one_f_one_b,
    placement_of,
    zb_h1,
    zb_h2,
    zbv,
)
from ds_pipe.runner import Handler, run
from ds_pipe.timing import Timing, simulate
from ds_pipe.verify import Report, ScheduleError, verify

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Handler",
    "Op",
    "Program",
    "Report",
    "ScheduleError",
    "Timing",
    "accumulation",
    "add_comms",
    "add_gathers",
    "add_reduces",
    "dualpipe_v",
    "gpipe",
    "inference",
    "interleaved",
    "listed",
    "looped",
    "make_program",
    "mark_reduce",
    "one_f_one_b",
    "placement_of",
    "run",
    "simulate",
    "vee",
    "verify",
    "zb_h1",
    "zb_h2",
    "zbv",
]

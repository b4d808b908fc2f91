"""Training steps as programs, and models in stages.

    >>> print(mark_reduce(accumulation(3), every_backward=False))
    0F0 0B0 0F1 0B1 0F2 0B2*

Order of the files: actions, costs and placement; the generator (`listing`), its schedules by name (`programs`) and the clock
they are compared by (`schedule_timing`); passes, verify, runner: none of these needs torch or a process group. Then models: partition,
layers and module cut them, a stage runs one part of one, links carry values between them, the executor runs a rank's program.
"""

from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs
from ds_pipe.decoder_stages import DecoderStages
from ds_pipe.grad_scaler import StageGradScaler
from ds_pipe.gradient_reduction import clip_grad_norm_, global_norm, reduce_gradients
from ds_pipe.layer_specs import LayerSpec, TiedLayerSpec
from ds_pipe.loss_weights import count_tokens
from ds_pipe.module import PipelineModule
from ds_pipe.pipeline_api import Pipeline, pipeline, split_batch
from ds_pipe.profile import profile_layers
from ds_pipe.program_passes import add_comms, add_gathers, add_reduces, mark_reduce
from ds_pipe.programs import (
    SCHEDULES,
    PipelineSpec,
    accumulation,
    dualpipe_v,
    gpipe,
    inference,
    interleaved,
    list_scheduled,
    make_program,
    one_f_one_b,
    placement_of,
    zb_h1,
    zb_h2,
    zbv,
)
from ds_pipe.runner import Handler, run
from ds_pipe.schedule_timing import ScheduleTiming, simulate
from ds_pipe.stage_placement import looped, vee
from ds_pipe.staged import StagedModel, Tie
from ds_pipe.topology import (
    PipeDataParallelTopology,
    PipelineGroups,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from ds_pipe.trace import Trace, tracing
from ds_pipe.traced_stages import TracedStages
from ds_pipe.verify import ScheduleError, ScheduleReport, verify

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "DecoderStages",
    "Handler",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "Pipeline",
    "PipelineGroups",
    "PipelineModule",
    "PipelineParallelGrid",
    "PipelineSpec",
    "ProcessTopology",
    "Program",
    "ScheduleError",
    "ScheduleReport",
    "ScheduleTiming",
    "StageGradScaler",
    "StagedModel",
    "Tie",
    "TiedLayerSpec",
    "Trace",
    "TracedStages",
    "accumulation",
    "add_comms",
    "add_gathers",
    "add_reduces",
    "clip_grad_norm_",
    "count_tokens",
    "dualpipe_v",
    "global_norm",
    "gpipe",
    "inference",
    "interleaved",
    "list_scheduled",
    "looped",
    "make_program",
    "mark_reduce",
    "one_f_one_b",
    "pipeline",
    "placement_of",
    "profile_layers",
    "reduce_gradients",
    "run",
    "simulate",
    "split_batch",
    "tracing",
    "vee",
    "verify",
    "zb_h1",
    "zb_h2",
    "zbv",
]

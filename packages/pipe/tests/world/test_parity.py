"""Pipelines give the loss and the gradients of one process: every schedule, model, accumulation and checkpointing."""

import functools
import itertools
import random

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import ds_pipe
from ds_config.errors import PlanError
from ds_pipe.stage import PipelineStage
from ds_pipe.stage_link import ValueStructure, _value, describe
from ds_testing import world

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe-v"]
KINDS = ["plain", "tied", "skip"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@world(2)
def test_two_stages(bench, schedule):
    for kind, every, micros in zip(KINDS * 2, (0, 1, 2, 2, 0, 1), (2, 4, 5, 5, 2, 4), strict=True):
        bench.check(kind, micros, schedule=schedule, activation_checkpoint_interval=every)


WHOLE = ("gpipe", "1f1b", "interleaved")  # torch's reentrant checkpoint cannot give gradients of inputs alone


@pytest.mark.parametrize(
    ("schedule", "reentrant"), [*((name, True) for name in WHOLE), *((name, False) for name in SCHEDULES)]
)
@world(2)
def test_a_checkpoint_function_of_the_caller(bench, schedule, reentrant):
    """Torch's reentrant one gives an embedding no gradient, whose input needs none."""
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    for kind, every in zip(KINDS[:2], (1, 2), strict=True):
        bench.check(
            kind, 4, schedule=schedule, steps=1, activation_checkpoint_interval=every, activation_checkpoint_func=again
        )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"])
@world(4)
def test_four_ranks(bench, schedule):
    if schedule in ("1f1b", "zb-h1"):  # the others have more stages than this model has layers that differ
        bench.check("tied", 9, schedule=schedule, steps=1)
    bench.check("skip", 4, schedule=schedule, num_stages=2, steps=1)
    bench.check("tied", 5, schedule=schedule, num_stages=2, steps=1, activation_checkpoint_interval=2)


@pytest.mark.parametrize("kind", ["tied by property", "tied unlike"])
@world(2)
def test_ties_by_a_property(bench, kind):
    """Megatron's embedding shares its child's weight so; all ranks call it by its name in the first layer, as one stage does."""
    name = "tied_modules.words.words.weight"
    assert [tie.name for tie in bench.cut(kind).staged.ties] == [name]
    assert name in dict(bench.cut(kind).staged.named_logical())
    assert name in dict(bench.cut(kind, num_stages=1).staged.named_logical())
    bench.check(kind, 4)


@world(2)
def test_schedules_of_a_measured_step(bench):
    """A step is traced, and its durations make the schedule of the next ones."""
    step = ds_pipe.pipeline(bench.cut("tied"), 4)
    step(bench.batches(4))  # the first one also meets the other ranks
    with ds_pipe.tracing(step) as traces:
        step(bench.batches(4))
    step.close()
    costs = traces[0].costs()
    for kind, micros, every in (("plain", 2, 0), ("tied", 4, 2), ("skip", 5, 0), ("tied", 5, 0)):
        bench.check(kind, micros, steps=1, costs=costs, activation_checkpoint_interval=every)


@world(4)
def test_listed_schedules_of_unequal_stages(bench):
    rng = random.Random(0)
    for kind, micros, stages in (("plain", 9, 4), ("tied", 4, 4), ("skip", 5, 2)):
        costs = ds_pipe.Costs.measured([tuple(rng.uniform(0.2, 3) for _ in range(3)) for _ in range(stages)])
        bench.check(kind, micros, steps=1, costs=costs, num_stages=stages)


@world(1)
def test_unused_scalar_between_stages_of_one_rank(bench):
    """It has no gradient: 1 is the loss's alone."""
    for schedule, every in (("interleaved", 0), ("zbv", 0), ("dualpipe-v", 0), ("zbv", 2), ("interleaved", 1)):
        bench.check("aside", 2, schedule=schedule, steps=1, activation_checkpoint_interval=every)


@world(2)
def test_unused_scalar_between_stages(bench):
    for schedule in SCHEDULES:
        bench.check("aside", 4, schedule=schedule, steps=1)


@world(2)
def test_stages_that_begin_in_place(bench):
    """Each stage's first layer changes its input; torch refuses that of a leaf."""
    for schedule in SCHEDULES:
        bench.check("inplace", 4, schedule=schedule, steps=1)


@world(1)
def test_stages_of_one_rank_that_begin_in_place(bench):
    for schedule in ("interleaved", "zbv", "dualpipe-v"):
        bench.check("inplace", 2, schedule=schedule, steps=1)


@world(1)
def test_changes_in_place_of_what_is_used_again_are_refused(bench):
    """The other use would see the change, and its gradient would not."""
    refused(bench, "inplace shared", "stage 1 changes its input")
    # From another rank, too, the two are one tensor.
    x = torch.randn(3, requires_grad=True) * 1
    structure, tensors = describe({"x": x, "first": x, "other": x.clone()}, "here")
    value = _value(ValueStructure.decoded(structure.encoded()), [t.detach().clone() for t in tensors])
    assert value["x"].data_ptr() == value["first"].data_ptr() != value["other"].data_ptr()
    stage = PipelineStage(1, InPlaceOf("x"), False)
    with pytest.raises(PlanError, match="stage 1 changes its input"):
        stage.forward(0, value)
    PipelineStage(1, InPlaceOf("other"), False).forward(0, value)


def refused(bench, kind, text, **options):
    step = ds_pipe.pipeline(bench.cut(kind, schedule="zbv", **options), 2)
    refusal = ("", "")
    try:  # an error that is kept would keep the process group
        step(bench.batches(2))
    except PlanError as error:
        refusal = (error.code, error.message)
    assert refusal[0] == "pipe-in-place"
    assert text in refusal[1]
    step.close()


class InPlaceOf(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, value):
        return value[self.name].relu_() + value["first"]


@world(1)
def test_a_checkpointed_segment_that_changes_its_input_is_refused(bench):
    refused(bench, "inplace", "checkpointed segment changes its input", activation_checkpoint_interval=1)


@world(1)
def test_loss_that_is_not_one_number(bench):
    """Refused; its gradients were zero."""
    for schedule in ("1f1b", "zbv"):
        cut = ds_pipe.PipelineModule(
            bench.layers("plain"), loss_fn=lambda out, labels: out.sum(-1), num_stages=1, schedule=schedule
        )
        step = ds_pipe.pipeline(cut, 2)
        with pytest.raises(PlanError, match=r"found 1 tensors that require gradients: of shape \[3, 6\]") as error:
            step(bench.batches(2))
        assert error.value.code == "pipe-loss"
        step.close()


@world(2)
def test_ragged_microbatches(bench):
    for schedule, kind in itertools.product(("1f1b", "zbv"), KINDS):
        bench.check(kind, 6, ragged=True, schedule=schedule)


@world(4)
def test_ragged_microbatches_over_two_pipelines(bench):
    bench.check("tied", 5, ragged=True, schedule="zb-h1", num_stages=2)


@world(1)
def test_one_stage_is_the_plain_loop(bench):
    for kind in KINDS:
        bench.check(kind, 3)
        bench.check(kind, 3, schedule="zbv")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@world(2, timeout=600)
def test_grid_of_two_stages(bench, schedule):
    for kind, micros, every in itertools.product(KINDS, (2, 4, 5), (0, 1, 3)):
        bench.check(kind, micros, schedule=schedule, activation_checkpoint_interval=every)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@world(4, timeout=600)
def test_drawn_combinations(bench, seed):
    rng = random.Random(seed)
    for _ in range(25):
        stages = rng.choice([1, 2, 4])
        schedule = rng.choice(SCHEDULES if stages < 4 else ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zbv"])
        bench.check(
            rng.choice(KINDS),
            rng.choice([1, stages, 2 * stages, 2 * stages + 1, 7]),
            ragged=rng.random() < 0.4,
            steps=1,
            schedule=schedule,
            num_stages=stages,
            partition_method=rng.choice(["uniform", "parameters"]),
            activation_checkpoint_interval=rng.choice([0, 0, 1, 2, 3]),
        )
    assert dist.get_world_size() == 4

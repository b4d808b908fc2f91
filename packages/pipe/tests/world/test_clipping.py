"""Gradients of stages in a loop of one's own: clipped by the norm of the whole model, as in one process."""

import math

import pytest
import torch

import ds_pipe
from ds_config.errors import ShardedAccessError
from ds_testing import world

CLIP = 0.05


def check(bench, kind, norm_type=2.0, steps_before=1, **options):
    """Norms and gradients of some steps; with `steps_before` 2 gradients of two steps are added."""
    single, cut = bench.Single(kind), bench.cut(kind, **options)
    step = ds_pipe.pipeline(cut, 2)
    copies = cut.places.data
    for number in range(3):
        for part in range(steps_before):
            data = [bench.batches(2, seed=100 * part + 10 * number + d) for d in range(copies.size)]
            for each in data:
                single.step(each)
            step(data[copies.rank])
        for param in single.named().values():
            if param.grad is not None:
                param.grad /= copies.size
        ds_pipe.reduce_gradients(cut)  # nothing is left to do
        wanted = torch.nn.utils.clip_grad_norm_(single.named().values(), CLIP, norm_type)
        assert float(wanted) > CLIP
        assert float(ds_pipe.clip_grad_norm_(cut, CLIP, norm_type)) == pytest.approx(float(wanted), rel=1e-5)
        named = single.named()
        for name, param in cut.staged.named_logical():
            if name in named and named[name].grad is not None:
                assert torch.allclose(param.grad, named[name].grad, atol=1e-6), name
        cut.zero_grad()
        for param in single.named().values():
            param.grad = None
    step.close()


@world(2)
def test_stages_are_clipped_as_in_one_process(bench):
    for kind in ("plain", "tied"):
        check(bench, kind)
    check(bench, "tied", math.inf)
    check(bench, "tied", schedule="zbv")


@world(4)
def test_stages_of_two_replicas_are_clipped_as_in_one_process(bench):
    check(bench, "tied", num_stages=2)


@world(2)
def test_gradients_of_two_steps_are_added(bench):
    """The sum over stages counted a tied gradient of the first step twice."""
    check(bench, "tied", steps_before=2)


@world(2)
def test_torch_clips_no_stage_by_its_own_norm(bench):
    """Every stage was clipped by its own norm."""
    cut = bench.cut("plain")
    step = ds_pipe.pipeline(cut, 2)
    step(bench.batches(2))
    with pytest.raises(ShardedAccessError, match=r"ds_pipe\.clip_grad_norm_") as error:
        torch.nn.utils.clip_grad_norm_(cut.parameters(), CLIP)
    assert error.value.code == "comm-part-norm"
    torch.optim.AdamW(cut.parameters()).step()
    step.close()


@world(1)
def test_torch_clips_where_one_rank_has_all_stages(bench):
    cut = bench.cut("plain", num_stages=1)
    step = ds_pipe.pipeline(cut, 2)
    step(bench.batches(2))
    norm = ds_pipe.global_norm(cut)
    assert float(torch.nn.utils.clip_grad_norm_(cut.parameters(), CLIP)) == pytest.approx(float(norm), rel=1e-6)
    step.close()

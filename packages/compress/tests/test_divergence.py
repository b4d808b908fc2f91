"""The generalized divergence against its definition, at the ends and between them."""

from __future__ import annotations

import pytest
import torch

from ds_compress import generalized_divergence, logit_loss
from ds_config.errors import PlanError


def by_definition(student, teacher, mask, beta, temperature):
    s, t = (logits.div(temperature).softmax(-1) for logits in (student, teacher))
    kl = lambda p, q: (p * (p / q).log()).sum(-1)  # noqa: E731
    if beta in (0, 1):
        rows = kl(t, s) if beta == 0 else kl(s, t)
    else:
        mixed = (1 - beta) * s + beta * t
        rows = beta * kl(t, mixed) + (1 - beta) * kl(s, mixed)
    return (rows * mask).sum()


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_it_is_what_the_paper_defines(beta):
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 3, 5, 11, dtype=torch.float64).unbind()
    mask = torch.rand(3, 5) > 0.4
    student.requires_grad_()
    found = generalized_divergence(student, teacher, mask, beta=beta, temperature=2.0)
    want = by_definition(student, teacher, mask, beta, 2.0)
    torch.testing.assert_close(found.total, want)
    assert found.count == mask.sum()
    torch.testing.assert_close(found.mean, want / mask.sum())
    torch.testing.assert_close(*(torch.autograd.grad(x, student)[0] for x in (found.total, want)))


def test_the_likeliest_entries_and_the_clip():
    torch.manual_seed(2)
    student, teacher = torch.randn(2, 1, 4, 7, dtype=torch.float64).unbind()
    mask = torch.ones(1, 4)
    likely = teacher.topk(3, -1).indices
    among = generalized_divergence(student.gather(-1, likely), teacher.gather(-1, likely), mask)
    torch.testing.assert_close(generalized_divergence(student, teacher, mask, top_k=3).total, among.total)
    assert generalized_divergence(student, teacher, mask, clip=0.0).total <= 0
    assert generalized_divergence(student, teacher, mask * 0).mean == 0


@pytest.mark.parametrize(
    "wrong",
    [{"beta": 1.5}, {"temperature": 0.0}, {"top_k": 8}, {"top_k": 0}, {"clip": -1.0}, {"mask": torch.ones(2, 4)}],
)
def test_numbers_and_shapes_that_cannot_be(wrong):
    logits = torch.zeros(1, 4, 7)
    mask = wrong.pop("mask", torch.ones(1, 4))
    with pytest.raises(PlanError) as caught:
        generalized_divergence(logits, logits, mask, **wrong)
    assert caught.value.code == "compress-distill"


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_say_nothing_are_refused(temperature):
    logits = torch.randn(2, 3, 7)
    with pytest.raises(PlanError, match="temperature"):
        generalized_divergence(logits, logits, torch.ones(2, 3), temperature=temperature)
    with pytest.raises(PlanError, match="temperature"):
        logit_loss(logits, logits, temperature)


def test_logits_of_other_shapes_are_not_broadcast():
    with pytest.raises(PlanError, match=r"student are \[4, 7\], of the teacher \[1, 7\]"):
        logit_loss(torch.randn(4, 7), torch.randn(1, 7))

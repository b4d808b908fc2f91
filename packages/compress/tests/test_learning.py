"""Curvature against a Hessian written out; distillation losses against their formulas; a cached teacher is not asked twice."""

from __future__ import annotations

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_compress import compression_scheduler, init_compression
from ds_compress.config import EigenvalueConfig
from ds_compress.distillation import (
    Distillation,
    Distiller,
    TeacherCache,
    attention_loss,
    hidden_loss,
    logit_loss,
)
from ds_compress.eigenvalues import Curvature, block_eigenvalues, stretch_schedule
from ds_config.errors import PlanError

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)


def curved():
    torch.manual_seed(0)
    net = nn.Module()
    net.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    return net, lambda: net.layers(x).square().sum()


def test_eigenvalues_are_those_of_the_hessian():
    net, loss = curved()
    config = EigenvalueConfig(layer_name="layers", layer_num=1, tol=1e-9, max_iter=500)
    found = block_eigenvalues(net, loss, config, normalized=False)
    params = list(net.layers[0].parameters())
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in grads])
    rows = [torch.cat([h.reshape(-1) for h in torch.autograd.grad(one, params, retain_graph=True)]) for one in flat]
    values = torch.linalg.eigvalsh(torch.stack(rows))
    assert found["layers.0"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-4)
    with pytest.raises(PlanError, match="has 0 layers"):
        block_eigenvalues(net, loss, EigenvalueConfig(layer_name="nothing"))
    with pytest.raises(PlanError, match="no second derivative"):
        block_eigenvalues(net, lambda: net.layers[2].weight.sum(), EigenvalueConfig(layer_name="layers", layer_num=1))


def test_sharp_layers_keep_their_bits_longer(small, tokens, caplog):
    config = {"quantize_training": {
        "enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}}}  # fmt: skip
    init_compression(small, config)
    section = EigenvalueConfig(enabled=True, verbose=True, layer_name="blocks", gas_boundary_resolution=2, max_iter=30)
    curvature, schedule, asked = Curvature(small, section), compression_scheduler(small), []

    def loss():
        asked.append(1)
        return small(tokens).square().mean()

    with caplog.at_level("INFO", "ds_compress"):
        for _ in range(4):
            curvature.step(loss)
            schedule.step()
    assert len(asked) == 2
    assert "largest eigenvalue of blocks.0" in caplog.text
    assert max(curvature.last.values()) == 1.0
    sharp = max(curvature.last, key=curvature.last.get)
    flat = min(curvature.last, key=curvature.last.get)
    stretch_schedule(small, {sharp: 1.0, flat: 0.0})
    assert small.get_submodule(sharp).up.compression.factor == 5
    assert small.get_submodule(flat).up.compression.factor == 1
    assert small.get_submodule(sharp).up.compression.bits.bits >= small.head.compression.bits.bits


def test_losses_equal_their_formulas():
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    rows = 4 * (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(logit_loss(student, teacher, 2.0), rows.mean())
    mask = torch.tensor([[1, 0, 0], [0, 1, 0]])
    torch.testing.assert_close(logit_loss(student, teacher, 2.0, mask), (rows[0, 0] + rows[1, 1]) / 2)
    torch.testing.assert_close(hidden_loss(student, teacher), nn.functional.mse_loss(student, teacher))
    a, b = torch.randn(2, 4, 3, 3).softmax(-1), torch.randn(2, 4, 3, 3).softmax(-1)
    torch.testing.assert_close(attention_loss(a, b), (b * (b / a).log()).sum(-1).mean())
    assert float(attention_loss(b[:, :2], b)) > 0 == float(attention_loss(b, b))


class Told(nn.Module):
    """A model whose outputs have attentions, and that counts its calls."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), 0

    def forward(self, x):
        self.calls += 1
        attentions = []
        for layer in self.layers:
            x = layer(x).tanh()
            attentions.append((x @ x.transpose(-1, -2)).softmax(-1)[:, None])
        return SimpleNamespace(logits=x, attentions=attentions)


def test_a_distiller_adds_up_what_was_asked_for_and_trains_only_the_student(tmp_path):
    torch.manual_seed(0)
    student, teacher, x = Told(2), Told(4), torch.randn(2, 3, 4)
    what = Distillation(1.0, 0.5, 2.0, 3.0, (("layers.0", "layers.1"), ("layers.1", "layers.3")), ((0, 1), (1, 3)))
    distiller = Distiller(student, teacher, what, cache=TeacherCache(tmp_path))
    losses = []
    for _ in range(2):
        loss = distiller.loss(student(x), x)
        losses.append(loss.item())
    assert teacher.calls == 1
    assert losses[0] == losses[1]
    out, taught = student(x), teacher(x)
    hidden, kept = [], x
    for own, other in ((0, 1), (1, 3)):
        y = x
        for layer in teacher.layers[:other]:
            y = layer(y).tanh()
        hidden.append(nn.functional.mse_loss(student.layers[own](kept), teacher.layers[other](y)))
        kept = student.layers[own](kept).tanh()
    attention = [attention_loss(out.attentions[i], taught.attentions[j]) for i, j in ((0, 1), (1, 3))]
    wanted = logit_loss(out.logits, taught.logits, 3.0) + 0.5 * sum(hidden) / 2 + 2 * sum(attention) / 2
    assert losses[0] == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    assert (
        Distiller(student, teacher, Distillation(), cache=TeacherCache(tmp_path / "b")).loss(student(x + 1), x + 1) > 0
    )
    distiller.close()
    for broken in ({"hidden": 1.0}, {"logits": 0.0}, {"temperature": 0.0}, {"attentions": ((0, 0),)}):
        with pytest.raises(PlanError):
            Distillation(**broken)
    with pytest.raises(PlanError, match=r"no module 'layers\.9'"):
        Distiller(student, teacher, Distillation(hidden=1.0, layers=(("layers.0", "layers.9"),)))


def test_a_student_comes_nearer_to_its_teacher(tokens):
    torch.manual_seed(0)
    teacher, student = models.Net(2), models.Net(1)
    distiller = Distiller(student, copy.deepcopy(teacher), Distillation(temperature=2.0))
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=0.01), []
    for _ in range(40):
        loss = distiller.loss(student(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]

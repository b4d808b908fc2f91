"""A teacher that is sharded over two ranks without an optimizer teaches as a whole one."""

from __future__ import annotations

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import ds_zero
from ds_compress.distillation import Distillation, Distiller
from ds_testing import world

spec = spec_from_file_location(
    "compress_models", Path(__file__).parents[2] / "packages" / "compress" / "tests" / "conftest.py"
)
models = module_from_spec(spec)
spec.loader.exec_module(models)


@world(2)
def test_a_sharded_teacher_teaches_as_a_whole_one():
    torch.manual_seed(0)
    whole, student = models.Net(2), models.Net(1)
    tokens = torch.randint(0, 20, (2, 6))
    what = Distillation(1.0, 1.0, layers=(("blocks.0", "blocks.1"),))
    wanted = Distiller(student, whole, what).loss(student(tokens), tokens).item()
    teacher = copy.deepcopy(whole).requires_grad_(False)
    sharding = ds_zero.shard(teacher, None, stage=3)
    distiller = Distiller(student, teacher, what)
    assert distiller.loss(student(tokens), tokens).item() == pytest.approx(wanted, rel=1e-6)
    distiller.loss(student(tokens), tokens).backward()
    assert all(p.grad is not None for p in student.parameters())
    sharding.close()

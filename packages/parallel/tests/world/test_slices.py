"""Inputs cut over the tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ds_comm
from ds_comm import Mesh, MeshSpec
from ds_config.errors import set_place
from ds_parallel import ActivationCheckpointing, ActivationPolicy
from ds_testing import world


@pytest.mark.parametrize("keeping", [ActivationPolicy(slices=True), ActivationPolicy(slices=True, slots=3)], ids=str)
@pytest.mark.parametrize("form", ["checkpoint", "checkpoint_reentrant"])
@world(2)
def test_each_rank_keeps_its_part(form: str, keeping: ActivationPolicy) -> None:
    """35 elements on two ranks: the last part is padded. A scalar is too small to be cut."""
    policy = ActivationCheckpointing(keeping, ds_comm.world_group())
    weight, scale = torch.randn(5, generator=torch.Generator().manual_seed(1)).requires_grad_(), torch.tensor(2.0)

    def run(call: object) -> tuple[Tensor, Tensor]:
        weight.grad = None
        x = torch.linspace(0, 1, 35).view(7, 5) * weight
        for _ in range(3):
            x = call(lambda t, s: (t * s).sin(), x, scale)  # type: ignore[operator]
        x.sum().backward()
        return x.detach(), weight.grad

    plain = run(lambda f, *args: f(*args))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(getattr(policy, form)), strict=True))
    assert policy.account.peak_device == 3 * 18 * 4  # ceil(35 / 2) elements of each
    assert policy.account.device == 0


@world(4)
def test_the_group_is_the_tensor_axis() -> None:
    mesh = Mesh.build(MeshSpec.fit(4, tensor=2))
    policy = ActivationCheckpointing(ActivationPolicy(slices=True), mesh["tensor"])
    x = torch.full((6,), float(mesh["data"].rank + 1), requires_grad=True)  # differs over data, alike over tensor
    policy.checkpoint(torch.exp, x * 1).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert policy.account.peak_device == 3 * 4
    set_place("")

"""`deepspeed.checkpointing` over the tensor-parallel ranks of an mpu."""

from __future__ import annotations

from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed._ours.training_engine import activation_checkpointing_api

from ds_testing import world


@world(2)
def test_inputs_are_cut_over_the_ranks_of_the_mpu():
    mpu = SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)
    checkpointing, before = deepspeed.checkpointing, activation_checkpointing_api._process
    activation_checkpointing_api._process = activation_checkpointing_api._Process()
    try:
        checkpointing.configure(mpu, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
        weight = torch.arange(1.0, 8.0, requires_grad=True)
        for form in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
            weight.grad = None
            form(torch.sin, form(torch.cos, weight * 1)).sum().backward()
            expected = -torch.sin(weight) * torch.cos(torch.cos(weight))
            assert torch.allclose(weight.grad, expected)
            assert (
                activation_checkpointing_api._process.policy.account.peak_device == 2 * 4 * 4
            )  # ceil(7 / 2) elements of each
        checkpointing.model_parallel_cuda_manual_seed(100)
        with checkpointing.get_cuda_rng_tracker().fork():
            drawn = torch.rand(1)
        generator = torch.Generator().manual_seed(100 + 2718 + dist.get_rank())
        assert torch.equal(drawn, torch.rand(1, generator=generator))
    finally:
        activation_checkpointing_api._process = before
        checkpointing.get_cuda_rng_tracker().reset()

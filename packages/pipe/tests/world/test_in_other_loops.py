"""A pipeline with accumulated steps and a schedule of rates, beside the same loop in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import ds_pipe
from ds_testing import world


def layers():
    return [ds_pipe.LayerSpec(nn.Linear, 6, 8), torch.tanh, ds_pipe.LayerSpec(nn.Linear, 8, 3)]


@world(2)
def test_several_steps_an_update_and_a_schedule():
    model = ds_pipe.PipelineModule(
        layers(), num_stages=dist.get_world_size(), loss_fn=nn.functional.mse_loss, seed_layers=True
    )
    step = ds_pipe.pipeline(model, 2)
    whole = nn.ModuleList()
    for index, layer in enumerate(layers()):
        torch.manual_seed(1234 + index)
        if isinstance(layer, ds_pipe.LayerSpec):
            whole.append(layer.build())
    optimizers = [torch.optim.AdamW(one.parameters(), 0.05) for one in (model, whole)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 5) for one in optimizers]
    for update in range(4):
        for turn in range(2):
            drawn = torch.Generator().manual_seed(10 * update + turn)
            microbatches = [(torch.randn(4, 6, generator=drawn), torch.randn(4, 3, generator=drawn)) for _ in range(2)]
            loss = step(microbatches)
            wanted = sum(nn.functional.mse_loss(whole[1](torch.tanh(whole[0](x))), y) for x, y in microbatches) / 2
            wanted.backward()
            assert abs(float(loss) - float(wanted)) < 1e-6
        for one in (*optimizers, *schedules):
            one.step()
        for one in optimizers:
            one.zero_grad()
    step.close()

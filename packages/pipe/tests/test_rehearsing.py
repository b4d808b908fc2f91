"""A stage in the middle of a pipeline is rehearsed after those before it, whose shapes it needs."""

from __future__ import annotations

import textwrap

import pytest

from ds_comm.rehearsal.rehearse_cli import rehearse

SCRIPT = """
    import torch, ds_comm, ds_pipe
    from torch import nn

    torch.set_num_threads(1)
    ds_comm.init_distributed()
    layers = [ds_pipe.LayerSpec(nn.Linear, a, b) for a, b in ((8, 16), (16, 32), (32, 64), (64, 1))]
    model = ds_pipe.PipelineModule(layers=layers, num_stages=4, loss_fn=nn.functional.mse_loss)
    step = ds_pipe.pipeline(model, microbatches=4, schedule="1f1b")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        step([(x, x.sum(1, keepdim=True)) for x in torch.randn(4, 2, 8)])
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_stage_sends_and_receives_what_its_place_asks_for(tmp_path):
    file = tmp_path / "stages.py"
    file.write_text(textwrap.dedent(SCRIPT))
    result = rehearse(file, world_size=4, links="free", rank=2, steps=2, warm_up=1)
    moved = {row.cause.split()[-1]: row for row in result.exposed}
    activations = 4 * 2 * (32 + 64) * 4  # four microbatches of two rows: 32 features come, 64 gradients come back
    assert activations <= moved["recv"].nbytes < 1.3 * activations
    assert activations <= moved["send"].nbytes < 1.3 * activations

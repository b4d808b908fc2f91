"""The programs of docs/how-to/two-dimensions.md, run on four ranks, have the losses of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_comm.shm import shm_group
from ds_moe import MoE, MoEOptions
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "two-dimensions.md"
PROGRAMS = dict(re.findall(r"<!-- ([\w ]+) -->\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL))


def run(name):
    space = {"__name__": "__main__"}
    exec(PROGRAMS["model"], space)
    exec(PROGRAMS[name], space)
    losses = torch.tensor(space["losses"])
    dist.all_reduce(losses)
    return losses / 4  # tensor ranks have equal ones


def wanted(parts, experts=False):
    """The same loop in one process, whose batch has the parts of all data-parallel ranks."""
    space = {}
    exec(PROGRAMS["model"], space)
    model, batch, losses = space["model"], space["batch"], []
    if experts:
        torch.manual_seed(0)
        options = MoEOptions(draw_apart=True)
        model.insert(
            2, MoE(16, space["Mlp"](), 4, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, options=options)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = model(torch.cat([batch(step, part) for part in range(parts)])).square().mean()
        loss.backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.1
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize(("name", "parts"), [("tensor fsdp2", 2), ("tensor zero", 2), ("expert fsdp2", 4)])
@world(4, backend=None)
def test_programs_have_the_losses_of_one_process(name, parts, tmp_path):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(tmp_path / "store"), size)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size)
    try:
        torch.testing.assert_close(run(name), wanted(parts, name.startswith("expert")), rtol=1e-5, atol=1e-6)
    finally:
        dist.destroy_process_group()

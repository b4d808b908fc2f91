"""A script of the engine is rehearsed in a world that is not there, with values laid over its configuration, and saves nothing."""

from __future__ import annotations

import textwrap

from torch import nn

import ds_engine
from ds_engine import load_config, make_plan, shapes_of
from ds_engine.plan_messages import messages_of

SCRIPT = """
    import torch
    import ds_engine

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0, "stage3_param_persistence_threshold": 0}}
    engine, *_ = ds_engine.initialize(model=model, config=config)
    assert torch.distributed.get_world_size() == 64
    while True:
        engine.backward(engine(torch.ones(2, 32)).square().mean())
        engine.step()
        if engine.global_steps == 5:
            engine.save_checkpoint("saved")
"""


def test_stages_send_what_their_plans_count(tmp_path):
    """Beside the messages of weights and gradients a step has those of the norm and of what ranks agree on: some words a rank."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(SCRIPT))
    shapes = shapes_of(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)))
    for stage in (1, 3):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
        plan = make_plan(load_config(config), shapes, 64)
        counted = sum(message.count * message.nbytes for message in messages_of(plan))
        changes = {"zero_optimization.stage": stage}
        result = ds_engine.rehearse(file, world_size=64, links="free", steps=20, warm_up=1, changes=changes)
        assert result.steps == 3  # of the five before the save one is not whole and one warms up
        # Three steps: a message that ends after its step counts in the next one, or not at all.
        assert 0.75 * counted < result.wire_bytes < 1.34 * counted + 64 * 256
    assert not (tmp_path / "saved").exists()

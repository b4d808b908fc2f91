"""A client of upstream's pipeline runs as it is written for upstream."""

import itertools

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from ds_config.errors import UnsupportedError
from ds_testing import world

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-2}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"activation_checkpoint_interval": 1},
    "steps_per_print": 1000,
}


def layers():
    return [
        LayerSpec(nn.Linear, 6, 12),
        torch.tanh,
        LayerSpec(nn.Linear, 12, 12),
        nn.ReLU(),
        LayerSpec(nn.Linear, 12, 1),
    ]


def batches():
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(8, 2, 6, generator=generator)
    return itertools.cycle([(x, x.sum(1, keepdim=True)) for x in xs])


@world(2, backend=None)
def test_train_and_evaluate():
    deepspeed.init_distributed("gloo")
    net = PipelineModule(
        layers=layers(),
        topology=PipeDataParallelTopology(num_pp=2, num_dp=1),
        loss_fn=nn.MSELoss(),
        partition_method="parameters",
        activation_checkpoint_interval=1,
        activation_checkpoint_func=deepspeed.checkpointing.checkpoint,
    )
    engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    assert isinstance(engine, PipelineEngine)
    assert engine.gradient_accumulation_steps() == engine._config.gradient_accumulation_steps == 8
    assert engine.is_first_stage() != engine.is_last_stage()
    assert engine.mpu is engine.grid
    assert (engine.micro_batches, engine.micro_batch_size) == (8, 2)
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, False, False)
    assert (engine.prev_stage, engine.next_stage) == (engine.stage_id - 1, engine.stage_id + 1)
    data = batches()
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(25)]
    assert losses[-1] < losses[0] / 2
    assert engine.global_steps == 25
    loss, logits = engine.eval_batch(batches(), return_logits=True)
    assert 0 < float(loss) < losses[0]
    assert (logits is None) == (not engine.is_last_stage())
    with pytest.raises(UnsupportedError, match="reduce_output"):
        engine.eval_batch(batches(), reduce_output="sum")
    with pytest.raises(UnsupportedError, match="train_batch"):
        engine(torch.zeros(2, 6))
    optimizer.close()
    engine.close()


class Noting(nn.Module):
    """Notes the first number of every microbatch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((float(x[0, 0]), len(x[0])))
        return x


@world(2, backend=None)
def test_training_data_is_read_in_its_own_order_with_shapes_of_its_own():
    deepspeed.init_distributed("gloo")
    first = Noting()
    net = PipelineModule(
        layers=[first, nn.PReLU(), nn.ReLU(), lambda x: x.mean(-1, keepdim=True), nn.Linear(1, 1)],
        num_stages=2, loss_fn=nn.MSELoss(), dynamic_shape=True,
    )  # fmt: skip
    rows = [(torch.full((1 + i // 8,), float(i)), torch.zeros(1)) for i in range(16)]
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config, training_data=rows)
    for _ in range(3):
        engine.train_batch()
    if engine.is_first_stage():
        assert first.seen == [(float(i), 1 + i // 8) for i in [*range(0, 16, 2), *range(0, 8, 2)]]
    engine.close()

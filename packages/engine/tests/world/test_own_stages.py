"""A model in stages whose layers are tensor parallel by themselves, cut for a topology with a model axis: as of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_engine
from ds_comm import Group
from ds_comm.differentiable import copy, reduce
from ds_config.errors import PlanError
from ds_pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, ProcessTopology, TiedLayerSpec
from ds_pipe.topology import PipelineGroups
from ds_testing import world

WORDS, WIDTH, MICRO, ACCUMULATION = 12, 8, 2, 2
ALONE = Group("alone", (0,), 0)


def part_of(value: torch.Tensor, group: Group, dim: int) -> nn.Parameter:
    """This rank's part of a tensor, marked as Megatron marks it."""
    param = nn.Parameter(value.chunk(group.size, dim)[group.rank].clone())
    param.tensor_model_parallel, param.partition_dim = True, dim
    return param


class Words(nn.Module):
    """A table of words, by its rows; `scale` is on every rank."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.group, self.scale = group, nn.Parameter(torch.ones(WIDTH))
        self.weight = part_of(torch.randn(WORDS, WIDTH) * 0.3, group, 0)

    def forward(self, tokens):
        first = self.group.rank * len(self.weight)
        inside = (tokens >= first) & (tokens < first + len(self.weight))
        rows = F.embedding((tokens - first) * inside, self.weight) * inside.unsqueeze(-1)
        return reduce(rows, self.group, unit="words") * self.scale


def head(words, x):
    """Scores of all words; those of the other ranks come as sums with zeros."""
    mine = F.linear(copy(x * words.scale, words.group, unit="x"), words.weight)
    before = words.group.rank * len(words.weight)
    return reduce(F.pad(mine, (before, WORDS - before - len(words.weight))), words.group, unit="scores")


class Block(nn.Module):
    def __init__(self, group: Group, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        whole = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.group, self.norm, self.bias = group, nn.LayerNorm(WIDTH), whole[1].bias
        self.up, self.shift = part_of(whole[0].weight, group, 0), part_of(whole[0].bias, group, 0)
        self.down = part_of(whole[1].weight, group, 1)

    def forward(self, x):
        inner = torch.tanh(F.linear(copy(self.norm(x), self.group, unit="x"), self.up, self.shift))
        return x + reduce(F.linear(inner, self.down), self.group, unit="y") + self.bias


def loss_fn(scores, labels):
    return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def cut(topology, group) -> PipelineModule:
    both = {"tied_weight_attr": ["weight", "scale"]}
    layers = [
        TiedLayerSpec("words", Words, group, **both),
        *(LayerSpec(Block, group, seed) for seed in range(2, 5)),
        TiedLayerSpec("words", Words, group, forward_fn=head, **both),
    ]
    return PipelineModule(layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")


def config(stage: int, **more):
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage}, **more,
    }  # fmt: skip


def tokens(step: int, replica: int, number: int):
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + number)
    rows = torch.randint(WORDS, (MICRO, 6), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def alone(steps: int, replicas: int):
    """Train the same model in one process with torch alone: the model, and loss and norm of each step."""
    words, blocks = Words(ALONE), [Block(ALONE, seed) for seed in range(2, 5)]
    model = nn.ModuleList([words, *blocks])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            for number in range(ACCUMULATION):
                x, labels = tokens(step, replica, number)
                for layer in model:
                    x = layer(x)
                loss = loss_fn(head(words, x), labels) / (ACCUMULATION * replicas)
                loss.backward()
                total += float(loss.detach())
        told.append((total, float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))))
        optimizer.step()
    return model, told


def train(engine, first: int, steps: int, replicas: int):
    replica = engine.mesh["data"].rank % replicas  # more than these see the same data
    return [
        engine.train_batch(iter([tokens(step, replica, number) for number in range(ACCUMULATION)]))
        for step in range(first, first + steps)
    ]


def check_weights(engine, whole, group, **tolerance) -> None:
    names = {"tied_modules.words": 0, "1": 1, "2": 2, "3": 3}
    for name, param in engine.module.named_parameters():
        layer, _, rest = name.rpartition(".") if "norm" not in name else name.partition(".")
        wanted = whole[names[layer]].get_parameter(rest)
        dim = getattr(param, "partition_dim", None)
        torch.testing.assert_close(
            param.float(), wanted if dim is None else wanted.chunk(group.size, dim)[group.rank], **tolerance
        )


@pytest.mark.parametrize(("stage", "dims"), [(0, (2, 2, 1)), (1, (2, 2, 1)), (1, (1, 2, 2))])
@world(4)
def test_it_trains_as_the_whole_model_does(stage, dims, tmp_path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    topology = PipeModelDataParallelTopology(num_pp=dims[0], num_mp=dims[1], num_dp=dims[2])
    group = PipelineGroups.build(topology).slice
    engine, *_ = ds_engine.initialize(model=cut(topology, group), config=config(stage))
    assert (engine.plan.batch.train, engine.mesh["tensor"].ranks) == (MICRO * ACCUMULATION * dims[2], group.ranks)
    whole, told = alone(4, dims[2])
    for result, (loss, norm) in zip(train(engine, 0, 2, dims[2]), told, strict=False):
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.norm == pytest.approx(norm, rel=1e-5)
    engine.save_checkpoint(folder[0], "t")
    evaluated = engine.eval_batch(iter([tokens(9, 0, number) for number in range(ACCUMULATION)]))
    engine.close()
    topology = PipeModelDataParallelTopology(
        num_pp=1, num_mp=2, num_dp=2
    )  # of two stages: goes on with one, and two replicas
    again, *_ = ds_engine.initialize(
        model=cut(topology, PipelineGroups.build(topology).slice), config=config(1 - stage)
    )
    again.load_checkpoint(folder[0], "t")
    assert again.eval_batch(iter([tokens(9, 0, number) for number in range(ACCUMULATION)])) == pytest.approx(evaluated)
    for result, (loss, norm) in zip(train(again, 2, 2, dims[2]), told[2:], strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.norm == pytest.approx(norm, rel=1e-5)
    check_weights(again, whole, group, rtol=1e-4, atol=1e-5)
    again.close()


@world(4)
def test_bf16_and_refusals() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    group = PipelineGroups.build(topology).slice
    engine, *_ = ds_engine.initialize(model=cut(topology, group), config=config(1, bf16={"enabled": True}))
    _, told = alone(3, 1)
    for result, (loss, norm) in zip(train(engine, 0, 3, 1), told, strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-2)
        assert result.norm == pytest.approx(norm, rel=2e-2)
    engine.close()
    cut_again = config(0, tensor_parallel={"autotp_size": 4, "megatron_layers": True})
    with pytest.raises(PlanError) as caught:
        ds_engine.initialize(model=cut(topology, group), config=cut_again)
    assert caught.value.code == "mesh-size"
    with pytest.raises(PlanError) as caught:
        ds_engine.initialize(model=cut(ProcessTopology(("model", "pipe"), (2, 2)), group), config=config(0))
    assert caught.value.code == "engine-stages"

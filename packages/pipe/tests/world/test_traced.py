"""Traced models in stages give the loss and the gradients of the whole model, beside torch.distributed.pipelining's cut."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_pipe
from ds_config.errors import PlanError, UnsupportedError
from ds_pipe.graph_cutting import balanced_stages, cut_graph, spec_stages, trace_model
from ds_testing import world

SPEC = {"layers.1": "beginning", "layers.2": "end"}


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(drop)
        self.register_buffer("gain", torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x)))) * self.gain


class Net(nn.Module):
    """With a skip connection from the first layer to the last, a tied head, a shape that is used late, and an argument left out."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block(drop) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        first = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if mask is not None:
            x = x * mask
        return self.head(x + first * scale).view(tokens.shape[0], -1, 11)


def make(drop: float = 0.0) -> Net:
    torch.manual_seed(3)
    return Net(drop)


def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def batches(count: int, ragged: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 5 + (m if ragged else 0)) for m in range(count)]
    return [tuple(torch.randint(11, s, generator=generator) for _ in range(2)) for s in shapes]


def check(schedule: str, tracer: str, spec: dict[str, str] | None, again: int = 0) -> None:
    whole, total = make(), 0.0
    data = batches(4, ragged=tracer == "fx")
    for tokens, labels in data:
        loss = loss_fn(whole(tokens), labels)
        (loss / 4).backward()
        total += float(loss.detach()) / 4
    cut = ds_pipe.TracedStages(make(), data[0][0], dist.get_world_size(), split_spec=spec, loss_fn=loss_fn, schedule=schedule,
                               virtual=2, tracer=tracer)  # fmt: skip
    cut.set_checkpoint_interval(again)
    step = ds_pipe.pipeline(cut, 4)
    assert float(step(data)) == pytest.approx(total, rel=1e-6)
    named = dict(whole.named_parameters())
    found = dict(cut.staged.named_logical())
    for name, param in found.items():
        assert (param.grad - named[name].grad).norm() <= 2e-6 * named[name].grad.norm(), (schedule, tracer, name)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, sorted(found))
    assert {name for part in parts for name in part} == set(named)
    if dist.get_world_size() > 1:
        assert all(len(part) < len(named) for part in parts)
    step.close()


@pytest.mark.parametrize(("tracer", "schedule", "spec", "again"), [
    ("fx", "1f1b", {"layers.2": "beginning"}, 0), ("fx", "zb-h1", None, 1), ("fx", "zbv", None, 0), ("export", "1f1b", None, 0),
    ("export", "zb-h1", {"layers.1": "end"}, 0),
])  # fmt: skip
@world(2)
def test_stages_of_two_ranks(tracer, schedule, spec, again):
    check(schedule, tracer, spec, again)


@world(1)
def test_stages_of_one_rank():
    for tracer in ("fx", "export"):
        check("interleaved", tracer, {"layers.1": "beginning"})


def test_a_cut_equals_torchs():
    """The same parameters on the same stages as torch.distributed.pipelining for its split_spec, and the same output."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    tokens = torch.randint(11, (3, 5))
    spec = {"layers.1": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING}
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pipeline(copy.deepcopy(model), (tokens,), split_spec=spec)
    for tracer in ("fx", "export"):
        traced = trace_model(model, tokens, tracer)
        ours = cut_graph(traced, spec_stages(traced, spec), range(3))
        tied = {"embed.weight": "head.weight"}
        value = tokens
        for number, stage in ours.items():
            names = {n.removeprefix("graph_module.") for n, _ in stage.named_parameters()}
            wanted = {n for n, _ in theirs.get_stage_module(number).named_parameters()}
            assert {tied.get(n, n) for n in names} == {tied.get(n, n) for n in wanted}
            value = stage(value)
        torch.testing.assert_close(value, theirs(tokens)[0] if isinstance(theirs(tokens), tuple) else theirs(tokens))
        assert ours[1].names == tuple(ours[1].names)
        assert {len(s.names) for s in ours.values()} <= {1, 2, 3}


def test_balance_and_arguments():
    model = make()
    traced = trace_model(model, {"tokens": torch.zeros(2, 3, dtype=torch.long), "mask": torch.ones(2, 3, 1)}, "fx")
    stages = balanced_stages(traced, 4)
    assert sorted(set(stages)) == [0, 1, 2, 3]
    assert stages == sorted(stages)
    parts = cut_graph(traced, stages, range(4))
    value = {"mask": torch.full((2, 3, 1), 0.5), "tokens": torch.randint(11, (2, 3)), "unused": 1}
    out = value
    for part in parts.values():
        out = part(out)
    torch.testing.assert_close(out, model(value["tokens"], value["mask"]))
    for bad in ({"tokens": value["tokens"]}, (value["tokens"],)):
        with pytest.raises(PlanError, match="pipe-batch"):
            parts[0](bad)


def test_what_cannot_be_cut_is_named():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    for tracer in ("fx", "export"):
        with pytest.raises(UnsupportedError, match="pipe-trace-model"):
            trace_model(Branches(), torch.ones(3), tracer)
    traced = trace_model(make(), torch.zeros(2, 3, dtype=torch.long), "fx")
    with pytest.raises(PlanError, match=r"Did you mean 'layers\.3"):
        spec_stages(traced, {"layer.3": "beginning"})
    with pytest.raises(PlanError, match="pipe-partition"):
        spec_stages(traced, {"layers.3": "middle"})


@world(1)
def test_exported_stages_say_what_they_were_exported_for():
    tokens = torch.randint(11, (3, 5))
    with pytest.raises(PlanError, match="2 stages"):
        ds_pipe.TracedStages(make(), tokens, 1, split_spec={"layers.2": "beginning"})
    cut = ds_pipe.TracedStages(make(0.5), tokens, 1, loss_fn=loss_fn, tracer="export")
    with pytest.raises(PlanError, match="pipe-trace-shape"):
        cut(torch.randint(11, (3, 6)))
    cut.eval()
    with pytest.raises(UnsupportedError, match="pipe-trace-mode"):
        cut(tokens)
    follows = ds_pipe.TracedStages(make(0.5), tokens, 1, loss_fn=loss_fn).eval()
    torch.testing.assert_close(follows(tokens), make().eval()(tokens))
    batch = torch.export.Dim("batch")
    dynamic = ds_pipe.TracedStages(make(), tokens, 1, tracer="export", dynamic_shapes=({0: batch},))
    torch.testing.assert_close(dynamic(torch.cat([tokens, tokens])), make()(torch.cat([tokens, tokens])))

"""Each technique of `compression_training`, at ZeRO stages 0 to 3 on two ranks, equals one process, and resumes amid its schedule on another stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_engine
from ds_compress import compression_scheduler, init_compression, redundancy_clean
from ds_testing import world

STEPS, HALF, ROWS = 5, 3, 2


class Text(nn.Module):
    """An embedding, layers of attention with two heads and a feed-forward, a head."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.query, self.key, self.value))
        x = x + self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).tanh())


class Picture(nn.Module):
    """Convolutions of one and of two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 2), nn.Conv1d(4, 4, 2)
        self.last = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (tokens.double()[:, None, :, None] * torch.arange(1, 6, dtype=torch.float64) / 20).sin()
        x = self.second(self.first(x).tanh()).tanh()
        return self.last(self.third(x.flatten(2)).tanh().mean(-1))


def technique(params, modules=("*",), related=None, **shared):
    group = {"params": params, "modules": list(modules), **({"related_modules": related} if related else {})}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"some": group}}


def bits(start, target, modules=("*",), **shared):
    period = {"start_bits": start, "target_bits": target, "quantization_period": 1}
    return {"weight_quantization": technique(period, modules, schedule_offset=1, **shared)}


def inputs(**shared):
    return {"activation_quantization": technique({"bits": 6}, ["layers"], schedule_offset=1, **shared)}


def sparse(method, **shared):
    kept = technique({"dense_ratio": 0.5}, ["up", "down"], schedule_offset=1, method=method, **shared)
    return {"sparse_pruning": kept}


def rows(method):
    return {"row_pruning": technique({"dense_ratio": 0.5}, ["up"], [["down"]], schedule_offset=2, method=method)}


def heads(method):
    related = [["query", "key", "value"]]
    return {"head_pruning": technique({"dense_ratio": 0.5}, ["out"], related, schedule_offset=2, method=method, num_heads=2)}  # fmt: skip


def channels(method):
    return {"channel_pruning": technique({"dense_ratio": 0.5}, ["first"], [["second"]], schedule_offset=2, method=method)}  # fmt: skip


MIXED = {"enabled": True, "quantize_change_ratio": 0.3}
TECHNIQUES = {
    "symmetric": bits(8, 4),
    "groups": bits(8, 4, quantize_groups=4),
    "asymmetric": bits(8, 4, quantization_type="asymmetric"),
    "stochastic": bits(8, 4, rounding="stochastic"),
    "stochastic-asymmetric": bits(6, 4, rounding="stochastic", quantization_type="asymmetric"),
    "mixed": bits(8, 4, fp16_mixed_quantize=MIXED),
    "ternary": bits(4, 2, ["layers"]),
    "binary": bits(2, 1, ["layers"]),
    "picture-bits": bits(8, 4),
    "dynamic": inputs(),
    "dynamic-asymmetric": inputs(quantization_type="asymmetric"),
    "static": inputs(range_calibration="static"),
    "static-asymmetric": inputs(range_calibration="static", quantization_type="asymmetric"),
    "l1": sparse("l1"),
    "topk": sparse("topk"),
    "snip_momentum": sparse("snip_momentum", schedule_offset_end=4, schedule_offset_stride=1, block_pattern="4x1"),
    "rows-l1": rows("l1"),
    "rows-topk": rows("topk"),
    "heads-l1": heads("l1"),
    "heads-topk": heads("topk"),
    "channels-l1": channels("l1"),
    "channels-topk": channels("topk"),
    "layers": {"layer_reduction": {
        "enabled": True, "keep_number_layer": 1, "module_name_prefix": "layers", "teacher_layer": [1],
        "other_module_name": ["embed", "head"]}},
}  # fmt: skip
PAIRS = [(first, second) for first in range(4) for second in range(4) if first != second]
QUICK = [(name, *PAIRS[number % len(PAIRS)]) for number, name in enumerate(TECHNIQUES)]
REST = [(name, *pair) for name in TECHNIQUES for pair in PAIRS if (name, *pair) not in QUICK]


def made(name, compressed=True):
    """The model as a script has it: compressed by the configuration alone, or before where that is the way."""
    torch.manual_seed(7)
    net = (Picture() if name.startswith(("picture", "channels")) else Text()).double()
    section = {"compression_training": TECHNIQUES[name]}
    if not compressed:
        return net
    if name == "layers":
        torch.manual_seed(8)
        init_compression(net, section, teacher_model=Text(2).double())
    elif "topk" in name:  # learnt scores are parameters
        torch.manual_seed(9)
        init_compression(net, section)
    return net


def config(name, stage):
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1, "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "adam_w_mode": False}}, "data_types": {},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compression_training": TECHNIQUES[name],
    }  # fmt: skip


def batch(step, rank):
    return torch.randint(0, 12, (ROWS, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def one_process(name, compressed=True):
    net = made(name, compressed)
    if compressed and name != "layers" and "topk" not in name:
        init_compression(net, {"compression_training": TECHNIQUES[name]})
    schedule, losses = compression_scheduler(net), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(STEPS):
        loss = net(torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, net


def equal(name, stage, resumed, folder):
    losses, wanted = one_process(name)
    engine, *_ = ds_engine.initialize(model=made(name), config=config(name, stage))
    assert train(engine, 0, HALF) == pytest.approx(losses[:HALF], rel=1e-6)
    engine.save_checkpoint(folder, tag="half")
    engine.close()
    other, *_ = ds_engine.initialize(model=(net := made(name)), config=config(name, resumed))
    other.load_checkpoint(folder, tag="half")
    assert train(other, HALF, STEPS) == pytest.approx(losses[HALF:], rel=1e-6)
    other.close()
    assert losses != pytest.approx(one_process(name, compressed=False)[0], rel=1e-6)
    if name != "layers":
        redundancy_clean(net)
        redundancy_clean(wanted)
    found = dict(net.named_parameters())
    for key, value in wanted.named_parameters():
        torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("name", "stage", "resumed"), QUICK)
@world(2)
def test_a_technique_equals_one_process_and_resumes_on_another_stage(name, stage, resumed, tmp_path):
    equal(name, stage, resumed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "resumed"), REST)
@world(2)
def test_a_technique_equals_one_process_on_every_other_pair_of_stages(name, stage, resumed, tmp_path):
    equal(name, stage, resumed, tmp_path)

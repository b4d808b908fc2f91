"""What is between a pruned layer and its readers: the cleaned model equals the masked one, or is refused before anything is pruned."""

from __future__ import annotations

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_compress import compression_scheduler, init_compression, redundancy_clean
from ds_config.errors import PlanError
from ds_testing import world

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)
section, technique = models.section, models.technique


class Shifted(nn.Module):
    """An activation of its own that maps 0 to 1."""

    def forward(self, x):
        return x.cos()


def rows(between, method="l1", **more):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 4)).double()
    pruning = technique({"dense_ratio": 0.5}, ["^0$"], [["^2$"]], schedule_offset=0, method=method)
    return init_compression(net, section(row_pruning=pruning, **more))


def convolutions(*between):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *between, nn.Conv2d(8, 4, 3)).double()
    pruning = technique({"dense_ratio": 0.5}, ["^0$"], [[f"^{len(between) + 1}$"]], schedule_offset=0, method="l1")
    return init_compression(net, section(channel_pruning=pruning))


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("between", [nn.Sigmoid(), Shifted(), nn.Softplus(), nn.Dropout(0.1)], ids=repr)
def test_an_activation_that_shifts_zero_is_cleaned_exactly(between, method):
    net, x = rows(between, method), torch.randn(5, 6, dtype=torch.float64)
    net.train()
    net(x).square().sum().backward()
    copy.deepcopy(net)  # after a forward
    net.eval()
    masked = net(x)
    redundancy_clean(net)
    assert net[2].in_features == 4
    torch.testing.assert_close(net(x), masked, atol=1e-12, rtol=0)


@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
def test_ranges_of_inputs_are_those_of_the_features_that_stay(symmetry):
    inputs = technique({"bits": 4}, ["^2$"], schedule_offset=0, quantization_type=symmetry)
    net, x = rows(nn.Sigmoid(), activation_quantization=inputs).eval(), torch.randn(5, 6, dtype=torch.float64)
    masked = net(x)
    redundancy_clean(net)
    torch.testing.assert_close(net(x), masked, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "between", [(nn.Sigmoid(),), (nn.Sigmoid(), nn.AvgPool2d(3, padding=1))], ids=["sigmoid", "pool"]
)
def test_channels_after_an_activation_that_shifts_zero(between):
    net, x = convolutions(*between).eval(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    masked = net(x)
    redundancy_clean(net)
    assert net[-1].in_channels == 4
    torch.testing.assert_close(net(x), masked, atol=1e-12, rtol=0)


def test_a_shift_before_a_flattened_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 6, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 5, 3)).double().eval()
    pruning = technique({"dense_ratio": 0.5}, ["^0$"], [["^3$"]], schedule_offset=0, method="l1")
    init_compression(net, section(channel_pruning=pruning))
    x = torch.randn(2, 2, 7, dtype=torch.float64)
    masked = net(x)
    redundancy_clean(net)
    torch.testing.assert_close(net(x), masked, atol=1e-12, rtol=0)


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x + self.bias


@pytest.mark.parametrize(
    "between",
    [nn.LayerNorm(8), nn.Softmax(-1), Softmax(), Bias(), nn.PReLU(8), nn.BatchNorm1d(8), nn.Linear(8, 8)],
    ids=lambda module: type(module).__name__,
)
def test_what_computes_a_feature_from_all_or_keeps_its_size_is_refused(between):
    with pytest.raises(PlanError, match="loses some of its 8 features") as caught:
        rows(between)
    assert caught.value.code == "compress-between"


@pytest.mark.parametrize("between", [nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, groups=8)], ids=repr)
def test_norms_that_are_not_related_to_channels_are_refused(between):
    with pytest.raises(PlanError) as caught:
        convolutions(between)
    assert caught.value.code == "compress-between"


def test_a_norm_over_all_heads_before_the_output_is_refused():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.norm, self.output = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.num_heads = 2

        def forward(self, x):
            return self.output(self.norm(self.value(x)))

    pruning = technique({"dense_ratio": 0.5}, ["output"], [["value"]], schedule_offset=0, method="l1", num_heads=2)
    net = Attention()
    state = list(net.state_dict())
    with pytest.raises(PlanError, match=r"norm \(LayerNorm, \[8\]\) keeps its size"):
        init_compression(net, section(head_pruning=pruning))
    assert list(net.state_dict()) == state


def test_looking_at_a_forward_leaves_the_model_and_the_random_numbers():
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.last = nn.Linear(4, 8), nn.Linear(8, 4), None
            self.inner = nn.Sequential(nn.Identity())

        def forward(self, x):
            self.last = self.inner[0].last = x
            return self.down(torch.sigmoid(self.up(x)) + torch.rand(1))

    net = Noted()
    pruning = technique({"dense_ratio": 0.5}, ["up"], [["down"]], schedule_offset=0, method="l1")
    state = torch.get_rng_state()
    init_compression(net, section(row_pruning=pruning))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.last is None
    assert not hasattr(net.inner[0], "last")


@world(2)
def test_scores_that_act_later_train_in_ddp():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    parts = {
        "sparse_pruning": technique({"dense_ratio": 0.5}, ["^0$"], schedule_offset=2, method="topk"),
        "row_pruning": technique({"dense_ratio": 0.5}, ["^2$"], [["^4$"]], schedule_offset=3, method="topk"),
    }
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    init_compression(net, section(**parts))
    before = net[0].compression.sparse_scores.detach().clone()
    model, optimizer, schedule = (
        DistributedDataParallel(net),
        torch.optim.SGD(net.parameters(), 0.1),
        compression_scheduler(net),
    )
    for step in range(5):
        model(torch.randn(3, 4)).square().sum().backward()
        scores = net[0].compression.sparse_scores
        assert bool(scores.grad.any()) == (step >= 2)
        optimizer.step()
        assert torch.equal(scores, before) == (step < 2)
        optimizer.zero_grad()
        schedule.step()

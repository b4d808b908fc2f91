"""Two of every four weights, convolutions of three dims, and torchao's formats: beside torchao's own masks and tensors."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_compress import (
    QuantScheme,
    codes_of_torchao,
    codes_of_training,
    compression_scheduler,
    gptq,
    init_compression,
    redundancy_clean,
    round_to_nearest,
    to_torchao,
)
from ds_compress.masks import two_of_four
from ds_config.errors import ConfigError, PlanError, UnsupportedError

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)
section, technique = models.section, models.technique


def fours(modules=("*",), ratio=0.5, offset=0):
    return section(
        sparse_pruning=technique({"dense_ratio": ratio}, list(modules), schedule_offset=offset, method="2:4")
    )


def test_a_mask_has_the_two_largest_of_every_four_inputs():
    for shape in ((6, 8), (4, 8, 3), (4, 4, 3, 3), (2, 12, 2, 2, 2)):
        weight = torch.randn(shape)
        mask = two_of_four(weight)
        rows = weight.abs().movedim(1, -1).reshape(-1, 4)
        kept = mask.movedim(1, -1).reshape(-1, 4)
        assert (kept.sum(1) == 2).all()
        smallest_kept = torch.where(kept, rows, torch.inf).amin(1)
        assert (smallest_kept >= torch.where(kept, -torch.inf, rows).amax(1)).all()
    assert two_of_four(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


@pytest.mark.slow
def test_a_mask_equals_torchs_sparsifier():
    """That of torch.ao.pruning, with which torchao's users train such weights."""
    sparsity = pytest.importorskip("torch.ao.pruning")
    layer = nn.Linear(32, 16)
    sparsifier = sparsity.WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    twin = nn.Sequential(copy.deepcopy(layer))
    sparsifier.prepare(twin, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    assert torch.equal(twin[0].weight != 0, two_of_four(layer.weight))


@pytest.mark.parametrize("convolution", [False, True])
def test_training_keeps_two_of_four(convolution):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()) if convolution else nn.Sequential(nn.Linear(16, 8))
    x = torch.randn(6, 4, 5, 5) if convolution else torch.randn(6, 16)
    init_compression(net, fours(offset=1))
    optimizer, schedule = torch.optim.SGD(net.parameters(), lr=0.1), compression_scheduler(net)
    before = net(x)
    for _ in range(3):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    mask = net[0].compression.sparse_mask.clone()
    assert not torch.equal(before, net(x))
    wanted, state = net(x), copy.deepcopy(net.state_dict())
    redundancy_clean(net)
    assert torch.equal(net[0].weight != 0, mask)
    assert mask.float().mean() == 0.5
    torch.testing.assert_close(net(x), wanted)
    resumed = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()) if convolution else nn.Sequential(nn.Linear(16, 8))
    init_compression(resumed, fours(offset=1))
    resumed.load_state_dict(state)  # masks are those that were chosen, not those of the weights now
    assert torch.equal(resumed[0].compression.sparse_mask, mask)
    torch.testing.assert_close(resumed(x), wanted)


def test_what_has_no_fours_is_refused():
    with pytest.raises(ConfigError, match="dense_ratio"):
        init_compression(nn.Sequential(nn.Linear(8, 8)), fours(ratio=0.4))
    with pytest.raises(PlanError, match="compress-groups"):
        init_compression(nn.Sequential(nn.Linear(6, 8)), fours())


def test_convolutions_of_three_dims_are_compressed_in_training():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten()
    )
    bits = {"start_bits": 8, "target_bits": 8, "quantization_period": 1}
    quantised = copy.deepcopy(net)
    grid = {**technique(bits, ["*"], schedule_offset=0)}
    grid["shared_parameters"]["quantize_groups"] = 8
    init_compression(quantised, section(weight_quantization=grid))
    codes = codes_of_training(quantised)
    assert codes["0"].shape == (8, 2, 3, 3, 3)
    redundancy_clean(quantised)
    torch.testing.assert_close(codes["0"].weight(), quantised[0].weight)
    init_compression(net, section(
        weight_quantization=technique(bits, ["*"], schedule_offset=0),
        channel_pruning=technique({"dense_ratio": 0.5}, ["^0$"], [["^1$", "^3$"]], schedule_offset=0, method="l1"),
    ))  # fmt: skip
    x = torch.randn(3, 2, 5, 5, 5)
    net(x).sum().backward()
    assert net[0].weight.grad is not None
    net.eval()
    wanted = net(x)
    redundancy_clean(net)
    assert (net[0].out_channels, net[1].num_features, net[3].in_channels) == (4, 4, 4)
    torch.testing.assert_close(net(x), wanted, atol=1e-5, rtol=1e-5)


# ---- torchao ---------------------------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


@pytest.mark.parametrize(
    "scheme", [QuantScheme(4, 32), QuantScheme(8, -1), QuantScheme(3, 32, symmetric=False)], ids=str
)
def test_codes_become_torchaos_tensors_and_come_back(scheme, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, x = mlp(), torch.randn(5, 64)
    codes = gptq(model, [torch.randn(64, 64)], scheme) if scheme.bits == 4 else round_to_nearest(model, scheme)
    wanted = model(x)
    to_torchao(model, codes)
    assert isinstance(model[0].weight, quantization.IntxUnpackedToInt8Tensor)
    torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(model[0].weight.dequantize(), codes["0"].weight())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = mlp()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), assign=True)
    back = codes_of_torchao(fresh)
    for name, one in codes.items():
        assert torch.equal(back[name].codes, one.codes)
        assert torch.equal(back[name].zeros, one.zeros)
        assert torch.equal(back[name].scales, one.scales)
        assert (back[name].scheme.bits, back[name].scheme.symmetric) == (scheme.bits, scheme.symmetric)


def test_models_that_torchao_quantised_are_read():
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    configs = [
        quantization.Int8WeightOnlyConfig(),
        quantization.IntxWeightOnlyConfig(torch.int4, granularity.PerGroup(32)),
        quantization.IntxWeightOnlyConfig(
            torch.int4, granularity.PerGroup(32), mapping_type=quantization.MappingType.ASYMMETRIC
        ),
    ]
    for config in configs:
        model = mlp()
        quantization.quantize_(model, config)
        codes = codes_of_torchao(model)
        assert set(codes) == {"0", "2"}
        for name, one in codes.items():
            torch.testing.assert_close(one.weight(), model.get_submodule(name).weight.dequantize())


def test_what_is_no_integer_of_rows_is_refused():
    quantization = pytest.importorskip("torchao.quantization")
    model = mlp()
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    with pytest.raises(UnsupportedError, match="compress-torchao"):
        codes_of_torchao(model)
    net = nn.Sequential(nn.Conv2d(4, 8, 3))
    codes = round_to_nearest(net, QuantScheme(8, -1), convolutions=True)
    with pytest.raises(UnsupportedError, match="compress-torchao"):
        to_torchao(net, codes)


@pytest.mark.slow
def test_torchao_is_loaded_without_a_word_about_other_devices() -> None:
    """Its import says which kernels it did not load: nobody who quantises on this machine can act on that."""
    pytest.importorskip("torchao")
    program = "import logging; from ds_compress.torchao_weights import _torchao; _torchao(); print(logging.getLogger('torchao').level)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["0"]
    assert done.stderr == ""

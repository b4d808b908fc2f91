"""Compressed models in programs that were written for plain ones: averages, copies, calls with other parameters, tracing."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from ds_compress import init_compression
from ds_config.errors import UnsupportedError
from ds_testing import world

QUANTIZED = {
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, "quantize_groups": 4},
            "different_groups": {"all": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["*"]}},
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, "range_calibration": "static"},
            "different_groups": {"all": {"params": {"bits": 8}, "modules": ["*"]}},
        },
    }
}


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def compressed():
    model = init_compression(plain(), QUANTIZED)
    model(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))  # ranges of inputs
    return model.eval()


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))


def test_an_average_of_the_weights_is_compressed_as_the_model_is():
    model = compressed()
    average = AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(average(X), model(X))


def test_a_model_is_saved_as_an_object():
    model, file = compressed(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), model(X))


def test_a_call_with_other_parameters_sees_them_compressed():
    model, other = compressed(), compressed()
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    found = torch.func.functional_call(model, params, (X,))
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(params[name])
    assert torch.equal(found, other(X))
    assert not torch.equal(found, model(X))


@pytest.mark.slow  # torch.export imports the compiler
def test_a_traced_and_an_exported_model_compute_the_same():
    model = compressed()
    y = torch.randn(3, 8)
    assert torch.equal(torch.export.export(model, (X,)).module()(y), model(y))
    assert torch.equal(torch.jit.trace(model, X, check_trace=False)(y), model(y))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_a_weight_that_is_computed_is_refused_by_name(change):
    """The first forward died with KeyError: 'weight'."""
    model = plain()
    change(model[0])
    state = list(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"0\.weight is computed from other parameters") as error:
        init_compression(model, QUANTIZED)
    assert error.value.code == "compress-parametrized"
    assert list(model.state_dict()) == state


@world(2)
def test_in_ddp():
    """Ranges of inputs are those of all ranks' batches."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    whole, rank = init_compression(plain(), QUANTIZED), dist.get_rank()
    net = DistributedDataParallel(init_compression(plain(), QUANTIZED))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, whole)]
    for step in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        net(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        # One process must not look for the other's ranges: it has both batches.
        for layer in (whole[0], whole[2]):
            layer.compression.group = alone()
        whole(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def alone():
    from ds_comm import self_group, world_group

    return self_group("alone", world_group().global_rank)

"""What compressed layers compute, and that nothing else of the model changes."""

from __future__ import annotations

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_compress import (
    compressed_layers,
    compression_scheduler,
    decompress,
    init_compression,
    is_compressed,
    redundancy_clean,
    resize_to_state_dict,
)
from ds_compress.masks import top_mask
from ds_compress.quantizers import QuantGrid, quantize
from ds_config.errors import ConfigError, PlanError, UnsupportedError

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)
SECTIONS, section, technique = models.SECTIONS, models.section, models.technique


def linear(**techniques):
    torch.manual_seed(1)
    return init_compression(nn.Sequential(nn.Linear(6, 8)), section(**techniques))


def weight_seen(model, x=None):
    """The weight and the bias that forward computed with."""
    x = torch.eye(6) if x is None else x
    bias = model(torch.zeros(1, 6))
    return (model(x) - bias).T, bias[0]


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_names_values_classes_and_gradients_stay_where_they_are(name, small, tokens):
    before = {n: (id(p), type(p)) for n, p in small.named_parameters()}
    classes = {n: type(m) for n, m in small.named_modules()}
    init_compression(small, SECTIONS[name])
    after = {n: (id(p), type(p)) for n, p in small.named_parameters() if ".compression." not in n}
    assert after == before
    assert {n: type(m) for n, m in small.named_modules() if n in classes} == classes
    schedule = compression_scheduler(small)
    for _ in range(6):
        small(tokens).square().mean().backward()
        schedule.step()
    assert all("weight" not in m.__dict__ for m in small.modules())
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in small.named_parameters() if "key.bias" not in n
    )
    decompress(small)
    assert not is_compressed(small)
    assert {n for n, _ in small.named_parameters()} == before.keys()


def test_weights_are_quantised_and_gradients_pass():
    model = linear(weight_quantization=technique({"start_bits": 4, "target_bits": 4}, ["*"], quantize_groups=8))
    plain = copy.deepcopy(model)
    decompress(plain)
    weight, bias = weight_seen(model)
    torch.testing.assert_close(weight, quantize(plain[0].weight, QuantGrid(4, 8)), atol=1e-6, rtol=0)
    torch.testing.assert_close(bias, plain[0].bias)
    x, grad = torch.randn(5, 6), torch.randn(5, 8)
    (model(x) * grad).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, grad.T @ x)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_single_weights_are_dropped(method):
    model = linear(sparse_pruning=technique({"dense_ratio": 0.25}, ["*"], schedule_offset=0, method=method))
    made = model[0].compression
    scores = model[0].weight.abs() if method == "l1" else made.sparse_scores
    mask = top_mask(scores, 0.25)
    weight, _ = weight_seen(model)
    torch.testing.assert_close(weight, model[0].weight * mask, atol=1e-6, rtol=0)
    assert int(mask.sum()) == 12
    x, grad = torch.randn(5, 6), torch.randn(5, 8)
    (model(x) * grad).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, grad.T @ x * mask)
    if method == "topk":
        torch.testing.assert_close(made.sparse_scores.grad, grad.T @ x * model[0].weight)


def test_an_l1_mask_is_of_the_weight_when_it_begins_and_stays():
    model = linear(sparse_pruning=technique({"dense_ratio": 0.5}, ["*"], schedule_offset=2))
    schedule = compression_scheduler(model)
    for _ in range(2):
        torch.testing.assert_close(weight_seen(model)[0], model[0].weight, atol=1e-6, rtol=0)
        schedule.step()
    with torch.no_grad():
        model[0].weight.normal_()
    wanted = top_mask(model[0].weight.abs(), 0.5)
    assert torch.equal(weight_seen(model)[0].abs() > 1e-7, wanted)
    with torch.no_grad():
        model[0].weight.normal_()
    assert torch.equal(weight_seen(model)[0].abs() > 1e-7, wanted)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_are_dropped_with_their_bias(method):
    model = linear(row_pruning=technique({"dense_ratio": 0.25}, ["*"], schedule_offset=0, method=method))
    scores = model[0].weight.abs().sum(1) if method == "l1" else model[0].compression.row_scores.view(-1)
    weight, bias = weight_seen(model)
    keep = scores.topk(2).indices.sort().values
    assert weight.abs().sum(1).nonzero().view(-1).tolist() == bias.nonzero().view(-1).tolist() == keep.tolist()


def test_heads_are_columns_of_the_output_projection():
    torch.manual_seed(0)
    model = init_compression(nn.Sequential(nn.Linear(6, 8)), section(head_pruning=technique(
        {"dense_ratio": 0.5}, ["*"], schedule_offset=0, method="l1", num_heads=3)))  # fmt: skip
    size = model[0].weight.abs().sum(0).view(3, 2).sum(1)
    columns = weight_seen(model)[0].abs().sum(0).view(3, 2).sum(1)
    assert columns.nonzero().view(-1).tolist() == size.topk(2).indices.sort().values.tolist()


def test_inputs_have_a_range_a_token_or_a_running_one():
    dynamic = linear(activation_quantization=technique({"bits": 4}, ["*"], schedule_offset=0))
    x = torch.randn(5, 6, requires_grad=True)
    y = dynamic(x)
    torch.testing.assert_close(
        y, nn.functional.linear(quantize(x, QuantGrid(4, 5)), dynamic[0].weight, dynamic[0].bias)
    )
    y.sum().backward()
    torch.testing.assert_close(x.grad, dynamic[0].weight.sum(0).expand(5, 6))
    static = linear(activation_quantization=technique(
        {"bits": 4}, ["*"], schedule_offset=0, range_calibration="static"))  # fmt: skip
    batches = [torch.randn(5, 6) * scale for scale in (1, 3, 0.1)]
    low, high = None, None
    for batch in batches:
        static(batch)
        least, most = float(batch.min()), float(batch.max())
        low = least if low is None else 0.95 * low + 0.05 * least
        high = most if high is None else 0.95 * high + 0.05 * most
    assert static[0].compression.input_range.tolist() == pytest.approx([low, high], rel=1e-5)
    static.eval()
    out = static(batches[1])
    scale = 2 * max(abs(low), abs(high)) / 16
    wanted = (batches[1] / scale).round().clamp(-8, 7) * scale
    torch.testing.assert_close(out, nn.functional.linear(wanted, static[0].weight, static[0].bias))
    assert static[0].compression.input_range.tolist() == pytest.approx([low, high], rel=1e-5)


def test_blocks_fall_to_what_the_loss_is_sensitive_to():
    model = linear(sparse_pruning=technique(
        {"dense_ratio": 0.25}, ["*"], schedule_offset=1, schedule_offset_end=3, method="snip_momentum",
        block_pattern="4x1"))  # fmt: skip
    schedule, scores, shares = compression_scheduler(model), torch.zeros(2, 6), []
    for step in range(5):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        mask = model[0].compression.sparse_mask.repeat_interleave(4, 0)
        seen = (model[0].weight * mask).detach().requires_grad_()
        nn.functional.linear(x, seen, model[0].bias).square().sum().backward()
        if step < 3:
            share = (seen.grad * model[0].weight.detach()).view(2, 4, 6).sum(1).abs()
            scores = 0.9 * scores + share / share.sum()
        model(x).square().sum().backward()
        schedule.step()
        kept = model[0].compression.sparse_mask
        shares.append(int(kept.sum()))
        if step == 2:
            assert torch.equal(kept, top_mask(scores, 0.25))
    assert shares == [12, 6, 3, 3, 3]  # all, half of the way (exponentially), a quarter from step 3 on


def test_the_schedule_is_resumed_from_the_state_dict(small, tokens):
    config = models.ALL
    init_compression(small, config)
    schedule = compression_scheduler(small)
    for _ in range(3):
        small(tokens)
        schedule.step()
    small(tokens)
    other = init_compression(models.Net(), config)
    other.load_state_dict(small.state_dict())
    again = compression_scheduler(other)
    assert again.training_steps == 3
    for _ in range(3):
        torch.testing.assert_close(other(tokens), small(tokens), atol=0, rtol=0)
        again.step()
        schedule.step()
    assert other.blocks[0].up.compression.bits == small.blocks[0].up.compression.bits
    third = init_compression(models.Net(), config)
    third.load_state_dict(small.state_dict())
    restarted = compression_scheduler(third)
    restarted.load_state_dict(schedule.state_dict())
    torch.testing.assert_close(third(tokens), small(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("name", sorted(set(SECTIONS) - {"stochastic"}))  # which rounds at random until it is final
def test_the_cleaned_model_equals_the_masked_one(name, small, tokens):
    # In fp64: sums of another order may round an input to the next step of its grid.
    init_compression(small.double(), SECTIONS[name])
    schedule = compression_scheduler(small)
    for _ in range(30):
        if name in ("snip", "static"):
            small(tokens).square().mean().backward()
        schedule.step()
    small.eval()
    wanted, numel = small(tokens), sum(p.numel() for p in small.parameters())
    redundancy_clean(small, SECTIONS[name])
    torch.testing.assert_close(small(tokens), wanted, atol=1e-5, rtol=1e-5)
    assert not any(".compression." in n and "input_range" not in n and "state" not in n for n in small.state_dict())
    if name in ("rows", "all"):
        assert small.blocks[0].up.weight.shape == (12, 16)
        assert small.blocks[0].down.weight.shape == (16, 12)
        assert (small.blocks[0].up.out_features, small.blocks[0].down.in_features) == (12, 12)
    if name in ("heads", "all"):
        assert small.blocks[1].attention.num_heads == 2
        assert small.blocks[1].attention.query.weight.shape == (8, 16)
        assert small.blocks[1].attention.output.weight.shape == (16, 8)
    if name in ("rows", "heads", "all"):
        assert sum(p.numel() for p in small.parameters()) < numel
        state = {n: v for n, v in small.state_dict().items() if ".compression." not in n}
        fresh = resize_to_state_dict(models.Net().double(), state)
        fresh.load_state_dict(state)
        if name != "all":  # whose inputs are quantised
            torch.testing.assert_close(fresh(tokens), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_channels_shrink_their_norm_and_the_next_convolution(method):
    """What the norm made of dropped channels reached the next layer in training, and was cut away at the end."""
    torch.manual_seed(0)
    net, x = models.Images(), torch.randn(4, 3, 8, 8)
    channels = technique({"dense_ratio": 0.5}, ["first"], [["norm", "second"]], schedule_offset=0, method=method)
    both = {**channels["different_groups"],
            "more": {"params": {"dense_ratio": 0.5}, "modules": ["second"], "related_modules": [["last"]]}}  # fmt: skip
    init_compression(net, section(channel_pruning={**channels, "different_groups": both}))
    with torch.no_grad():
        nn.init.normal_(net.norm.bias)
    net(x).sum().backward()
    net.eval()
    wanted = net(x)
    torch.testing.assert_close(copy.deepcopy(net)(x), wanted)
    redundancy_clean(net)
    assert (net.first.out_channels, net.norm.num_features, net.second.in_channels, net.last.in_features) == (4, 4, 4, 8)
    torch.testing.assert_close(net(x), wanted, atol=1e-5, rtol=1e-5)


def test_it_compiles_in_one_graph(small, tokens):
    init_compression(small, section(weight_quantization=models.WEIGHTS,
                                    **SECTIONS["learnt"]["compression_training"]))  # fmt: skip
    wanted = small(tokens)
    found = torch.compile(small, backend="eager", fullgraph=True)(tokens)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_tied_weights_are_compressed_in_each_use(tokens):
    net = models.Net()
    net.head.weight = net.embed.weight
    init_compression(
        net, section(weight_quantization=technique({"start_bits": 2, "target_bits": 2}, ["embed", "head"]))
    )
    assert len(list(compressed_layers(net))) == 2
    net(tokens).sum().backward()
    assert net.head.weight is net.embed.weight
    assert "head.weight" not in dict(net.named_parameters())


def test_a_wrong_model_is_refused_and_left_as_it_was(small):
    names = list(small.state_dict())
    cases = {
        "finds no layer": section(weight_quantization=technique({"start_bits": 8, "target_bits": 8}, ["nothing"])),
        "another pattern found": section(row_pruning=technique({"dense_ratio": 0.5}, ["up", "blocks.0"])),
        "its related 'head' 1": section(row_pruning=technique({"dense_ratio": 0.5}, ["up"], [["head"]])),
        "quantize_groups is 7": section(weight_quantization=technique({"start_bits": 8, "target_bits": 8}, ["up"], quantize_groups=7)),
        "num_heads is 3": section(head_pruning=technique({"dense_ratio": 0.5}, ["output"], num_heads=3)),
        "no teacher_model": section(layer_reduction={"enabled": True, "module_name_prefix": "blocks", "teacher_layer": [0]}),
    }  # fmt: skip
    for text, config in cases.items():
        with pytest.raises(PlanError, match=text):
            init_compression(small, config)
    assert list(small.state_dict()) == names
    with pytest.raises(UnsupportedError, match="MultiheadAttention"):
        init_compression(nn.MultiheadAttention(8, 2), SECTIONS["weights"])
    with pytest.raises(PlanError, match="not compressed"):
        redundancy_clean(small)
    init_compression(small, SECTIONS["weights"])
    with pytest.raises(PlanError, match="already"):
        init_compression(small, SECTIONS["weights"])


def test_related_patterns_may_find_nothing(small, tokens, caplog):
    pruned = []
    for related in (["down"], ["down", "norm_that_this_model_lacks"]):
        net = copy.deepcopy(small)
        init_compression(net, section(row_pruning=technique({"dense_ratio": 0.5}, ["up"], [related])))
        redundancy_clean(net)
        pruned.append(net)
    assert "norm_that_this_model_lacks" in caplog.text
    assert torch.equal(pruned[0](tokens), pruned[1](tokens))


def test_a_wrong_section_is_refused_with_all_its_problems():
    config = {"compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}},
        "row_pruning": {"shared_parameters": {"method": "l3"}},
        "head_pruning": technique({"dense_ratio": 0.5}, ["*"]),
        "sparse_pruning": technique({"dense_ratio": 0.5}, ["("]),
        "layer_reduction": {"enabled": True},
        "rows_pruning": {},
    }}  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        init_compression(nn.Linear(2, 2), config)
    for text in ("without different_groups", "l3", "num_heads must be said", "no regular expression", "teacher_layer",
                 "row_pruning"):  # fmt: skip
        assert text in str(caught.value)

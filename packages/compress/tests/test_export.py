"""Quantisation after training keeps outputs; what is exported loads in transformers by its own loaders, and by a reader written here."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_compress import compression_scheduler, init_compression, redundancy_clean
from ds_compress.model_export import export_compressed_tensors, export_gguf, export_gptq, pack_columns, pack_rows
from ds_compress.posttraining import QuantScheme, codes_of_training, gptq, linears_of, round_to_nearest
from ds_compress.smoothing import awq, find_foldable_norms, smoothquant
from ds_compress.sparsity_report import report_of
from ds_config.errors import PlanError, UnsupportedError


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[::13] *= 12  # outliers, as trained models have them
    return model


def batches(count=4):
    drawn = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(0, 64, (4, 16), generator=drawn)} for _ in range(count)]


@pytest.fixture(scope="module")
def model():
    return llama()


def error(changed, model, tokens):
    with torch.no_grad():
        return float((changed(**tokens).logits - model(**tokens).logits).square().mean())


def test_calibrated_rounding_is_better_than_nearest(model):
    errors, kept, tokens = {}, {}, batches(6)[-1]
    for name, how in {
        "nearest": lambda m, s: round_to_nearest(m, s),
        "gptq": lambda m, s: gptq(m, batches(), s),
        "awq": lambda m, s: (awq(m, batches(), s), round_to_nearest(m, s))[1],
    }.items():
        changed = copy.deepcopy(model)
        codes = how(changed, QuantScheme(3, 32, symmetric=False))
        errors[name], kept[name] = error(changed, model, tokens), codes
        for layer, one in codes.items():
            assert torch.equal(changed.get_submodule(layer).weight, one.weight())
            assert one.codes.max() <= 7
    assert errors["gptq"] < 0.9 * errors["nearest"]
    assert errors["awq"] < errors["nearest"]
    assert "lm_head" not in kept["gptq"]
    assert len(kept["gptq"]) == 14


def test_gptq_without_correlation_is_rounding_to_nearest():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 4))
    nearest = copy.deepcopy(layer)
    round_to_nearest(nearest, QuantScheme(4, 4))
    gptq(layer, [torch.eye(8)], QuantScheme(4, 4))
    torch.testing.assert_close(layer[0].weight, nearest[0].weight, atol=1e-6, rtol=0)


def test_folds_change_nothing_and_make_inputs_even(model):
    found = find_foldable_norms(model, batches(1)[0])
    assert {f.norm for f in found} >= {"model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"}
    changed = copy.deepcopy(model)
    spread = {}
    for name, one in (("before", model), ("after", changed)):
        if name == "after":
            smoothquant(changed, batches(2), 0.5)
        seen = []
        handle = one.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, a, s=seen: s.append(a[0]))
        with torch.no_grad():
            one(**batches(1)[0])
        handle.remove()
        size = seen[0].abs().flatten(0, 1).amax(0)
        spread[name] = float(size.max() / size.median())
    assert spread["after"] < 0.5 * spread["before"]
    tokens = batches(1)[0]
    torch.testing.assert_close(changed(**tokens).logits, model(**tokens).logits, atol=1e-4, rtol=1e-4)

    class Residual(nn.Module):  # the norm's output goes on beside the layer
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.norm(x)
            return x + self.layer(x)

    assert find_foldable_norms(Residual(), torch.randn(3, 8)) == []


def test_packing_puts_the_first_code_lowest():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15, 9]])
    assert [w & 0xFFFFFFFF for w in pack_columns(codes, 4)[0].tolist()] == [0xF7654321, 0x9]
    assert torch.equal(pack_rows(codes.T, 4), pack_columns(codes, 4).T)


@pytest.mark.parametrize("scheme", [QuantScheme(4, 32), QuantScheme(8, -1)], ids=str)
def test_compressed_tensors_load_in_transformers(model, scheme, tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers reads the format with this library")
    changed, tokens = copy.deepcopy(model), batches(1)[0]
    codes = gptq(changed, batches(2), scheme)
    export_compressed_tensors(changed, codes, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tokens).logits.float(), changed(**tokens).logits, atol=1e-4, rtol=1e-4)
    stored = load_file(tmp_path / "model.safetensors")
    linear = [n for n in stored if n.endswith(("weight_packed", "weight_scale"))]
    ratio = sum(stored[n].nbytes for n in linear) / sum(m.weight.nbytes for m in linears_of(model).values())
    assert ratio == pytest.approx((scheme.bits / 8 + 4 / (32 if scheme.bits == 4 else 75)) / 4, rel=0.1)


@pytest.mark.parametrize("scheme", [QuantScheme(4, 32, False), QuantScheme(8, -1, False)], ids=str)
def test_asymmetric_codes_are_read_by_compressed_tensors(model, scheme, tmp_path):
    """By the library's own reader: transformers 5 with compressed-tensors 0.20 expects zeros unpacked, and then unpacks them."""
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base", reason="the library that reads it")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    changed = copy.deepcopy(model)
    export_compressed_tensors(changed, gptq(changed, batches(2), scheme), tmp_path)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(section).config_groups["group_0"]
    stored = load_file(tmp_path / "model.safetensors")
    for name, module in linears_of(changed).items():
        own = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
        found = base.PackedQuantizationCompressor.decompress(own, read)["weight"]
        torch.testing.assert_close(found, module.weight.detach(), atol=1e-6, rtol=1e-5)


def test_what_was_trained_in_few_bits_is_exported_to_the_bit(tmp_path):
    changed, tokens = llama(), batches(1)[0]
    names = r"self_attn\.[qkvo]_proj"
    init_compression(changed, {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_groups": 64},
        "different_groups": {"qo": {"params": {"start_bits": 8, "target_bits": 8}, "modules": [names]}}}}})  # fmt: skip
    compression_scheduler(changed)
    with torch.no_grad():
        wanted = changed(**tokens).logits
    broken = llama()
    init_compression(broken, {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True, "quantization_type": "asymmetric", "quantize_groups": 64},
        "different_groups": {"q": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["q_proj"]}}}}})  # fmt: skip
    with pytest.raises(PlanError, match="64 groups of 8 bits, asymmetric"):
        codes_of_training(broken)
    codes = codes_of_training(changed)
    assert {c.scheme for c in codes.values()} == {
        QuantScheme(8, -1),
        QuantScheme(8, 32),
    }  # k and v have two scales a row
    with pytest.raises(PlanError, match="2 schemes in one file"):
        export_gptq(changed, codes, tmp_path)
    redundancy_clean(changed)
    for name, one in codes.items():
        assert torch.equal(one.weight(), changed.get_submodule(name).weight)
    export_compressed_tensors(changed, codes, tmp_path)
    pytest.importorskip("compressed_tensors", reason="transformers reads the format with this library")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tokens).logits.float(), wanted, atol=1e-5, rtol=1e-5)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = None
        self.first, self.second, self.last = nn.Conv2d(4, 8, 3), nn.Conv1d(8, 8, 3, groups=2), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu().flatten(2)).mean(-1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "nearest"])
def test_convolutions_are_exported_and_read_to_the_bit(trained, bits, tmp_path):
    """Only linear layers had codes: what a convolution had learnt in few bits was written in 32."""
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base", reason="the library that reads it")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch.manual_seed(0)
    net = Picture()
    if trained:
        init_compression(net, {"compression_training": {"weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": 8},
            "different_groups": {"all": {"params": {"start_bits": bits, "target_bits": bits}, "modules": ["first", "second"]}}}}})  # fmt: skip
        codes = codes_of_training(net)
        wanted = net(torch.ones(2, 4, 5, 5))
        redundancy_clean(net)
        assert torch.equal(net(torch.ones(2, 4, 5, 5)), wanted)
    else:
        codes = round_to_nearest(net, QuantScheme(bits, -1), convolutions=True)
        assert "last" in codes
    assert {"first", "second"} <= set(codes)
    assert "first" not in round_to_nearest(copy.deepcopy(net), QuantScheme(4, -1))
    theirs = tmp_path.parent / f"{tmp_path.name}-theirs"
    theirs.write_text("thesis")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(theirs)
    export_compressed_tensors(net, codes, tmp_path, config={"model_type": "picture"})
    assert theirs.read_text() == "thesis"
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(section).config_groups["group_0"]
    assert set(read.targets) == set(codes)
    stored = load_file(tmp_path / "model.safetensors")
    for name in codes:
        own = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
        found = base.PackedQuantizationCompressor.decompress(own, read)["weight"]
        weight = net.get_submodule(name).weight
        assert torch.equal(codes[name].weight(), weight)
        torch.testing.assert_close(found.view(weight.shape).float(), weight.detach(), atol=1e-6, rtol=1e-5)
    with pytest.raises(PlanError, match="first, a convolution"):
        export_gptq(net, codes, tmp_path)


def unpack(words, bits, axis):
    """A reader of its own: codes of int32 words along an axis, in Python's arithmetic on numpy."""
    import numpy

    array = words.numpy().astype(numpy.int64) & 0xFFFFFFFF
    parts = [(array >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)]
    stacked = numpy.stack(parts, axis=axis + 1)
    shape = list(array.shape)
    shape[axis] *= 32 // bits
    return torch.from_numpy(stacked.reshape(shape))


@pytest.mark.parametrize(
    "scheme", [QuantScheme(4, 32), QuantScheme(4, -1, symmetric=False), QuantScheme(8, 64)], ids=str
)
def test_gptq_files_say_what_the_model_has(model, scheme, tmp_path):
    """transformers loads them with gptqmodel, whose kernels want a GPU: read here as the format says."""
    changed = copy.deepcopy(model)
    export_gptq(changed, round_to_nearest(changed, scheme), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["bits"], section["sym"]) == ("gptq", scheme.bits, scheme.symmetric)
    for name, module in linears_of(changed).items():
        codes = unpack(stored[f"{name}.qweight"], scheme.bits, 0)
        zeros = (unpack(stored[f"{name}.qzeros"], scheme.bits, 1) + 1) % 2**scheme.bits
        index = stored[f"{name}.g_idx"].long()
        weight = (codes - zeros[index]).float() * stored[f"{name}.scales"][index].float()
        torch.testing.assert_close(weight.T, module.weight, atol=1e-6, rtol=1e-3)
    assert f"{name}.weight" not in stored
    assert "lm_head.weight" in stored


@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-5), ("Q8_0", 0.02), ("Q4_0", 0.25)])
def test_gguf_loads_in_transformers(model, kind, limit, tmp_path):
    pytest.importorskip("gguf", reason="the format is written with this library")
    export_gguf(model, tmp_path / "model.gguf", kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    tokens = batches(1)[0]
    with torch.no_grad():
        wanted, found = model(**tokens).logits, loaded(**tokens).logits.float()
    assert float((found - wanted).norm() / wanted.norm()) < limit
    size = (tmp_path / "model.gguf").stat().st_size
    assert size < {"F32": 1.1, "Q8_0": 0.35, "Q4_0": 0.22}[kind] * 4 * sum(p.numel() for p in model.parameters())


def test_what_a_format_cannot_say_is_refused(model, tmp_path):
    codes = round_to_nearest(copy.deepcopy(model), QuantScheme(3, 32))
    with pytest.raises(PlanError, match="3 bits"):
        export_compressed_tensors(model, codes, tmp_path)
    with pytest.raises(PlanError, match="without codes"):
        export_compressed_tensors(model, {}, tmp_path)
    with pytest.raises(PlanError, match="group_size is 48"):
        gptq(model, batches(1), QuantScheme(4, 48))
    with pytest.raises(PlanError, match="no calibration batch reached"):
        gptq(model, [], QuantScheme(4, 32))
    with pytest.raises(PlanError, match="9 bits"):
        QuantScheme(9)
    with pytest.raises(UnsupportedError, match=r"GGUF names of a Linear model .* llama, mistral, qwen2"):
        export_gguf(nn.Linear(2, 2), tmp_path / "x.gguf")
    for name, more, text in (
        ("Mistral", {}, "sliding_window = 4096"),
        ("Llama", {"attention_bias": True, "hidden_act": "gelu"}, "activation gelu and attention_bias"),
        ("Gemma2", {"head_dim": 16}, "query_pre_attn_scalar = 256"),
    ):
        with pytest.raises(PlanError, match=text):
            export_gguf(family(name, **more), tmp_path / "x.gguf")


def family(name, **more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for value in made.parameters():
            if value.dim() == 1:  # norms and biases that say something
                value.add_(torch.rand_like(value) / 2)
    return made


# Head sizes are the ones that transformers takes for granted, because its loader does not read them.
@pytest.mark.parametrize(("name", "more"), [
    ("Mistral", {"sliding_window": None}), ("Qwen2", {}), ("Qwen3", {"head_dim": 128}),
    ("Gemma2", {"head_dim": 256, "sliding_window": 8}),
])  # fmt: skip
def test_gguf_of_other_families_loads_in_transformers(name, more, tmp_path):
    pytest.importorskip("gguf", reason="the format is written with this library")
    made, tokens = family(name, **more), batches(1)[0]
    export_gguf(made, tmp_path / "model.gguf", "F32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tokens).logits.float(), made(**tokens).logits, atol=1e-5, rtol=1e-5)


def test_weights_of_torchao_are_reported_and_exported_but_not_compressed_again(model, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="the library whose tensors are looked at")
    changed, tokens = copy.deepcopy(model), batches(1)[0]
    whole = {layer.name: layer for layer in report_of(changed)}
    quantization.quantize_(changed.model, quantization.Int8WeightOnlyConfig())
    told = {layer.name: layer for layer in report_of(changed)}
    name = "model.layers.0.mlp.up_proj.weight"
    assert whole[name].bits == 32
    assert 8 < told[name].bits < 9
    with torch.no_grad():
        wanted = changed(**tokens).logits
    export_gguf(changed, tmp_path / "model.gguf", "F32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tokens).logits.float(), wanted, atol=1e-4, rtol=1e-4)
    section = {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True},
        "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["up_proj"]}}}}}  # fmt: skip
    for refused in (
        lambda: init_compression(changed, section),
        lambda: round_to_nearest(changed, QuantScheme(4, 32)),
        lambda: gptq(changed, batches(1), QuantScheme(4, 32)),
    ):
        with pytest.raises(UnsupportedError, match="quantised already"):
            refused()
    up = changed.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(up.weight.dequantize())
    init_compression(changed, {"compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": True}, "different_groups": {"one": {
            "params": {"start_bits": 8, "target_bits": 8}, "modules": [r"layers\.0\.mlp\.up_proj"]}}}}})  # fmt: skip
    assert changed(**tokens).logits.shape == wanted.shape

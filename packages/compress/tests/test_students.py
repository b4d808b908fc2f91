"""Students start from layers of their teacher; transposed layers become linear ones."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ds_compress import convert_conv1d_to_linear, init_compression, redundancy_clean, student_initialization
from ds_config.errors import PlanError

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)


def reduction(*layers: int, **more: object) -> dict:
    return {"compression_training": {"layer_reduction": {
        "enabled": True, "keep_number_layer": len(layers), "module_name_prefix": "blocks", "teacher_layer": list(layers),
        "other_module_name": ["embed", "head"], **more}}}  # fmt: skip


def test_a_student_has_layers_of_its_teacher():
    teacher, student = models.Net(4), models.Net(2)
    init_compression(student, reduction(1, 3), teacher_model=teacher)
    for name, value in student.state_dict().items():
        source = name.replace("blocks.1", "blocks.3").replace("blocks.0", "blocks.1")
        assert torch.equal(value, teacher.state_dict()[source]), name
    assert all(
        not torch.equal(a, b) or a.ndim == 1
        for a, b in zip(models.Net(2).parameters(), student.parameters(), strict=True)
    )


def test_what_does_not_fit_is_refused_and_nothing_is_copied():
    student = models.Net(2)
    before = {n: v.clone() for n, v in student.state_dict().items()}
    for text, config in {
        "no module 'blocks.9'": reduction(0, 9),
        "the student has 2 layers": reduction(0),
        "no module 'tail'": reduction(0, 1, other_module_name=["tail"]),
        "differ in": reduction(0, 1, other_module_name=["embed", "blocks"]),
    }.items():
        with pytest.raises(PlanError, match=text):
            student_initialization(student, models.Net(4), config)
    assert all(torch.equal(v, before[n]) for n, v in student.state_dict().items())


def test_gpt2_is_converted_then_compressed():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 32, (2, 8))
    wanted = model(tokens).logits
    bare = {"compression_training": {"weight_quantization": models.technique(
        {"start_bits": 8, "target_bits": 8}, [r"attn\.c_attn"])}}  # fmt: skip
    with pytest.raises(PlanError, match="convert_conv1d_to_linear"):
        init_compression(model, bare)
    convert_conv1d_to_linear(model)
    torch.testing.assert_close(model(tokens).logits, wanted, atol=1e-5, rtol=1e-5)
    init_compression(model, bare)
    compressed = model(tokens).logits
    assert not torch.allclose(compressed, wanted, atol=1e-5)
    redundancy_clean(model)
    torch.testing.assert_close(model(tokens).logits, compressed, atol=1e-6, rtol=1e-6)

"""Hugging Face decoders in stages give the loss and the gradients of the whole model."""

import pytest
import torch
import torch.distributed as dist

import ds_pipe
from ds_config.errors import UnsupportedError
from ds_testing import world

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 24, "max_position_embeddings": 32}  # fmt: skip


def make(kind):
    torch.manual_seed(7)
    if kind == "gpt2":  # its embedding is tied to its head
        config = transformers.GPT2Config(vocab_size=29, n_embd=16, n_layer=4, n_head=2, n_positions=32, resid_pdrop=0,
                                         embd_pdrop=0, attn_pdrop=0)  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    return model(config(**SIZES, tie_word_embeddings=kind == "qwen2"))


def batches(count, masked):
    generator = torch.Generator().manual_seed(5)
    for number in range(count):
        ids = torch.randint(29, (2, 6 + number % 2), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, -2:] = 0
            batch["labels"][0, -2:] = -100
        yield batch


def check(kind, schedule, masked, again=0):
    whole = make(kind)
    total = 0.0
    for batch in batches(4, masked):
        loss = whole(**batch, use_cache=False).loss
        (loss / 4).backward()
        total += float(loss.detach()) / 4
    cut = ds_pipe.DecoderStages(make(kind), dist.get_world_size(), schedule=schedule)
    cut.set_checkpoint_interval(again)
    step = ds_pipe.pipeline(cut, 4)
    assert float(step(list(batches(4, masked)))) == pytest.approx(total, rel=1e-6)
    named = dict(whole.named_parameters())
    for name, param in cut.staged.named_logical():
        wanted = named[name].grad
        assert (param.grad - wanted).norm() <= 2e-6 * wanted.norm(), (kind, schedule, name)
    step.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@world(2)
def test_two_ranks(kind):
    check(kind, "1f1b", masked=False)
    check(kind, "zb-h1", masked=True)
    check(kind, "zbv", masked=False, again=1)


@world(1)
def test_other_models_are_refused():
    with pytest.raises(UnsupportedError) as caught:
        ds_pipe.DecoderStages(torch.nn.Linear(2, 2), 1)
    assert caught.value.code == "pipe-decoder"

"""A BERT of transformers, trained from scratch on text at hand, keeps its accuracy when it is compressed; what is written to disk is the compressed model, and small.

The task: are 24 words in a row English prose (Python's help topics) or program (Python's library)? Some seconds of training, then a few for each technique.
"""

from __future__ import annotations

import _pydecimal
import argparse
import copy
import inspect
import io
import re
import tarfile
import tokenize
import unittest.mock
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from ds_compress import (
    Distillation,
    Distiller,
    codes_of_training,
    compression_scheduler,
    decompress,
    export_compressed_tensors,
    init_compression,
    redundancy_clean,
    resize_to_state_dict,
)

pytestmark = pytest.mark.slow
LENGTH, CHUNK = 12, 256
LAYERS = [r"encoder\.layer"]


def words_of_both():
    prose = "\n".join(line for key in sorted(topics) for line in topics[key].splitlines() if line[:1].isalpha())
    code = "\n".join(inspect.getsource(module) for module in (argparse, tarfile, unittest.mock, _pydecimal))
    names = tokenize.generate_tokens(io.StringIO(code).readline)
    code = " ".join(token.string for token in names if token.type in (tokenize.NAME, tokenize.OP))
    return [re.findall(r"[a-z]+|[^\sa-z]", text.lower()) for text in (prose, code)]


class Task:
    def __init__(self):
        both = words_of_both()
        counts = [Counter(words) for words in both]
        shared = [word for word, _ in (counts[0] + counts[1]).most_common() if min(c[word] for c in counts) > 3]
        numbers = {word: number for number, word in enumerate(shared, 2)}
        self.words, self.parts = len(shared) + 2, {"train": [], "test": []}
        for words in both:
            known = torch.tensor([numbers[word] for word in words if word in numbers])
            chunks = known[: len(known) // CHUNK * CHUNK].view(-1, CHUNK)
            held = torch.arange(len(chunks)) % 6 == 5
            self.parts["train"].append(chunks[~held])
            self.parts["test"].append(chunks[held])
        self.drawn = torch.Generator().manual_seed(1)
        self.test = self.draw(4000, "test", torch.Generator().manual_seed(2))

    def draw(self, rows, part="train", drawn=None):
        drawn, found = drawn or self.drawn, []
        for chunks in self.parts[part]:
            which = torch.randint(0, len(chunks), (rows // 2,), generator=drawn)
            start = torch.randint(0, CHUNK - LENGTH, (rows // 2,), generator=drawn)
            found.append(chunks[which[:, None], start[:, None] + torch.arange(LENGTH)])
        tokens = torch.cat([torch.ones(rows // 2 * 2, 1, dtype=torch.long), torch.cat(found)], 1)
        return tokens, torch.arange(2).repeat_interleave(rows // 2)

    def bert(self, layers=4):
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(
            vocab_size=self.words, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1))  # fmt: skip

    def train(self, model, steps, rate, loss_of=None):
        optimizer, schedule = torch.optim.AdamW(model.parameters(), lr=rate), compression_scheduler(model)
        model.train()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, 2 * (steps - step) / steps)
            tokens, labels = self.draw(64)
            out = model(tokens)
            loss = cross_entropy(out.logits, labels) if loss_of is None else loss_of(out, tokens, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return model.eval()

    @torch.no_grad()
    def logits(self, model):
        return model.eval()(self.test[0]).logits.float()

    def accuracy(self, model):
        found = float((self.logits(model).argmax(1) == self.test[1]).float().mean())
        return found


@pytest.fixture(scope="module")
def task():
    return Task()


@pytest.fixture(scope="module")
def whole(task):
    model = task.train(task.bert(), 350, 1e-3)
    assert task.accuracy(model) > 0.95
    return model


def technique(params, modules, related=None, **shared):
    group = {"params": params, "modules": modules, **({"related_modules": related} if related else {})}
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"all": group}}


def section(**techniques):
    return {"compression_training": techniques}


def bytes_of(folder):
    return (folder / "model.safetensors").stat().st_size


def plain_bytes(model):
    return sum(value.nbytes for value in model.state_dict().values())


@pytest.mark.parametrize(("bits", "groups", "inputs", "points", "ratio"), [(8, 128, 8, 0.01, 0.28), (4, 256, None, 0.02, 0.18)])  # fmt: skip
def test_few_bits_keep_the_accuracy(task, whole, bits, groups, inputs, points, ratio, tmp_path):
    asked = {
        "weight_quantization": technique({"start_bits": bits, "target_bits": bits}, LAYERS, quantize_groups=groups)
    }
    activations = {"activation_quantization": technique({"bits": inputs}, LAYERS)} if inputs else {}
    model = init_compression(copy.deepcopy(whole), section(**asked, **activations))
    assert not torch.allclose(task.logits(model), task.logits(whole), atol=1e-3)
    task.train(model, 80, 2e-4)
    assert task.accuracy(model) >= task.accuracy(whole) - points
    compressed, codes = task.logits(model), codes_of_training(model)
    redundancy_clean(model)
    torch.testing.assert_close(task.logits(model), compressed, atol=1e-5, rtol=1e-5)
    # The folder has weights; quantised inputs are asked for again of what was loaded.
    decompress(model)
    export_compressed_tensors(model, codes, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(task.logits(loaded), task.logits(model), atol=1e-5, rtol=1e-5)
    if inputs:
        torch.testing.assert_close(task.logits(init_compression(loaded, section(**activations))), compressed, atol=1e-5, rtol=1e-5)  # fmt: skip
    packed = sum(one.codes.numel() for one in codes.values())
    promised = plain_bytes(model) - 4 * packed + packed * bits // 8 + sum(4 * c.scales.numel() for c in codes.values())
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(v.nbytes for n, v in stored.items() if not n.endswith("weight_shape")) == promised
    assert (
        sum(v.nbytes for n, v in stored.items() if n.endswith(("weight_packed", "weight_scale"))) < ratio * 4 * packed
    )


def test_half_of_the_heads_keep_the_accuracy(task, whole, tmp_path):
    related = [[r"self\.query", r"self\.key", r"self\.value"]]
    asked = section(head_pruning=technique(
        {"dense_ratio": 0.5}, [r"attention\.output\.dense"], related, method="l1", num_heads=4))  # fmt: skip
    model = init_compression(copy.deepcopy(whole), asked)
    task.train(model, 150, 5e-4)
    assert task.accuracy(model) >= task.accuracy(whole) - 0.02
    compressed = task.logits(model)
    redundancy_clean(model)
    torch.testing.assert_close(task.logits(model), compressed, atol=1e-5, rtol=1e-5)
    assert model.config.num_attention_heads == 2
    before, after = (sum(p.numel() for n, p in m.named_parameters() if ".attention." in n and "dense.b" not in n and "Norm" not in n)
                     for m in (whole, model))  # fmt: skip
    assert after * 2 == before
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert bytes_of(tmp_path) == pytest.approx(plain_bytes(whole) - 2 * before, abs=12_000)
    state = load_file(tmp_path / "model.safetensors")
    again = resize_to_state_dict(task.bert(), state)
    again.load_state_dict(state)
    torch.testing.assert_close(task.logits(again), compressed, atol=1e-5, rtol=1e-5)


def test_half_of_the_layers_with_distillation_keep_the_accuracy(task, whole, tmp_path):
    student = task.bert(layers=2)
    init_compression(student, section(layer_reduction={
        "enabled": True, "keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 3],
        "other_module_name": ["bert.embeddings", "bert.pooler", "classifier"]}), teacher_model=whole)  # fmt: skip
    pairs = (("bert.encoder.layer.0", "bert.encoder.layer.1"), ("bert.encoder.layer.1", "bert.encoder.layer.3"))
    distiller = Distiller(student, whole, Distillation(logits=1.0, hidden=0.1, temperature=2.0, layers=pairs))
    task.train(student, 200, 1e-3, lambda out, tokens, labels: distiller.loss(out, tokens))
    distiller.close()
    assert task.accuracy(student) >= task.accuracy(whole) - 0.03
    student.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(task.logits(loaded), task.logits(student), atol=1e-5, rtol=1e-5)
    layer = sum(p.nbytes for p in whole.bert.encoder.layer[0].parameters())
    assert bytes_of(tmp_path) == pytest.approx(plain_bytes(whole) - 2 * layer, abs=12_000)

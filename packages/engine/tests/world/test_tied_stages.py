"""A decoder whose embedding is its head, in stages: ranks know the tied weight by other names, and sum its gradient all the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_engine
import ds_zero
from ds_engine import SumLoss
from ds_pipe import DecoderStages, ProcessTopology
from ds_testing import world

transformers = pytest.importorskip("transformers")
ROWS, STEPS = 4, 2


def model():
    torch.manual_seed(3)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=24, max_position_embeddings=16, tie_word_embeddings=True,
        )
    )  # fmt: skip


def loss_fn(logits, labels):
    total = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return SumLoss(total, torch.tensor(labels.numel()))


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(32, (ROWS, 7), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def alone():
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for ids, labels in batches():
        part = loss_fn(whole(input_ids=ids, use_cache=False).logits, labels)
        (part.total / part.count).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield float((part.total / part.count).detach()), float(norm)


def check(stage, tensor):
    topology = ProcessTopology(("pipe", "data", "model"), (2, dist.get_world_size() // (2 * tensor), tensor))
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": tensor},
    }
    cut = DecoderStages(model(), topology=topology, loss_fn=loss_fn)
    engine, *_ = ds_engine.initialize(model=cut, config=config)
    copy, copies = engine.mesh["data"].rank, engine.mesh["data"].size
    for (ids, labels), (loss, norm) in zip(batches(), alone(), strict=True):
        mine = ((ids[i : i + 1], labels[i : i + 1]) for i in range(copy, ROWS, copies))
        result = engine.train_batch(({"input_ids": ids}, labels) for ids, labels in mine)
        assert float(result.loss) == pytest.approx(loss, rel=1e-5)
        assert float(result.norm) == pytest.approx(norm, rel=1e-4)
    tied = [p for name, p in cut.named_parameters() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    if stage == 3:  # one gather of both stages
        with ds_zero.GatheredParameters(tied):
            assert tied[0].shape == (32 // tensor, 16)
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@world(2)
def test_two_stages(stage):
    check(stage, 1)


@pytest.mark.parametrize("stage", [0, 3])
@world(4)
def test_two_stages_of_tensor_ranks(stage):
    check(stage, 2)

"""One rank of a job whose model is cut otherwise than in shards of state, for rehearsals: it trains until it is stopped.

usage: python modes.py tp8|ep8|pp4

tp8: a Llama in eight tensor-parallel ranks, stage 1 over the others. ep8: a Mixtral whose experts lie on eight ranks. pp4: four stages of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from zero import HEADS, LAYERS, VOCAB, WIDTH, Block

import ds_engine
from ds_pipe import LayerSpec, PipelineModule

BATCH, TOKENS, MICROBATCHES, STAGES = 1, 32, 8, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 1},
}


def tensor_parallel() -> tuple[nn.Module, dict]:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": LAYERS}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=4 * WIDTH, **heads)
    return LlamaForCausalLM(config), {"tensor_parallel": {"autotp_size": 8}}


def expert_parallel() -> tuple[nn.Module, dict]:
    from transformers import MixtralConfig, MixtralForCausalLM

    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS // 2}
    config = MixtralConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_local_experts=8, **heads)
    return MixtralForCausalLM(config), {"expert_parallel": {"enabled": True, "autoep_size": 8}}


class Words(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCAB, WIDTH)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stages() -> tuple[nn.Module, dict]:
    blocks = [LayerSpec(Block) for _ in range(LAYERS)]
    layers = [LayerSpec(Words), *blocks, LayerSpec(nn.Linear, WIDTH, VOCAB)]
    return PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of), {"gradient_accumulation_steps": MICROBATCHES}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        words = torch.randint(VOCAB, (BATCH, TOKENS + 1))
        yield words[:, :-1], words[:, 1:]


def main(mode: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, changes = {"tp8": tensor_parallel, "ep8": expert_parallel, "pp4": stages}[mode]()
    engine, *_ = ds_engine.initialize(model=model, config=CONFIG | changes)
    data = batches()
    while True:
        if mode == "pp4":
            engine.train_batch(data)
            continue
        words, labels = next(data)
        engine.backward(loss_of(engine(words).logits, labels))
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])

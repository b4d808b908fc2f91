"""One engine of the inference benchmark: reads a line, does it, answers with a line of JSON. Random weights, the same in all engines.

    inference.py ENGINE LAYERS       ENGINE: ours-bf16, ours-int8, ours-int8-rounded, ours-int4, ours-int4-rounded, transformers-bf16

Lines: `decode N`: N tokens of one request; `first N`: the first token of a prompt of N; `batch N`: 32 ragged requests, N tokens each;
`read`: the read bandwidth that this process reaches with the same threads; `resident`: bytes that this process holds now.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import psutil
import torch

THREADS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2, 1024, 2816, 16, 8, 32000
FORMS = {
    "int8": ("int8", "float"),
    "int8-rounded": ("int8", "int8"),
    "int4": ("int4", "float"),
    "int4-rounded": ("int4", "int8"),
}


def model_of(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.fill_(1.0) if "norm" in name else param.uniform_(-0.035, 0.035)
        inverse = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 64, 2).float() / 64)
        model.model.rotary_emb.inv_freq.copy_(inverse)
        model.model.rotary_emb.original_inv_freq.copy_(inverse)
    return model


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB) for _ in range(draw.randrange(16, 129))] for _ in range(32)]


class Ours:
    """The paged engine over the native loop."""

    def __init__(self, form: str, layers: int) -> None:
        from ds_inference import Budget, Quantize, load

        how = None if form == "bf16" else Quantize(FORMS[form][0], activations=FORMS[form][1])
        self.engine = load(
            model_of(layers), quantize=how, native=True, budget=Budget(512, 64, length=2048), share=False
        )
        if self.engine.decoder.obstacle:
            raise SystemExit(self.engine.decoder.obstacle)
        program = self.engine.decoder._native._program
        packed = [m for layer in program.layers for m in layer.matrices] + [program.head]
        self.bytes = sum(m.data.nbytes + (0 if m.params is None else m.params.nbytes) for m in packed)

    def run(self, prompts: list[list[int]], count: int) -> None:
        from ds_inference import Sampling

        self.engine.generate(prompts, Sampling(count, ignore_end=True))

    def decode(self, count: int) -> float:
        """Seconds a token, once the prompt is computed."""
        from ds_inference import Sampling

        self.engine.submit([5] * 8, Sampling(count + 1, ignore_end=True))
        self.engine.step()
        begin = time.perf_counter()
        for _ in self.engine.stream():
            pass
        return (time.perf_counter() - begin) / count


class Transformers:
    """`generate` of transformers; batches are padded on the left."""

    def __init__(self, layers: int) -> None:
        self.model = model_of(layers)
        self.bytes = sum(p.nbytes for n, p in self.model.named_parameters() if "embed" not in n)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], count: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self.model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    def decode(self, count: int) -> float:
        begin = time.perf_counter()
        self.run([[5] * 8], 1)
        middle = time.perf_counter()
        self.run([[5] * 8], count + 1)
        return (time.perf_counter() - middle - (middle - begin)) / count


def read_bandwidth() -> float:
    """Bytes a second of one pass over 512 MiB."""
    from ds_ops.stream import sum_squares

    if not hasattr(read_bandwidth, "room"):
        read_bandwidth.room = torch.ones(1 << 27)  # type: ignore[attr-defined]
    room = read_bandwidth.room  # type: ignore[attr-defined]
    begin = time.perf_counter()
    sum_squares(room)
    return room.nbytes / (time.perf_counter() - begin)


def main() -> None:
    engine, layers = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(THREADS)
    kind, form = engine.split("-", 1)
    made: Any = Ours(form, layers) if kind == "ours" else Transformers(layers)
    made.run([[1, 2, 3]], 2)
    print(json.dumps({"bytes": made.bytes}), flush=True)
    for line in sys.stdin:
        what, *rest = line.split()
        count = int(rest[0]) if rest else 0
        begin = time.perf_counter()
        if what == "decode":
            found = made.decode(count)
        elif what == "first":
            made.run([[7] * count], 1)
            found = time.perf_counter() - begin
        elif what == "batch":
            made.run(prompts(), count)
            found = time.perf_counter() - begin
        elif what == "resident":
            found = float(psutil.Process().memory_info().rss)
        else:
            found = read_bandwidth()
        print(json.dumps({"found": found}), flush=True)


if __name__ == "__main__":
    main()

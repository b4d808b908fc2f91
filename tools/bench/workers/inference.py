"""Ours and transformers as engines of the inference benchmark (`inference_load.py` says what they are asked). Random weights.

inference.py make FOLDER LAYERS     the folder that all engines read: weights in bf16, a tokenizer of words
inference.py run FOLDER ENGINE      ENGINE: ours-bf16, ours-int8, ours-int8-rounded, ours-int4, ours-int4-rounded, transformers-bf16
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from inference_load import HEADS, HIDDEN, INNER, KV_HEADS, THREADS, VOCAB, run

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


def make(folder: Path, layers: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model_of(layers).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


class Ours:
    """The paged engine over the native loop."""

    def __init__(self, form: str, folder: Path) -> None:
        from ds_inference import QuantizationOptions, SchedulerConfig, load

        how = None if form == "bf16" else QuantizationOptions(FORMS[form][0], activations=FORMS[form][1])
        self.engine = load(
            folder,
            quantize=how,
            native=True,
            budget=SchedulerConfig(512, 64, max_model_len=2048),
            enable_prefix_caching=False,
        )
        if self.engine.decoder.obstacle:
            raise SystemExit(self.engine.decoder.obstacle)
        program = self.engine.decoder._native._program
        packed = [m for layer in program.layers for m in layer.matrices] + [program.head]
        self.bytes = sum(m.data.nbytes + (0 if m.params is None else m.params.nbytes) for m in packed)

    def run(self, prompts: list[list[int]], count: int) -> None:
        from ds_inference import SamplingParams

        self.engine.generate(prompts, SamplingParams(count, ignore_eos=True))

    def read(self) -> float:
        return read_bandwidth()


class Transformers:
    """`generate` of transformers; batches are padded on the left."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.bytes = sum(p.nbytes for n, p in self.model.named_parameters() if "embed" not in n)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], count: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self.model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)


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
    what, folder, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(THREADS)
    if what == "make":
        if not (folder / "model.safetensors").exists():
            make(folder, int(rest))
        return
    kind, form = rest.split("-", 1)
    run(lambda: Ours(form, folder) if kind == "ours" else Transformers(folder))


if __name__ == "__main__":
    main()

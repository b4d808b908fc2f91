"""`nox -s bench -- gpu`: one GPU: kernels as a share of a copy, training steps beside a plain loop and FSDP2, generation beside transformers.

Kernels are timed by events of the device; a share is (bytes that must move / time) / (the copy's rate). Engines train the same GPT from the
same weights, one after another in one process, and their losses are recorded.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import records
import tables
import torch
import torch.distributed as dist
from kernels import Case, norm_cases
from meetings import WORKERS
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_ops import convert
from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantSpec
from ds_ops.optim.adam import AdamW
from ds_ops.quant import dequantize, quantize

sys.path.insert(0, str(WORKERS))
from steps import engine_step, stepping

VOCABULARY = 32_000


# ---- kernels ---------------------------------------------------------------------------------------------------------


def microseconds(work: Callable[[], object], rounds: int = 15) -> float:
    """Of the device: it sleeps for 5 ms or more first, so that the host has launched everything when the work begins."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def streams() -> list[Case]:
    x = torch.randn(256 * 2**20, device="cuda")
    half = x.bfloat16()
    cases = [Case("fp32 to bf16", 1.5 * x.nbytes, lambda: convert(half, x), lambda: half.copy_(x))]
    for f in (INT8, INT4, FP8_E4M3):
        q = quantize(half, QuantSpec(f, 256))
        nbytes = half.nbytes + q.nbytes
        cases.append(Case(f"quantize bf16 to {f.name}", nbytes, lambda q=q: quantize(half, q.spec, out=q)))
        cases.append(Case(f"dequantize {f.name} to bf16", nbytes, lambda q=q: dequantize(q, out=half)))
    return cases


def updates() -> list[Case]:
    cases = []
    for title, count, side in (("268 M fp32 in 16 tensors", 16, 4096), ("2 M fp32 in 500 tensors", 500, 64)):
        params = [torch.randn(side, side, device="cuda", requires_grad=True) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        own, theirs = AdamW(params, lr=1e-3), torch.optim.AdamW(params, lr=1e-3, fused=True)
        cases.append(Case(f"AdamW, {title}", 7.0 * sum(p.nbytes for p in params), own.step, theirs.step))
    return cases


def norms(cols: int) -> list[Case]:
    return norm_cases(torch.randn(2**27 // cols, cols, device="cuda", dtype=torch.bfloat16), f"bf16, rows of {cols}")


def kernels() -> list[dict[str, Any]]:
    """A row for each kernel. share: of a copy's rate. peer: torch's time over ours; 0 without one; both on the device."""
    x = torch.randn(256 * 2**20, device="cuda")
    y = torch.empty_like(x)
    rows: list[dict[str, Any]] = []
    groups = [lambda: [Case("copy of 1 GiB", 2 * x.nbytes, lambda: y.copy_(x))], streams, updates]
    for group in [*groups, *(partial(norms, cols) for cols in (1024, 4096, 8192))]:
        for case in group():
            took = microseconds(case.ours)
            gb_s, peer = case.nbytes / took / 1e3, microseconds(case.peer) / took if case.peer else 0.0
            share = gb_s / (rows[0]["gb_s"] if rows else gb_s)
            rows.append({"name": case.name, "us": took, "gb_s": gb_s, "share": share, "peer": peer})
            print(rows[-1], flush=True)
    return rows


# ---- training --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """forward(tokens [B, T]) is the mean loss of the next tokens."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def make_model(size: dict[str, int]) -> Gpt:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(**size)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
    return model


def stepped(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A step with clipping and torch's fused AdamW."""
    return stepping(loss_of, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), clipped=model)


def plain(size: dict[str, int]) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """Weights of fp32, operations of bf16 by autocast, torch's fused AdamW."""
    model = make_model(size)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(batch)
        return loss

    return stepped(model, loss_of), lambda: None


def fsdp2(size: dict[str, int]) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """Masters of fp32, blocks in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    model = make_model(size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return stepped(model, model), lambda: None


def ours(zero: dict[str, Any]) -> Callable[[dict[str, int]], tuple[Callable[[Tensor], Tensor], Callable[[], None]]]:
    def start(size: dict[str, int]) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
        config = {
            "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}, "zero_optimization": zero,
        }  # fmt: skip
        engine = ds_engine.initialize(model=make_model(size), config=config)[0]
        return engine_step(engine), engine.close

    return start


HOST = {"device": "cpu", "pin_memory": True}
TRAINERS = {
    "plain": plain,
    "stage 0": ours({"stage": 0}),
    "stage 1": ours({"stage": 1}),
    "stage 2": ours({"stage": 2}),
    "stage 3": ours({"stage": 3}),
    "stage 2, optimizer on the host": ours({"stage": 2, "offload_optimizer": HOST}),
    "stage 3, all on the host": ours({"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}),
    "FSDP2": fsdp2,
}


def training(steps: int, names: list[str], size: dict[str, int], batch: tuple[int, int]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step, close = TRAINERS[name](size)
        generator = torch.Generator(device="cuda").manual_seed(1)
        tokens = torch.randint(VOCABULARY, (batch[0], batch[1] + 1), device="cuda", generator=generator)
        losses, times = [], []
        for _ in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loss = step(tokens)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
            losses.append(float(loss.detach()))
        rest = times[3:]
        found.append({"name": name, "ms": statistics.median(rest), "least_ms": min(rest), "losses": losses[:8],
                      "peak_gib": torch.cuda.max_memory_allocated() / 2**30, **size})  # fmt: skip
        print(found[-1], flush=True)
        close()
        del step, close, loss, tokens
    return found


# ---- generation ------------------------------------------------------------------------------------------------------


LLAMAS = {
    "1.1 G": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
              "num_key_value_heads": 4, "vocab_size": 32_000},
    "8 G": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 128},
}  # fmt: skip
LOADS = [("1.1 G", 1, 512), ("1.1 G", 32, 128), ("1.1 G", 128, 512), ("8 G", 1, 512), ("8 G", 32, 512)]
Generate = Callable[[int], list[list[int]]]
"""The next so many tokens of every prompt, likeliest first."""


def ours_of(model: nn.Module, prompts: Tensor, new: int, codes: str | None = None) -> Generate:
    from ds_inference import SamplingParams, load

    room = prompts.shape[0] * (prompts.shape[1] + new + 32)
    engine = load(
        model, enable_prefix_caching=False, quantize=codes, cache_tokens=room
    )  # as transformers, each prompt is computed
    return lambda count: [a.tokens for a in engine.generate(prompts.tolist(), SamplingParams(max_new_tokens=count))]


def transformers_of(model: nn.Module, prompts: Tensor, **cache: Any) -> Generate:
    inputs = {"input_ids": prompts.to(model.device), "attention_mask": torch.ones_like(prompts, device=model.device)}

    def generate(count: int) -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, **cache)
        return out[:, prompts.shape[1] :].tolist()

    return generate


def generation(size: str, rows: int, prompt: int, new: int, device: str = "cuda") -> list[dict[str, Any]]:
    """Seconds of a first token and of `new` tokens, and the peak of memory: ours in bf16, int8 and int4, transformers plainly and with a static
    cache whose step it compiles. Each has a call of all tokens before, which compiles and captures.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMAS[size], max_position_embeddings=4096, eos_token_id=None, bos_token_id=None)
    prompts = torch.randint(config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(2))
    engines: dict[str, Callable[[nn.Module], Generate]] = {
        "ours": lambda model: ours_of(model, prompts, new),
        "transformers": lambda model: transformers_of(model, prompts),
        "transformers, static cache, compiled": lambda model: transformers_of(
            model, prompts, cache_implementation="static"
        ),
    }
    if rows == 1:
        engines |= {
            f"ours, {codes}": lambda model, codes=codes: ours_of(model, prompts, new, codes)
            for codes in ("int8", "int4")
        }
    found, answers = [], {}
    for name, start in engines.items():
        gc.collect()
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        call = start(model)
        call(new)
        seconds = []
        for count in (1, new):
            begin = time.perf_counter()
            answers[name] = call(count)
            seconds.append(time.perf_counter() - begin)
        row: dict[str, Any] = {"size": size, "rows": rows, "prompt": prompt, "new": new, "engine": name}
        row |= {"first_s": seconds[0], "s": seconds[1]}
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        row["weights_gib"] = sum(p.nbytes for p in model.parameters()) / 2**30
        same = [
            sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(answers["ours"], answers[name], strict=True)
        ]
        row["same_tokens"] = sum(same) / (rows * new)
        print(row, flush=True)
        found.append(row)
        del call, model
    return found


def main() -> None:
    parser = records.parser_of("gpu", __doc__)
    parser.add_argument("parts", nargs="*", default=["kernels", "training", "generation"])
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    on = {"machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}"}
    size = {"layers": 24, "width": 1024, "heads": 16}
    for part in args.parts:
        if part == "kernels":
            found = kernels()
        elif part == "training":
            found = training(args.steps, list(TRAINERS), size, (8, 1024))
        else:
            found = [row for load in LOADS for row in generation(*load, new=64)]
        records.add("gpu", **on, **{part: found})
    tables.fill("gpu")


if __name__ == "__main__":
    main()

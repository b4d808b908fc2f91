"""`nox -s bench -- gpu`: one GPU: kernels as a share of a copy, training steps beside a plain loop and FSDP2, generation beside transformers.

Kernels are timed by events of the device; a share is (bytes that must move / time) / (the copy's rate). Engines train the same GPT from the
same weights, one after another in one process, and their losses are recorded. `--out FILE` writes the record elsewhere; `--page` only
writes the page from it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_ops import convert
from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantSpec
from ds_ops.norms import add_rms_norm, rms_norm
from ds_ops.optim.adam import AdamW
from ds_ops.quant import dequantize, quantize

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
TABLES = re.compile(r"(<!-- tables -->\n).*?(<!-- end -->)", re.DOTALL)
VOCABULARY = 32_000


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel. share: of a copy's rate. peer: torch's time over ours; 0 without one; both on the device."""

    name: str
    us: float
    gb_s: float
    share: float
    peer: float


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


class Table:
    """Rows, each beside the rate of a copy."""

    def __init__(self) -> None:
        x = torch.randn(256 * 2**20, device="cuda")
        y = torch.empty_like(x)
        took = microseconds(lambda: y.copy_(x))
        self.copy = 2 * x.nbytes / took
        self.rows = [Row("copy of 1 GiB", took, self.copy / 1e3, 1.0, 0.0)]

    def add(
        self, name: str, nbytes: float, ours: Callable[[], object], peer: Callable[[], object] | None = None
    ) -> None:
        took = microseconds(ours)
        other = microseconds(peer) / took if peer else 0.0
        self.rows.append(Row(name, took, nbytes / took / 1e3, nbytes / took / self.copy, other))
        print(self.rows[-1], flush=True)


def streams(table: Table) -> None:
    x = torch.randn(256 * 2**20, device="cuda")
    half = x.bfloat16()
    table.add("fp32 to bf16", 1.5 * x.nbytes, lambda: convert(half, x), lambda: half.copy_(x))
    for f in (INT8, INT4, FP8_E4M3):
        q = quantize(half, QuantSpec(f, 256))
        nbytes = half.nbytes + q.nbytes
        table.add(f"quantize bf16 to {f.name}", nbytes, lambda q=q: quantize(half, q.spec, out=q))
        table.add(f"dequantize {f.name} to bf16", nbytes, lambda q=q: dequantize(q, out=half))


def updates(table: Table) -> None:
    for title, count, side in (("268 M fp32 in 16 tensors", 16, 4096), ("2 M fp32 in 500 tensors", 500, 64)):
        params = [torch.randn(side, side, device="cuda", requires_grad=True) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        own, theirs = AdamW(params, lr=1e-3), torch.optim.AdamW(params, lr=1e-3, fused=True)
        table.add(f"AdamW, {title}", 7.0 * sum(p.nbytes for p in params), own.step, theirs.step)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (weight.numel(),), weight, 1e-6)


def norms(table: Table, cols: int) -> None:
    x = torch.randn(2**27 // cols, cols, device="cuda", dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.ones(cols, device="cuda", dtype=torch.bfloat16)

    def torch_sum_norm() -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch_norm(total, weight), total

    def backward(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        made = norm(a, w)
        return lambda: torch.autograd.grad(made, (a, w), residual, retain_graph=True)

    n, rows = x.nbytes, f"bf16, rows of {cols}"
    table.add(f"RMS norm {rows}", 2 * n, lambda: rms_norm(x, weight), lambda: torch_norm(x, weight))
    table.add(f"RMS norm of a sum {rows}", 4 * n, lambda: add_rms_norm(x, residual, weight), torch_sum_norm)
    table.add(f"RMS norm backward {rows}", 3 * n, backward(rms_norm), backward(torch_norm))


def kernels() -> list[Row]:
    table = Table()
    streams(table)
    updates(table)
    for cols in (1024, 4096, 8192):
        norms(table, cols)
    return table.rows


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


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
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": zero,
        }
        engine = ds_engine.initialize(model=make_model(size), config=config)[0]

        def step(batch: Tensor) -> Tensor:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss

        return step, engine.close

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
        row = {
            "size": size,
            "rows": rows,
            "prompt": prompt,
            "new": new,
            "engine": name,
            "first_s": seconds[0],
            "s": seconds[1],
        }
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


# ---- page ------------------------------------------------------------------------------------------------------------


def filled(page: str, found: dict[str, Any]) -> str:
    lines = [
        "| a step of the GPT | ms | of a plain loop | peak memory, GiB | loss after 8 steps |",
        "|---|---|---|---|---|",
    ]
    plain_ms = found["training"][0]["ms"]
    for row in found["training"]:
        name = {"plain": "a plain loop: autocast, fused AdamW", "FSDP2": "FSDP2"}.get(
            row["name"], f"**ds-zero {row['name']}**"
        )
        lines.append(
            f"| {name} | {row['ms']:.1f} | {row['ms'] / plain_ms:.2f} | {row['peak_gib']:.1f} | {row['losses'][7]:.2f} |"
        )
    # Rows of before 2026-11-26 took their prompt from the cache; they have no time of a first token, and are not shown.
    computed = [row for row in found["generation"] if "engine" in row]
    if computed:
        lines += [
            "",
            "| generation | engine | tokens/s | first token, ms | peak memory, GiB |",
            "|---|---|---|---|---|",
        ]
    for row in computed:
        rate, first = row["rows"] * row["new"] / row["s"], 1e3 * row["first_s"]
        where = f"{row['size']}, {row['rows']} x {row['prompt']}"
        lines.append(f"| {where} | {row['engine']} | {rate:,.0f} | {first:.0f} | {row['peak_gib']:.1f} |")
    lines += ["", "| kernel | us | GB/s | of a copy | torch takes |", "|---|---|---|---|---|"]
    for row in found["kernels"]:
        peer = f"{row['peer']:.2f}x" if row["peer"] else ""
        lines.append(f"| {row['name']} | {row['us']:.0f} | {row['gb_s']:.0f} | {row['share']:.0%} | {peer} |")
    text = "\n".join([*lines, "", f"Measured {found['date']} on one {found['machine']}, alone.", ""])
    return TABLES.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)


def write_page(found: dict[str, Any]) -> None:
    PAGE.write_text(filled(PAGE.read_text(), found))
    (PAGE.parent / "gpu.svg").write_text(picture(found))


def picture(found: dict[str, Any]) -> str:
    """Bars: milliseconds of a step, and its peak memory."""
    rows = found["training"]
    high = 24 * len(rows) + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {high}" font-family="sans-serif" font-size="12">']
    out.append('<text x="220" y="20">a step, ms</text><text x="540" y="20">peak memory, GiB</text>')
    for at, row in enumerate(rows):
        y = 34 + 24 * at
        out.append(f'<text x="210" y="{y + 13}" text-anchor="end">{row["name"]}</text>')
        colour = "#adb5bd" if row["name"] in ("plain", "FSDP2") else "#2a6f97"
        for x, key in ((220, "ms"), (540, "peak_gib")):
            wide = 220 * row[key] / max(r[key] for r in rows)
            out.append(f'<rect x="{x}" y="{y}" width="{wide:.0f}" height="16" fill="{colour}"/>')
            out.append(f'<text x="{x + wide + 4:.0f}" y="{y + 13}">{row[key]:.1f}</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["kernels", "training", "generation"])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    if args.page:
        write_page(json.loads(DATA.read_text()))
        return
    found: dict[str, Any] = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }
    size = {"layers": 24, "width": 1024, "heads": 16}
    for part in args.parts:
        if part == "kernels":
            found[part] = [asdict(row) for row in kernels()]
        elif part == "training":
            found[part] = training(args.steps, list(TRAINERS), size, (8, 1024))
        else:
            found[part] = [row for load in LOADS for row in generation(*load, new=64)]
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.out == DATA:
        write_page(found)


if __name__ == "__main__":
    main()

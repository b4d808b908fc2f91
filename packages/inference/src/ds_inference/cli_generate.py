"""`ds generate FOLDER PROMPT`: one answer in the terminal, as it comes; without a prompt, a conversation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["HELP", "main", "read_engine", "register", "register_model"]

HELP = "answer in the terminal (`ds generate FOLDER PROMPT`, or a conversation without a prompt)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    register_model(parser)
    parser.add_argument("prompt", nargs="?", help="left out: a conversation, one line a turn, until end of input")
    parser.add_argument("--json", action="store_true", help="print each answer as a line of JSON, when it is whole")


def register_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the model and the sampling."""
    parser.add_argument("folder", help="what save_pretrained wrote: config.json, *.safetensors, a tokenizer")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens that have this part of the probability together",
    )
    parser.add_argument("--seed", type=int, help="of what is drawn (default: another one every time)")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="of weights and cache: cpu, cuda, cuda:1, ... (default: the accelerator, if there is one)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="PART",
        help="of an accelerator's memory, for weights, steps and cache together, where no size of the cache is given",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and cache (default: theirs)"
    )
    parser.add_argument(
        "--quantize", choices=["int8", "int4", "fp8", "fp6"], help="weights of few bits (default: as they are)"
    )
    parser.add_argument(
        "--cache-dtype", choices=["int8", "fp8"], help="of keys and values (default: that of the weights)"
    )


def read_engine(args: argparse.Namespace) -> tuple[Any, Any]:
    """Load the engine with its tokenizer, and build the sampling parameters from the options."""
    import torch

    from ds_inference.model_loader import load
    from ds_inference.sampling import SamplingParams
    from ds_inference.text import read_tokenizer

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    cache_dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(args.cache_dtype)
    engine = load(
        args.folder,
        dtype=dtype,
        device=args.device,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tokenizer=read_tokenizer(args.folder),
        quantize=args.quantize,
        cache_dtype=cache_dtype,
    )
    return engine, SamplingParams(args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)


def main(args: argparse.Namespace) -> int:
    """Print the answer."""
    engine, how = read_engine(args)
    tokenizer: Any = engine.tokenizer
    if args.prompt is not None:
        _print(engine, tokenizer.encode(args.prompt), how, as_json=args.json)
        return 0
    turns: list[dict[str, Any]] = []
    for line in sys.stdin:
        turns.append({"role": "user", "content": line.rstrip("\n")})
        turns.append({"role": "assistant", "content": _print(engine, tokenizer.chat(turns), how, as_json=args.json)})
    return 0


def _print(engine: Any, prompt: Sequence[int], how: Any, *, as_json: bool) -> str:
    from ds_inference.text import TextStream

    text, answer, began_s, tokens, reason = TextStream(engine.tokenizer), "", time.perf_counter(), 0, ""
    engine.submit(prompt, how)
    for event in engine.stream():
        piece = text.push(event.token) + (text.finish() if event.reason else "")
        answer, tokens, reason = answer + piece, tokens + 1, event.reason or ""
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    took_s = time.perf_counter() - began_s
    counts = {"prompt_tokens": len(prompt), "tokens": tokens, "reason": reason, "seconds": took_s}
    sys.stdout.write(json.dumps({"text": answer, **counts}) + "\n" if as_json else "\n")
    sys.stdout.flush()
    return answer


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["generate", *sys.argv[1:]]))

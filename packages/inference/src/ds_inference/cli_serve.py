"""`ds serve FOLDER`: answers over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from ds_config.errors import PlanError

__all__ = ["HELP", "main", "register"]

HELP = "answer over HTTP, in OpenAI's protocol (`ds serve FOLDER`)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", help="what save_pretrained wrote: config.json, *.safetensors, a tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this host only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", help="the model's name in requests (default: the folder's)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and cache (default: theirs)"
    )
    parser.add_argument(
        "--quantize", choices=["int8", "int4", "fp8", "fp6"], help="weights of few bits (default: as they are)"
    )
    parser.add_argument("--cache-dtype", choices=["int8"], help="of keys and values (default: that of the weights)")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter, asked for as model NAME; several",
    )
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="on several ranks: experts are given to ranks whole"
    )
    parser.add_argument(
        "--kv-cache-tokens", type=int, default=65536, help="size of the cache of keys and values, in tokens"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="under way at a time; further ones get 429")
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens of a prompt and its answer together")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="computed in one step, over all requests"
    )


def main(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then answer what is under way and end. If the engine fails, tell all who wait and raise its error.

    Started on several ranks (`ds run --nproc 2 --module ds_launcher serve FOLDER`), they hold each layer together: the first one
    answers HTTP and leads, the others follow.
    """
    import torch
    import uvicorn

    import ds_comm
    from ds_inference.model_loader import load
    from ds_inference.rank_worker import follow, leading
    from ds_inference.scheduler import SchedulerConfig
    from ds_inference.serve.app import ServerLimits, make_app
    from ds_inference.serve.worker import Worker
    from ds_inference.text import read_tokenizer

    group = ds_comm.init_distributed()
    tokenizer = read_tokenizer(args.folder)
    engine = load(
        args.folder,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        cache_tokens=args.kv_cache_tokens,
        budget=SchedulerConfig(
            args.max_num_batched_tokens,
            min(args.max_num_batched_tokens, args.max_num_seqs),
            max_model_len=args.max_model_len,
        ),
        tokenizer=tokenizer,
        quantize=args.quantize,
        cache_dtype=None if args.cache_dtype is None else torch.int8,
        adapters=_adapters(args.adapter),
        group=group if group.size > 1 else None,
        enable_expert_parallel=args.enable_expert_parallel,
    )
    if group.rank:
        follow(engine)
        return 0
    name = args.name or Path(args.folder).resolve().name
    with leading(engine) if group.size > 1 else nullcontext():
        worker = Worker(engine, lambda: setattr(server, "should_exit", True))
        app = make_app(worker, tokenizer, name, ServerLimits(args.max_num_seqs, longest=args.max_model_len))
        # Idle connections stay longer than clients keep them (5 s of httpx, and so of openai, is uvicorn's own default, too): else
        # a client may ask on a connection in the moment in which the server closes it.
        config = uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            log_level="warning",
            timeout_graceful_shutdown=60,
            timeout_keep_alive=75,
        )
        server = uvicorn.Server(config)
        server.run()
        if worker.failure is not None:
            raise worker.failure
    return 0 if server.started else 1


def _adapters(options: list[str]) -> dict[str, str]:
    wrong = [one for one in options if "=" not in one or one.startswith("=")]
    if wrong:
        raise PlanError(
            f"--adapter {wrong[0]}", code="inference-adapter", fix="Write --adapter NAME=FOLDER, once for each."
        )
    return dict(one.split("=", 1) for one in options)

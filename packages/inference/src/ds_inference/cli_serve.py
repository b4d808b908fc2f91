"""`ds serve FOLDER`: answers over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ds_config.errors import PlanError

__all__ = ["HELP", "main", "register"]

HELP = "answer over HTTP, in OpenAI's protocol (`ds serve FOLDER`)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", help="what save_pretrained wrote: config.json, *.safetensors, a tokenizer")
    address = parser.add_argument_group("who may ask, and where")
    address.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this host only)")
    address.add_argument("--port", type=_port, default=8000, help="port to listen on")
    address.add_argument(
        "--api-key", default="", metavar="KEY",
        help="what requests have to send as `Authorization: Bearer KEY` (default: DS_SERVE_API_KEY, or nothing)",
    )  # fmt: skip
    address.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="a name in the Host of requests that is served, several; * for all (default: on loopback its names, else all)",
    )  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument("--name", help="the model's name in requests (default: the folder's)")
    model.add_argument(
        "--device",
        metavar="DEVICE",
        help="of weights and cache: cpu, cuda, cuda:1, ... (default: the accelerator, if there is one)",
    )
    model.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and cache (default: theirs)"
    )
    model.add_argument(
        "--quantize", choices=["int8", "int4", "fp8", "fp6"], help="weights of few bits (default: as they are)"
    )
    model.add_argument(
        "--cache-dtype", choices=["int8", "fp8"], help="of keys and values (default: that of the weights)"
    )
    model.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER",
        help="a LoRA adapter, asked for as model NAME; several",
    )  # fmt: skip
    model.add_argument(
        "--embedder", metavar="FOLDER", help="a model that answers /v1/embeddings, by its folder's name (default: none)"
    )
    model.add_argument(
        "--enable-expert-parallel", action="store_true", help="on several ranks: experts are given to ranks whole"
    )
    model.add_argument(
        "--no-lookahead",
        action="store_true",
        help="launch a step only when the tokens of the last one are known (default on a CPU; the answers are the same)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--kv-cache-tokens",
        type=int,
        metavar="N",
        help="size of the cache of keys and values, in tokens (default: 65536 on a CPU, else what is free of the device)",
    )
    limits.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="PART",
        help="of an accelerator's memory, for weights, steps and cache together, where no size of the cache is given",
    )
    limits.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="under way at a time; further ones get 429"
    )
    limits.add_argument(
        "--max-model-len", type=int, default=4096, metavar="N", help="tokens of a prompt and its answer together"
    )
    limits.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="N", help="computed in one step, over all requests"
    )


def main(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then answer what is under way and end. If the engine fails, tell all who wait and raise its error.

    Started on several ranks (`ds run --nproc 2 --module ds_launcher serve FOLDER`), they hold each layer together: the first one
    answers HTTP and leads, the others follow.
    """
    import torch
    import uvicorn

    import ds_comm
    from ds_inference.cache_size import usable_device
    from ds_inference.embedding import load_embedder
    from ds_inference.model_loader import load
    from ds_inference.rank_worker import follow, leading
    from ds_inference.scheduler import SchedulerConfig
    from ds_inference.serve.app import ServerLimits, ServerOptions, make_app
    from ds_inference.serve.connections import connection_options
    from ds_inference.serve.graceful_server import GracefulServer
    from ds_inference.serve.worker import Worker
    from ds_inference.text import read_tokenizer

    group = ds_comm.init_distributed()
    tokenizer = read_tokenizer(args.folder)
    place = usable_device(args.device)
    engine = load(
        args.folder,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        device=place,
        cache_tokens=65536 if args.kv_cache_tokens is None and place.type == "cpu" else args.kv_cache_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        budget=SchedulerConfig(
            args.max_num_batched_tokens,
            min(args.max_num_batched_tokens, args.max_num_seqs),
            max_model_len=args.max_model_len,
        ),
        tokenizer=tokenizer,
        quantize=args.quantize,
        cache_dtype={"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(args.cache_dtype),
        adapters=_adapters(args.adapter),
        group=group if group.size > 1 else None,
        enable_expert_parallel=args.enable_expert_parallel,
        lookahead=False if args.no_lookahead else None,
    )
    if group.rank:
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # the first rank answers what is under way, and then says that it is over
            signal.signal(number, signal.SIG_IGN)
        follow(engine)
        return 0
    name = args.name or Path(args.folder).resolve().name
    with leading(engine) if group.size > 1 else nullcontext():
        worker = Worker(engine, lambda: setattr(server, "should_exit", True))
        options = ServerOptions(
            args.api_key or os.environ.get("DS_SERVE_API_KEY", ""), _hosts(args.host, args.allowed_host)
        )
        if args.embedder:
            embedder = load_embedder(args.embedder, tokenizer=read_tokenizer(args.embedder))
            options = ServerOptions(options.api_key, options.hosts, embedder, Path(args.embedder).resolve().name)
        limits = ServerLimits(args.max_num_seqs, longest=args.max_model_len)
        app = make_app(worker, tokenizer, name, limits, options)
        # Idle connections stay longer than clients keep them (5 s of httpx, and so of openai, is uvicorn's own default, too): else
        # a client may ask on a connection in the moment in which the server closes it.
        config = uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            log_level="warning",
            timeout_graceful_shutdown=60,
            timeout_keep_alive=75,
            **connection_options(limits.stall),
        )
        server = GracefulServer(config)
        sys.stderr.write(_banner(args, name, engine, _resident_mb()))
        try:
            server.run()
        finally:  # also after a second SIGINT, which skips the end of the application
            worker.close()
        if worker.failure is not None:
            raise worker.failure
    return 0 if server.started else 1


def _port(text: str) -> int:
    if not text.isdecimal() or not int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _hosts(address: str, names: list[str]) -> tuple[str, ...]:
    """Return the names in `Host` that are served: on loopback its names and those given, elsewhere those given; empty: all."""
    if "*" in names:
        return ()
    loopback = address in _LOOPBACK or address.startswith("127.")
    return tuple(name.lower() for name in (*names, *((address, *_LOOPBACK) if loopback else ())))


def _banner(args: argparse.Namespace, name: str, engine: Any, resident_mb: int) -> str:
    """Return what the server says before it begins: where it listens, what it serves, and where to read on."""
    pool = engine.scheduler.pool
    longest = min(engine.scheduler.budget.max_model_len, pool.count * pool.size)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{args.port}"
    return (
        f"ds serve: {url}/v1 answers as model {name!r}\n"
        f"  on {engine.decoder.device}: {longest} tokens for a prompt and its answer, a cache for {pool.count * pool.size},"
        f" {resident_mb} MB of memory in use\n"
        f"  API: {url}/docs   how-to: docs/how-to/serve-a-model.md\n"
    )


def _resident_mb() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss) >> 20


def _adapters(options: list[str]) -> dict[str, str]:
    wrong = [one for one in options if "=" not in one or one.startswith("=")]
    if wrong:
        raise PlanError(
            f"--adapter {wrong[0]}", code="inference-adapter", fix="Write --adapter NAME=FOLDER, once for each."
        )
    return dict(one.split("=", 1) for one in options)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["serve", *sys.argv[1:]]))

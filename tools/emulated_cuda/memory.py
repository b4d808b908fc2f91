"""Measure what torch's allocator holds on a card while a Llama is trained: FOLDER/run python tools/emulated_cuda/memory.py [--engines ...].

Prints a line of JSON a run: an engine, its ranks, and in GiB the peak of allocated and of reserved memory after five steps, on the first
rank. With `EMULATED_CUDA_SIZES_ONLY=1`, which this sets, kernels allocate their results and compute nothing, so a model may be larger than this
host. Engines: `plain`, `fsdp2`, `fsdp2-2` (weights stay gathered after forward), `ours-STAGE` and `deepspeed-STAGE`, the latter two with `-host`
(optimizer on the host) or `-all` (weights, too); `plain`, `fsdp2` and `ours-STAGE` with `-compiled`, `ours-STAGE` with `-fused` layers. DeepSpeed has to be importable: `--path` names folders that hold it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from typing import Any

SIZES = {
    "0.37G": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1.36G": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
    "3.14G": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 26, "num_attention_heads": 24},
}
GIB = 1 << 30
STEPS, WARM = 8, 4  # compiled graphs are profiled in the third step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["plain", "fsdp2", "ours-0", "ours-2", "ours-3"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--size", default="1.36G", choices=sorted(SIZES))
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
    parser.add_argument("--checkpointed", action="store_true", help="layers run again in backward")
    parser.add_argument("--path", nargs="*", default=[], help="folders to import from")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        return train(chosen)
    for ranks in chosen.ranks:
        for engine in chosen.engines:
            start(chosen, engine, ranks)
    return None


def start(chosen: argparse.Namespace, engine: str, ranks: int) -> None:
    """Run one engine on its ranks, and print what the first one measured."""
    options = [
        "--size",
        chosen.size,
        "--rows",
        str(chosen.rows),
        "--tokens",
        str(chosen.tokens),
        "--accumulate",
        str(chosen.accumulate),
        "--vocabulary",
        str(chosen.vocabulary),
    ]
    options += ["--checkpointed"] * chosen.checkpointed
    common = {
        **os.environ, "EMULATED_CUDA_SIZES_ONLY": "1", "EMULATED_CUDA_DEVICES": "8", "EMULATED_CUDA_GB": "140", "DS_ACCELERATOR": "cuda",
        "TRITON_INTERPRET": "0", "DS_FAKE_DEVICES": ",".join(["9.0 132"] * 8), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 40000)),
        "WORLD_SIZE": str(ranks), "PYTHONPATH": ":".join([*chosen.path, os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    processes = []
    for rank in range(ranks):
        command = [sys.executable, __file__, *options, "--engines", engine, "--rank", str(rank)]
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate() for process in processes]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith('{"engine"')]
    print(lines[0] if lines else f"{engine} on {ranks}: {outputs[0][1][-600:]}", flush=True)


def train(chosen: argparse.Namespace) -> None:
    """Train on this rank, and print what the allocator held."""
    import torch

    torch.cuda.set_device(chosen.rank)
    (engine,) = chosen.engines
    model = make_model(chosen, torch.device("cuda", chosen.rank))
    numel = sum(p.numel() for p in model.parameters())
    microbatch = {"plain": by_torch, "fsdp2": by_torch, "ours": by_ours, "deepspeed": by_deepspeed}[
        engine.split("-")[0]
    ]
    run = microbatch(chosen, engine, model)
    del model
    ids = torch.zeros((chosen.rows, chosen.tokens), dtype=torch.long, device="cuda")
    for step in range(STEPS):
        for _ in range(chosen.accumulate):
            run(ids)
        if step == WARM:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    memory = {
        "between steps": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    record = {"engine": engine, "ranks": int(os.environ["WORLD_SIZE"]), "size": chosen.size, "parameters": numel}
    record |= {"accumulate": chosen.accumulate, "checkpointed": chosen.checkpointed}
    if chosen.rank == 0:
        print(json.dumps(record | {name: round(size / GIB, 2) for name, size in memory.items()}), flush=True)
    os._exit(0)  # nothing of use is left to be done, and the ends of processes are not what is measured


def make_model(chosen: argparse.Namespace, device: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES[chosen.size]
    config = LlamaConfig(
        **sizes, num_key_value_heads=sizes["num_attention_heads"], vocab_size=chosen.vocabulary, max_position_embeddings=chosen.tokens,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if chosen.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loss_of(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def by_torch(chosen: argparse.Namespace, engine: str, model: Any) -> Any:
    """Train under autocast, or by FSDP2 with fp32 masters, bf16 between; clip and fused AdamW as in the others."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if engine.startswith("fsdp2"):
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", chosen.rank))
        options: dict[str, Any] = {"reshard_after_forward": "-2" not in engine}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if "host" in engine:
            options["offload_policy"] = CPUOffloadPolicy()
        for block in model.model.layers:
            if engine.endswith("-compiled"):
                block.compile()
            fully_shard(block, **options)
        fully_shard(model, **options)
    elif engine.endswith("-compiled"):
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    done = 0

    def run(ids: Any) -> None:
        nonlocal done
        with torch.autocast("cuda", torch.bfloat16, enabled=engine.startswith("plain")):
            loss = loss_of(model, ids)
        (loss / chosen.accumulate).backward()
        done += 1
        if done % chosen.accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def configuration(chosen: argparse.Namespace, engine: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": int(engine.split("-")[1])}
    if engine.endswith(("-host", "-all")):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if engine.endswith("-all"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": chosen.rows, "gradient_accumulation_steps": chosen.accumulate, "zero_optimization": zero,
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10**9,
    }  # fmt: skip


def microbatches(engine: Any) -> Any:
    def run(ids: Any) -> None:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()

    return run


def by_ours(chosen: argparse.Namespace, engine: str, model: Any) -> Any:
    import ds_engine

    config = configuration(chosen, engine) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    if engine.endswith("-fused"):
        config["kernels"] = "auto"
    if compiled := engine.endswith("-compiled"):
        config["compile"] = {"deepcompile": True}
    trained = ds_engine.initialize(model=model, config=config)[0]
    if compiled:
        trained.compile()
    return microbatches(trained)


def by_deepspeed(chosen: argparse.Namespace, engine: str, model: Any) -> Any:
    """Use torch's AdamW, whose fused kernel holds what DeepSpeed's own does, which would have to be compiled."""
    import deepspeed
    import torch

    config = configuration(chosen, engine) | {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    config["zero_optimization"] |= {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_param_persistence_threshold": 100000,
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused="offload_optimizer" not in config["zero_optimization"]
    )
    return microbatches(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])


if __name__ == "__main__":
    main()

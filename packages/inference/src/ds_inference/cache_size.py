"""Where a model goes that nobody placed, and how large its KV cache is where nobody says.

On an accelerator the cache takes what is free: after the weights are there, a trial step shows what a step needs beside them.
"""

from __future__ import annotations

import torch

from ds_comm import all_gather_json, self_group
from ds_comm.metadata import raise_together
from ds_config.errors import PlanError
from ds_inference.cache import Cache
from ds_inference.decoder_model import Runner
from ds_inference.paged_attention import make_batch
from ds_inference.requests import ScheduledChunk, SchedulerConfig

__all__ = ["cache_blocks", "default_device", "trial_chunks", "usable_device"]

_CPU_TOKENS = 8192


def default_device() -> torch.device:
    """Return the current accelerator of this process, or the CPU where torch finds none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def usable_device(name: torch.device | str | None) -> torch.device:
    """Return the device of that name, or the current accelerator of this process for None; the CPU where torch finds none.

    Raises:
        PlanError: there is no such device, or torch cannot put a tensor there ("inference-device").
    """
    if name is None:
        return default_device()
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # torch's own for a build without the device
        raise PlanError(
            f"device {str(name)!r} cannot be used: {str(error).splitlines()[0]}",
            code="inference-device",
            fix=f"Name one that this torch has ({default_device()}), or leave it out.",
        ) from error


def cache_blocks(
    decoder: Runner,
    size: int,
    dtype: torch.dtype | None,
    tokens: int | None,
    utilization: float,
    budget: SchedulerConfig | None = None,
) -> int:
    """Return how many blocks of `size` tokens the cache has, as many on all ranks that hold the model together (collective there).

    Args:
        tokens: What was asked for; None: 8,192 on a CPU, else as many as fit into `utilization` of the device's memory.
        budget: Of a step: the trial step has as many tokens and rows of logits. None: the usual one.
    Raises:
        PlanError: not one block fits, or `utilization` is no part of the memory ("inference-cache").
    """
    if size < 1:
        raise PlanError(f"blocks of {size} tokens", code="inference-cache", fix="Use 1 or more, such as 16.")
    if not 0.0 < utilization <= 1.0:
        raise PlanError(
            f"gpu_memory_utilization={utilization}",
            code="inference-cache",
            fix="Give a part of the memory: more than 0, at most 1.",
        )
    if tokens is not None or decoder.device.type == "cpu" or not decoder.spec.layers:
        return -(-(_CPU_TOKENS if tokens is None else tokens) // size)
    step = _step_bytes(decoder, size, budget or SchedulerConfig())
    free, total = torch.accelerator.get_memory_info(decoder.device)
    reserve = total - free + step
    each = Cache.bytes_of(decoder.spec, size, dtype or decoder.dtype)
    group, count, failure = getattr(decoder, "group", self_group()), 0, None
    try:
        count = fit_blocks(int(total * utilization) - reserve, each, decoder.spec.max_seq_len, size)
    except PlanError as error:
        failure = error
    # Ranks plan alike, or follow one that plans: none may have blocks that another has not.
    raise_together(failure, group, unit="cache")
    return int(min(all_gather_json(count, group, unit="cache")))


def fit_blocks(room: int, each: int, longest: int, size: int) -> int:
    """Return how many blocks of `each` bytes fit into `room` bytes, at most those of 1,024 sequences of `longest` tokens.

    Raises:
        PlanError: not one fits ("inference-cache").
    """
    count = min(room // each - 1, 1024 * -(-longest // size))  # one more is for rows of padding
    if count < 1:
        raise PlanError(
            f"{room} bytes are left for the cache beside weights and a step; a block of {size} tokens takes {each}",
            code="inference-cache",
            fix="Raise gpu_memory_utilization, quantize the weights, or give cache_tokens.",
        )
    return count


def trial_chunks(longest: int, size: int, budget: SchedulerConfig) -> list[ScheduledChunk]:
    """Return a step of prompts that is as large as a step of `budget` can be: its tokens, and its rows of logits.

    The sequences share their blocks: what is computed is of no interest.
    """
    left, rows, chunks = budget.max_num_batched_tokens, budget.max_num_seqs, list[ScheduledChunk]()
    longest = min(longest, budget.max_model_len)
    while left:
        count = min(left, longest, budget.max_prefill_chunk or left)
        outputs = min(rows, count)
        chunks.append(ScheduledChunk(-1 - len(chunks), (0,) * count, 0, tuple(range(-(-count // size))), outputs))
        left, rows = left - count, rows - outputs
    return chunks


def _step_bytes(decoder: Runner, size: int, budget: SchedulerConfig) -> int:
    """Return the bytes that the largest step takes at its peak, beside weights and cache; these are given back to the device."""
    chunks = trial_chunks(decoder.spec.max_seq_len, size, budget)
    cache = Cache(decoder.spec, len(chunks[0].blocks), size, decoder.dtype, decoder.device)
    batch, _ = make_batch(chunks, size, decoder.device)
    torch.accelerator.reset_peak_memory_stats(decoder.device)
    before = torch.accelerator.memory_allocated(decoder.device)
    decoder.forward(batch, cache)
    torch.accelerator.synchronize(decoder.device)
    peak = int(torch.accelerator.max_memory_allocated(decoder.device) - before)
    del cache, batch
    torch.accelerator.empty_cache()  # what is free then is so with the step's kernels and workspaces
    return peak

"""`deepspeed.module_inject.tp_shard`: how many of a dim's elements each tensor-parallel rank gets, by upstream's names and numbers.

ds-parallel cuts by a plan of its own (`ds_parallel.heads`); this answers programs that compute sizes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed._ours.base.forwarding import method
from deepspeed._ours.base.raising import refused
from deepspeed._ours.communication import comm as dist

num_kv_heads: int | None = None
num_attention_heads: int | None = None
n_embd: int | None = None
tp_grain_size = 1
_NO_HEADS = ("lm_head", "embed_out")
_NO_HEADS_IN = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def _setting(name: str, meaning: str) -> tuple[Callable[[int | None], None], Callable[[], int | None]]:
    """Build the functions that set and return a variable of this module."""

    def assign(num: int | None) -> None:
        globals()[name] = num

    return method(assign, f"Set {meaning}."), method(lambda: globals()[name], f"Return {meaning}, as it was set.")


set_num_kv_heads, get_num_kv_heads = _setting(
    "num_kv_heads", "the number of key-value heads, between which dims that are whole heads are split; None: anywhere"
)
set_num_attention_heads, get_num_attention_heads = _setting("num_attention_heads", "the number of attention heads")
set_n_embd, get_n_embd = _setting("n_embd", "the embedding size")
set_tp_grain_size, _ = _setting(
    "tp_grain_size", "the grain size: other dims are split between its multiples; the last rank has the remainder"
)


def get_shard_size(
    total_size: int, mp_size: int, name: str | None = None, rank: int | None = None, mp_group: Any = None, num_kv_heads:
    int | None = None,
) -> int:  # fmt: skip
    """Return the elements of a rank's shard of a dim.

    Args:
        name: Of the layer; parts of the name say that its dim has nothing to do with heads.
        rank: In the tensor-parallel group; None: this process's.
        num_kv_heads: Instead of the number set by `set_num_kv_heads`.
    Raises:
        ValueError: neither rank nor group is given, and the group is not the world.
    """
    if rank is None:
        if mp_group is None and dist.get_world_size() != mp_size:
            raise refused("shard-of-group", mp_size, dist.get_world_size())
        rank = dist.get_rank() if mp_group is None else dist.get_rank(group=mp_group)
    heads = globals()["num_kv_heads"] if num_kv_heads is None else num_kv_heads
    apart = str(name) in _NO_HEADS or any(part in str(name) for part in _NO_HEADS_IN)
    if heads is not None and total_size % heads == 0 and not apart:
        return total_size // heads * _share(heads, mp_size, rank)
    if total_size < tp_grain_size:
        return _share(total_size, mp_size, rank)
    grains, over = divmod(total_size, tp_grain_size)
    return _share(grains, mp_size, rank) * tp_grain_size + (over if rank == mp_size - 1 else 0)


def _share(number: int, ranks: int, rank: int) -> int:
    return number // ranks + (rank < number % ranks)


def get_shard_size_list(
    total_size: int, mp_size: int, name: str | None = None, num_kv_heads: int | None = None
) -> list[int]:
    """Return the elements of each rank's shard; their sum is `total_size`."""
    return [get_shard_size(total_size, mp_size, name, rank, num_kv_heads=num_kv_heads) for rank in range(mp_size)]

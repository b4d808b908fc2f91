"""What a parameter of a tensor-parallel layer says of how it is cut: the dict `ds_autotp_universal_checkpoint_meta`.

Its entries are for who cuts the whole tensor again (`_resolve_autotp_partition`); those under `conversion` are for who joins the parts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

META = "ds_autotp_universal_checkpoint_meta"
_SHAPES = (
    "logical_shape", "output_shape", "sub_param_shape", "sub_param_sizes", "partition_sizes", "target_partition_shape",
    "original_shape",
)  # fmt: skip
_JOINS = ("partition_dim", "sub_param_shape", "sub_param_shard_widths", "original_shape", "is_bias", "replicated")


def metadata(
    *, partition_type: str, is_bias: bool = False, replicated: bool = False, unsupported_reason: str | None = None,
    **told: Any,
) -> dict[str, Any]:  # fmt: skip
    """Build the dict. What is not told is None in it.

    Args:
        partition_type: "column" or "row".
        told: Shapes (`logical_shape` of the whole, `target_partition_shape` of the part, ...), `partition_dim`, `partition_sizes` of the ranks;
            `sub_param_sizes` of several parts in one dim and `sub_param_shard_widths` of each on every rank, as `sub_param_shape` says them.
        unsupported_reason: Why the parts of ranks cannot be joined.
    """
    names = ("partition_dim", "sub_param_shard_widths", *_SHAPES)
    entries: dict[str, Any] = {name: told.pop(name, None) for name in names}
    if told:
        raise TypeError(f"unknown entries: {sorted(told)}")
    entries |= {name: tuple(entries[name]) for name in _SHAPES if entries[name] is not None}
    entries |= {"is_bias": is_bias, "replicated": replicated, "partition_type": partition_type}
    conversion = {name: entries[name] for name in ("partition_type", *_JOINS)}
    conversion["unsupported_reason"] = unsupported_reason
    return {"universal_checkpoint_version": 0.4, **entries, "conversion": conversion}


def conversion_of(param: Tensor) -> dict[str, Any] | None:
    """Return what a parameter says of how its parts join; None where it says nothing."""
    said = getattr(param, META, None)
    return None if said is None else said["conversion"]

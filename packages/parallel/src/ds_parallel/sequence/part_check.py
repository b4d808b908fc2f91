"""Whether a model computes of parts of a sequence what it computes of the whole: looked at once, with a few tokens.

Only attention is exchanged between ranks that share sequences. What else looks at other tokens (state-space layers, convolutions, linear attention), or
counts positions by itself (learned positions from 0), would come to other numbers on every rank but the first, and nothing would say so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
from ds_comm import Group
from ds_comm.metadata import on_group
from ds_config.errors import UnsupportedError
from ds_parallel.sequence.hf_attention import UlyssesAttention

__all__ = ["check_parts"]

_TOKENS = 8
"""On each rank."""
_DROPPED = frozenset({"labels", "shift_labels", "attention_mask"})


@torch.no_grad()
def check_parts(model: nn.Module, inputs: Mapping[str, Any], group: Group, args: tuple[Any, ...] = ()) -> float | None:
    """Compare what `model` makes of a few tokens in one piece and in parts. Collective over `group`.

    Args:
        model: One whose registered attention exchanges over `group`; others are not looked at.
        inputs: Keywords of a forward of this rank: tensors [batch, sequence / N, ...].
        group: The ranks that share sequences.
        args: What the forward is given by position.
    Returns:
        The relative difference; None if nothing could be compared: inputs of other shapes, experts that drop tokens, numbers that are not finite.
    Raises:
        UnsupportedError: on all ranks, if the parts are not those of the whole ("sequence-parts").
    Cost: two forwards of eight tokens a rank.
    """
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = UlyssesAttention.registered(name) if isinstance(name, str) else None
    if attention is None or group.size == 1:
        return None
    whole, each = _few(model, _by_name(model, args, inputs), group.size)
    lengths = ds_comm.all_gather_json([each, sorted(whole)], group, unit="sequence check")
    if any(one != lengths[0] for one in lengths) or not each:
        return None
    for key, tensor in sorted(whole.items()):
        if isinstance(tensor, Tensor):
            sent = on_group(tensor, group)
            ds_comm.broadcast(sent, group=group, group_src=0, unit=f"sequence check {key}")
            if sent is not tensor:
                tensor.copy_(sent)
    cut = slice(group.rank * each, (group.rank + 1) * each)
    part = {key: value[:, cut].contiguous() if isinstance(value, Tensor) else value for key, value in whole.items()}
    with _exchanging(model, attention, False):
        wanted = _first(model(**whole))
    with _exchanging(model, attention, True):
        found = _first(model(**part))
    if wanted is None or found is None or wanted.dim() < 2 or wanted[:, cut].shape != found.shape:
        error = float("nan")
    else:
        error = float((found.double() - wanted[:, cut].double()).norm() / wanted.double().norm().clamp_min(1e-30))
    errors = ds_comm.all_gather_json(error if error == error else None, group, unit="sequence check")
    known = [one for one in errors if one is not None]
    if len(known) < len(errors):
        return None
    exact = found is not None and found.dtype in (torch.float32, torch.float64)
    limit = (
        1e-3 if exact else min(0.1, 0.01 + 4 * known[0])
    )  # the first rank's part of a causal model differs by rounding only
    if max(known) > limit:
        raise UnsupportedError(
            f"{type(model).__name__} in parts of a sequence is not what it is in one piece: outputs of {each} tokens on each of {group.size} ranks differ by "
            f"{max(known):.1%}. A layer beside its attention looks at other tokens, or positions are counted by the model itself",
            code="sequence-parts",
            fix="Train this model without sequence parallelism, or give it layers that exchange (ds_parallel.sequence.DistributedAttention).",
        )
    return max(known)


def _by_name(model: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Name what is given by position as the model's forward does: that of the model inside adapters, whose own takes anything."""
    if not args:
        return dict(inputs)
    inside = getattr(model, "get_base_model", lambda: model)()
    names = [
        one.name
        for one in inspect.signature(inside.forward).parameters.values()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return dict(zip(names, args, strict=False)) | dict(inputs)


def _few(model: nn.Module, inputs: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], int]:
    """Return one row of the first tokens of `inputs`, and how many are for each rank: 0 where they cannot be told from other inputs."""
    leading = next((inputs[key] for key in ("input_ids", "inputs_embeds") if isinstance(inputs.get(key), Tensor)), None)
    drops = any(getattr(module, "capacity_factor", None) for module in model.modules())
    if leading is None or leading.dim() < 2 or drops:
        return {}, 0
    length = leading.shape[1]
    each = min(_TOKENS, length // ranks)
    whole: dict[str, Any] = {}
    for key, value in inputs.items():
        if key in _DROPPED:
            continue
        if isinstance(value, Tensor):
            if value.dim() < 2 or value.shape[1] != length:
                return {}, 0
            value = value[:1, : each * ranks].detach().clone(memory_format=torch.contiguous_format)
            if key == "position_ids":
                value = torch.arange(each * ranks, device=value.device, dtype=value.dtype).expand_as(value).contiguous()
        whole[key] = value
    return whole, each


def _first(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    values = logits.values() if isinstance(logits, Mapping) else logits if isinstance(logits, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


@contextmanager
def _exchanging(model: nn.Module, attention: UlyssesAttention, exchanges: bool) -> Iterator[None]:
    """Run in evaluation mode, with attention that exchanges or does not."""
    training = [module for module in model.modules() if module.training]
    before = attention.in_eval, attention.documents, attention.padding
    attention.in_eval, attention.documents, attention.padding = exchanges, None, None
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        attention.in_eval, attention.documents, attention.padding = before

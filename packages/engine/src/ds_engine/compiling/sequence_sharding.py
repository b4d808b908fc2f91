"""Batches of a compiled run whose sequences are shared: each rank computes its part of what the caller gives all of them whole.

    cut      what the model is given -> this rank's part of it, with positions and labels made from the whole
    whole    the loss of a part -> the loss of the batch, the same on every rank of a sequence

Attention is exchanged by the model (a transformers model whose attention function is wrapped, a model with `DistributedAttention`), or where it
does not by the pass `autosp` (`graph_split.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from ds_config.errors import PlanError, UnsupportedError
from ds_engine.compiling.backends import Shares
from ds_engine.compiling.graph_split import wrap_attention
from ds_parallel.sequence import sequence_part, token_weighted_loss
from ds_parallel.sequence.hf_attention import UlyssesAttention
from ds_parallel.sequence.sequence_batches import IGNORED
from ds_parallel.tensor.head_updates import InputCheck

__all__ = ["SharedBatch"]


class SharedBatch:
    """See the module's docstring.

    Args:
        model: Its forward takes `position_ids`, and `shift_labels` where it is given labels.
        shares: Who shares sequences, and how.
    Attributes:
        in_graphs: Attention is wrapped in the graphs: a forward must be one.
        length: Of the last part.
    """

    def __init__(self, model: nn.Module, shares: Shares) -> None:
        self.model, self.group, self.in_graphs = model, shares.group, shares.in_graphs
        self.attention = None if shares.attention is None else UlyssesAttention.registered(shares.attention)
        self.length = 0
        self._wrapped = 0
        self._check: InputCheck | None = InputCheck(shares.group, axis="sequence")
        self._signature = inspect.signature(model.forward)
        kinds = {parameter.kind for parameter in self._signature.parameters.values()}
        self._takes_more = inspect.Parameter.VAR_KEYWORD in kinds

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | int]:
        """Return this rank's part of a batch, as keywords, and its tokens for the loss. Collective the first time.

        Raises:
            PlanError: no sequence is recognised, it does not divide ("sequence-length"), the model does not take the
            arguments that a part
                needs ("sequence-arguments"), or ranks were given different batches ("tensor-inputs").
        """
        callback, self._check = self._check, None
        if callback is not None:
            callback(self.model, args, dict(kwargs))
        named_inputs = self._named(args, kwargs)
        part = sequence_part(named_inputs, self.group.rank, self.group.size)
        self.length = part["position_ids"].shape[-1]
        if self.attention is not None:
            self.attention.documents = named_inputs.get("position_ids") is not None
            mask = named_inputs.get("attention_mask")
            self.attention.padding = isinstance(mask, Tensor) and not bool(mask.all())
        self._check_taken(part)
        labels = part.get("shift_labels")
        if labels is not None and "labels" in named_inputs and "shift_labels" not in self._signature.parameters:
            part["labels"] = labels  # transformers' models compute a loss where they are given labels
        tokens = part["position_ids"].numel() if labels is None else (labels != IGNORED).sum()
        return part, tokens

    def whole(self, result: Any, tokens: Tensor | int) -> Any:
        """Replace the loss in the model's result for its part by the loss of the whole. Other results stay parts."""
        loss = result if isinstance(result, Tensor) else _loss_in(result)
        if not isinstance(loss, Tensor) or loss.dim():
            return result
        mean = token_weighted_loss(loss, tokens, self.group)
        if isinstance(result, Tensor):
            return mean
        if isinstance(result, tuple):
            return (mean, *result[1:])
        result["loss"] = mean
        return result

    def wrap(self, gm: fx.GraphModule, model_owns: list[bool]) -> None:
        """Add sequence all-to-alls to the attention of a captured forward.

        `model_owns`: of each input whether it is the model's.
        """
        if self.in_graphs and self.group.order is not None:
            self._wrapped += wrap_attention(gm, self.group.order.key, self.length, [not owned for owned in model_owns])

    def check_wrapped(self) -> None:
        """Raise UnsupportedError where a forward ran and no attention was found in it ("compile-cuts")."""
        if self.in_graphs and not self._wrapped:
            raise UnsupportedError(
                "the pass autosp found no scaled_dot_product_attention in the model's forward, so its parts see nothing of each other",
                code="compile-cuts",
                fix="Use torch.nn.functional.scaled_dot_product_attention, ds_parallel.sequence.DistributedAttention, or leave the pass out.",
            )

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        named = {name: value for name, value in named.items() if value is not None}
        if "num_items_in_batch" in named:
            raise PlanError(
                "num_items_in_batch was given to a model whose sequences are shared: its loss would not be a mean over a part",
                code="sequence-arguments",
                fix="Leave it out: losses of parts are weighed by their tokens.",
            )
        return named

    def _check_taken(self, part: Mapping[str, Any]) -> None:
        known = self._signature.parameters
        missing = [name for name in ("position_ids", "shift_labels") if name in part and name not in known]
        if missing and not self._takes_more:
            raise PlanError(
                f"the model's forward takes {', '.join(known)}; a part of a sequence needs {' and '.join(missing)} besides",
                code="sequence-arguments",
                fix="Let forward take position_ids, and shift_labels (the next token of each position) instead of labels.",
            )


def _loss_in(result: Any) -> Any:
    if isinstance(result, Mapping):
        return result.get("loss")
    return result[0] if isinstance(result, tuple) and result else None

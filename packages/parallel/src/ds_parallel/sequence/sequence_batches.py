"""Batches for ranks that share sequences: shifted labels and positions are made from the whole, then each rank takes its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ds_comm
from ds_comm import GroupLike, as_group
from ds_comm.differentiable import all_gather
from ds_comm.metadata import raise_together
from ds_config.errors import PlanError

__all__ = ["SequenceDataLoader", "sequence_part", "token_weighted_loss"]

IGNORED = -100


def sequence_part(batch: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return this rank's part of a batch: every tensor [batch, sequence, ...] is split in its dim 1.

    Other values do not change. `labels` become `shift_labels` (the label of position i is token i + 1 of the whole
    sequence, across the border of parts); `position_ids` are counted where the batch has none.

    Raises:
        PlanError: the ranks do not divide the sequence ("sequence-length").
    """
    whole = dict(batch)
    leading = next((key for key in ("input_ids", "inputs_embeds", "labels", "shift_labels") if key in whole), None)
    if leading is None:
        raise PlanError(
            f"a batch with {sorted(whole)} has no sequence",
            code="sequence-length",
            fix="Give input_ids or inputs_embeds, [batch, sequence, ...].",
        )
    length = whole[leading].shape[1]
    if length % ranks:
        raise PlanError(
            f"a sequence of {length} tokens over {ranks} ranks",
            code="sequence-length",
            fix=f"Pad it to a multiple of {ranks} (pad_to_multiple_of of the collator), labels with {IGNORED}.",
        )
    if "labels" in whole:
        whole["shift_labels"] = functional.pad(whole.pop("labels"), (0, 1), value=IGNORED)[..., 1:]
    if "position_ids" not in whole:
        rows = whole[leading].shape[0]
        whole["position_ids"] = torch.arange(length, device=whole[leading].device).expand(rows, length)
    each = length // ranks

    def part(value: Any) -> Any:
        is_cut = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
        return value[:, rank * each : (rank + 1) * each].contiguous() if is_cut else value

    return {key: part(value) for key, value in whole.items()}


class SequenceDataLoader:
    """Every rank of a sequence group reads its own batches; together they train on each of them, a part each.

    Args:
        loader: This rank's, which gives dicts of tensors [batch, sequence, ...].
        group: The ranks that share sequences.
        device: Where the parts go; None leaves them on the host.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], group: GroupLike, device: Any = None) -> None:
        self.loader, self.group, self.device = loader, as_group(group), device

    def __len__(self) -> int:
        return len(self.loader) * self.group.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield, for every batch of the loader, this rank's part of the batch of every rank, in rank order.

        Raises:
            PlanError: see `sequence_part`; loaders that end at different batches ("sequence-loader").
            Exception: what the loader of a rank raised; on every rank of the group.
        """
        ranks = self.group.size
        batches = iter(self.loader)
        while True:
            local_batch, error = _next_on_host(batches)
            everyones: list[Any] = [None] * ranks
            ds_comm.all_gather_object(everyones, _FAILED if error is not None else local_batch, group=self.group)
            if any(isinstance(batch, str) for batch in everyones):
                raise_together(error, self.group, unit="sequence loader")
            ended = [rank for rank, batch in enumerate(everyones) if batch is None]
            if len(ended) == ranks:
                return
            if ended:
                raise PlanError(
                    f"the loaders of ranks {ended} of {self.group} have ended, the others have not",
                    code="sequence-loader",
                    fix="Give every rank as many batches (drop_last, or a distributed sampler).",
                )
            for batch in everyones:
                part = sequence_part(batch, self.group.rank, ranks)
                yield {key: self._placed(value) for key, value in part.items()}

    def _placed(self, value: Any) -> Any:
        return value.to(self.device) if self.device is not None and isinstance(value, Tensor) else value


def token_weighted_loss(loss: Tensor, tokens: Tensor | int, group: GroupLike) -> Tensor:
    """Compute the mean loss over all tokens of a sequence from each rank's mean over its tokens.

    Args:
        loss: This rank's mean over the tokens that count; any value where none does.
        tokens: How many tokens count on this rank.
    Returns:
        The same on every rank of the group. Its gradient is that of a single process where gradients are averaged over
        the ranks of a sequence, as the engine does, or summed over them and divided by their number.
    """
    group = as_group(group)
    count = torch.as_tensor(tokens, dtype=torch.float32, device=loss.device).reshape(1)
    total = torch.nan_to_num(loss.float()).reshape(1) * count
    both: Tensor = all_gather(torch.cat([total, count]), group).view(group.size, 2)
    return both[:, 0].sum() / both[:, 1].sum()


_FAILED = "failed"  # in the place of a batch


def _next_on_host(batches: Iterator[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, Exception | None]:
    """Draw a batch to the host: it, None at the end; and what that raised."""
    try:
        batch = next(batches, None)
        if batch is None:
            return None, None
        host = {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
    except Exception as error:
        return None, error
    return host, None

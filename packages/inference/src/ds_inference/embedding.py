"""Texts to vectors: encoders (BERT and its kin), and decoders read as encoders, by their own forward in ragged batches.

    embedder = load_embedder("folder")          # or a module; what its sentence-transformers files say is followed
    vectors = embedder.embed([[101, 7592, 102], ...])        # or texts, with a tokenizer: fp32 [texts, width]

Inputs are sorted by length and put together as long as a batch has at most `budget` places, padding included: a text's vector does not
depend on what is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_config.errors import CheckpointError, PlanError
from ds_config.json_files import read_json
from ds_inference.llm_engine import Tokenizer

__all__ = ["Embedder", "Pooling", "load_embedder"]

Pooling = Literal["mean", "first", "last", "max"]
"""Which hidden states make the vector: all tokens' mean or maximum, or the first or last token's."""


class Embedder:
    """Made by `load_embedder`.

    Args:
        module: Gives `last_hidden_state` [n, length, width] for `input_ids` and `attention_mask`.
        pooling, normalized: How a vector is made of hidden states; normalized vectors have length 1.
        budget: Places of a batch.
        longest: Tokens of an input; longer ones are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        pooling: Pooling = "mean",
        normalized: bool = True,
        budget: int = 8192,
        longest: int | None = None,
    ) -> None:
        if pooling not in get_args(Pooling):
            raise PlanError(
                f"pooling by {pooling!r}", code="inference-embedding", fix=f"Use one of {', '.join(get_args(Pooling))}."
            )
        self.module, self.tokenizer = module, tokenizer
        self.pooling, self.normalized, self.budget = pooling, normalized, budget
        config: Any = getattr(module, "config", None)
        self.longest = longest or getattr(config, "max_position_embeddings", None) or 1 << 20
        self._device = next(module.parameters()).device

    @torch.inference_mode()
    def embed(self, inputs: Sequence[str | Sequence[int]]) -> Tensor:
        """Compute the embeddings of the inputs, in their order, as fp32 [inputs, width].

        Raises:
            PlanError: an input is empty or too long, or a text and there is no tokenizer ("inference-embedding").
        """
        tokens = [self.tokens(one) for one in inputs]
        wrong = [i for i, t in enumerate(tokens) if not 0 < len(t) <= self.longest]
        if wrong:
            raise PlanError(
                f"inputs {wrong[:4]} have {[len(tokens[i]) for i in wrong[:4]]} tokens; the model takes 1 to {self.longest}",
                code="inference-embedding",
                fix="Shorten them, or cut them into parts.",
            )
        vectors: dict[int, Tensor] = {}
        for rows in self._batches(tokens):
            for i, vector in zip(rows, self._run([tokens[i] for i in rows]), strict=True):
                vectors[i] = vector
        return torch.stack([vectors[i] for i in range(len(tokens))]) if tokens else torch.empty(0, 0, device="cpu")

    def tokens(self, one: str | Sequence[int]) -> list[int]:
        """Tokenize a text; return token ids unchanged."""
        if not isinstance(one, str):
            return list(one)
        if self.tokenizer is None:
            raise PlanError(
                "a text, and no tokenizer",
                code="inference-embedding",
                fix="Pass tokens, or load_embedder(..., tokenizer=).",
            )
        return list(self.tokenizer.encode(one))

    def _batches(self, tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        rows: list[int] = []
        for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
            if rows and (len(rows) + 1) * len(tokens[i]) > self.budget:
                yield rows
                rows = []
            rows.append(i)
        if rows:
            yield rows

    def _run(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, tokens))
        ids = torch.tensor([[*t, *([0] * (longest - len(t)))] for t in tokens], device=self._device)
        lengths = torch.tensor([len(t) for t in tokens], device=self._device)
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        hidden = self.module(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "first":
            out = hidden[:, 0]
        elif self.pooling == "last":
            out = hidden[torch.arange(len(tokens), device="cpu"), lengths - 1]
        elif self.pooling == "max":
            out = hidden.masked_fill(~mask[..., None], -torch.inf).amax(1)
        else:
            out = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        return F.normalize(out, dim=-1) if self.normalized else out


def load_embedder(
    source: str | PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    tokenizer: Tokenizer | None = None,
    pooling: Pooling | None = None,
    normalized: bool | None = None,
    budget: int = 8192,
) -> Embedder:
    """Load an embedder from a folder (transformers' or sentence-transformers') or a module.

    Args:
        pooling, normalized: None: as the folder's `modules.json` says; without such a file, the mean, normalized.
        budget: Places of a batch.
    Raises:
        CheckpointError: the folder cannot be read, or transformers is missing ("inference-folder").
    """
    settings: dict[str, Any] = {}
    if isinstance(source, nn.Module):
        module = source.eval()
        inner = getattr(module, "base_model", module)  # a head gives logits; vectors are below it
        module = inner if isinstance(inner, nn.Module) else module
    else:
        settings = _said(Path(source))
        try:
            from transformers import AutoModel

            module = AutoModel.from_pretrained(
                source, local_files_only=True, trust_remote_code=False, dtype=dtype or "auto"
            ).eval()
        except (ImportError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{source} cannot be read: {error}",
                code="inference-folder",
                fix="Give a folder that save_pretrained wrote; install ds-inference[text].",
            ) from error
        module.to(device)
    return Embedder(
        module,
        tokenizer=tokenizer,
        pooling=pooling or settings.get("pooling", "mean"),
        normalized=normalized if normalized is not None else settings.get("normalized", True),
        budget=budget,
        longest=settings.get("longest"),
    )


_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def _said(folder: Path) -> dict[str, Any]:
    """Read the settings in the files of sentence-transformers; empty without such files."""
    settings: dict[str, Any] = {}
    if not (folder / "modules.json").exists():
        return settings
    modules = read_json(folder / "modules.json", _torn, list)
    settings["normalized"] = any(m["type"].endswith(".Normalize") for m in modules)
    for module in modules:
        file = folder / module["path"] / "config.json"
        if module["type"].endswith(".Pooling"):
            pooling = read_json(file, _torn)
            on = [mode for name, mode in _MODES.items() if pooling.get(name)]
            if len(on) != 1:
                raise CheckpointError(
                    f"{file} pools by {on or 'something else'}",
                    code="inference-folder",
                    fix="Give pooling=: mean, first, last or max.",
                )
            settings["pooling"] = on[0]
    sizes = folder / "sentence_bert_config.json"
    if sizes.exists():
        settings["longest"] = read_json(sizes, _torn).get("max_seq_length")
    return settings


def _torn(text: str) -> CheckpointError:
    return CheckpointError(text, code="inference-folder", fix="Fetch the folder again.")

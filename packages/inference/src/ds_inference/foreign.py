"""A Hugging Face decoder of no declared family runs through its own forward, with our cache, batches and sampling.

Its keys and values are learnt from one token at the start. A step's chunks are put together by their length; each group is one
forward of the module, whose past is what our blocks hold, put at the right end and masked on the left. The new keys and values go into
the blocks. So everything that the scheduler does (prefixes that are shared, chunks, preemption, samples) holds for it too.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ds_config.errors import UnsupportedError
from ds_inference.adapters import Adapter
from ds_inference.attention import Batch, keep
from ds_inference.spec import Attention, Layer, Mlp, Norm, Spec

if TYPE_CHECKING:
    from ds_inference.model import Cache

__all__ = ["ForeignDecoder", "read_module"]


class ForeignDecoder:
    """Runs batches through a module. The face is `Decoder`'s.

    Args:
        module: A causal language model of transformers whose layers keep keys and values; used, not copied.
    Attributes:
        spec: What is known of it: what its layers keep, its tokens, how long it may be.
        obstacle: Why the native loop does not run.
    Raises:
        UnsupportedError: it keeps something else than keys and values ("inference-foreign").
    Cost: copies each sequence's keys and values once a step and layer; chunks of one length share a forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.obstacle = "it runs through its own forward"
        self.adapters: dict[str, Adapter] = {}
        known = inspect.signature(module.forward).parameters
        self._positions, self._last = "position_ids" in known, "logits_to_keep" in known
        self.spec = self._learn()

    @torch.no_grad()  # not inference_mode: hooks of a sharded module keep tensors beyond a call
    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Compute the batch's tokens, keep their keys and values, and return logits fp32 [R, vocab] of `batch.outputs`."""
        row = {token: i for i, token in enumerate(batch.outputs.tolist())}
        out = torch.empty(len(row), self.spec.vocab, device=self.device)
        groups: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
        for first, count, start, blocks in batch.chunks:
            groups[count].append((first, start, blocks))
        for count, chunks in groups.items():
            at = torch.tensor([[first + i for i in range(count)] for first, _, _ in chunks], device=self.device)
            wanted = [
                (g, i, row[first + i])
                for g, (first, _, _) in enumerate(chunks)
                for i in range(count)
                if first + i in row
            ]
            most = count - min((i for _, i, _ in wanted), default=count - 1)
            past, mask = self._past([(start, blocks) for _, start, blocks in chunks], count, cache)
            logits = self._run(batch.tokens[at], batch.positions[at], past, mask, most)
            self._keep(past, batch.slots[at].flatten(), count, cache)
            for g, i, target in wanted:
                out[target] = logits[g, i - count].float()
        return out

    # ---- how

    def _learn(self) -> Spec:
        config = cast("Any", self.module).config
        text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        kind = str(config.model_type)
        past = _new_past()
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                logits = self._run(one, one, past, torch.ones_like(one), 1)
            kept = [(y.keys, y.values) for y in past.layers]
        except (AttributeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise _strange(kind, f"its forward with a past of keys and values fails: {error}") from error
        if not kept or any(t is None or t.dim() != 4 or t.shape[-2] != 1 for pair in kept for t in pair):
            raise _strange(kind, "its layers do not keep keys and values of every token")
        layers = tuple(
            Layer(Attention(k.shape[1], k.shape[1], k.shape[-1], v.shape[-1], 1.0), Mlp(0, "silu", gated=False))
            for k, v in kept
        )
        ends = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
        longest = next((v for n in _LONGEST if (v := getattr(text, n, None))), 1 << 20)
        return Spec(
            family=kind,
            hidden=text.hidden_size,
            vocab=logits.shape[-1],
            layers=layers,
            norm=Norm(),
            longest=int(longest),
            ends=() if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),),
        )

    def _run(self, tokens: Tensor, positions: Tensor, past: Any, mask: Tensor, most: int) -> Tensor:
        """[G, n] to logits [G, at least `most`, vocab] of the last tokens."""
        given: dict[str, Any] = {"past_key_values": past, "attention_mask": mask, "use_cache": True}
        if self._positions:
            given["position_ids"] = positions
        if self._last:
            given["logits_to_keep"] = most
        with _answering(self.module):
            logits: Tensor = self.module(input_ids=tokens, **given).logits
        return logits

    def _past(self, chunks: list[tuple[int, tuple[int, ...]]], count: int, cache: Cache) -> tuple[Any, Tensor]:
        """What the chunks' sequences hold, [G, heads, longest, width] in each layer, ends together; and which of it is theirs."""
        longest, size = max(start for start, _ in chunks), cache.size
        past = _new_past()
        mask = torch.zeros(len(chunks), longest + count, dtype=torch.int64)
        rows = torch.zeros(len(chunks), longest, dtype=torch.int64)
        for g, (start, blocks) in enumerate(chunks):
            mask[g, longest - start :] = 1
            at = torch.arange(start)
            rows[g, longest - start :] = torch.tensor(blocks, dtype=torch.int64)[at // size] * size + at % size
        rows = rows.to(self.device)
        if longest:
            for i, (keys, values, *scales) in enumerate(cache.layers):
                k, v = (t.flatten(0, 1)[rows] for t in (keys, values))
                if scales:
                    k, v = (t * s.flatten(0, 1)[rows][..., None] for t, s in zip((k, v), scales, strict=True))
                past.update(k.to(self.dtype).transpose(1, 2), v.to(self.dtype).transpose(1, 2), i)
        return past, mask.to(self.device)

    @staticmethod
    def _keep(past: Any, slots: Tensor, count: int, cache: Cache) -> None:
        for layer, (keys, values, *scales) in zip(past.layers, cache.layers, strict=True):
            for i, (new, kept) in enumerate(((layer.keys, keys), (layer.values, values))):
                flat = new[:, :, -count:].transpose(1, 2).flatten(0, 1)
                keep(flat, slots, kept, scales[i] if scales else None)


_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def _new_past() -> Any:
    from transformers import DynamicCache

    return DynamicCache()  # without a configuration: all layers keep everything, and masks say what is seen


@contextmanager
def _answering(module: nn.Module) -> Iterator[None]:
    """No dropout, for a while."""
    training = module.training
    if training:
        module.eval()
    try:
        yield
    finally:
        if training:
            module.train()


def _strange(kind: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"generation by a {kind} model: {why}",
        code="inference-foreign",
        fix="Use the model's own generate, or a family that is declared (ds_inference.families).",
    )


def read_module(
    source: str | PathLike[str] | nn.Module,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    weights: Mapping[str, Tensor] | None,
) -> nn.Module:
    """The module of a folder, or one with other weights or another dtype: then a copy, never the caller's own changed.

    Raises:
        UnsupportedError: transformers is missing or does not know the folder's kind ("inference-family").
    """
    if not isinstance(source, nn.Module):
        try:
            from transformers import AutoModelForCausalLM

            found: nn.Module = AutoModelForCausalLM.from_pretrained(
                source, local_files_only=True, trust_remote_code=False, dtype=dtype or "auto"
            )
        except (ImportError, ValueError, KeyError) as error:
            raise UnsupportedError(
                f"{source} is of no declared family, and transformers does not read it: {error}",
                code="inference-family",
                fix="Install ds-inference[text] with a transformers that knows the model; code in folders is never run.",
            ) from error
        return found.to(device).eval()
    if weights is not None:
        made: nn.Module = type(source)(cast("Any", source).config)
        with torch.no_grad():
            for name, target in made.state_dict().items():
                target.copy_(weights[name])
        return made.to(device=device, dtype=dtype)
    first = next(source.parameters())
    same = (dtype is None or dtype == first.dtype) and (device is None or torch.device(device) == first.device)
    return source if same else copy.deepcopy(source).to(device=device, dtype=dtype)

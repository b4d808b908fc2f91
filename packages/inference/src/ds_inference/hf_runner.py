"""A Hugging Face decoder of no declared family runs through its own forward, with our cache, batches and sampling.

What its layers keep is learnt from one token at the start (`RecurrentState`). A step's chunks are put together by their length; each group
is one forward of the module, whose past is what our blocks hold, put at the right end and masked on the left, and the sequences' states.
The new keys and values go into the blocks, the states into the sequences' rows. So everything that the scheduler does (chunks,
preemption, samples; without states also prefixes that are shared, and drafts) holds for it too.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_accel import streams
from ds_config.errors import UnsupportedError
from ds_inference.adapters import Adapter
from ds_inference.cache import Cache
from ds_inference.paged_attention import BatchIndices, keep
from ds_inference.recurrent_state import RecurrentState, strange
from ds_inference.spec import AttentionSpec, DecoderLayerSpec, DecoderSpec, Mlp, Norm

__all__ = ["HFModelRunner", "read_module"]

_Piece = tuple[int, int, tuple[int, ...]]  # of a batch: its first token, the position of that, the sequence's blocks


class HFModelRunner:
    """Runs batches through a module. The face is `Decoder`'s.

    Args:
        module: A causal language model of transformers whose layers keep keys and values, or states; used, not copied.
    Attributes:
        spec: What is known of it: what its layers keep, its tokens, how long it may be. Layers without keys and values are left out.
        obstacle: Why the native loop does not run.
        stateful: Layers have states.
    Raises:
        UnsupportedError: it keeps something else ("inference-foreign").
    Cost: copies each sequence's keys, values and states once a step and layer; chunks of one length share a forward. Where the
        module's scan cannot begin with a state (Mamba 1 and its kin), every token of a chunk that follows others is a forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.obstacle = "it runs through its own forward"
        self.adapters: dict[str, Adapter] = {}
        known = inspect.signature(module.forward).parameters
        self._positions, self._last = "position_ids" in known, "logits_to_keep" in known
        self._memory = RecurrentState(module)
        self.spec = self._learn()
        self.stateful = self._memory.stateful

    @torch.no_grad()  # not inference_mode: hooks of a sharded module keep tensors beyond a call
    def forward(self, batch: BatchIndices, cache: Cache) -> Tensor:
        """Compute the batch's tokens, keep their keys, values and states, and return logits fp32 [R, vocab] of `batch.outputs`."""
        with streams.on_device(self.device):
            return self._forward(batch, cache)

    def _forward(self, batch: BatchIndices, cache: Cache) -> Tensor:
        out = torch.empty(len(batch.outputs), self.spec.vocab, device=self.device)
        row = {token: i for i, token in enumerate(batch.outputs.tolist())}
        groups: dict[tuple[int, bool, int], list[_Piece]] = defaultdict(list)
        for first, count, start, blocks in batch.chunks:
            follows, place = self.stateful and start > 0, first if self._memory.alone else 0
            groups[count, follows, place].append((first, start, blocks))
        for (count, follows, _), pieces in groups.items():
            size = 1 if follows and not self._memory.continues else count
            for i in range(0, count, size):
                moved = [(first + i, start + i, blocks) for first, start, blocks in pieces]
                wanted = [
                    (g, j, row[token])
                    for g, (first, _, _) in enumerate(moved)
                    for j, token in enumerate(range(first, first + size))
                    if token in row
                ]
                logits = self._compute(batch, moved, size, cache, wanted)
                for g, j, target in wanted:
                    out[target] = logits[g, j - size].float()
        return out

    def _compute(
        self,
        batch: BatchIndices,
        pieces: Sequence[_Piece],
        count: int,
        cache: Cache,
        wanted: Sequence[tuple[int, int, int]],
    ) -> Tensor:
        """Run a forward over `count` tokens of each piece, and return the logits [pieces, n, vocab] of their last tokens.

        With states, either all pieces begin or none does.

        Args:
            wanted: Of which pieces, and which of their tokens, logits are read.
        """
        tokens = [[first + i for i in range(count)] for first, _, _ in pieces]
        at = streams.copy_to(torch.tensor(tokens, device="cpu"), self.device)
        most = count - min((i for _, i, _ in wanted), default=count - 1)
        past, mask = self._past([(start, blocks) for _, start, blocks in pieces], count, cache)
        logits, states = self._run(batch.tokens[at].long(), batch.positions[at].long(), past, mask, most)
        self._keep(past, batch.slots[at].flatten(), count, cache)
        cache.states.write([blocks[0] for _, _, blocks in pieces], states)
        return logits

    # ---- how

    def _learn(self) -> DecoderSpec:
        config = cast("Any", self.module).config
        text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        kind = str(config.model_type)
        past = self._memory.new_past()
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                logits, _ = self._run(one, one, past, torch.ones_like(one), 1)
                later = [self._first_logits(token) for token in (0, logits.shape[-1] - 1)]
            pairs = self._memory.learn(past)
        except (AttributeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise strange(kind, f"its forward with a past fails: {error}") from error
        if (later[0] - later[1]).abs().max() > _SAME.get(self.dtype, 1e-2) * later[0].abs().max():
            raise strange(kind, "its tokens see those that come later")
        layers = tuple(
            DecoderLayerSpec(
                AttentionSpec(k.shape[1], k.shape[1], k.shape[-1], v.shape[-1], 1.0), Mlp(0, "silu", gated=False)
            )
            for k, v in pairs
        )
        ends = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
        longest = next((v for n in _LONGEST if (v := getattr(text, n, None))), 1 << 20)
        return DecoderSpec(
            family=kind,
            hidden=text.hidden_size,
            vocab=logits.shape[-1],
            layers=layers,
            norm=Norm(),
            max_seq_len=int(longest),
            eos_ids=() if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),),
        )

    def _first_logits(self, after: int) -> Tensor:
        """Compute the logits of a first token that others follow."""
        tokens = torch.tensor([[0, after, after, after]], device=self.device)
        places = torch.arange(4, device=self.device)[None]
        return self._run(tokens, places, self._memory.new_past(), torch.ones_like(tokens), 4)[0][0, 0].float()

    def _run(
        self, tokens: Tensor, positions: Tensor, past: Any, mask: Tensor | None, most: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute logits [G, at least `most`, vocab] of the last tokens of [G, n], and the states after these tokens."""
        keywords: dict[str, Any] = {**self._memory.forward_keywords(past), "attention_mask": mask}
        if self._positions:
            keywords["position_ids"] = positions
        if self._last:
            keywords["logits_to_keep"] = most
        with _answering(self.module):
            result = self.module(input_ids=tokens, **keywords)
        return result.logits, self._memory.collect_states(past, result)

    def _past(
        self, sequences: list[tuple[int, tuple[int, ...]]], count: int, cache: Cache
    ) -> tuple[Any, Tensor | None]:
        """Build the past of the sequences, left-padded [G, heads, longest, width] in each layer, and the attention mask.

        No mask where nothing is padded and there are states: some recurrent layers take the mask for that of the new
        tokens only.
        """
        longest, size = max(start for start, _ in sequences), cache.size
        follows = self.stateful and longest > 0
        past = self._memory.new_past(cache.states.read([blocks[0] for _, blocks in sequences]) if follows else ())
        mask = torch.zeros(len(sequences), longest + count, dtype=torch.int64, device="cpu")
        rows = torch.zeros(len(sequences), longest, dtype=torch.int64, device="cpu")
        for g, (start, blocks) in enumerate(sequences):
            mask[g, longest - start :] = 1
            at = torch.arange(start, device="cpu")
            rows[g, longest - start :] = (
                torch.tensor(blocks, dtype=torch.int64, device="cpu")[at // size] * size + at % size
            )
        rows = streams.copy_to(rows, self.device)
        if longest:
            for i, (keys, values, *scales) in zip(self._memory.saved_lengths, cache.layers, strict=True):
                k, v = (
                    (t.view(torch.uint8).flatten(0, 1)[rows].view(t.dtype) if scales else t.flatten(0, 1)[rows])
                    for t in (keys, values)
                )
                if scales:
                    k, v = (t.float() * s.flatten(0, 1)[rows][..., None] for t, s in zip((k, v), scales, strict=True))
                past.update(k.to(self.dtype).transpose(1, 2), v.to(self.dtype).transpose(1, 2), i)
        even = not cache.layers or all(start == longest for start, _ in sequences)
        return past, None if self.stateful and even else streams.copy_to(mask, self.device)

    def _keep(self, past: Any, slots: Tensor, count: int, cache: Cache) -> None:
        for i, (keys, values, *scales) in zip(self._memory.saved_lengths, cache.layers, strict=True):
            layer = past.layers[i]
            for n, (new, stored) in enumerate(((layer.keys, keys), (layer.values, values))):
                flat = new[:, :, -count:].transpose(1, 2).flatten(0, 1)
                keep(flat, slots, stored, scales[n] if scales else None)


_SAME = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Of logits that differ by rounding, the part of the largest one; experts may be given other rows."""
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@contextmanager
def _answering(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode inside the context, without dropout. A frozen part of a model that trains stays in it."""
    training = [part for part in module.modules() if part.training] if module.training else []
    if training:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def read_module(
    source: str | PathLike[str] | nn.Module,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    weights: Mapping[str, Tensor] | None,
) -> nn.Module:
    """Load the module of a folder, or copy a module for other weights or another dtype.

    Never changes the caller's module.

    Raises:
        UnsupportedError: transformers is missing or does not know the folder's kind ("inference-family").
    """
    if not isinstance(source, nn.Module):
        try:
            from transformers import AutoModelForCausalLM

            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                source, local_files_only=True, trust_remote_code=False, dtype=dtype or "auto"
            )
        except (ImportError, ValueError, KeyError) as error:
            raise UnsupportedError(
                f"{source} is of no declared family, and transformers does not read it: {error}",
                code="inference-family",
                fix="Install ds-inference[text] with a transformers that knows the model; code in folders is never run.",
            ) from error
        return module.to(device).eval()
    if weights is not None:
        reloaded: nn.Module = type(source)(cast("Any", source).config)
        with torch.no_grad():
            for name, target in reloaded.state_dict().items():
                target.copy_(weights[name])
        return reloaded.to(device=device, dtype=dtype)
    first = next(source.parameters())
    same = (dtype is None or dtype == first.dtype) and (device is None or torch.device(device) == first.device)
    return source if same else copy.deepcopy(source).to(device=device, dtype=dtype)

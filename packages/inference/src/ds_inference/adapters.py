"""LoRA adapters (Hu et al. 2021): folders of PEFT become small matrices by role, added where a request asks for them.

y += (x A^T) B^T * scale for the rows of a batch that wear the adapter; B has the scale in it. Several adapters share a batch, and the
blocks of each keep their own keys and values: a request's salt is its adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ds_config.errors import CheckpointError, UnsupportedError
from ds_config.json_files import read_json
from ds_inference.decoder_weights import Prefixed, arranged, typed_folder_errors
from ds_inference.families import Sources
from ds_inference.quantize import Weight
from ds_inference.spec import DecoderSpec, ExpertsSpec, Mlp, WeightSource

__all__ = ["Adapter", "read_adapter"]

_REFUSED = {"use_dora": False, "modules_to_save": None, "target_parameters": None, "bias": "none", "use_qalora": False}
_NAME = re.compile(r"(?:base_model\.model\.)?(.*)\.(lora_[AB])(?:\.\w+)?\.weight")
_ROLES = ("attention.qkv", "attention.out", "attention.q", "attention.q_down", "attention.q_up", "attention.kv_down",
          "feed.up", "feed.down", "feed.shared.up", "feed.shared.down", "feed.shared_gate")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """By role: A [rank, in], and B [out, rank] with the scale."""

    deltas: Mapping[str, tuple[Tensor, Tensor]]

    def add(self, role: str, y: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add the role's part to rows of y [T, out], from x [T, in]."""
        delta = self.deltas.get(role)
        if delta is not None:
            a, b = delta
            y.index_add_(0, rows, ((x[rows] @ a.t()) @ b.t()).to(y.dtype))

    def check(self, folder: str | PathLike[str], weights: Mapping[str, Weight]) -> None:
        """Refuse what does not fit the model's weights, by role: no step could compute it.

        Raises:
            CheckpointError: a matrix has another size than its layer ("inference-adapter").
        """
        for role, (down, up) in self.deltas.items():
            weight = weights[f"{role}.weight"]
            layer = tuple(weight.shape) if isinstance(weight, Tensor) else (weight.rows, weight.cols)
            if (len(up), down.shape[1]) != layer:
                raise _misfit(folder, f"{role} is {list(layer)}, its adapter {[len(up), down.shape[1]]}")


@typed_folder_errors
def read_adapter(
    folder: str | PathLike[str], spec: DecoderSpec, sources: Sources, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Read the LoRA adapter of a folder that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        CheckpointError: a file is missing, or a module is none of the model's ("inference-adapter").
        UnsupportedError: another kind than plain LoRA of linear layers ("inference-adapter").
    """
    config, state = _read(folder)
    wrong = {k: config[k] for k, plain in _REFUSED.items() if config.get(k) not in (plain, None, [])}
    if config.get("peft_type") != "LORA" or wrong:
        raise UnsupportedError(
            f"an adapter of type {config.get('peft_type')} with {wrong}",
            code="inference-adapter",
            fix="Merge it into the model (merge_and_unload of PEFT) and load that.",
        )
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in state.items():
        found_name = _NAME.fullmatch(name)
        if found_name is None:
            raise CheckpointError(
                f"{folder} holds {name}, which is no part of a LoRA of a linear layer",
                code="inference-adapter",
                fix="Merge it into the model (merge_and_unload of PEFT) and load that.",
            )
        module, part = found_name.groups()
        other = state.get(name.replace(part, "lora_B" if part == "lora_A" else "lora_A"))
        if other is None or tensor.dim() != 2 or other.dim() != 2:
            raise _misfit(
                folder, f"{name} is {list(tensor.shape)}, the other matrix of its pair {other and list(other.shape)}"
            )
        if part == "lora_A":
            down, up = tensor.to(device, dtype), other.to(device, torch.float32)
            if len(down) != up.shape[1]:
                raise _misfit(folder, f"{name} is {list(down.shape)}, the other matrix of its pair {list(up.shape)}")
            pairs[module + ".weight"] = down, (up * _scale(config, module, len(tensor))).to(dtype)
    deltas, used = {}, set[str]()
    names = Prefixed(pairs)
    for role, choices in sources.items():
        if not role.endswith(tuple(f"{r}.weight" for r in _ROLES)):
            continue
        for i in range(len(spec.layers)):
            for choice in choices:
                delta = _delta(choice, i, names, spec, role)
                if delta is not None:
                    deltas[role.replace("{i}", str(i)).removesuffix(".weight")] = delta
                    used |= {
                        names.checkpoint_name(n.replace("{i}", str(i)))
                        for n in choice.names
                        if n.replace("{i}", str(i)) in names
                    }
    left = sorted(set(pairs) - used)
    if left or not deltas:
        raise CheckpointError(
            f"{folder} adapts {', '.join(left[:4]) or 'nothing'}: no linear layer of a {spec.family} model that takes adapters",
            code="inference-adapter",
            fix="Merge the adapter into the model (merge_and_unload of PEFT) and load that; experts, embeddings and the head take none.",
        )
    return Adapter(deltas)


def _misfit(folder: str | PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter in {folder} does not fit: {what}",
        code="inference-adapter",
        fix="Give an adapter of this very model, as PEFT's save_pretrained wrote it.",
    )


def _read(folder: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = Path(folder) / "adapter_model.safetensors"
    try:
        return read_json(Path(folder) / "adapter_config.json", _unread), load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unread(f"{weights} cannot be read: {error}") from error


def _unread(text: str) -> CheckpointError:
    return CheckpointError(
        text,
        code="inference-adapter",
        fix="Give the folder that PEFT's save_pretrained wrote: adapter_config.json and adapter_model.safetensors.",
    )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = float(config.get("lora_alpha", 8))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _delta(source: WeightSource, i: int, pairs: Prefixed, spec: DecoderSpec, role: str) -> tuple[Tensor, Tensor] | None:
    """Build the role's A and B with rows in the role's order; modules without an adapter count as zeros."""
    names = [name.replace("{i}", str(i)) for name in source.names]
    if not any(name in pairs for name in names):
        return None
    sizes = _sizes(role, spec, i) if len(names) > 1 else [0]
    rows = WeightSource(source.names, source.layout if source.layout in ("heads", "groups", "shards") else "rows")
    downs, ups = [], []
    for at, name in enumerate(names):
        if name in pairs:
            a, b = pairs[name]
            zeros = [b if j == at else b.new_zeros(size, b.shape[1]) for j, size in enumerate(sizes)]
            downs.append(a)
            ups.append(arranged(rows, zeros, i, spec))
    return torch.cat(downs).contiguous(), torch.cat(ups, 1).contiguous()


def _sizes(role: str, spec: DecoderSpec, i: int) -> list[int]:
    """Return the output sizes of the modules that a role is fused from."""
    a, feed = spec.layers[i].attention, spec.layers[i].feed
    if role.endswith("qkv.weight"):
        return [a.heads * a.width, a.kv_heads * a.width, a.kv_heads * a.value_width]
    width = feed.shared if isinstance(feed, ExpertsSpec) and ".shared." in role else feed.width
    return [width, width] if isinstance(feed, Mlp) or ".shared." in role else [width]

"""Write a quantised model as a folder that other programs load: compressed-tensors, GPTQ, GGUF.

| format | bits | what reads it |
|---|---|---|
| `compressed_tensors` | 4, 8 | transformers with `compressed-tensors`, vLLM |
| `gptq` | 2, 4, 8 | transformers with `gptqmodel`, vLLM |
| `gguf` | 8 (Q8_0), 4 (Q4_0), 16 | llama.cpp, transformers with `gguf`; the families of `FAMILIES` |

Only safetensors and JSON are written, no code and no pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_compress.posttraining import QuantizedWeight, QuantScheme
from ds_compress.quantised import is_quantised, values_of
from ds_config.errors import PlanError, UnsupportedError
from ds_config.regular_file import replace_text, replacing

__all__ = [
    "FAMILIES",
    "GgufFamily",
    "export_compressed_tensors",
    "export_gguf",
    "export_gptq",
    "pack_columns",
    "pack_rows",
]


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, columns] of unsigned codes into int32 [rows, ceil(columns * bits / 32)].

    The first code is in the lowest bits.
    """
    each = 32 // bits
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // each) * each, dtype=torch.int64, device="cpu")
    padded[:, :columns] = codes.cpu().long()
    shifts = torch.arange(each, dtype=torch.int64, device="cpu") * bits
    words = (padded.view(rows, -1, each) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack codes as `pack_columns` does, but along rows: int32 [ceil(rows * bits / 32), columns]."""
    return pack_columns(codes.T, bits).T.contiguous()


def export_compressed_tensors(
    model: nn.Module,
    codes: Mapping[str, QuantizedWeight],
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder of format "pack-quantized".

    Args:
        model: A transformers model (its `config` is written), or any module with `config` given.
        codes: Of its linear layers and convolutions; they may have different schemes. Other layers are written as they are. Asymmetric ones
            are read by compressed-tensors itself; transformers 5 with compressed-tensors 0.20 refuses packed zeros. A convolution is
            written as its matrix [out, in_channels / groups * kernel], which is what the format's readers unpack; `view(weight.shape)` follows.
    Returns:
        The folder.
    Raises:
        PlanError: codes of other than 4 or 8 bits, or no codes ("compress-export").
    """
    if not codes:
        raise _export("a model without codes", "Quantise at least one layer.")
    for one in codes.values():
        if one.scheme.bits not in (4, 8):
            raise _export(f"{one.scheme.bits} bits", "Use 4 or 8 bits.")
    state, alike = _plain_state(model, codes), dict[QuantScheme, list[str]]()
    for name, one in codes.items():
        alike.setdefault(one.scheme, []).append(name)
        state[f"{name}.weight_packed"] = pack_columns(one.codes, one.scheme.bits)
        state[f"{name}.weight_scale"] = one.scales.cpu().contiguous()
        state[f"{name}.weight_shape"] = torch.tensor(one.codes.shape, dtype=torch.int64, device="cpu")
        if not one.scheme.symmetric:
            state[f"{name}.weight_zero_point"] = pack_rows(one.zeros, one.scheme.bits)
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in codes]
    linear = all(one.shape is None for one in codes.values())
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(alike) == 1 and linear else names,
            "weights": _weights_section(scheme), "input_activations": None, "output_activations": None,
        }
        for number, (scheme, names) in enumerate(alike.items())
    }  # fmt: skip
    section = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ignored,
    }  # fmt: skip
    return _write(model, state, folder, config, section)


def _weights_section(scheme: QuantScheme) -> dict[str, Any]:
    rows = scheme.group_size == -1
    return {
        "num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False,
        "strategy": "channel" if rows else "group", "group_size": None if rows else scheme.group_size,
    }  # fmt: skip


def export_gptq(
    model: nn.Module,
    codes: Mapping[str, QuantizedWeight],
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder of format "gptq", version 1: packed along inputs, zeros less one, scales in fp16.

    Raises:
        PlanError: schemes differ, or are of other bits, or a layer does not fill whole words ("compress-export").
    """
    scheme = _one_scheme(codes, (2, 4, 8))
    each, state = 32 // scheme.bits, _plain_state(model, codes)
    for name, one in codes.items():
        if one.shape is not None:
            raise _export(f"{name}, a convolution", "Leave convolutions out, or use export_compressed_tensors.")
        out, inputs = one.codes.shape
        if out % each or inputs % each:
            raise _export(f"{name} of {out} x {inputs}, {each} codes in a word", "Leave the layer out of quantisation.")
        groups = one.scales.shape[1]
        state[f"{name}.qweight"] = pack_rows(one.codes.T, scheme.bits)
        state[f"{name}.qzeros"] = pack_columns((one.zeros.T.int() - 1) % 2**scheme.bits, scheme.bits)
        state[f"{name}.scales"] = one.scales.T.contiguous().half()
        state[f"{name}.g_idx"] = torch.arange(inputs, dtype=torch.int32, device="cpu") // (inputs // groups)
    section = {
        "quant_method": "gptq", "bits": scheme.bits, "group_size": scheme.group_size, "desc_act": False,
        "sym": scheme.symmetric, "true_sequential": True, "damp_percent": 0.01, "checkpoint_format": "gptq",
        "modules_in_block_to_quantize": None,
    }  # fmt: skip
    return _write(model, state, folder, config, section)


def _one_scheme(codes: Mapping[str, QuantizedWeight], bits: tuple[int, ...]) -> QuantScheme:
    schemes = {one.scheme for one in codes.values()}
    if len(schemes) != 1:
        raise _export(f"{len(schemes)} schemes in one file", "Quantise at least one layer, and all layers alike.")
    scheme = schemes.pop()
    if scheme.bits not in bits:
        raise _export(f"{scheme.bits} bits", f"Use {' or '.join(map(str, bits))} bits.")
    return scheme


def _export(feature: str, fix: str) -> PlanError:
    return PlanError(f"the format has no place for {feature}", code="compress-export", fix=fix)


def _plain_state(model: nn.Module, codes: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """Return the state dict of the tensors that are not quantized, tied tensors only under their first name."""
    state, visited = {}, set()
    left_out = {f"{name}.weight" for name in codes}
    for name, tensor in model.state_dict().items():
        value = values_of(tensor)
        key = (id(tensor) if is_quantised(tensor) else tensor.data_ptr(), tensor.shape)
        if name in left_out or ".compression." in name or (value.numel() and key in visited):
            continue
        visited.add(key)
        state[name] = value.detach().cpu().contiguous()
    return state


def _write(
    model: nn.Module,
    state: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    config: Mapping[str, Any] | None,
    section: Mapping[str, Any],
) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if config is None:
        model_config = getattr(model, "config", None)
        if model_config is None or not hasattr(model_config, "to_dict"):
            raise _export("a model without a config", "Pass config=, what config.json shall say.")
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config = {**model_config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
    with replacing(path / "model.safetensors") as draft:
        save_file(dict(state), draft, metadata={"format": "pt"})
    text = json.dumps({**config, "quantization_config": dict(section)}, indent=2, default=str)
    replace_text(path / "config.json", text + "\n")
    return path


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How GGUF says models of one `model_type`.

    Attributes:
        architecture: Its name in the file.
        pairs: Rotary features lie side by side, (x0, x1), not in halves: rows of queries and keys are reordered.
        norm_shift: Added to the weights of norms.
        activation: What programs that read the file take for granted.
    """

    architecture: str
    pairs: bool = False
    norm_shift: float = 0.0
    activation: str = "silu"


# llama.cpp's own converter writes Mistral as Llama, too. Gemma's norms multiply by 1 + weight.
FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", pairs=True),
    "mistral": GgufFamily("llama", pairs=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "gemma2": GgufFamily("gemma2", norm_shift=1.0, activation="gelu_pytorch_tanh"),
}


def export_gguf(
    model: nn.Module,
    path: str | os.PathLike[str],
    kind: Literal["Q8_0", "Q4_0", "F16", "F32"] = "Q8_0",
    vocabulary: list[str] | None = None,
) -> Path:
    """Write a GGUF file of a causal language model of one of `FAMILIES`. Weights whose rows are no multiple of 32, and vectors, stay in 32 bits.

    Args:
        model: Of transformers, its weights as they shall be (after `redundancy_clean`, or of `gptq`).
        kind: Format of matrices: blocks of 32 with a scale, in 8 or 4 bits; or floats.
        vocabulary: The tokens, for programs that read text; numbers stand for them otherwise.
    Raises:
        UnsupportedError: another family, or the library `gguf` is missing ("compress-export").
        PlanError: the model has what files of its family do not say ("compress-export").
    Cost: writes one tensor at a time.
    """
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(
            "GGUF files are written with the library gguf, which is not installed",
            code="compress-export",
            fix="Install ds-compress[gguf].",
        ) from None
    config: Any = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        raise UnsupportedError(
            f"GGUF names of a {getattr(config, 'model_type', type(model).__name__)} model are not known here, those of "
            f"{', '.join(FAMILIES)} are",
            code="compress-export",
            fix="Use export_compressed_tensors, or llama.cpp's own converter.",
        )
    _sayable(config, family)
    writer = gguf.GGUFWriter(str(path), family.architecture)
    _tell(writer, config)
    tokens = vocabulary or [f"<{number}>" for number in range(config.vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([1] * len(tokens))
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    wanted = getattr(gguf.GGMLQuantizationType, kind)
    for name, value in _plain_state(model, {}).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise _export(f"{name}", f"Use a causal {config.model_type} model of transformers without further modules.")
        data = value.float()
        if family.pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = _interleaved(data, heads)
        if name.endswith("norm.weight"):
            data = data + family.norm_shift
        plain = data.dim() < 2 or (data.shape[-1] % 32 != 0 and kind.startswith("Q"))
        form = gguf.GGMLQuantizationType.F32 if plain else wanted
        writer.add_tensor(target, gguf.quants.quantize(data.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _sayable(config: Any, family: GgufFamily) -> None:
    """Refuse what readers of the format would take for something else."""
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", family.activation)
    scalar = getattr(config, "query_pre_attn_scalar", None)
    window = config.model_type != "gemma2" and getattr(config, "sliding_window", None)
    wrong = [
        text
        for broken, text in (
            (activation != family.activation, f"activation {activation}"),
            (family.pairs and getattr(config, "attention_bias", False), "attention_bias"),
            (window, f"sliding_window = {window}"),
            (scalar not in (None, config.head_dim if scalar else None), f"query_pre_attn_scalar = {scalar}"),
        )
        if broken
    ]
    if wrong:
        raise _export(" and ".join(wrong), "Use a model without it, or export_compressed_tensors.")


def _tell(writer: Any, config: Any) -> None:
    """Write the sizes of a model to the metadata of a GGUF file."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(_rope(config)))
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _rope(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    value = parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    if parameters.get("rope_type", "default") != "default":
        raise _export(f"rope of type {parameters['rope_type']}", "Use a model with plain rotary positions.")
    return float(value)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from halves (x0, x_n/2), ... to the rotary pairs (x0, x1), (x2, x3), ... of GGUF."""
    out, inputs = weight.shape
    return weight.view(heads, 2, out // heads // 2, inputs).transpose(1, 2).reshape(out, inputs).contiguous()

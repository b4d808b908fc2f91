"""The shapes of a model that need not be built: from a function that makes it on meta, from files, or from its sizes.

package.module:function  file.py:function    called without arguments on the meta device
DIR                                          a checkpoint of safetensors: shapes from the headers of its files
config.json  DIR                             sizes of a Hugging Face model: built on meta where transformers is
                                             installed; computed for the decoders of `FAMILIES` where it is not
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ds_config.errors import ConfigError, UnsupportedError
from ds_config.json_files import read_json
from ds_engine.builder import shapes_of
from ds_engine.plan import Shapes
from ds_zero.layout.units import ModuleInfo, ParamInfo

__all__ = ["FAMILIES", "decoder_shapes", "model_from", "shapes_from"]

FAMILIES: Mapping[str, bool] = {"llama": False, "mistral": False, "qwen2": True}
"""`model_type` of decoders whose shapes follow from a few sizes, and whether q, k and v have a bias."""

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
                "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
                "F8_E5M2": "float8_e5m2"}  # fmt: skip


def shapes_from(spec: str) -> Shapes:
    """Load the shapes of the model that `spec` names (see the module's docstring), without memory or values.

    Raises as `model_from`.
    """
    return model_from(spec)[0]


def model_from(spec: str) -> tuple[Shapes, nn.Module | None]:
    """Load the shapes of the model that `spec` names, and the model on meta; None where only names and shapes are known.

    Raises:
        ConfigError: there is no such file, module or name, or it makes no module ("plan-model").
        UnsupportedError: a Hugging Face model of another family, and transformers is not installed ("plan-model").
    """
    path = Path(spec)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return (_of_files(files), None) if files else _of_config(path / "config.json")
    if path.suffix == ".json":
        return _of_config(path)
    make = _find(spec)
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise _wrong(f"{spec} gave a {type(model).__name__}, not a torch.nn.Module", "Return the model.")
    return shapes_of(model), model


def _wrong(message: str, fix: str) -> ConfigError:
    return ConfigError(message, code="plan-model", fix=fix)


def _find(spec: str) -> Callable[[], object]:
    place, colon, name = spec.rpartition(":")
    if not colon:
        raise _wrong(
            f"{spec!r} does not say which model", "Write module:function, file.py:function, or a model's folder."
        )
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise _wrong(f"there is no file {path}", "Check the path.")
    try:
        module = _module_of(path.resolve()) if path.suffix == ".py" else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise _wrong(f"{spec}: {error}", "Install it, or give a file.") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise _wrong(f"{place} has nothing callable named {name!r}", "Check the name.")
    return factory


def _module_of(file: Path) -> ModuleType:
    """Import `file` with its folder in front of `sys.path`, also where another module of its name is loaded."""
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names:
        name = f"{name} of {file.parent}"
        if name in sys.modules:
            return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    loader = SourceFileLoader(name, str(file))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(file)))
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and pickle look there for what the file defines
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---- Hugging Face


def _of_files(files: list[Path]) -> Shapes:
    from safetensors import safe_open  # its header alone is read

    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  the file is no mapping
                piece = opened.get_slice(name)
                tensors.append((name, tuple(piece.get_shape()), _TORCH_NAMES.get(piece.get_dtype(), "float32")))
    return _shapes(tensors)


def _of_config(path: Path) -> tuple[Shapes, nn.Module | None]:
    if not path.is_file():
        raise _wrong(f"there is no {path}", "Give a folder with config.json or safetensors files.")
    config = read_json(path, partial(ConfigError, code="plan-model", fix="Give the config.json of a model."))
    if importlib.util.find_spec("transformers") is not None:
        transformers: Any = importlib.import_module("transformers")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path.parent))
        return shapes_of(model), model
    return _shapes(list(decoder_shapes(config))), None


def decoder_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and format of each parameter of a Hugging Face decoder, in their order.

    Args:
        config: Its config.json.
    Raises:
        UnsupportedError: another family ("plan-model").
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"the shapes of a {family!r} model are not known here (known: {', '.join(sorted(FAMILIES))})",
            code="plan-model",
            fix="Install transformers, or give module:function.",
        )
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix("torch.")
    hidden, middle, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    rows = {"q": heads * head, "k": (config.get("num_key_value_heads") or heads) * head}
    rows["v"] = rows["k"]
    biased = config.get("attention_bias", FAMILIES[str(family)])
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), dtype
    for layer in range(config["num_hidden_layers"]):
        under = f"model.layers.{layer}"
        for name, size in rows.items():
            yield f"{under}.self_attn.{name}_proj.weight", (size, hidden), dtype
            if biased:
                yield f"{under}.self_attn.{name}_proj.bias", (size,), dtype
        yield f"{under}.self_attn.o_proj.weight", (hidden, rows["q"]), dtype
        for name, shape in {"gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle)}.items():
            yield f"{under}.mlp.{name}_proj.weight", shape, dtype
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{under}.{name}.weight", (hidden,), dtype
    yield "model.norm.weight", (hidden,), dtype
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (config["vocab_size"], hidden), dtype


def _shapes(tensors: list[tuple[str, tuple[int, ...], str]]) -> Shapes:
    modules: dict[str, ModuleInfo] = {"": ModuleInfo("")}
    params = []
    for name, shape, dtype in tensors:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth])
            following = parts[depth]
            # A list of numbered layers has no forward of its own.
            modules.setdefault(module, ModuleInfo(module, callable=not following.isdigit()))
        params.append(ParamInfo(name, shape, dtype, ".".join(parts[:-1]), 0))
    return Shapes(tuple(params), tuple(modules.values()))

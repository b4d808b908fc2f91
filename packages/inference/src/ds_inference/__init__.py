"""Generation from large models: paged, batched, exact, and in step with training.

Names are loaded when they are first used: `ds chat --help` and its like import this package, and torch only where a model is read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_inference.config import InferenceConfig, RaggedConfig
    from ds_inference.embedding import Embedder, load_embedder
    from ds_inference.injection import InferenceEngine, init_inference
    from ds_inference.llm_engine import LLMEngine, RequestOutput, Tokenizer, TokenOutput
    from ds_inference.model_loader import load
    from ds_inference.quantize import QuantizationOptions
    from ds_inference.ragged import RaggedEngine, SchedulingError, SchedulingResult, build_hf_engine
    from ds_inference.sampling import SamplingParams
    from ds_inference.scheduler import SchedulerConfig

__all__ = [
    "Embedder",
    "InferenceConfig",
    "InferenceEngine",
    "LLMEngine",
    "QuantizationOptions",
    "RaggedConfig",
    "RaggedEngine",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingError",
    "SchedulingResult",
    "TokenOutput",
    "Tokenizer",
    "build_hf_engine",
    "init_inference",
    "load",
    "load_embedder",
]

_HOMES = {
    "config": ("InferenceConfig", "RaggedConfig"),
    "embedding": ("Embedder", "load_embedder"),
    "llm_engine": ("RequestOutput", "TokenOutput", "LLMEngine", "Tokenizer"),
    "injection": ("InferenceEngine", "init_inference"),
    "model_loader": ("load",),
    "quantize": ("QuantizationOptions",),
    "ragged": ("RaggedEngine", "SchedulingError", "SchedulingResult", "build_hf_engine"),
    "sampling": ("SamplingParams",),
    "scheduler": ("SchedulerConfig",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Generation from large models: paged, batched, exact, and in step with training."""

from ds_inference.config import InferenceConfig, RaggedConfig
from ds_inference.embedding import Embedder, load_embedder
from ds_inference.engine import Answer, Event, Generator, Tokenizer
from ds_inference.injection import InferenceEngine, init_inference
from ds_inference.loading import load
from ds_inference.quantize import Quantize
from ds_inference.ragged import RaggedEngine, SchedulingError, SchedulingResult, build_hf_engine
from ds_inference.sampling import Sampling
from ds_inference.scheduler import Budget

__all__ = [
    "Answer",
    "Budget",
    "Embedder",
    "Event",
    "Generator",
    "InferenceConfig",
    "InferenceEngine",
    "Quantize",
    "RaggedConfig",
    "RaggedEngine",
    "Sampling",
    "SchedulingError",
    "SchedulingResult",
    "Tokenizer",
    "build_hf_engine",
    "init_inference",
    "load",
    "load_embedder",
]

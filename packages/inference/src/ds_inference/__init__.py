"""Generation from large models: paged, batched, exact, and in step with training."""

from ds_inference.engine import Answer, Event, Generator, Tokenizer, load
from ds_inference.sampling import Sampling
from ds_inference.scheduler import Budget

__all__ = ["Answer", "Budget", "Event", "Generator", "Sampling", "Tokenizer", "load"]

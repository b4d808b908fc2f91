"""Scripts written for DeepSpeed run on the ds packages. What each name is here: `deepspeed._surface`."""

from deepspeed._lazy import names

__all__, __getattr__, __dir__ = names(__name__)

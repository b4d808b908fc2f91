"""Names of `deepspeed.runtime.zero.mics`; what each is here: `deepspeed._surface`."""

from deepspeed._lazy import names

__all__, __getattr__, __dir__ = names(__name__)

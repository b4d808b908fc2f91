"""Names of `deepspeed.runtime.zero.parameter_offload`; what each is here: `deepspeed._surface`."""

from deepspeed._lazy import names

__all__, __getattr__, __dir__ = names(__name__)

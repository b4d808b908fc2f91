"""Names of `deepspeed.utils.zero_to_fp32`; what each is here: `deepspeed._surface`."""

from deepspeed._lazy import names

__all__, __getattr__, __dir__ = names(__name__)

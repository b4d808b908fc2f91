"""Names of `deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine`; what each is here: `deepspeed._surface`."""

from deepspeed._lazy import names

__all__, __getattr__, __dir__ = names(__name__)

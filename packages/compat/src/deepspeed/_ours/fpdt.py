"""`deepspeed.sequence.fpdt_layer`: names that programs import at their top whether or not they use them. Using one is an error."""

from __future__ import annotations

from typing import Any, NoReturn

from ds_config.errors import UnsupportedError

__all__ = ["FpdtAttention", "FpdtFfn", "FpdtFunction", "FpdtInput", "FpdtLogitsLoss"]


class _NotBuilt:
    """Chunked attention with keys and values on the host."""

    _name = ""
    _instead = "ds_parallel.sequence: ring attention, or Ulysses with a tiled MLP and a tiled loss"

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        self._refuse()

    @classmethod
    def apply(cls, *args: Any, **options: Any) -> NoReturn:
        """Not here.

        Raises:
            UnsupportedError: always ("compat-missing").
        """
        del args, options
        cls._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise UnsupportedError(
            f"deepspeed.sequence.fpdt_layer.{cls._name} is not built here",
            code="compat-missing",
            fix=f"Use {cls._instead}.",
        )


class FpdtAttention(_NotBuilt):
    """Attention in chunks of the sequence."""

    _name = "FPDT_Attention"


class FpdtFfn(_NotBuilt):
    """A feed-forward layer in chunks."""

    _name = "FPDT_FFN"
    _instead = "ds_parallel.TiledMLP"


class FpdtInput(_NotBuilt):
    """Tokens in the order of chunks."""

    _name = "FPDT_InputConstruct"


class FpdtLogitsLoss(_NotBuilt):
    """Logits and their loss in chunks."""

    _name = "FPDT_LogitsLoss"
    _instead = "ds_parallel.tiled_logits_loss"


class FpdtFunction(_NotBuilt):
    """The function under `FpdtAttention`."""

    _name = "_FPDTGPUOffloadingAttentionImpl_"

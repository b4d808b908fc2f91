"""`deepspeed.module_inject.layers`: what callers use of tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ds_parallel.tensor import cut_of, whole_params

__all__ = ["GatherReplacedLayerParams"]


def GatherReplacedLayerParams(  # noqa: N802  upstream's name
    params: nn.Parameter | Iterable[nn.Parameter], module: nn.Module, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Inside, `params` are the whole tensors of a model that is cut over ranks. Collective over them."""
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    return whole_params(given, cut_of(module)) if enabled else nullcontext()

"""`deepspeed.zero`: gathered access and `Init` under upstream's signatures."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

import ds_zero
from ds_config.errors import ShardedAccessError, UnsupportedError

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_log = logging.getLogger("DeepSpeed")
_orig_torch_arange = torch.arange
register_external_parameter = ds_zero.register_external_parameter
unregister_external_parameter = ds_zero.unregister_external_parameter


@contextmanager
def GatheredParameters(  # noqa: N802  upstream's name
    params: Iterable[Parameter] | Parameter | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, `params` are whole. Collective. See `ds_zero.GatheredParameters`.

    A change without `modifier_rank` is dropped with a warning, where ds-zero raises. Contexts may be nested.
    """
    try:
        with ds_zero.GatheredParameters(params, modifier_rank, fwd_module, enabled):
            yield
    except ShardedAccessError as error:
        if error.code != "sharded-write":
            raise
        _log.warning("%s", error)


class Init:
    """A context in which models are made for stage 3.

    Models are built whole, on whatever device the caller chose, and cut by `deepspeed.initialize`: the numbers are upstream's,
    the memory while building is not. Said in one warning. Nothing in torch is replaced and no random number is drawn.

    Args:
        module: A model that is there already; left as it is.
        enabled: False does nothing, and says nothing.
        others: Where and how upstream cuts; `initialize` decides that here.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        del module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory
        del config_dict_or_path, config, dtype, mpu, others
        if enabled:
            _warn_whole()

    def __enter__(self) -> None:
        """Models made from here on are built whole."""

    def __exit__(self, *raised: object) -> None:
        """Nothing to undo."""


@functools.cache
def _warn_whole() -> None:
    _log.warning("zero.Init: models are built whole on every rank, and cut when deepspeed.initialize gets them")


class TiledLinear(ds_zero.TiledLinear):
    """`ds_zero.TiledLinear` with upstream's arguments.

    Args:
        init_linear: A whole layer to take the values of.
    Raises:
        UnsupportedError: inputs or outputs that stay split, another class of tiles ("compat-argument").
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
    ) -> None:
        if input_is_already_split or not combine_out_splits or linear_cls is not nn.Linear:
            raise UnsupportedError(
                f"TiledLinear(input_is_already_split={input_is_already_split}, combine_out_splits={combine_out_splits}, "
                f"linear_cls={linear_cls.__name__})",
                code="compat-argument",
                fix="Give and take whole tensors, and tiles of torch.nn.Linear.",
            )
        super().__init__(in_features, out_features, bias, in_splits, out_splits)
        if init_linear is not None:
            self.copy_params_from(init_linear)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """The constructor itself: `Init` replaces nothing in torch. Clients assign this name and read it again."""
    del target_fp_dtype
    return fn


def shutdown_init_context() -> None:
    """Nothing in torch was replaced, so there is nothing to take back while a model is built."""


def restore_init_context() -> None:
    """See `shutdown_init_context`."""

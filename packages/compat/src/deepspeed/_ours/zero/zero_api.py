"""`deepspeed.zero`: gathered access and `Init` under upstream's signatures."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import ds_zero
from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.communication.comm import init_distributed
from deepspeed._ours.zero.init_buffers import CONSTRUCTORS, BufferFormat
from deepspeed._ours.zero.params import mark_scattered
from ds_comm import as_group, world_group
from ds_config import read
from ds_config.errors import ShardedAccessError
from ds_engine import load_config
from ds_engine.mixed_precision import Casting, casting_of
from ds_zero.runtime.init_shards import Scatter, scatter_of
from ds_zero.runtime.sharded_model import sharding_of

_log = logging.getLogger("DeepSpeed")


@contextmanager
def GatheredParameters(  # noqa: N802  upstream's name
    params: Iterable[Parameter] | Parameter | nn.Module | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather `params` inside the context, as full tensors. Collective. See `ds_zero.GatheredParameters`.

    A change without `modifier_rank` is dropped with a warning, where ds-zero raises. Contexts may be nested.

    Raises:
        ShardedAccessError: such a change of a model with `zero_optimization.enable_sanity_checks`, also in the configuration that
            `Init` was given ("sharded-write").
    """
    if not isinstance(params, nn.Module | Parameter):
        params = list(params) if isinstance(params, Iterable) else []  # None: the bias of a layer that has none
    try:
        with ds_zero.GatheredParameters(params, modifier_rank, fwd_module, enabled):
            yield
    except ShardedAccessError as error:
        if error.code != "sharded-write" or _checked(params):
            raise
        _log.warning("%s", error)


def _of_trained(read: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return `read`, with None for a parameter that is not trained: upstream has no fp32 copy and no state of it."""

    @wraps(read)
    def of_trained(param: Parameter, *args: Any, **options: Any) -> Tensor | None:
        return read(param, *args, **options) if param.requires_grad else None

    return of_trained


safe_get_full_fp32_param = _of_trained(ds_zero.safe_get_full_fp32_param)
safe_get_full_optimizer_state = _of_trained(ds_zero.safe_get_full_optimizer_state)
safe_get_local_fp32_param = _of_trained(ds_zero.safe_get_local_fp32_param)
safe_get_local_optimizer_state = _of_trained(ds_zero.safe_get_local_optimizer_state)


def _checked(params: Iterable[Parameter] | Parameter | nn.Module) -> bool:
    """Whether the configuration of a model that these parameters belong to asks for sanity checks."""
    one = [params] if isinstance(params, Parameter) else params
    several = [p for p in (one.parameters() if isinstance(one, nn.Module) else one) if isinstance(p, Parameter)]
    owners = map(sharding_of, several)
    return any(owner is not None and owner.options.strict for owner in owners) or any(
        scatter_of(param) in _strict for param in several
    )


def single_rank_error(
    dp_world_size: int, explicit_process_group: Any, env: Mapping[str, str] | None = None
) -> str | None:
    """Return an error text if a launcher started several ranks but the world size is 1; else None.

    Such a rank would hold a model unsharded.
    """
    world_size = str((os.environ if env is None else env).get("WORLD_SIZE"))
    if dp_world_size != 1 or explicit_process_group is not None or not world_size.isdecimal() or int(world_size) <= 1:
        return None
    return f"zero.Init before init_distributed(): WORLD_SIZE={world_size}, and the process group has one rank"


class Init(ds_zero.Init):
    """Inside, models are cut over the ranks while they are built: no process ever holds one whole. Collective.

    `GatheredParameters` makes parameters whole again, `deepspeed.initialize` takes them over. Nothing in torch is replaced and no
    random number is drawn. Makes the process group if there is none.

    Args:
        module: A model that is there already: cut at once.
        data_parallel_group, sequence_data_parallel_group: Ranks to cut over; all by default.
        config_dict_or_path, config: Says the format of floating-point parameters: fp32, or what bf16 or fp16 enable. Without it
            they keep the format they are made in. Nothing else of it is read, so it may hold "auto". Buffers that torch's constructors make
            have the format, too, see `BufferFormat`.
        enabled: False does nothing.
        dtype: The format, whatever the configuration says.
        tensor_overrides: Without upstream's "dtype" among them parameters and buffers keep the format they are made in.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None,
        enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None, zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False, zero_quantized_nontrainable_weights: bool = False, sequence_data_parallel_group:
        Any = None, param_swapper: Any = None, tensor_overrides: Iterable[Any] | None = None,
    ) -> None:  # fmt: skip
        try:
            torch.device("cpu" if remote_device in (None, "none", "nvme") else str(remote_device))
        except RuntimeError:
            raise refused("remote-device", remote_device) from None
        # Where upstream puts the parts; here they stay where the model is made.
        del mem_efficient_linear, remote_device, pin_memory, mpu
        del (
            zero_param_parallel_group,
            zero_quantized_weights,
            zero_quantized_nontrainable_weights,
            param_swapper,
        )  # as `initialize` says
        if enabled:
            init_distributed()
        self._ranks = as_group(data_parallel_group or sequence_data_parallel_group) if enabled else world_group()
        wrong = (
            single_rank_error(self._ranks.size, data_parallel_group or sequence_data_parallel_group)
            if enabled
            else None
        )
        if wrong is not None:
            raise refused("single-rank", wrong)
        source = config if config_dict_or_path is None else config_dict_or_path
        keeps = tensor_overrides is not None and "dtype" not in {getattr(one, "name", one) for one in tensor_overrides}
        wanted = _format(source) if dtype is None and enabled else dtype
        super().__init__(group=self._ranks, enabled=enabled, dtype=None if keeps else wanted)
        if enabled and _section(source).get("enable_sanity_checks") is True:
            _strict.add(self._scatter)
        narrow = self.enabled and self.dtype in (torch.bfloat16, torch.float16)
        self._buffers = (
            BufferFormat(self.dtype, _fp32_buffers(source, self.dtype)) if narrow and self.dtype is not None else None
        )
        if module is not None and enabled:
            self.cut(module)

    def __enter__(self) -> Init:
        _entered.append(self)
        super().__enter__()
        if self._buffers is not None:
            self._buffers.narrowing = _narrowing_constructors(self._buffers.dtype)
            self._buffers.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._buffers is not None:
            self._buffers.__exit__(*raised)
        _entered.remove(self)
        super().__exit__(*raised)

    def pause(self) -> None:
        """Stop sharding new modules, and casting their buffers, until `go_on` is called."""
        super().pause()
        if self._buffers is not None:
            self._buffers.active = False

    def go_on(self) -> None:
        """Cut what is made from here on."""
        super().go_on()
        if self._buffers is not None:
            self._buffers.active = True

    def on_sharded(self, param: Parameter) -> None:
        """Give it the attributes that clients read."""
        mark_scattered(param, self._ranks)


_strict: weakref.WeakSet[Scatter] = weakref.WeakSet()
_entered: list[Init] = []
"""The contexts that this process is in, for those who make something apart inside of them."""


class MiCS_Init(Init):  # noqa: N801  upstream's name
    """`Init` for a model that is then sharded over `mics_shard_size` ranks. Until then all ranks share one copy.

    Raises:
        ConfigError: the configuration has no `mics_shard_size` ("compat-argument").
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        bound = inspect.signature(Init).bind(module, *args, **options).arguments
        source = bound.get("config_dict_or_path", bound.get("config"))
        section = _section(source)
        if self.enabled and int(section.get("mics_shard_size", -1)) < 1:
            raise refused("mics-size", section.get("mics_shard_size"))


def _section(source: Any) -> Mapping[str, Any]:
    section = None if source is None else read(source).data.get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def _format(source: Any) -> torch.dtype | None:
    if source is None:
        return None
    document = read(source).data
    for names, dtype in ((("bf16", "bfloat16"), torch.bfloat16), (("fp16",), torch.float16)):
        if any(isinstance(document.get(name), Mapping) and document[name].get("enabled") is True for name in names):
            return dtype
    return torch.float32


def _fp32_buffers(source: Any, dtype: torch.dtype) -> Casting:
    """Return which buffers of a narrow model are fp32, from the configuration or from what a model says of itself."""
    section = read(source).data.get("data_types") if source is not None else None
    names = section.get("keep_in_fp32_modules", "auto") if isinstance(section, Mapping) else "auto"
    low = {"fp16" if dtype is torch.float16 else "bf16": {"enabled": True}}
    config: Mapping[str, Any] = {**low, "data_types": {"keep_in_fp32_modules": names}, "train_batch_size": 1}
    return casting_of(load_config(dict(config)))


class TiledLinear(ds_zero.TiledLinear):
    """`ds_zero.TiledLinear` with upstream's arguments.

    Args:
        input_is_already_split: The input is a list of `in_splits` tensors.
        combine_out_splits: The output is one tensor, not a list of `out_splits`.
        linear_cls: Class of a tile; called with `linear_kwargs`.
        init_linear: A whole layer to take the values of.
    Raises:
        PlanError: more tiles than features ("tiled-splits"); a RuntimeError, too.
    """

    @raising(RuntimeError)
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
        input_is_already_split: bool = False, combine_out_splits: bool = True, linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None, **linear_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_features,
            out_features,
            bias,
            in_splits,
            out_splits,
            layer=partial(linear_cls, **linear_kwargs),
            split_input=input_is_already_split,
            join_output=combine_out_splits,
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., Any]:
    """Return a constructor as `fn` whose floating-point tensors are of `target_fp_dtype`, on `target_device` where the caller names none.

    `Init` replaces nothing in torch. It asks this function, or what a client has assigned to its name, which constructors it may take for
    narrow: transformers keeps `torch.arange` as it is, of which tables of rotations are made.
    """

    @wraps(fn)
    def narrow(*args: Any, **options: Any) -> Any:
        if target_device is not None and options.get("device") is None:
            options["device"] = target_device
        tensor = fn(*args, **options)
        if target_fp_dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    _narrowing.add(narrow)
    return narrow


_narrowing: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _narrowing_constructors(dtype: torch.dtype) -> frozenset[Callable[..., Any]]:
    """Return which of torch's constructors make narrow tensors, by who has the name now."""
    public = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    wrap = getattr(public, "zero_wrapper_for_fp_tensor_constructor", zero_wrapper_for_fp_tensor_constructor)
    return frozenset(fn for fn in CONSTRUCTORS if wrap(fn, target_fp_dtype=dtype, target_device=None) in _narrowing)


def shutdown_init_context() -> None:
    """Pause all entered `Init` contexts: parameters created until `restore_init_context` are not sharded."""
    for context in _entered:
        context.pause()


def restore_init_context() -> None:
    """Resume the `Init` contexts that `shutdown_init_context` paused."""
    for context in _entered:
        context.go_on()

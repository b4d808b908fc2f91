"""`deepspeed.module_inject.layers`: layers that are cut over tensor-parallel ranks, by upstream's classes.

ds-parallel cuts a model in place, and `isinstance` says of its layers what upstream's classes would be. Programs that wrap a
layer themselves get one of these: this rank's part of the weight, computed with the same collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._ours.base.raising import refused
from deepspeed._ours.parallel.cut_metadata import META, conversion_of, metadata
from deepspeed._ours.parallel.tp_shards import get_shard_size_list
from ds_comm import Group, as_group
from ds_comm.differentiable import copy, reduce
from ds_comm.groups import self_group
from ds_parallel.tensor import DimShards, ShardKind, TensorParallelModel, kind_of, tensor_parallel_of, unsharded_params
from ds_parallel.tensor.sharded_linear import ShardedLinear

Sizes = Sequence[int | Sequence[int]]
_training: list[bool] = [False]


def set_autotp_mode(training: bool = False) -> None:
    """Note whether layers are cut for training: what `is_autotp_training_mode` answers. `initialize` says so itself."""
    _training[0] = bool(training)


def is_autotp_training_mode() -> bool:
    """Whether layers are cut for training."""
    return _training[0]


class ColumnParallel:
    """`ColumnParallel.apply(group, x)`: `x` as it is; its gradients are summed over the group."""

    @staticmethod
    def apply(group: Any, x: Tensor) -> Tensor:
        return x if group is None else copy(x, group)


class RowParallel:
    """`RowParallel.apply(group, x, is_inference_mode)`: the sum of every rank's `x`."""

    @staticmethod
    def apply(group: Any, x: Tensor, is_inference_mode: bool = False) -> Tensor:
        del is_inference_mode  # a sum costs the same
        return x if group is None else reduce(x, group)


class _AlsoCut(type):
    """Layers that ds-parallel has cut are instances of the class that says the same of them."""

    kinds: tuple[ShardKind, ...] = ()
    several: bool | None = None

    def __instancecheck__(cls, instance: object) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        kind = kind_of(instance) if cls.kinds and isinstance(instance, nn.Module) else None
        if kind not in cls.kinds:
            return False
        parts = len(vars(instance)["_ds_part"].cut.parts)
        return cls.several is None or cls.several is (parts > 1)


class TensorParallel_Layer(ShardedLinear, metaclass=_AlsoCut):  # noqa: N801  upstream's name
    """A linear layer of which this rank holds a part.

    Args:
        module: The whole layer; its parameters become this one's, and are cut.
        mp_group: torch's group of the ranks that share it; None: this rank alone.
        skip_partition: Its parameters are this rank's part already.
        options: `name`, which `get_shard_size_list` asks about; `gather_output` of column layers; `shape` and
            `partition_dim` of those that are cut in parts.
    """

    kinds: tuple[ShardKind, ...] = (ShardKind.COLUMN, ShardKind.ROW)
    partition_dim = 0
    transposed = False
    name: str | None

    def __init__(self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, **options: Any) -> None:
        group: Group = self_group("tensor") if mp_group is None else as_group(mp_group)
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        if self.transposed:
            weight.data = weight.data.t().contiguous()
        name, dim = options.get("name"), options.get("partition_dim", type(self).partition_dim)
        size = _whole_shape(weight)[dim] * (group.size if skip_partition else 1)
        parts = self._part_sizes(size, options)
        cut = _cut_of(dim, parts or (size,), group.size, name)
        self.__dict__.update(_subparam_sizes=parts, name=name, _options=options)
        super().__init__(weight, getattr(module, "bias", None), cut, group, local=skip_partition or group.size == 1)
        self.mp_group, self.tp_world_size = mp_group, group.size
        self.gather_output = bool(options.get("gather_output", False))
        self.partition_dim = dim
        for param in (self.weight, self.bias):
            if param is not None:
                self.config_tp_params(param)
        self._mark_uc_metadata()

    @property
    def tp_index(self) -> int:
        """The tensor-parallel rank."""
        return self.rank

    @tp_index.setter
    def tp_index(self, rank: int) -> None:
        self.rank = rank

    @property
    def _subparam_shard_widths(self) -> list[list[int]] | None:
        """What each rank has of each of several parts; None for a dim in one part."""
        widths = [[stop - start for start, stop in part] for part in self.cut.parts]
        return widths if len(widths) > 1 else None

    @_subparam_shard_widths.setter
    def _subparam_shard_widths(self, widths: Sequence[Sequence[int]]) -> None:
        self.cut = _cut_by(self.partition_dim, widths)

    def _freeze_partition_sizes(self, total_size: int) -> tuple[int, ...]:
        """Cut a dim of so many elements as `tp_shard`'s settings say now. The ranks' widths."""
        parts = self._part_sizes(total_size, self.__dict__["_options"])
        self.__dict__["_subparam_sizes"] = parts
        self.cut = _cut_of(self.partition_dim, parts or (total_size,), self.tp_world_size, self.name)
        return tuple(map(self.cut.width, range(self.tp_world_size)))

    unsupported: str | None = None

    def _mark_uc_metadata(self) -> None:
        """Let the parameters say how they are cut (`cut_metadata`)."""
        widths = self._subparam_shard_widths
        for param in (self.weight, self.bias):
            if param is None:
                continue
            shape, dim = list(_whole_shape(param)), self.sharded_dim(param)
            marks: dict[str, Any] = {"target_partition_shape": tuple(param.shape), "replicated": dim is None}
            if dim is not None:
                shape[dim] = self.cut.size
                marks["partition_dim"] = dim
                if widths is None:
                    marks["partition_sizes"] = tuple(map(self.cut.width, range(self.tp_world_size)))
                else:
                    sizes = tuple(map(sum, widths))
                    spec = [*(self.__dict__["_options"].get("shape") or shape)] if param.dim() > 1 else [sizes]
                    spec[dim] = sizes
                    marks |= {"sub_param_sizes": sizes, "sub_param_shape": spec, "sub_param_shard_widths": widths}
            meta = metadata(
                partition_type="row" if self.cut.dim else "column", logical_shape=shape, original_shape=shape,
                output_shape=shape[:1], is_bias=param is self.bias, unsupported_reason=self._why_not_joined(), **marks,
            )  # fmt: skip
            setattr(param, META, meta)

    def _why_not_joined(self) -> str | None:
        return self.unsupported or (
            "its fused weight interleaves or replicates blocks" if self.__dict__["_subparam_sizes"] is None else None
        )

    def _part_sizes(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        """Return the sizes of the parts of the dim; None: it is laid out in another way."""
        shape = options.get("shape") if type(self).several else None
        return _sizes_of(shape, size, options.get("partition_dim", self.partition_dim))

    def config_tp_params(self, param: nn.Parameter) -> None:
        """Give a parameter the functions that programs call on it."""
        param.tensor_model_parallel = self.sharded_dim(param) is not None  # type: ignore[attr-defined]
        param.gather_params, param._tp_partition = self.gather_params, self._tp_partition  # type: ignore[attr-defined]

    def gather_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Let parameters be whole. Collective over the group."""
        self._check_parts()
        super().gather_params(params)

    def shard_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Keep this rank's part of whole parameters."""
        self._check_parts()
        super().shard_params(params)

    def _check_parts(self) -> None:
        if why := self._why_not_joined():
            raise refused("interleaved-parts", self.name, why)

    def _tp_partition(self, params: Iterable[nn.Parameter | None]) -> None:
        """Keep this rank's part of whole parameters."""
        self.shard_params(params)


def _cut_of(dim: int, sizes: Sequence[int], ranks: int, name: str | None) -> DimShards:
    """Cut each part of a dim as `tp_shard`'s settings say now; later changes of them do not matter.

    Raises:
        PlanError: a rank would have none of one of several parts ("tensor-parts"); a RuntimeError, too.
    """
    widths = shard_widths(sizes, ranks, name)
    if len(sizes) > 1 and any(0 in part for part in widths):
        raise refused("empty-part", name, ranks)
    return _cut_by(dim, widths)


def shard_widths(sub_param_sizes: Sequence[int], ranks: int, name: str | None = None) -> list[list[int]]:
    """List what each rank has of each part of a dim."""
    return [get_shard_size_list(size, ranks, name) for size in sub_param_sizes]


def _cut_by(dim: int, widths: Sequence[Sequence[int]]) -> DimShards:
    starts = accumulate(map(sum, widths), initial=0)
    parts = tuple(tuple(pairwise(accumulate(part, initial=start))) for part, start in zip(widths, starts, strict=False))
    return DimShards(dim, sum(map(sum, widths)), parts)


def _whole_shape(param: nn.Parameter) -> torch.Size:
    """Return a parameter's shape, also of one that upstream's stage 3 has emptied."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


class LinearLayer(TensorParallel_Layer):
    """Output features are cut; the input is whole."""

    kinds: tuple[ShardKind, ...] = (ShardKind.COLUMN,)

    def __init__(
        self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, gather_output: bool = False, **options: Any
    ) -> None:  # fmt: skip
        super().__init__(module, mp_group, skip_partition, gather_output=gather_output, **options)


class LinearAllreduce(TensorParallel_Layer):
    """Input features are cut; results are summed."""

    kinds: tuple[ShardKind, ...] = (ShardKind.ROW,)
    partition_dim = 1


class LmHeadLinearAllreduce(LinearAllreduce):
    """The same for an input that every rank has whole: each takes its part of it."""

    kinds = ()
    split_input = True


class SubParamLinearLayer(LinearLayer):
    """A fused weight: each of its parts is cut. `shape=(3, -1)`: three equal ones; `((q, k, v), -1)`: of these sizes."""

    several = True

    def __init__(
        self, module: nn.Module, mp_group: Any = None, shape: Any = None, partition_dim: int = 0, **options: Any
    ) -> None:
        super().__init__(module, mp_group, shape=shape, partition_dim=partition_dim, **options)


class SubParamLinearAllreduce(LinearAllreduce):
    """The same for input features."""

    several = True

    def __init__(
        self, module: nn.Module, mp_group: Any = None, shape: Any = None, partition_dim: int = 1, **options: Any
    ) -> None:
        super().__init__(module, mp_group, shape=shape, partition_dim=partition_dim, **options)


class GateUpPack_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """Gate and up projection in one weight, behind each other."""

    kinds = ()

    def _part_sizes(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        return (size // 2, size // 2)


class fused_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """Query, key and value in one weight, behind each other and of one size.

    Args:
        options: `fused_module` is what the layer is part of; its class says how its weight is laid out.
    """

    kinds = ()
    _THIRDS = ("QWenBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "DecoderLayer", "GPT2Block", "OPTDecoderLayer")

    def __init__(self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, **options: Any) -> None:
        self.__dict__["_fused"] = options.pop("fused_module", None)
        super().__init__(module, mp_group, skip_partition, **options)

    def _part_sizes(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        owner = self.__dict__["_fused"]
        owner = getattr(owner, "module", owner)
        known = owner is None or type(owner).__name__.lstrip("_") in self._THIRDS
        return (size // 3,) * 3 if known and size % 3 == 0 else None

    def shard_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Keep this rank's part, and tell the attention module, which unpacks the output by its `split_size`."""
        super().shard_params(params)
        attention = getattr(self.__dict__["_fused"], "attn", None)
        if attention is not None and hasattr(attention, "split_size"):
            start, stop = self.cut.stretches(self.group.rank)[0]
            attention.split_size = stop - start


class Yuan_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """A layer of Yuan, whose ranks have heads that do not lie behind each other: taken as it is, neither cut here nor joined."""

    kinds = ()
    unsupported = "its ranks have noncontiguous head groups"


class Yuan_LinearAllreduce(LinearAllreduce):  # noqa: N801  upstream's name
    """The same for input features."""

    kinds = ()
    unsupported = Yuan_LinearLayer.unsupported


class conv_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """A `Conv1D` of transformers, whose weight is [in, out]."""

    kinds = ()
    transposed = True


def _sizes_of(shape: Sizes | None, size: int, dim: int) -> tuple[int, ...]:
    extent = None if shape is None or dim >= len(shape) else shape[dim]
    if isinstance(extent, Sequence):
        known = sum(part for part in extent if part != -1)
        return tuple(size - known if part == -1 else part for part in extent)
    equal = shape[0] if shape is not None and dim == 0 and isinstance(extent, int) and len(shape) > 1 else 1
    if not isinstance(equal, int) or equal < 1 or size % equal:
        raise refused("part-sizes", size, shape)
    return (size // equal,) * equal


# ---- layers that ds-parallel has cut


_TOLD = ("name", "gather_output", "mp_group", "tp_world_size", "tp_index")
_GIVEN = ("tensor_model_parallel", "gather_params", "_tp_partition")


def dress(model: nn.Module) -> None:
    """Give the layers of a cut model, and their parameters, the attributes that upstream's have."""
    cut = tensor_parallel_of(model)
    if cut is None:
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    for decision in cut.plan.cut:
        attributes, group = modules[decision.name].__dict__, cut.group
        layer_values = (decision.name, decision.gather_output, group.pg, group.size, group.rank)
        attributes.update({key: value for key, value in zip(_TOLD, layer_values, strict=True) if key not in attributes})
        attributes["_dressed"] = True
    for name, shard in cut.shards.items():
        if name in cut.precut:  # of one of the classes above
            continue
        saved: list[Tensor] = []
        values = (True, partial(_make_whole, cut, name, saved), partial(_cut_again, cut, name, saved))
        vars(shard.param).update(zip(_GIVEN, values, strict=True))


def undress(model: nn.Module) -> None:
    """Take the attributes back."""
    for module in model.modules():
        attributes = vars(module)
        for key in _TOLD if attributes.pop("_dressed", False) else ():
            attributes.pop(key, None)
        for param in module.parameters(recurse=False):
            if isinstance(vars(param).get("gather_params"), partial):
                for key in _GIVEN:
                    vars(param).pop(key, None)


@torch.no_grad()
def _make_whole(cut: TensorParallelModel, name: str, saved: list[Tensor], params: Iterable[nn.Parameter]) -> None:
    if not saved:
        for param in params:
            saved.append(param.data)
            param.data = cut.whole(name)


@torch.no_grad()
def _cut_again(cut: TensorParallelModel, name: str, saved: list[Tensor], params: Iterable[nn.Parameter]) -> None:
    shard = cut.shards[name]
    for param in params:
        start, stop = shard.cut.parts[shard.part][cut.group.rank]
        local = param.data.narrow(shard.cut.dim, start, stop - start)
        if saved:
            param.data = saved.pop().copy_(local)
        else:
            param.data = local.contiguous()


def GatherReplacedLayerParams(  # noqa: N802  upstream's name
    params: nn.Parameter | Iterable[nn.Parameter], module: nn.Module, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Gather `params` of a tensor-parallel model inside the context, as full tensors. Collective over its ranks."""
    selected = [params] if isinstance(params, nn.Parameter) else list(params)
    if not enabled:
        return nullcontext()
    layers = [layer for layer in module.modules() if type.__instancecheck__(TensorParallel_Layer, layer)]
    return _Gathered(selected, layers) if layers else unsharded_params(selected, tensor_parallel_of(module))  # type: ignore[arg-type]


class _Gathered(AbstractContextManager[None]):
    def __init__(self, params: list[nn.Parameter], layers: list[TensorParallel_Layer]) -> None:
        self._owners: list[tuple[TensorParallel_Layer, nn.Parameter]] = [
            (layer, param)
            for layer in layers
            for param in layer.parameters(recurse=False)
            if any(param is p for p in params)
        ]

    def __enter__(self) -> None:
        for layer, param in self._owners:
            layer.gather_params([param])

    def __exit__(self, *error: object) -> None:
        for layer, param in self._owners:
            layer._tp_partition([param])


def collect_autotp_universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Collect the metadata of universal checkpoints: how the parts that ranks have of each parameter join."""
    rows: list[str] = []
    whole: list[str] = []
    vocabulary: dict[str, int] = {}  # with its tokens
    several: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    cut = tensor_parallel_of(model)
    shards: dict[str, Any] = {} if cut is None else dict(cut.shards)
    owners = dict(model.named_modules())
    for full, param in model.named_parameters():
        path, _, name = full.rpartition(".")
        module, pattern = owners[path], rf"^{re.escape(full)}$"
        dim, said = _cut_dim(module, param, full, shards), conversion_of(param) or {}
        if why := said.get("unsupported_reason"):
            unknown[pattern] = why
        elif dim is None:
            whole.append(pattern)
        elif said.get("sub_param_shard_widths"):
            several.append({"patterns": [pattern], "shape": [*said["sub_param_shape"]], "partition_dim": dim})
            widths[pattern] = [[*part] for part in said["sub_param_shard_widths"]]
        elif dim == 1:
            rows.append(pattern)
        elif isinstance(module, nn.Embedding) or (name == "weight" and getattr(module, "gather_output", False)):
            vocabulary[pattern] = shards[full].shape[0] if full in shards else len(param)
    sizes = {"original_vocab_size": max(vocabulary.values())} if vocabulary else {}
    return {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": rows,
        "tp_replicated_parameter_patterns": whole,
        "vocabulary_parameter_patterns": list(vocabulary),
        "parameter_with_sub_params": several,
        "sub_param_shard_widths": widths,
        "autotp_unsupported_parameter_patterns": unknown,
        **sizes,
    }


def _cut_dim(module: nn.Module, param: nn.Parameter, full: str, shards: dict[str, Any]) -> int | None:
    if type.__instancecheck__(TensorParallel_Layer, module):
        layer: TensorParallel_Layer = module  # type: ignore[assignment]
        return layer.sharded_dim(param)
    if full in shards:
        return int(shards[full].cut.dim)
    return None

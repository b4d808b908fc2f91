"""`deepspeed.module_inject.layers`: layers that are cut over tensor-parallel ranks, by upstream's classes.

ds-parallel cuts a model in place, and `isinstance` says of its layers what upstream's classes would be. Programs that wrap a
layer themselves get one of these: this rank's part of the weight, computed with the same collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed._ours.raising import also
from deepspeed._ours.tp_shards import get_shard_size_list
from deepspeed._surface.constants import CHECKPOINT
from ds_comm import Group, as_group
from ds_comm.differentiable import copy, gather, reduce, split
from ds_comm.groups import self_group
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor import ShardKind, TensorParallelModel, kind_of, tensor_parallel_of, unsharded_params

__all__ = [
    "ColumnParallel", "GateUpPack_LinearLayer", "GatherReplacedLayerParams",
    "LinearAllreduce", "LinearLayer", "LmHeadLinearAllreduce", "RowParallel", "SubParamLinearAllreduce",
    "SubParamLinearLayer", "TensorParallel_Layer", "collect_autotp_universal_checkpoint_info", "conv_LinearLayer",
    "dress", "fused_LinearLayer", "is_autotp_training_mode", "set_autotp_mode", "undress",
]  # fmt: skip

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


class TensorParallel_Layer(nn.Module, metaclass=_AlsoCut):  # noqa: N801  upstream's name
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

    def __init__(self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, **options: Any) -> None:
        super().__init__()
        self.mp_group = mp_group
        self.group: Group = self_group("tensor") if mp_group is None else as_group(mp_group)
        self.tp_world_size, self.tp_index = self.group.size, self.group.rank
        self.name: str | None = options.get("name")
        self.gather_output = bool(options.get("gather_output", False))
        self.partition_dim = options.get("partition_dim", type(self).partition_dim)
        self.weight: nn.Parameter = module.weight  # type: ignore[assignment]
        self.bias: nn.Parameter | None = getattr(module, "bias", None)
        if self.transposed:
            self.weight.data = self.weight.data.t().contiguous()
        self._orig_weight_shape = tuple(self.weight.shape)
        whole = self.weight.shape[self.partition_dim] * (self.tp_world_size if skip_partition else 1)
        self._subparam_sizes: tuple[int, ...] | None = self._parts(whole, options)
        self._freeze_partition_sizes(whole)
        if not skip_partition:
            self._tp_partition([self.weight, self.bias])
        for param in (self.weight, self.bias):
            if param is not None:
                self.config_tp_params(param)

    def _parts(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        del options
        return (size,)

    def _freeze_partition_sizes(self, size: int) -> None:
        """Settle what each rank holds of every part: later changes of `tp_shard`'s settings do not matter."""
        parts = (size,) if self._subparam_sizes is None else self._subparam_sizes
        self._subparam_shard_widths = [get_shard_size_list(part, self.tp_world_size, self.name) for part in parts]
        if (
            self._subparam_sizes is not None
            and len(parts) > 1
            and any(0 in widths for widths in self._subparam_shard_widths)
        ):
            raise also(PlanError, RuntimeError)(
                f"{self.name}: {self.tp_world_size} ranks leave one with an empty query/key/value shard",
                code="tensor-parts",
                fix="Use fewer tensor-parallel ranks.",
            )

    def config_tp_params(self, param: nn.Parameter) -> None:
        """Give a parameter the functions that programs call on it."""
        param.tensor_model_parallel = param is self.weight or self._column  # type: ignore[attr-defined]
        param.gather_params, param._tp_partition = self.gather_params, self._tp_partition  # type: ignore[attr-defined]

    @property
    def _column(self) -> bool:
        return self.partition_dim == 0

    def _dim(self, param: Tensor) -> int | None:
        """Return the dim along which a parameter is sharded; None where the parameter is replicated."""
        return self.partition_dim if param.dim() > 1 else 0 if self._column else None

    def _cuttable(self) -> None:
        if self._subparam_sizes is None:
            raise UnsupportedError(
                f"{self.name}: a fused weight that interleaves or replicates blocks cannot be put together by parts",
                code="tensor-parts",
                fix="Let the engine cut the model: `tensor_parallel` of the configuration knows such layers.",
            )

    @torch.no_grad()
    def gather_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Let parameters be whole. Collective over the group."""
        self._cuttable()
        widths = [sum(of_rank) for of_rank in zip(*self._subparam_shard_widths, strict=True)]
        for param in params:
            dim = None if param is None else self._dim(param)
            if param is None or dim is None or param.shape[dim] == sum(widths):
                continue
            by_rank = gather(param.data, self.group, dim, widths).split(widths, dim)
            parts = [
                piece.split([part[rank] for part in self._subparam_shard_widths], dim)
                for rank, piece in enumerate(by_rank)
            ]
            param.data = torch.cat([torch.cat(part, dim) for part in zip(*parts, strict=True)], dim)

    @torch.no_grad()
    def _tp_partition(self, params: Iterable[nn.Parameter | None]) -> None:
        """Keep this rank's part of whole parameters."""
        self._cuttable()
        for param in params:
            dim = None if param is None else self._dim(param)
            if param is None or dim is None:
                continue
            shards, start = [], 0
            for widths in self._subparam_shard_widths:
                begin, end = list(pairwise(accumulate(widths, initial=start)))[self.tp_index]
                shards.append(param.data.narrow(dim, begin, end - begin))
                start += sum(widths)
            param.data = torch.cat(shards, dim).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]: this rank's columns, or all columns where outputs are all-reduced or gathered."""
        if self._column:
            out = functional.linear(copy(x, self.group), self.weight, self.bias)
            return self._together(out) if self.gather_output else out
        out = reduce(functional.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias

    def _together(self, out: Tensor) -> Tensor:
        sizes = [widths[self.tp_index] for widths in self._subparam_shard_widths]
        pieces = out.split(sizes, -1)
        gathered = [
            gather(piece, self.group, -1, widths)
            for piece, widths in zip(pieces, self._subparam_shard_widths, strict=True)
        ]
        return torch.cat(gathered, -1)

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"weight={shape}, bias={self.bias is not None}, rank {self.tp_index} of {self.tp_world_size}"


class LinearLayer(TensorParallel_Layer):
    """Output features are cut; the input is whole."""

    kinds: tuple[ShardKind, ...] = (ShardKind.COLUMN,)


class LinearAllreduce(TensorParallel_Layer):
    """Input features are cut; results are summed."""

    kinds: tuple[ShardKind, ...] = (ShardKind.ROW,)
    partition_dim = 1


class LmHeadLinearAllreduce(LinearAllreduce):
    """The same for an input that every rank has whole: each takes its part of it."""

    kinds = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(split(x, self.group, -1, self._subparam_shard_widths[0]))


class SubParamLinearLayer(LinearLayer):
    """A fused weight: each of its parts is cut. `shape=(3, -1)`: three equal ones; `((q, k, v), -1)`: of these sizes."""

    kinds: tuple[ShardKind, ...] = (ShardKind.COLUMN,)
    several = True

    def _parts(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        return _part_sizes(options.get("shape"), size, self.partition_dim)


class SubParamLinearAllreduce(LinearAllreduce):
    """The same for input features."""

    kinds: tuple[ShardKind, ...] = (ShardKind.ROW,)
    several = True

    def _parts(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        return _part_sizes(options.get("shape"), size, self.partition_dim)


class GateUpPack_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """Gate and up projection in one weight, behind each other."""

    kinds = ()

    def _parts(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        return (size // 2, size // 2)


class fused_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """Query, key and value in one weight, behind each other and of one size.

    Args:
        fused_module: What the layer is part of; its class says how its weight is laid out.
    """

    kinds = ()
    _THIRDS = ("QWenBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "DecoderLayer", "GPT2Block", "OPTDecoderLayer")

    def __init__(self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, **options: Any) -> None:
        self.__dict__["_fused"] = options.pop("fused_module", None)
        super().__init__(module, mp_group, skip_partition, **options)

    def _parts(self, size: int, options: dict[str, Any]) -> tuple[int, ...] | None:
        owner = self.__dict__["_fused"]
        owner = getattr(owner, "module", owner)
        known = owner is None or type(owner).__name__.lstrip("_") in self._THIRDS
        return (size // 3,) * 3 if known and size % 3 == 0 else None

    def _freeze_partition_sizes(self, size: int) -> None:
        if self._subparam_sizes is not None:
            self._subparam_sizes = (size // 3,) * 3
        super()._freeze_partition_sizes(size)

    def _tp_partition(self, params: Iterable[nn.Parameter | None]) -> None:
        super()._tp_partition(params)
        attention = getattr(self.__dict__["_fused"], "attn", None)
        if attention is not None and hasattr(attention, "split_size"):  # it unpacks the output by this
            attention.split_size = self._subparam_shard_widths[0][self.tp_index]


class conv_LinearLayer(LinearLayer):  # noqa: N801  upstream's name
    """A `Conv1D` of transformers, whose weight is [in, out]."""

    kinds = ()
    transposed = True


def _part_sizes(shape: Sizes | None, size: int, dim: int) -> tuple[int, ...]:
    extent = None if shape is None or dim >= len(shape) else shape[dim]
    if isinstance(extent, Sequence):
        known = sum(part for part in extent if part != -1)
        return tuple(size - known if part == -1 else part for part in extent)
    equal = shape[0] if shape is not None and dim == 0 and isinstance(extent, int) and len(shape) > 1 else 1
    if not isinstance(equal, int) or equal < 1 or size % equal:
        raise PlanError(
            f"a dim of {size} in the parts of shape {shape}", code="tensor-parts", fix="Give sizes that add up."
        )
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
    """Collect the metadata of universal checkpoints: the parameters sharded by rows, and the replicated parameters."""
    rows: list[str] = []
    whole: list[str] = []
    vocabulary: dict[str, int] = {}  # with its tokens
    cut = tensor_parallel_of(model)
    shards: dict[str, Any] = {} if cut is None else dict(cut.shards)
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            dim = _cut_dim(module, param, full, shards)
            pattern = rf"^{re.escape(full)}$"
            if dim is None:
                whole.append(pattern)
            elif dim == 1:
                rows.append(pattern)
            elif isinstance(module, nn.Embedding) or (name == "weight" and getattr(module, "gather_output", False)):
                vocabulary[pattern] = shards[full].shape[0] if full in shards else len(param)
    sizes = {str(CHECKPOINT["ORIGINAL_VOCAB_SIZE"]): max(vocabulary.values())} if vocabulary else {}
    return {
        str(CHECKPOINT["UNIVERSAL_CHECKPOINT_VERSION_KEY"]): CHECKPOINT["UNIVERSAL_CHECKPOINT_VERSION_VALUE"],
        str(CHECKPOINT["PARAMETER_WITH_ROW_PARALLELISM_PATTERNS"]): rows,
        str(CHECKPOINT["TP_REPLICATED_PARAMETER_PATTERNS"]): whole,
        str(CHECKPOINT["VOCABULARY_PARAMETER_PATTERNS"]): list(vocabulary),
        **sizes,
    }


def _cut_dim(module: nn.Module, param: nn.Parameter, full: str, shards: dict[str, Any]) -> int | None:
    if type.__instancecheck__(TensorParallel_Layer, module):
        find: Callable[[Tensor], int | None] = module._dim  # type: ignore[assignment]
        return find(param)
    if full in shards:
        return int(shards[full].cut.dim)
    return None

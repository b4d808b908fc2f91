"""Cut a model as a plan says, and put its parts together again.

plan = make_tensor_plan(facts_of(model), TensorOptions(degree=4))
cut = parallelize_model(model, plan, mesh["tensor"])     # weights become this rank's parts; the model's code stays
...                                              # train
cut.state_dict()                                 # the model's own names, whole tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm import Box, Group, ParamSharding, ReductionGroup, param_sharding, set_param_sharding
from ds_comm.ddp import mark_unlike
from ds_comm.differentiable import gather
from ds_comm.fsdp import watch_fsdp
from ds_comm.part_gradients import guard_gradients
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor.dim_shards import DimShards
from ds_parallel.tensor.half_batches import HalfBatches, Turns, run_layers_in_halves
from ds_parallel.tensor.head_updates import InputCheck, follow_heads, sum_over
from ds_parallel.tensor.layer_rules import ShardKind
from ds_parallel.tensor.parallel_layers import CopyToTensorRegion, LayerShard, cut_class, part_names
from ds_parallel.tensor.parallel_losses import causal_loss
from ds_parallel.tensor.partial_gradients import PartialGradients, ReplicaGradientCheck
from ds_parallel.tensor.sharded_linear import ShardedLinear
from ds_parallel.tensor.tp_plan import Decision, TensorPlan

__all__ = ["Held", "TensorParallelModel", "parallelize_model", "tensor_parallel_of", "unsharded_params"]

_MARK = "_ds_cut_model"
_ADVICE = (
    "To clip, call ds_parallel.tensor.clip_grad_norm_(model, max_norm), which counts every part once. For an optimizer of whole tensors (LAMB, Muon, "
    "Adafactor, LBFGS) cut the model with ds_parallel.tensor.dtensor_params.parallelize_module."
)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter that is one part of a logical tensor.

    Attributes:
        param: On this rank.
        name: Of the logical tensor: the parameter's name in the uncut model.
        shape: Of the logical tensor.
        cut: How it is cut.
        part: Which of the cut's parts this is.
    """

    param: nn.Parameter
    name: str
    shape: tuple[int, ...]
    cut: DimShards
    part: int

    def box(self, rank: int) -> Box:
        """Return the box of the logical tensor that `rank` has."""
        start, stop = self.cut.parts[self.part][rank]
        dim = self.cut.dim
        offset, size = [0] * len(self.shape), list(self.shape)
        offset[dim], size[dim] = start, stop - start
        return Box(tuple(offset), tuple(size))


class TensorParallelModel:
    """What `parallelize_model` did.

    Attributes:
        model: The model, cut in place.
        plan: How.
        group: The tensor-parallel ranks.
        shards: Its parameters that are parts, by their names in the model. One that is one part is the parameter it was.
        precut: Names of those of `shards` that the program had cut before: a `ShardedLinear` in its model.
        replaced: Parameters in several parts, and what took their place: for optimizers that were made before.
        turns: Of the two halves of a layer, where layers run in halves.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, group: Group) -> None:
        self.model, self.plan, self.group = model, plan, group
        self.turns = Turns()
        self.shards: dict[str, Held] = {}
        self.precut: set[str] = set()
        self.replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._were: list[_Was] = []
        self._param_shardings: dict[nn.Parameter, ParamSharding] = {}
        self._handles: list[RemovableHandle] = []
        self._part_handles: list[RemovableHandle] = []  # on parameters and their gradients
        self._inputs: InputCheck | None = None
        self._loss: Any = None
        self._partials, self._replicas = PartialGradients(group), ReplicaGradientCheck(group)

    def check_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the first batch over the ranks, as the model's first forward does.

        For callers whose model is captured by a compiler.

        Raises:
            PlanError: the ranks have different batches ("tensor-inputs").
        """
        inputs, self._inputs = self._inputs, None
        if inputs is not None:
            inputs(self.model, args, dict(kwargs))

    def use_cut_logits(self) -> None:
        """Let the model compute its loss from logits cut by vocabulary, for a plan with `gather_logits=False`.

        Raises:
            UnsupportedError: the model has no `loss_function`, or its last layer is not cut by vocabulary ("tensor-vocabulary").
        """
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        name = next((name for name, module in self.model.named_modules() if module is head), None)
        decision = next((d for d in self.plan.decisions if d.name == name and d.kind is ShardKind.COLUMN), None)
        if decision is None or decision.gather_output or not hasattr(self.model, "loss_function"):
            found = "it has no loss_function" if decision else f"its last layer ({name}) is whole on every rank"
            raise UnsupportedError(
                f"vocab_parallel_lm_head: the loss of {type(self.model).__name__} cannot be computed from cut logits: {found}",
                code="tensor-vocabulary",
                fix="Leave the key out; logits are then put together on every rank.",
            )
        self._loss = self.model.loss_function
        widths = [decision.cuts["weight"].width(rank) for rank in range(self.group.size)]
        self.model.loss_function = causal_loss(self.group, widths)  # type: ignore[assignment]  # transformers' setter

    def assign(self, data: Group | None = None, divisor: int = 1) -> None:
        """Tell ds-zero and checkpoints what every parameter of the model is.

        What was said of them before (by stages: names in the unsplit model, gradients summed over stages) stays true.

        Args:
            data: The ranks with this rank's part of the model, over which gradients are summed and state is cut; None says
                nothing of families: only names, shapes and boxes.
            divisor: What such a sum is divided by: data-parallel (times sequence-parallel) ranks.
        """
        rank, degree = self.group.rank, self.group.size
        families: dict[tuple[ReductionGroup | None, int], ReductionGroup] = {}

        def family(was: ReductionGroup | None, copies: int) -> ReductionGroup | None:
            if data is None:
                return was
            if (was, copies) not in families:
                title = f"tensor-{copies}" if copies > 1 else "tensor"
                families[was, copies] = (
                    ReductionGroup(title, data, divisor, copies=copies)
                    if was is None
                    else replace(was, name=f"{was.name}, {title}", copies=was.copies * copies)
                )
            return families[was, copies]

        for name, param in self.model.named_parameters():  # a tied one by its first name, as without a cut
            shard = self.shards.get(name)
            origin = param if shard is None else self._origin(shard)
            was = self._param_shardings.setdefault(origin, param_sharding(origin))
            if shard is None:
                set_param_sharding(param, replace(was, family=family(was.family, degree)))
            else:
                copies = len(shard.cut.sharers(shard.part, rank))
                logical = was.name or shard.name
                set_param_sharding(
                    param, ParamSharding(family(was.family, copies), logical, shard.shape, shard.box(rank))
                )

    def whole(self, name: str) -> Tensor:
        """Gather the shards of parameter `name` into its logical tensor. Collective.

        Returns:
            The logical shape; zeros outside the part that this parameter covers.
        """
        shard = self.shards[name]
        out = torch.zeros(shard.shape, dtype=shard.param.dtype, device=shard.param.device)
        self._fill(out, shard)
        return out

    def state_dict(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the unsplit model, with full tensors under their original names. Collective.

        Every rank of the group calls this method.

        Args:
            keep: Whether this rank gets the result; other ranks get an empty dict.
        Cost: the largest tensor twice besides the result.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            shard = self.shards.get(name)
            if shard is None:
                if keep:
                    state[name] = tensor.detach()
                continue
            out = state.get(shard.name)
            if out is None:
                out = torch.empty(shard.shape, dtype=tensor.dtype, device=tensor.device)
                if keep:
                    state[shard.name] = out
            self._fill(out, shard)
        return state

    def _fill(self, out: Tensor, shard: Held) -> None:
        dim, stretches = shard.cut.dim, shard.cut.parts[shard.part]
        widths = [stop - start for start, stop in stretches]
        with torch.no_grad():
            pieces = gather(shard.param.detach(), self.group, dim, widths).split(widths, dim)
            for (start, stop), piece in zip(stretches, pieces, strict=True):
                out.narrow(dim, start, stop - start).copy_(piece)

    def release_parts(self) -> None:
        """Take back what watches parameters and gradients: the parameters become DTensors, and the model no longer is one of this class."""
        while self._part_handles:
            self._part_handles.pop().remove()
        self._replicas.remove()
        self.model.__dict__.pop(_MARK, None)

    def close(self) -> None:
        """Take back hooks; the model stays cut."""
        while self._part_handles:
            self._part_handles.pop().remove()
        while self._handles:
            self._handles.pop().remove()
        self._replicas.remove()
        self.turns.close()

    def undo(self) -> None:
        """Give the model whole weights and its own layers back. Collective: every rank of the group calls it."""
        self.close()
        if self._loss is not None:
            self.model.loss_function = self._loss
        whole: dict[int, Tensor] = {}
        shards = [shard for name, shard in self.shards.items() if name not in self.precut]
        for shard in shards:
            key = id(self._origin(shard))
            if key not in whole:
                whole[key] = shard.param.new_empty(shard.shape)
            self._fill(whole[key], shard)
        origins = {id(self._origin(shard)): self._origin(shard) for shard in shards}
        for key, origin in origins.items():
            origin.data, origin.grad = whole[key], None
            self._param_shardings.setdefault(origin, ParamSharding())
            mark_unlike([origin], ())
        for param, said in self._param_shardings.items():
            set_param_sharding(param, said)
        self._param_shardings.clear()
        for was in reversed(self._were):
            was.restore()
        self.shards.clear()
        self.precut.clear()
        self._were.clear()
        self.model.__dict__.pop(_MARK, None)

    def _origin(self, shard: Held) -> nn.Parameter:
        return next((old for old, parts in self.replaced.items() if any(p is shard.param for p in parts)), shard.param)


@dataclass(frozen=True, slots=True, eq=False)
class _Was:
    """What a module was before it was cut."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    params: Mapping[str, nn.Parameter | None]

    @classmethod
    def note(cls, module: nn.Module) -> _Was:
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        return cls(module, type(module), attributes, dict(module._parameters))

    def restore(self) -> None:
        self.module.__dict__.pop("_ds_part", None)
        self.module.__dict__.pop("_ds_halves", None)
        self.module.__class__ = self.kind
        self.module.__dict__.update(self.attributes)
        self.module._parameters.clear()
        self.module._parameters.update(self.params)


def parallelize_model(
    model: nn.Module,
    plan: TensorPlan,
    group: Group,
    *,
    take: Callable[[nn.Parameter], None] = lambda param: None,
) -> TensorParallelModel:
    """Cut `model` in place: each rank keeps its part of every weight, and frees the rest. Parameters may be on meta.

    Every rank holds the whole model with equal values, or its shapes; ranks decide alike, nothing is communicated. A `ShardedLinear` over the
    same ranks is part of the cut model as it is.

    Args:
        take: Called with each parameter before it is cut, on every rank in one order: afterwards the parameter is whole, and nobody's
            but the model's (`ds_zero.Init` leaves shards).

    Raises:
        PlanError: the plan is for another number of ranks, or a tied parameter is cut in two ways ("tensor-tied").
        UnsupportedError: a layer cannot be cut ("tensor-layer"). The model is then as it was.
    Cost: one copy of this rank's part, layer by layer.
    """
    if plan.degree != group.size:
        raise PlanError(
            f"the plan is for {plan.degree} tensor-parallel ranks, the group has {group.size}",
            code="tensor-degree",
            fix="Make the plan with the degree of the group.",
        )
    result = TensorParallelModel(model, plan, group)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_tied(model, plan)
    classes = {d.name: _class_of(modules[d.name], d) for d in plan.cut}  # all of them before anything changes
    fans: dict[str, CopyToTensorRegion] = {}
    sliced: set[int] = set()
    for decision in plan.cut:
        module = modules[decision.name]
        first = not isinstance(getattr(module, "_ds_part", None), LayerShard)  # a module may have two names
        if first:
            result._were.append(_Was.note(module))
        for name in decision.cuts:
            _replace(result, decision, module, name, sliced, take)
        if first:
            cut = decision.cuts.get("weight") or decision.cuts["gate_up_proj"]
            part = _layer_shard(result, decision, cut, fans)
            module.__dict__["_ds_part"] = part
            module.__class__ = classes[decision.name]
            _resize(module, decision, cut, group.rank)
    if plan.halves:
        layers = {name: modules[name] for name in plan.halves}
        result._were += [_Was.note(layer) for layer in layers.values()]
        run_layers_in_halves(layers, HalfBatches(result.turns, plan.head_arguments))
    _note_precut(result, modules)
    _note_holders(result)
    _mark_parts(result)
    result._were += [_Was.note(modules[name]) for name in plan.heads]
    result._handles += follow_heads(plan, group.rank, modules)
    _sum_gradients(result, modules)
    if group.size > 1:
        parts = {id(held.param): held.param for held in result.shards.values()}
        result._part_handles += guard_gradients(parts.values(), _ADVICE, whole=False)
        result._part_handles += watch_fsdp(model)
        result._inputs = InputCheck(group)
        result._handles.append(result._inputs.watch(model))
        result._part_handles.append(
            result._replicas.watch_first(model, [shard.param for shard in result.shards.values()])
        )
    model.__dict__[_MARK] = result
    return result


def _note_precut(result: TensorParallelModel, modules: Mapping[str, nn.Module]) -> None:
    """Register the parts of layers that the program has cut over the same ranks."""
    for name, module in modules.items():
        if not isinstance(module, ShardedLinear) or module.group.ranks != result.group.ranks:
            continue
        if len(module.cut.parts) > 1:
            raise UnsupportedError(
                f"{name} was cut before, in {len(module.cut.parts)} parts of one weight",
                code="tensor-layer",
                fix="Leave the layer whole, and name its parts in partition_config, or cut a layer for each.",
            )
        for key, param in module.named_parameters(recurse=False):
            dim = module.sharded_dim(param)
            if dim is not None:
                shape = (*param.shape[:dim], module.cut.size, *param.shape[dim + 1 :])
                cut = replace(module.cut, dim=dim)
                result.shards[f"{name}.{key}"] = Held(param, f"{name}.{key}", shape, cut, 0)
                result.precut.add(f"{name}.{key}")


def _layer_shard(
    result: TensorParallelModel, decision: Decision, cut: DimShards, fans: dict[str, CopyToTensorRegion]
) -> LayerShard:
    """Return what a layer knows of itself; layers below one module share the copy of their input."""
    plan, group = result.plan, result.group
    turns = result.turns if any(decision.name.startswith(f"{layer}.") for layer in plan.halves) else None
    made = CopyToTensorRegion(group, plan.late_gradients, turns)
    fan = fans.setdefault(decision.name.rpartition(".")[0], made)
    fan.has_end = fan.has_end or decision.kind is ShardKind.ROW
    return LayerShard(
        group,
        cut,
        fan,
        result._partials,
        decision.layer.transposed,
        decision.gather_output,
        decision.split_input,
        turns,
    )


def _mark_parts(result: TensorParallelModel) -> None:
    """Say that tensor-parallel peers hold other parts, whoever asks before there are families: DDP would copy over them."""
    group = result.group
    for held in result.shards.values():
        same = held.cut.sharers(held.part, group.rank)
        mark_unlike([held.param], (rank for place, rank in enumerate(group.ranks) if place not in same))


def tensor_parallel_of(model: nn.Module) -> TensorParallelModel | None:
    """Return the tensor-parallel form of a model, or of the model that contains it; None if unsplit."""
    parallel_model = next((vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)), None)
    return parallel_model if isinstance(parallel_model, TensorParallelModel) else None


@contextmanager
def unsharded_params(params: Iterable[nn.Parameter], cut: TensorParallelModel | None) -> Iterator[None]:
    """Gather the full tensors of the sharded `params` inside the context, read-only. Collective over the group.

    A part of a fused weight is gathered from all ranks for that part only. Parameters that ZeRO has freed must be
    gathered outside of this context.
    """
    local_data: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for param in params:
            shard = next((h for h in (cut.shards.values() if cut is not None else ()) if h.param is param), None)
            if cut is None or shard is None:
                continue
            whole = param.new_empty(shard.shape)
            cut._fill(whole, shard)
            stretches = shard.cut.parts[shard.part]
            first, last = min(start for start, _ in stretches), max(stop for _, stop in stretches)
            local_data.append((param, param.data))
            param.data = whole.narrow(shard.cut.dim, first, last - first).contiguous()
        yield
    finally:
        for param, data in local_data:
            param.data = data


def _class_of(module: nn.Module, decision: Decision) -> type[nn.Module]:
    names = {name: part_names(name, cut) for name, cut in decision.cuts.items()}
    dims = {name: cut.dim for name, cut in decision.cuts.items()}
    if getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
        raise PlanError(
            f"{decision.name}: an embedding with max_norm or sparse gradients cannot be cut",
            code="tensor-parts",
            fix="Skip this layer.",
        )
    return cut_class(type(module), decision.kind, names, dims)


def _replace(
    result: TensorParallelModel,
    decision: Decision,
    module: nn.Module,
    name: str,
    sliced: set[int],
    take: Callable[[nn.Parameter], None],
) -> None:
    """Put this rank's parts in the place of parameter `name`. One part: the parameter stays who it is, wherever it is tied."""
    cut, full = decision.cuts[name], f"{decision.name}.{name}"
    shape = decision.layer.shapes.get(name)
    if shape is None:
        return
    names = part_names(name, cut)
    old = next((old for old, parts in result.replaced.items() if parts[0] is module._parameters.get(names[0])), None)
    if old is None:
        old = module._parameters.get(name)
    if old is None:
        return
    if id(old) not in sliced:
        sliced.add(id(old))
        take(old)
        pieces = [
            old.detach().narrow(cut.dim, start, stop - start).clone(memory_format=torch.contiguous_format)
            for start, stop in cut.stretches(result.group.rank)
        ]
        if len(names) == 1:
            old.data = pieces[0]
        else:
            result.replaced[old] = [nn.Parameter(piece, requires_grad=old.requires_grad) for piece in pieces]
            old.data = old.new_empty(0)
        old.grad = None
    params = result.replaced.get(old, [old])
    if len(names) > 1:
        module._parameters.pop(name, None)
        for part_name, param in zip(names, params, strict=True):
            module.register_parameter(part_name, param)
    for index, (part_name, param) in enumerate(zip(names, params, strict=True)):
        result.shards[f"{decision.name}.{part_name}"] = Held(param, full, shape, cut, index)


def _resize(module: nn.Module, decision: Decision, cut: DimShards, rank: int) -> None:
    """Set the sizes that a module stores as attributes to those of this rank's part."""
    width, attributes = cut.width(rank), module.__dict__
    column = decision.kind is ShardKind.COLUMN
    keys = {
        ShardKind.COLUMN: ("out_features", "nf"),
        ShardKind.ROW: ("in_features", "nx"),
        ShardKind.VOCABULARY: ("num_embeddings",),
        ShardKind.FEATURES: ("embedding_dim",),
        ShardKind.EXPERTS: (),
    }[decision.kind]
    for key in keys:
        if key in attributes and not (column and decision.gather_output):
            attributes[key] = width
    if decision.kind is ShardKind.EXPERTS:
        inner = cut.size // 2
        for key, value in list(attributes.items()):
            if key in ("intermediate_dim", "intermediate_size", "ffn_dim", "expert_dim") and value == inner:
                attributes[key] = decision.cuts["down_proj"].width(rank)
    if decision.kind is ShardKind.VOCABULARY and attributes.get("padding_idx") is not None:
        start, stop = cut.parts[0][rank]
        attributes["padding_idx"] = (
            attributes["padding_idx"] - start if start <= attributes["padding_idx"] < stop else None
        )


def _check_tied(model: nn.Module, plan: TensorPlan) -> None:
    cuts: dict[str, DimShards] = {f"{d.name}.{key}": cut for d in plan.cut for key, cut in d.cuts.items()}
    places: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(param), []).append(name)
    for names in places.values():
        tied_cuts = {name: cuts.get(name) for name in names}
        if len(set(tied_cuts.values())) == 1:
            continue
        loose = [name for name, cut in tied_cuts.items() if cut is None and not _holder(name, tied_cuts)]
        if loose or len({cut for cut in tied_cuts.values() if cut is not None}) > 1:
            summary = ", ".join(
                f"{name}: {'whole' if cut is None else f'dim {cut.dim}'}" for name, cut in tied_cuts.items()
            )
            raise PlanError(
                f"a tied parameter would be cut in several ways ({summary})",
                code="tensor-tied",
                fix="Give all layers that share it rules that cut it alike, or skip them all.",
            )


def _holder(name: str, cuts: Mapping[str, DimShards | None]) -> bool:
    """Whether `name` only holds a bias for a layer below it (`cls.predictions.bias` for `cls.predictions.decoder.bias`)."""
    above, _, key = name.rpartition(".")
    return key == "bias" and any(
        cut is not None and other.startswith(f"{above}.") and other != name for other, cut in cuts.items()
    )


def _note_holders(result: TensorParallelModel) -> None:
    """Register the shard also under the names of modules that only reference another module's parameter."""
    first = {id(shard.param): shard for shard in result.shards.values()}
    for name, param in result.model.named_parameters(remove_duplicate=False):
        shard = first.get(id(param))
        if shard is not None and name not in result.shards:
            result.shards[name] = Held(shard.param, name, shard.shape, shard.cut, shard.part)


def _sum_gradients(result: TensorParallelModel, modules: Mapping[str, nn.Module]) -> None:
    """Register all-reduces for gradients of parameters that several ranks replicate but use differently."""
    group = result.group
    summed = [
        param
        for decision in result.plan.decisions
        if decision.sum_gradient
        for param in modules[decision.name].parameters(recurse=False)
    ]
    for param in summed:
        result._part_handles += sum_over(param, group)
    result._partials.know([shard.param for shard in result.shards.values()], summed)
    for shard in {id(shard.param): shard for shard in result.shards.values()}.values():
        stretches = shard.cut.parts[shard.part]
        distinct = sorted(set(stretches))
        if len(distinct) < group.size:
            result._part_handles += sum_over(shard.param, group, distinct.index(stretches[group.rank]), len(distinct))

"""`PipelineModule`: a list of layers, cut into stages, of which a rank builds its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
from ds_config.errors import PlanError, UnsupportedError
from ds_pipe._torch import tree_leaves, tree_map
from ds_pipe.building import annotate_params, broadcast_ties, tie
from ds_pipe.layer_specs import LayerSpec, TiedLayerSpec, class_name, parameters_of, shared_parameter
from ds_pipe.partition import balanced, matching, uniform
from ds_pipe.profile import profile_layers
from ds_pipe.programs import PipelineSpec, placement_of
from ds_pipe.recompute import Backwards, checkpointed
from ds_pipe.staged import StagedModel
from ds_pipe.topology import PipelineGroups, PipelineParallelGrid, ProcessTopology, plain_topology

__all__ = ["PipelineModule"]


class PipelineModule(nn.Module):
    """A model given as a list of layers, of which this rank holds its stages.

    Layers are LayerSpec, TiedLayerSpec, modules, or functions of one value; each is called with what the one before it returned.
    Modules are named by their place in the list ("3.weight"), tied ones by their key ("tied_modules.embed.weight"), so that
    names do not depend on the number of stages.

    Args:
        layers: The whole model, the same on every rank.
        num_stages: Ranks of one pipeline; must divide the world size. Or give `topology`.
        topology: Ranks by axes, one of which is `pipe`.
        loss_fn: `loss_fn(outputs, labels)`; without it the last layer's output is the loss.
        seed_layers: Seed every layer's construction with `base_seed` + its index, and its forwards by that and the microbatch.
        seed_fn: Instead of `torch.manual_seed`.
        partition_method: `parameters` (balanced), `uniform`, `type:REGEX` (balances layers whose class name matches), `profile`
            (balances measured times), or a list of times of every layer (`profile_layers` gives one).
        activation_checkpoint_interval: Keep only the input of every so many layers and compute the rest again; 0 keeps all.
        activation_checkpoint_func: `func(run, *inputs)` instead of our own.
        checkpointable_layers: Class names; only segments made of these are checkpointed. By default those with parameters.
        dynamic_shape: Shapes may always change here; the argument is there for those who pass it.
        schedule: Decides how many stages a rank has: any name `ds_pipe.placement_of` knows.
        virtual: Stages a rank, for `interleaved`.
        sample: Inputs of a microbatch, for `profile`.
    Raises:
        PlanError: fewer layers than stages ("pipe-layers"), ranks that do not fit ("pipe-topology"), an unknown partition
            ("pipe-partition").
    Collective over the world.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str = "1f1b",
        virtual: int = 2,
        sample: Any = None,
    ) -> None:
        super().__init__()
        del dynamic_shape
        self.specs, self.loss_fn, self.seed_layers, self.base_seed = list(layers), loss_fn, seed_layers, base_seed
        self._seed = seed_fn or torch.manual_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else list(checkpointable_layers)
        self.micro_offset = 0
        self.places = PipelineGroups.build(topology or plain_topology(num_stages))
        self.schedule, self.virtual = schedule, virtual
        self.num_stages = self.places.pipe.size
        self.rank_of = placement_of(schedule, self.num_stages, virtual)
        self._method = partition_method if isinstance(partition_method, str) else ""
        if partition_method == "profile":
            partition_method = profile_layers(self.specs, _given(sample))
        self._mpu = PipelineParallelGrid(self.places)
        self.stage_id = self.places.pipe.rank
        self.parts = self._partition(partition_method, len(self.rank_of))
        self.tied_modules = nn.ModuleDict()
        self._uses: dict[int, Callable[[Any], Any]] = {}
        self._build()
        self._staged = self._stages()

    # ---- which rank has what

    def _partition(self, method: str | Sequence[float], parts: int) -> tuple[int, ...]:
        if not isinstance(method, str):
            return balanced(list(method), parts)
        kind = method.lower()
        if kind == "uniform":
            return uniform(len(self.specs), parts)
        if kind == "parameters":
            return balanced([parameters_of(layer) for layer in self.specs], parts)
        if kind.startswith("type:"):
            return balanced(matching([class_name(layer) for layer in self.specs], method[5:]), parts)
        raise PlanError(
            f"partition_method {method!r} is not known",
            code="pipe-partition",
            fix="Use parameters, uniform, type:REGEX, profile, or a list with the time of every layer.",
        )

    def partitions(self) -> tuple[int, ...]:
        """Return the bounds of the stages: stage s has layers `[bounds[s], bounds[s + 1])`."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that contains layer `layer_idx`; raise PlanError if there is no such layer."""
        stages = [s for s in range(len(self.rank_of)) if self.parts[s] <= layer_idx < self.parts[s + 1]]
        if not stages:
            raise PlanError(
                f"layer {layer_idx} of a model of {len(self.specs)} layers",
                code="pipe-layers",
                fix=f"Ask for 0 to {len(self.specs) - 1}.",
            )
        return stages[0]

    def topology(self) -> ProcessTopology:
        return self.places.topology

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of this rank, by the names of Megatron's mpu."""
        return self._mpu

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    # ---- building

    @property
    def _own_layers(self) -> list[int]:
        mine = [s for s, r in enumerate(self.rank_of) if r == self.places.pipe.rank]
        return [i for s in mine for i in range(self.parts[s], self.parts[s + 1])]

    def _build(self) -> None:
        for index in self._own_layers:
            layer = self.specs[index]
            if self.seed_layers:
                self._seed(self.base_seed + index)
            if isinstance(layer, PipelineModule):
                raise UnsupportedError(
                    f"layer {index} is itself a PipelineModule", code="pipe-layer", fix="Put its layers into the list."
                )
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
                module = self.tied_modules[layer.key]
                self._uses[index] = module if layer.forward_fn is None else partial(layer.forward_fn, module)
            elif isinstance(layer, (LayerSpec, nn.Module)):
                built = layer.build() if isinstance(layer, LayerSpec) else layer
                self.add_module(str(index), built)
                self._uses[index] = built
            elif callable(layer):
                self._uses[index] = layer
            else:
                raise PlanError(
                    f"layer {index} is a {type(layer).__name__}",
                    code="pipe-layer",
                    fix="Give LayerSpec, TiedLayerSpec, modules, or functions of one value.",
                )

    def _stages(self) -> StagedModel:
        stages = [s for s, r in enumerate(self.rank_of) if r == self.places.pipe.rank]
        parts = {s: _StageModule(self, range(self.parts[s], self.parts[s + 1])) for s in stages}
        holders: dict[str, list[int]] = {}
        firsts: dict[str, TiedLayerSpec] = {}
        for index, layer in enumerate(self.specs):
            if isinstance(layer, TiedLayerSpec):
                for path in layer.tied_weight_attr:
                    name = f"tied_modules.{layer.key}.{path}"
                    firsts.setdefault(name, layer)
                    holders.setdefault(name, []).append(self.rank_of[self.stage_owner(index)])
        shared = self._shared(firsts)
        names = {local: whole for local, whole, _ in shared.values() if local != whole}
        tied = {id(param) for _, _, param in shared.values()}
        for name, param in self.named_parameters(remove_duplicate=False):
            if name.startswith("tied_modules.") and id(param) not in tied:
                # Not tied: every rank that holds the layer has its own.
                key = name.split(".")[1]
                number = min(i for i, s in enumerate(self.specs) if isinstance(s, TiedLayerSpec) and s.key == key)
                if number not in self._uses:
                    mine_first = min(i for i in self._uses if getattr(self.specs[i], "key", None) == key)
                    names[name] = f"{mine_first}.{name.split('.', 2)[2]}"
        asked_ties = tie(self.places, holders, {asked: param for asked, (_, _, param) in shared.items()})
        ties = tuple(replace(one, name=shared[one.name][1]) for one in asked_ties)
        broadcast_ties(ties)
        staged = StagedModel(self, parts, self.rank_of, self.places, self.loss_fn, names, ties)
        annotate_params(staged)
        return staged

    def _shared(self, firsts: Mapping[str, TiedLayerSpec]) -> dict[str, tuple[str, str, nn.Parameter]]:
        """Find the tied parameters of this rank by what was asked: name here, name in the unsplit model, parameter.

        Args:
            firsts: Of every tied parameter that is asked for, `tied_modules.KEY.PATH`, the first layer.
        """
        shared: dict[str, tuple[str, str, nn.Parameter]] = {}
        missing: list[str] = []
        for asked, first in firsts.items():
            _, key, path = asked.split(".", 2)
            if key not in self.tied_modules:
                continue
            found = shared_parameter(self.tied_modules[key], path, first)
            if found is None:
                missing.append(asked)
            else:
                shared[asked] = f"tied_modules.{key}.{found[0]}", f"tied_modules.{key}.{found[1]}", found[2]
        if missing:
            raise PlanError(
                f"tied layers have no parameter {', '.join(missing)}",
                code="pipe-tied",
                fix="Name the attribute path of the parameter in tied_weight_attr.",
            )
        return shared

    @property
    def pipe_staging(self) -> PipelineSpec:
        """How this model is cut, for those who plan its steps."""
        return PipelineSpec(self.schedule, self.num_stages, self.virtual, self._method, self.seed_layers)

    @property
    def staged(self) -> StagedModel:
        """The stages of this rank, for `ds_pipe.pipeline`."""
        return self._staged

    # ---- use

    def forward(self, value: Any) -> Any:
        """Run the layers of this rank, one after the other: the whole model where there is one stage."""
        for part in self._staged.parts.values():
            value = part(value)
        return value

    def run_layers(self, start: int, stop: int) -> Callable[[Any], Any]:
        """Return a function that runs layers [start, stop) of this rank."""
        offset = self.micro_offset

        def run(value: Any) -> Any:
            for index in range(start, stop):
                if self.seed_layers:
                    self._seed(self.base_seed * (offset + 2) + index)  # + 1 seeded its construction
                value = self._uses[index](value)
            return value

        return run

    def is_checkpointable(self, start: int, stop: int) -> bool:
        """Whether a segment of layers is one to compute again."""
        layers = [self._uses[i] for i in range(start, stop)]
        if self.checkpointable_layers is not None:
            return all(class_name(self.specs[i]) in self.checkpointable_layers for i in range(start, stop))
        modules = [getattr(use, "args", (use,))[0] if isinstance(use, partial) else use for use in layers]
        return any(isinstance(m, nn.Module) and any(True for _ in m.parameters()) for m in modules)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Compute activations again every `interval` layers; 0: keep them."""
        self.activation_checkpoint_interval = interval

    def untied_source(self, name: str) -> str | None:
        """Return the parameter that `name` is a copy of where fewer stages hold the layers; None if it is no such copy.

        A tied layer on several stages has a copy of its untied parameters on each. The first one is named
        `tied_modules.<key>.<path>`, and the others `<layer>.<path>`, whichever stages there are.
        """
        number, _, path = name.partition(".")
        if not (number.isdecimal() and path and int(number) < len(self.specs)):
            return None
        layer = self.specs[int(number)]
        return f"tied_modules.{layer.key}.{path}" if isinstance(layer, TiedLayerSpec) else None

    def sources_of(self, name: str) -> list[str]:
        """Return the names that a parameter of a tied layer may have instead, where it was cut or saved otherwise.

        The layer's under `tied_modules`, then those of the numbered layers that share it, as DeepSpeed's files without ZeRO have it.
        """
        tied = self.untied_source(name) or name
        prefix, _, path = tied.partition(".")
        key = (
            next((k for k in self._tied_keys() if path.startswith(f"{k}.")), None) if prefix == "tied_modules" else None
        )
        if key is None:
            return []
        leaf = path.removeprefix(f"{key}.")
        numbers = [n for n, spec in enumerate(self.specs) if isinstance(spec, TiedLayerSpec) and spec.key == key]
        return [other for other in (tied, *(f"{number}.{leaf}" for number in numbers)) if other != name]

    def _tied_keys(self) -> set[str]:
        return {spec.key for spec in self.specs if isinstance(spec, TiedLayerSpec)}

    def get_additional_losses(self) -> Mapping[str, Any] | None:
        """Return losses to report besides the main loss; subclasses return a dict of tensors."""
        return None

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the parameters that other stages share, each with the process group of these stages."""
        return [(one.param, one.group.pg) for one in self._staged.ties]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied parameters over the stages that hold them. Collective over those."""
        for one in self._staged.ties:
            if one.param.grad is None:
                one.param.grad = torch.zeros_like(one.param)
            ds_comm.all_reduce(one.param.grad, group=one.group, unit="tied")


class _StageModule(nn.Module):
    """The layers of one stage, as one module: segments of them may be computed again in the backward."""

    def __init__(self, owner: PipelineModule, layers: range) -> None:
        super().__init__()
        self._owner = [owner]  # in a list: it is not a submodule
        self._layers = layers
        self.backwards: Backwards | None = None  # the Stage that runs it says
        for index in layers:
            use = owner._uses[index]
            module = use.args[0] if isinstance(use, partial) else use
            if isinstance(module, nn.Module):
                self.add_module(str(index), module)

    def forward(self, value: Any) -> Any:
        owner, every = self._owner[0], self._owner[0].activation_checkpoint_interval
        bounds = [*range(self._layers.start, self._layers.stop, every or max(1, len(self._layers))), self._layers.stop]
        for start, stop in itertools.pairwise(bounds):
            run = owner.run_layers(start, stop)
            again = every > 0 and torch.is_grad_enabled() and owner.is_checkpointable(start, stop)
            if again and owner.activation_checkpoint_func is not None:
                # Such functions look for tensors among their arguments, and some give weights no gradient where none of those needs one.
                value, several = _differentiable(value), isinstance(value, tuple)
                anchor = () if _needs_gradient(value) else (torch.empty(0, requires_grad=True, device="cpu"),)
                value = owner.activation_checkpoint_func(
                    _of_arguments(run, len(anchor), several), *anchor, *(value if several else (value,))
                )
            elif again and self.backwards is not None:
                value = checkpointed(run, value, self.backwards)
            else:
                value = run(value)
        if self._layers.start == owner.parts[self._stage]:
            owner.micro_offset += 1 if self._stage == min(owner.staged.parts) else 0
        return value

    @property
    def _stage(self) -> int:
        return self._owner[0].stage_owner(self._layers.start)


def _differentiable(value: Any) -> Any:
    """Make floating tensors of `value` require gradients where no tensor does, as reentrant checkpointing needs."""
    if _needs_gradient(value):
        return value
    return tree_map(
        lambda t: t.detach().requires_grad_(True) if isinstance(t, Tensor) and t.is_floating_point() else t, value
    )


def _of_arguments(run: Callable[[Any], Any], start: int, several: bool) -> Callable[..., Any]:
    """Return `run` of a tuple, or of one value, as a function of arguments that begin at `start`."""
    return lambda *values: run(values[start:] if several else values[start])


def _needs_gradient(value: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(value))


def _given(sample: Any) -> Any:
    if sample is None:
        raise PlanError(
            "partition_method profile was given no sample",
            code="pipe-partition",
            fix="Pass sample=, the inputs of a microbatch; every layer is run on what the one before it makes of them.",
        )
    return sample

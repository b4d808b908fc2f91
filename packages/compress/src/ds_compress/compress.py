"""From a configuration and a model to a compressed model, and its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from ds_comm import Group, all_reduce_coalesced, as_group, world_group
from ds_compress.config import CompressionConfig, compression_of
from ds_compress.layer_compression import LayerCompression, attach, attached, detach
from ds_compress.layer_kinds import BatchNorms, Convolutions
from ds_compress.pruned_paths import check_path
from ds_compress.quantised import refuse_quantised
from ds_compress.recipe import CompressibleLayer, CompressionRecipe, Kind, LayerRecipe, Pruned, make_recipe
from ds_compress.students import student_initialization, teaches
from ds_config.config_file import Source
from ds_config.errors import PlanError, UnsupportedError

__all__ = [
    "CompressionScheduler",
    "compress",
    "compressed_layers",
    "compression_scheduler",
    "decompress",
    "init_compression",
    "is_compressed",
    "layers_of",
]

_PARALLEL = ("ColumnParallelLinear", "RowParallelLinear", "LinearLayer", "LinearAllreduce")  # of Megatron and of AutoTP


def layers_of(model: nn.Module) -> list[CompressibleLayer]:
    """List the layers of a model that can be compressed, and the norms that shrink with them, in the model's order."""
    layers = []
    for name, module in model.named_modules():
        kind, weight = _kind(module), getattr(module, "weight", None)
        if kind is not None and isinstance(weight, Tensor):
            layers.append(CompressibleLayer(name, kind, tuple(getattr(weight, "ds_shape", weight.shape))))
    return layers


def _kind(module: nn.Module) -> Kind | None:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, Convolutions):
        return "conv"
    if isinstance(module, nn.Linear) or type(module).__name__ in _PARALLEL:
        return "linear"
    if isinstance(module, BatchNorms) and module.affine:
        return "norm"
    return None


def init_compression(
    model: nn.Module,
    deepspeed_config: Source | CompressionConfig,
    teacher_model: nn.Module | None = None,
    mpu: Any = None,
) -> nn.Module:
    """Compress a model as the section `compression_training` says. It is changed in place, and returned.

    Its modules and parameters stay the same objects under the same names. Techniques begin when the schedule says: an engine, or
    `compression_scheduler(model).step()` after each update, moves it on. `redundancy_clean` makes it final.

    Args:
        model: On one rank or as each rank holds it, not yet sharded.
        deepspeed_config: A whole configuration (dict, path, text), or the section.
        teacher_model: Where layers of a student come from, if `layer_reduction` is enabled. An engine of it does not compress it.
        mpu: Its `get_data_parallel_group()` says whose batches are one batch; by default those of all ranks.
    Raises:
        ConfigError: the section is wrong. PlanError: it does not fit the model; nothing was changed.
    """
    section = compression_of(deepspeed_config)
    recipe = make_recipe(section, layers_of(model))
    _check(model, recipe)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise PlanError(
                "layer_reduction is enabled, and there is no teacher_model",
                code="compress-teacher",
                fix="Pass teacher_model= to init_compression, before the engine is made.",
            )
        student_initialization(model, teacher_model, section)
    if teacher_model is not None:
        teaches(teacher_model)
    group = None if mpu is None else as_group(mpu.get_data_parallel_group())
    compress(model, recipe, group)
    return model


def compress(model: nn.Module, recipe: CompressionRecipe, group: Group | None = None) -> list[LayerCompression]:
    """Attach a recipe. `group`: ranks whose batches are one batch; None is all ranks, looked up when needed."""
    _check(model, recipe)
    for name, one in recipe.layers.items():
        for _, pruned in _kinds(one):
            if pruned.related:
                check_path(model, name, pruned.related, one.layer.shape[0])
        for other in one.heads.related if one.heads is not None else ():
            check_path(model, other, (name,), one.layer.shape[1], functions=False)
    compressions = {name: attach(model.get_submodule(name), one) for name, one in recipe.layers.items()}
    for name, one in recipe.layers.items():
        compressions[name].group = group
        for kind, pruned in _kinds(one):
            for other in pruned.related:
                reader = model.get_submodule(other)
                if isinstance(reader, BatchNorms):
                    compressions[name].mask_norm(kind, reader)
                else:
                    compressions[name].mask_reader(kind, reader)
    return list(compressions.values())


def _kinds(recipe: LayerRecipe) -> Iterator[tuple[Literal["row", "channel"], Pruned]]:
    """Yield what drops output features of a layer."""
    if recipe.rows is not None:
        yield "row", recipe.rows
    if recipe.channels is not None:
        yield "channel", recipe.channels


def decompress(model: nn.Module) -> None:
    """Take all compression away; weights stay as they are trained."""
    for module in list(model.modules()):
        detach(module)


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerCompression]]:
    """Yield (name, module, compression) of each compressed layer."""
    for name, module in model.named_modules():
        compression = attached(module)
        if compression is not None:
            yield name, module, compression


def is_compressed(model: nn.Module) -> bool:
    """Whether any layer is compressed."""
    return any(True for _ in compressed_layers(model))


def _check(model: nn.Module, recipe: CompressionRecipe) -> None:
    for name, _, _ in compressed_layers(model):
        raise PlanError(
            f"{name} is compressed already",
            code="compress-twice",
            fix="Call init_compression once, or decompress first.",
        )
    for name in recipe.layers:
        module = model.get_submodule(name)
        refuse_quantised(name, module)
        part = vars(module).get("_ds_part")  # what ds-parallel leaves on a layer that it cut
        if part is not None and part.group.size > 1:
            raise UnsupportedError(
                f"{name} is cut over {part.group.size} ranks: groups and ranges of a part are not those of the whole layer",
                code="compress-degrees",
                fix="Leave it out by its name, or compress a model that is not cut.",
            )
    for outer, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        inside = [name for name in recipe.layers if name.startswith(f"{outer}." if outer else "")]
        if inside:
            raise UnsupportedError(
                f"{inside[0]} is a part of torch.nn.MultiheadAttention, which reads its weight without calling it",
                code="compress-attention",
                fix="Leave it out by its name, or use attention whose projections are called.",
            )


class CompressionScheduler:
    """Moves the schedule of a compressed model on: `step()` after each update that was applied.

    Attributes:
        training_steps: Updates so far.
    """

    def __init__(self, model: nn.Module, compression_config: Any = None, group: Group | None = None) -> None:
        del compression_config  # the layers know
        self.model = model
        self.layers = [compression for _, _, compression in compressed_layers(model)]
        self.training_steps = max((compression.steps for compression in self.layers), default=0)
        if group is not None:
            for compression in self.layers:
                compression.group = group

    def step(self, step_zero_check: bool = False) -> None:
        """Advance the schedules of all layers after an applied update. Collective where snip_momentum prunes.

        With `step_zero_check` no update was applied, and the step count stays.
        """
        if step_zero_check:
            return
        self._sum_sensitivity()
        self.training_steps += 1
        for compression in self.layers:
            compression.at(self.training_steps)
            compression.prune_blocks()

    def resume(self, steps: int) -> None:
        """Go on after `steps` updates, with buffers of the model that were loaded by whatever means."""
        for compression in self.layers:
            compression.pull()
            compression.at(steps)
        self.training_steps = steps

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps; masks and ranges are buffers of the model."""
        return {"training_steps": self.training_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state; load the model's state dict first."""
        self.resume(int(state["training_steps"]))

    def _sum_sensitivity(self) -> None:
        sensing = [
            compression
            for compression in self.layers
            if compression.recipe.sparse is not None and "sensitivity" in compression._buffers
        ]
        if not sensing:
            return
        group = sensing[0].group or world_group()
        if group.size > 1:
            all_reduce_coalesced([compression.sensitivity for compression in sensing], group=group)


def compression_scheduler(model: nn.Module, compression_config: Any = None) -> CompressionScheduler:
    """Return the schedule of a model that `init_compression` compressed."""
    return CompressionScheduler(model, compression_config)

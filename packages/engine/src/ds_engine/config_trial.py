"""What a start would refuse of a configuration, found without one: the plan of a model, or of one so plain that every run has as much.

A client fills in values that the file leaves to it ("auto"). For a check any values of the right kind do, since what is wrong with the
rest does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from ds_config.config_file import read_all
from ds_config.errors import DsError
from ds_config.file_check import Auto
from ds_engine.config import Config
from ds_engine.config_rules import AXES, broken_rules, lasting_problems
from ds_engine.config_sections import TorchOptimizerSection
from ds_engine.mixed_precision import casting_of, precision_of
from ds_engine.optimizer_table import FROM_MUP, make_optimizer, reduces_itself
from ds_engine.plan import Shapes
from ds_engine.planner import make_plan
from ds_zero.layout.model_checks import check_model
from ds_zero.layout.units import ModuleInfo, ParamInfo
from ds_zero.update.wrapped_optimizer import traits_of

__all__ = ["CLIENTS", "answers_of", "refusals"]

_RATE: Final = 5e-5
_HUGGING_FACE: Final[Mapping[str, object]] = {
    "optimizer.params.lr": _RATE,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.total_num_steps": 1000,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": _RATE,
    "scheduler.params.warmup_num_steps": 10,
    "gradient_clipping": 1.0,
}
CLIENTS: Final = {"hf": "the Trainer"}
"""Who fills in "auto", by the name on the command line."""

# These ask for something that a model has or has not (attention, experts, layers): a plain one says nothing about them.
_OF_THE_MODEL: Final = frozenset(
    ["compress-scores", "compress-teacher", "engine-stages", "moe-places", "plan-model", "quantize-weights",
     "sequence-attention", "sparse-attention", "zero-lora"]
)  # fmt: skip
_WORLDS: Final = (2, 4, 8)  # a run of one rank sends nothing, and is refused less


def answers_of(client: str | None, source: str) -> tuple[Auto, list[str]]:
    """Return what "auto" stands for in a check of the file `source`, and the keys of the file that `client` fills in."""
    if client is None:
        return {}, []
    data = read_all(source).data
    asked = {key for key, value in _flat(data).items() if value == "auto"}
    answers: dict[str, object] = dict(_HUGGING_FACE)
    if "train_batch_size" in asked or "train_batch_size" not in data:
        answers["train_micro_batch_size_per_gpu"] = 1
    return answers, sorted(asked)


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{above}{key}.")
        else:
            out[f"{above}{key}"] = value
    return out


def refusals(config: Config, world: int | None, shapes: Shapes | None, model: nn.Module | None = None) -> list[DsError]:
    """Collect what a start refuses of a valid configuration.

    Args:
        world: Number of ranks; None reports what no number of ranks cures.
        shapes: The model's; None reports what every model meets.
        model: The model, on meta; None where there are only shapes. Its buffers are cast as the configuration says.
    """
    broken = list(lasting_problems(config) if world is None else broken_rules(config, world, AXES)[1])
    if broken:
        return broken
    worlds = (world,) if world is not None else [n for n in _WORLDS if not broken_rules(config, n, AXES)[1]]
    planned = [_planned(config, number, shapes) or _refused(config, number if world else 1, model) for number in worlds]
    first = planned[0] if planned else None
    if first is None or any(error is None or error.code != first.code for error in planned):
        return []
    return [] if shapes is None and first.code in _OF_THE_MODEL else [first]


def _planned(config: Config, world: int, shapes: Shapes | None) -> DsError | None:
    """Return the error of planning for `world` ranks; None where the plan can be made."""
    try:
        make_plan(config, shapes or _plain_model(), world)
    except DsError as error:
        return error
    return None


def _refused(config: Config, world: int, model: nn.Module | None) -> DsError | None:
    """Return the error of sharding a model with the optimizer of the configuration; None where both can be."""
    model = _PlainModel() if model is None else model
    if (buffers := casting_of(config).buffers) is not None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(buffers)
    try:
        check_model(model, precision_of(config), world, released=config.zero_optimization.stage == 3)
        section = config.optimizer
        made_by_mup = isinstance(section, TorchOptimizerSection) and section.type.lower() in FROM_MUP
        if section is not None and not made_by_mup and not reduces_itself(section):
            params = [param for param in model.parameters() if param.requires_grad]
            traits_of(make_optimizer(section, params, model), None)
    except DsError as error:
        return error
    return None


class _PlainModel(nn.Module):
    """A matrix and a vector, which every model has at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, device="meta")


def _plain_model() -> Shapes:
    """Describe a model with a single matrix, which every model has at least."""
    return Shapes((ParamInfo("weight", (256, 256), "float32", "", 0),), (ModuleInfo(""),))

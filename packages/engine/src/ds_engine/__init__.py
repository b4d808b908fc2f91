"""The meta-package: Config -> Plan -> Engine.

    engine, optimizer, loader, scheduler = ds_engine.initialize(model=model, config="cfg.json", training_data=data)
    print(engine.plan)
    result = engine.train_batch()

Names are loaded when they are first used, so that `import ds_engine` costs nothing beyond the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_comm.rehearsal.rehearse_cli import rehearse
    from ds_engine.arguments import add_config_arguments
    from ds_engine.batch import BatchRequest, BatchSizes, resolve_batch
    from ds_engine.builder import InitArgs, build, initialize, shapes_of
    from ds_engine.config import Config, explain_config, load_config
    from ds_engine.engine import Engine
    from ds_engine.generating import HybridEngine
    from ds_engine.loss_total import SumLoss
    from ds_engine.lr_schedules import LRScheduler
    from ds_engine.plan import Plan, Shapes
    from ds_engine.planner import make_plan
    from ds_engine.result import StepResult
    from ds_engine.rollout import Rollout
    from ds_engine.transforms.sparse import SparseSelfAttention
    from ds_engine.uneven_inputs import WeightedBatch, even_batches

__all__ = [
    "BatchRequest",
    "BatchSizes",
    "Config",
    "Engine",
    "HybridEngine",
    "InitArgs",
    "LRScheduler",
    "Plan",
    "Rollout",
    "Shapes",
    "SparseSelfAttention",
    "StepResult",
    "SumLoss",
    "WeightedBatch",
    "add_config_arguments",
    "build",
    "even_batches",
    "explain_config",
    "initialize",
    "load_config",
    "make_plan",
    "rehearse",
    "resolve_batch",
    "shapes_of",
]

_HOMES = {
    "ds_comm.rehearsal.rehearse_cli": ("rehearse",),
    "ds_engine.arguments": ("add_config_arguments",),
    "ds_engine.batch": ("BatchSizes", "BatchRequest", "resolve_batch"),
    "ds_engine.builder": ("InitArgs", "build", "initialize", "shapes_of"),
    "ds_engine.config": ("Config", "explain_config", "load_config"),
    "ds_engine.engine": ("Engine",),
    "ds_engine.generating": ("HybridEngine",),
    "ds_engine.loss_total": ("SumLoss",),
    "ds_engine.lr_schedules": ("LRScheduler",),
    "ds_engine.plan": ("Plan", "Shapes"),
    "ds_engine.planner": ("make_plan",),
    "ds_engine.result": ("StepResult",),
    "ds_engine.rollout": ("Rollout",),
    "ds_engine.transforms.sparse": ("SparseSelfAttention",),
    "ds_engine.uneven_inputs": ("WeightedBatch", "even_batches"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

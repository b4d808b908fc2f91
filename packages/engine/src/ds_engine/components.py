"""What an engine holds, and how far a run is. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ds_monitor
from ds_ckpt import LocalCheckpointer
from ds_ckpt.engines import Checkpointer
from ds_comm import Mesh
from ds_engine.compiling import Shares
from ds_engine.executor import ProgramExecutor
from ds_engine.health import HealthWatch
from ds_engine.init_args import Follower
from ds_engine.loader import ResumableLoader
from ds_engine.step_telemetry import Telemetry
from ds_engine.transforms import Applied
from ds_parallel import ActivationCheckpointing
from ds_zero import ShardedModel, ShardedOptimizer

__all__ = ["Components", "RunCounters"]


@dataclass(slots=True)
class Components:
    """What an engine holds; made by `ds_engine.builder`.

    Attributes:
        module: The model, on its device and sharded.
        optimizer: None for an engine that only evaluates.
        sharding: The units of the model.
        scheduler: Anything with `step`, `state_dict`, `load_state_dict`; None for a constant rate.
        loader: The training data; None when the caller brings it.
        mesh: The groups of this rank.
        device: Where the model is.
        telemetry: Reports steps.
        checkpointer: Saves at once, or behind the next steps.
        activations: How calls are checkpointed.
        executor: Runs the program of this rank.
        health: Watches for numbers that go wrong.
        applied: The transforms that the model went through.
        followers: What goes on with each applied update.
        shares: How a compiled run shares sequences that all ranks are given whole; None: it is given parts.
        near: Copies on the nodes; None without `checkpoint.local`.
        run: Whose metrics the engine's are; its sinks are those that the engine added and takes away when it is closed.
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    sharding: ShardedModel
    scheduler: Any
    loader: ResumableLoader | None
    mesh: Mesh
    device: torch.device
    telemetry: Telemetry
    checkpointer: Checkpointer
    activations: ActivationCheckpointing
    executor: ProgramExecutor
    health: HealthWatch
    applied: Applied
    run: ds_monitor.Run
    followers: tuple[Follower, ...] = ()
    shares: Shares | None = None
    near: LocalCheckpointer | None = None


@dataclass(slots=True)
class RunCounters:
    """How far a run is. Saved and resumed.

    Attributes:
        steps: Optimizer steps, skipped ones included.
        samples: Samples trained on, over all ranks.
        micro_steps: Calls of `step` on this rank, that is microbatches.
        skipped: Steps whose update was left out.
        tokens: What sum losses were divided by, over all ranks.
    """

    steps: int = 0
    samples: int = 0
    micro_steps: int = 0
    skipped: int = 0
    tokens: int = 0

    def add(self, *, samples: int, tokens: int, skipped: bool) -> None:
        """Count one step."""
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        self.skipped += skipped

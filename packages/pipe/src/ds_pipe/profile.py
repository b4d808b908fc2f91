"""How long every layer takes, measured: what `partition_method="profile"` balances."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
from ds_comm.metadata import metadata_device, raise_together
from ds_pipe._torch import tree_leaves, tree_map
from ds_pipe.layer_specs import LayerSpec, TiedLayerSpec

__all__ = ["profile_layers"]


def profile_layers(layers: Sequence[Any], sample: Any, repeats: int = 5) -> list[float]:
    """Measure the seconds of forward and backward of every layer, the same on all ranks (those of rank 0).

    A single layer at a time is built and run on the output of the previous layer, so the whole model never exists at
    once.

    Args:
        layers: As PipelineModule takes them.
        sample: The inputs of a microbatch.
        repeats: Runs of each; the fastest counts, which other processes disturbed least.
    Raises:
        Exception: what a layer raised on rank 0; on every rank.
    Collective over the world: rank 0 measures, other ranks wait. The random state is restored.
    """
    world, error = ds_comm.world_group(), None
    seconds = torch.zeros(len(layers), dtype=torch.float64, device="cpu")
    if world.rank == 0:
        state = torch.get_rng_state()
        try:
            for index, layer in enumerate(layers):
                seconds[index], sample = _measure(_use(layer), sample, repeats)
        except Exception as failed:
            error = failed
        finally:
            torch.set_rng_state(state)
    raise_together(error, world, unit="profile")
    seconds = seconds.to(metadata_device(world))
    ds_comm.broadcast(seconds, group=world, group_src=0, unit="profile")
    return [float(s) for s in seconds]


def _use(layer: Any) -> Any:
    module = layer.build() if isinstance(layer, LayerSpec) else layer
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        return partial(layer.forward_fn, module)
    return module


def _measure(use: Any, value: Any, repeats: int) -> tuple[float, Any]:
    times, out = [], value
    for _ in range(repeats):
        inputs = tree_map(_leaf, value)
        begin = time.perf_counter()
        out = use(inputs)
        ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        times.append(time.perf_counter() - begin)
    module = use.args[0] if isinstance(use, partial) else use
    if isinstance(module, nn.Module):
        module.zero_grad()
    return min(times), tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().requires_grad_(True)
    return leaf

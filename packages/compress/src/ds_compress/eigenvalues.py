"""Curvature of the loss, layer by layer: the largest eigenvalue of the Hessian of each layer's parameters.

Block power iteration with Hessian-vector products (Yao et al., HAWQ, arXiv:1905.03696; MoQ uses it to keep the bits of sharp layers longer).
It needs gradients of gradients: a whole model on one rank, kernels with second derivatives (not fused attention).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ds_compress.compress import compressed_layers
from ds_compress.config import EigenvalueConfig
from ds_config.errors import PlanError

__all__ = ["Curvature", "block_eigenvalues", "stretch_schedule"]

_log = logging.getLogger("ds_compress")


def block_eigenvalues(
    model: nn.Module, loss: Callable[[], Tensor], config: EigenvalueConfig, *, normalized: bool = True
) -> dict[str, float]:
    """Estimate the largest eigenvalue, by absolute value, of the Hessian of each of the model's layers.

    Args:
        model: Its module `config.layer_name` is a list of layers; the first `config.layer_num` of them, or all, are
        used.
        loss: Runs the model and returns its loss, a scalar. Called once.
        config: Iterations, tolerance, stability.
        normalized: Divide by the largest of all, so in [0, 1]; otherwise the values are signed and not scaled.
    Returns:
        By name of the layer.
    Raises:
        PlanError: there are no such layers, or the loss has no second derivative in a layer ("compress-eigenvalue").
    Cost: one forward, and for each layer and iteration one more backward. Keeps the graph of one forward.
    """
    blocks = _blocks(model, config)
    wanted = {name: [p for p in block.parameters() if p.requires_grad] for name, block in blocks.items()}
    every = [p for params in wanted.values() for p in params]
    grads = dict(zip(every, torch.autograd.grad(loss(), every, create_graph=True, allow_unused=True), strict=True))
    eigenvalues = {}
    for number, (name, params) in enumerate(wanted.items()):
        used = [(p, g) for p in params if (g := grads[p]) is not None and g.requires_grad]
        if not used:
            raise PlanError(
                f"the loss has no second derivative in {name}",
                code="compress-eigenvalue",
                fix="Use eager attention, and a loss that depends on every layer.",
            )
        eigenvalues[name] = _power(used, config, number)
        if config.verbose:
            _log.info("largest eigenvalue of %s: %.4g", name, eigenvalues[name])
    if not normalized:
        return eigenvalues
    most = max((abs(value) for value in eigenvalues.values()), default=0.0)
    return {name: abs(value) / most if most else 0.0 for name, value in eigenvalues.items()}


def _blocks(model: nn.Module, config: EigenvalueConfig) -> dict[str, nn.Module]:
    try:
        children = dict(model.get_submodule(config.layer_name).named_children())
    except AttributeError:
        children = {}
    names = list(children)[: config.layer_num or None]
    if not names or len(names) < config.layer_num:
        raise PlanError(
            f"eigenvalue.layer_name {config.layer_name!r} has {len(children)} layers, layer_num is {config.layer_num}",
            code="compress-eigenvalue",
            fix="Name the list of layers as the model does, for instance bert.encoder.layer.",
        )
    return {f"{config.layer_name}.{name}": children[name] for name in names}


def _power(used: list[tuple[nn.Parameter, Tensor]], config: EigenvalueConfig, seed: int) -> float:
    params, grads = [p for p, _ in used], [g for _, g in used]
    drawn = torch.Generator(params[0].device).manual_seed(seed)
    vector = [torch.randn(p.shape, generator=drawn, device=p.device, dtype=p.dtype) for p in params]
    value = 0.0
    for _ in range(config.max_iter):
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in vector)) + config.stability
        vector = [v / norm for v in vector]
        product = torch.autograd.grad(grads, params, grad_outputs=vector, retain_graph=True, allow_unused=True)
        after = [torch.zeros_like(p) if h is None else h.detach() for p, h in zip(params, product, strict=True)]
        before, value = value, sum(float((v * h).double().sum()) for v, h in zip(vector, after, strict=True))
        if not math.isfinite(value):
            return 0.0
        if value == 0.0 or abs(value - before) / abs(value) < config.tol:
            break
        vector = after
    return value


def stretch_schedule(model: nn.Module, values: Mapping[str, float]) -> None:
    """Extend the bit-reduction periods of layers whose name starts with a name in `values`.

    Periods that begin from now on are 1 + floor(4 * value) times longer.

    Args:
        values: Eigenvalues in [0, 1], by name of a block.
    """
    for name, _, compression in compressed_layers(model):
        for block, value in values.items():
            if name == block or name.startswith(f"{block}."):
                compression.factor = 1 + math.floor(4 * value)


class Curvature:
    """Computes eigenvalues every so many steps, and slows the schedule of sharp layers down.

    Attributes:
        last: The last eigenvalues, in [0, 1].
    """

    def __init__(self, model: nn.Module, config: EigenvalueConfig) -> None:
        self.model, self.config = model, config
        self.last: dict[str, float] = {}
        self._steps = 0

    def step(self, loss: Callable[[], Tensor]) -> None:
        """Call it before the schedule's step. `loss` is called only if it is time: at every `gas_boundary_resolution`-th step."""
        if self.config.enabled and self._steps % self.config.gas_boundary_resolution == 0:
            self.last = block_eigenvalues(self.model, loss, self.config)
            stretch_schedule(self.model, self.last)
        self._steps += 1

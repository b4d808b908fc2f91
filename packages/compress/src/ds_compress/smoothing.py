"""Move size from inputs to weights, or the other way, so that what is quantised has fewer outliers. The model computes the same.

A linear layer reads what a norm wrote: dividing the norm's output by s, feature by feature, and multiplying the layer's columns by s changes
nothing. `smoothquant` chooses s = max|x|^a / max|w|^(1-a) (SmoothQuant: Xiao et al., arXiv:2211.10438), for quantised inputs. `awq`
searches s = mean|x|^a for the a with the smallest error of quantised weights (AWQ: Lin et al., arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.posttraining import QuantScheme, linears_of, observed, row_grid, run, to_codes
from ds_config.errors import PlanError

__all__ = ["Fold", "awq", "find_foldable_norms", "smoothquant"]


@dataclass(frozen=True, slots=True)
class Fold:
    """A norm, and the linear layers that alone read what it writes."""

    norm: str
    layers: tuple[str, ...]


@torch.no_grad()
def find_foldable_norms(model: nn.Module, batch: Any) -> list[Fold]:
    """Find the norms whose scales can be folded into linear layers, by running `batch`.

    Every candidate is tried, and accepted if outputs stay the same. A norm whose output also goes elsewhere (a
    residual, a
    router) fails that and is left out.
    """
    norms = {n: m for n, m in model.named_modules() if _is_norm(m)}
    wrote: dict[int, str] = {}
    read: dict[str, list[str]] = {}
    retained_outputs: list[Tensor] = []  # ids are of living tensors

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            retained_outputs.append(output)
            wrote[id(output)] = name

        return hook

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if args and id(args[0]) in wrote:
                read.setdefault(wrote[id(args[0])], []).append(name)

        return hook

    handles = [m.register_forward_hook(after(n)) for n, m in norms.items()]
    handles += [m.register_forward_pre_hook(before(n)) for n, m in linears_of(model, ()).items()]
    training = model.training
    model.eval()
    try:
        wanted = _tensors(run(model, batch))
        for handle in handles:
            handle.remove()
        folds = []
        for norm, layers in read.items():
            fold = Fold(norm, tuple(dict.fromkeys(layers)))
            width = norms[norm].weight.shape[0]
            trial = torch.linspace(0.5, 2.0, width, device=norms[norm].weight.device)
            _move(model, fold, trial)
            same = all(
                torch.allclose(a, b, atol=1e-4, rtol=1e-3)
                for a, b in zip(_tensors(run(model, batch)), wanted, strict=True)
            )
            _move(model, fold, 1 / trial)
            if same:
                folds.append(fold)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return folds


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and type(module).__name__.endswith("Norm")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().clone()] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _move(model: nn.Module, fold: Fold, scale: Tensor) -> None:
    """Divide what the norm writes by `scale`, multiply the columns that read it."""
    norm: Any = model.get_submodule(fold.norm)
    if type(norm).__name__.startswith("Gemma"):  # multiplies by 1 + weight
        norm.weight.copy_((norm.weight + 1) / scale.to(norm.weight.dtype) - 1)
    else:
        norm.weight.div_(scale.to(norm.weight.dtype))
    if getattr(norm, "bias", None) is not None:
        norm.bias.div_(scale.to(norm.bias.dtype))
    for name in fold.layers:
        layer: Any = model.get_submodule(name)
        layer.weight.mul_(scale.to(layer.weight.dtype))


@torch.no_grad()
def smoothquant(model: nn.Module, batches: Sequence[Any], alpha: float = 0.5) -> list[Fold]:
    """Apply SmoothQuant: make inputs of linear layers even, feature by feature; return the changed folds.

    Args:
        batches: Calibration inputs; the first also finds the places.
        alpha: 1 moves all unevenness from inputs to weights, 0 none.
    """
    folds = find_foldable_norms(model, _first(batches))
    most: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        now = inputs.abs().amax(0).float()
        most[name] = torch.maximum(most[name], now) if name in most else now

    _look(model, folds, batches, note)
    for fold in folds:
        weights = torch.stack([_weight(model, n).abs().amax(0) for n in fold.layers]).amax(0).float()
        scale = most[fold.layers[0]].clamp_min(1e-5) ** alpha / weights.clamp_min(1e-5) ** (1 - alpha)
        _move(model, fold, scale)
    return folds


@torch.no_grad()
def awq(
    model: nn.Module, batches: Sequence[Any], scheme: QuantScheme | None = None, steps: int = 20, rows: int = 512
) -> dict[str, float]:
    """Apply AWQ: protect the columns that large inputs are multiplied with.

    Quantize afterwards, with `round_to_nearest` or `gptq` of the same scheme.

    Args:
        batches: Calibration inputs; the first also finds the places.
        steps: Exponents from 0 to 1 that are tried.
        rows: Input rows that errors are measured on.
    Returns:
        The exponent by norm; 0.0 where no scale was better than no change.
    """
    scheme, folds = scheme or QuantScheme(), find_foldable_norms(model, _first(batches))
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    samples: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        sums[name] = sums.get(name, 0) + inputs.abs().float().sum(0)
        counts[name] = counts.get(name, 0) + len(inputs)
        if name not in samples:
            samples[name] = inputs[:rows].float()

    _look(model, folds, batches, note)
    chosen = {}
    for fold in folds:
        first = fold.layers[0]
        mean = (sums[first] / counts[first]).clamp_min(1e-5)
        best, least, best_scale = 0.0, float("inf"), torch.ones_like(mean)
        for step in range(steps + 1):
            alpha = step / steps
            scale = mean**alpha
            scale = scale / (scale.max() * scale.min()).sqrt()
            error = sum(_error(_weight(model, n).float(), samples[first], scale, scheme) for n in fold.layers)
            if error < least:
                best, least, best_scale = alpha, error, scale
        _move(model, fold, best_scale)
        chosen[fold.norm] = best
    return chosen


def _error(weight: Tensor, inputs: Tensor, scale: Tensor, scheme: QuantScheme) -> float:
    size = scheme.size(weight.shape[1])
    rows = (weight * scale).reshape(-1, size)
    step, zero = row_grid(rows, scheme)
    back = ((to_codes(rows, step, zero, scheme) - zero) * step).view(weight.shape) / scale
    return float((inputs @ (back - weight).T).square().sum())


def _weight(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).get_parameter("weight")


def _look(model: nn.Module, folds: Sequence[Fold], batches: Iterable[Any], note: Any) -> None:
    names = {fold.layers[0] for fold in folds}
    layers = {name: layer for name, layer in linears_of(model, ()).items() if name in names}
    training = model.training
    model.eval()
    with observed(layers, note):
        for batch in batches:
            run(model, batch)
    model.train(training)


def _first(batches: Sequence[Any]) -> Any:
    if not batches:
        raise PlanError("there are no calibration batches", code="compress-calibration", fix="Give a list with some.")
    return batches[0]

"""What a model is made of, layer by layer: bytes, bits, zeros, and how much faster it could be.

A file is read by its header and, for zeros, tensor by tensor; nothing is built and no code of the model runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from ds_compress.quantised import bytes_of, values_of
from ds_config.errors import PlanError

__all__ = ["LayerReport", "picture", "report_of", "table_of", "total_of"]

# What a layer is stored as, and what one weight of it would take in 16 bits.
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "qweight", "qzeros", "scales", "g_idx")
_BASE_BITS = 16


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer.

    Attributes:
        name: Of the module.
        numel: Weights, as many as they stand for.
        bytes: That are stored, with scales.
        zeros: Share of weights that are zero; None where they are packed.
    """

    name: str
    numel: int
    bytes: int
    zeros: float | None

    @property
    def bits(self) -> float:
        """Stored bits for each weight."""
        return 8 * self.bytes / self.numel if self.numel else 0.0

    @property
    def speed(self) -> float:
        """How many times faster than in 16 bits it is where reading weights is all that takes time: generation of few sequences."""
        return _BASE_BITS / self.bits if self.bits else 1.0


def report_of(model: nn.Module | str | os.PathLike[str]) -> list[LayerReport]:
    """Report the layers of a module, or of a folder of safetensors (a single file too), in order.

    Raises:
        PlanError: there are no safetensors ("compress-report").
    """
    tensors = _of_module(model) if isinstance(model, nn.Module) else _of_files(Path(model))
    layers: dict[str, dict[str, Tensor]] = {}
    order: list[LayerReport] = []
    for name, tensor in tensors:
        owner, _, part = name.rpartition(".")
        if part in _PARTS:
            layers.setdefault(owner, {})[part] = tensor
            continue
        zeros = float((values_of(tensor) == 0).float().mean()) if tensor.numel() else 0.0
        order.append(LayerReport(name, tensor.numel(), bytes_of(tensor), zeros))
    packed = [
        LayerReport(n, _weights(parts), sum(t.nbytes for t in parts.values()), None) for n, parts in layers.items()
    ]
    return sorted(order + packed, key=lambda layer: _natural(layer.name))


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key in natural order: layer 10 comes after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"[.]", name)]


def _weights(parts: Mapping[str, Tensor]) -> int:
    if "weight_shape" in parts:
        return int(parts["weight_shape"].prod())
    if "qweight" in parts and "g_idx" in parts:
        return parts["g_idx"].numel() * parts["qweight"].shape[1]
    return sum(t.numel() for t in parts.values())


def _of_module(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.named_parameters():
        if ".compression." not in name:
            yield name, value.detach()


def _of_files(path: Path) -> Iterator[tuple[str, Tensor]]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise PlanError(
            f"{path} is neither a safetensors file nor a folder with some",
            code="compress-report",
            fix="Give the folder that save_pretrained or an export wrote.",
        )
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                yield name, opened.get_tensor(name)


def total_of(layers: Sequence[LayerReport]) -> LayerReport:
    """Sum all layers into a single report."""
    numel = sum(layer.numel for layer in layers)
    known = [layer for layer in layers if layer.zeros is not None]
    counted = sum(layer.numel for layer in known)
    zeros = sum((layer.zeros or 0.0) * layer.numel for layer in known) / counted if counted else None
    return LayerReport("all", numel, sum(layer.bytes for layer in layers), zeros)


def table_of(layers: Sequence[LayerReport]) -> list[tuple[str, str, str, str, str, str]]:
    """Format rows of text: name, weights, KiB, bits, zeros, times faster; the last row is the total."""
    return [
        (
            layer.name,
            f"{layer.numel:,}",
            f"{layer.bytes / 1024:,.1f}",
            f"{layer.bits:.2f}",
            "packed" if layer.zeros is None else f"{layer.zeros:.1%}",
            f"{layer.speed:.2f}",
        )
        for layer in (*layers, total_of(layers))
    ]


def picture(layers: Sequence[LayerReport], path: str | os.PathLike[str]) -> Path:
    """Plot the bytes of each layer as bars, beside the bytes of 16-bit weights.

    The format follows the name's ending.

    Raises:
        PlanError: matplotlib is not installed ("compress-report").
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            "pictures need matplotlib, which is not installed", code="compress-report", fix="Install ds-compress[plot]."
        ) from None
    figure = Figure(figsize=(8, 1 + 0.22 * len(layers)), layout="constrained")
    axes = figure.subplots()
    names, rows = [layer.name for layer in layers], range(len(layers))
    axes.barh(rows, [layer.numel * _BASE_BITS / 8 / 1024 for layer in layers], color="lightgray", label="16 bits")
    axes.barh(rows, [layer.bytes / 1024 for layer in layers], height=0.5, label="stored")
    axes.set_yticks(list(rows), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("KiB")
    axes.legend()
    figure.savefig(path)
    return Path(path)

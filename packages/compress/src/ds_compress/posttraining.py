"""Quantisation after training: codes of few bits for the weights of linear layers, chosen so that outputs change little.

Words: a *code* is an unsigned integer; weight = (code - zero) * scale, with a scale and a zero for each row and each run of
`group_size` inputs. *Calibration batches* are inputs like those the model will see.

`round_to_nearest` looks at weights only. `gptq` (Frantar et al., arXiv:2210.17323) rounds input by input and lets the inputs that are left make up
for the error, weighed by how inputs go together. Here all layers are calibrated on the outputs of the unquantised model, in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.compress import compressed_layers
from ds_compress.layer_kinds import Convolutions
from ds_compress.quantised import refuse_quantised
from ds_config.errors import PlanError
from ds_config.option_checks import check_options

__all__ = [
    "QuantScheme",
    "QuantizedWeight",
    "codes_of_training",
    "gptq",
    "linears_of",
    "observed",
    "round_to_nearest",
    "row_grid",
    "run",
    "to_codes",
]


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Format of codes.

    Attributes:
        bits: 2 to 8.
        group_size: Inputs that share a scale; -1 is all of a row.
        symmetric: The zero is in the middle.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        if not 2 <= self.bits <= 8 or self.group_size == 0 or self.group_size < -1:
            raise PlanError(
                f"a scheme of {self.bits} bits and groups of {self.group_size}",
                code="compress-scheme",
                fix="Use 2 to 8 bits, and groups of -1 (a whole row) or more than 0.",
            )

    def size(self, inputs: int, name: str = "a layer") -> int:
        """Return the number of inputs of a group in a layer with `inputs` inputs; PlanError if they do not divide."""
        size = inputs if self.group_size == -1 else self.group_size
        if inputs % size:
            raise PlanError(
                f"{name} has {inputs} inputs, group_size is {size}",
                code="compress-scheme",
                fix="Use a group size that divides them, or leave the layer out.",
            )
        return size


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One quantised weight.

    Attributes:
        scheme: Its format.
        codes: [out, in], uint8; `in` of a convolution is all that one output reads: in_channels / groups * kernel.
        scales: [out, groups], fp32.
        zeros: [out, groups], uint8.
        shape: Of the weight where it is not [out, in], as of a convolution.
    """

    scheme: QuantScheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    shape: tuple[int, ...] | None = None

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize the codes into a weight: [out, in], or of the convolution's shape."""
        each = self.codes.shape[1] // self.scales.shape[1]
        spread = (self.codes.float() - self.zeros.float().repeat_interleave(each, 1)) * self.scales.repeat_interleave(
            each, 1
        )
        return spread.to(dtype).view(self.shape or spread.shape)


def linears_of(model: nn.Module, exclude: Iterable[str] = ("lm_head",)) -> dict[str, nn.Linear]:
    """Return linear layers by name, without those whose name matches a regular expression of `exclude`."""
    out = tuple(exclude)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(re.search(pattern, name) for pattern in out)
    }


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping by keyword, a tuple or list by position, anything else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def observed(layers: Mapping[str, nn.Linear], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `note(name, inputs [rows, in])` with the inputs of each layer, inside the context."""

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            note(name, args[0].detach().reshape(-1, args[0].shape[-1]))

        return before

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def row_grid(rows: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Scale and zero [rows, 1] of groups that are rows; scales are numbers of fp16."""
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        scale = rows.abs().amax(1, keepdim=True) * 2 / top
        zero = torch.full_like(scale, 2 ** (scheme.bits - 1))
    else:
        low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / torch.where(scale > 0, scale, torch.ones_like(scale))).round()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # Files keep scales in fp16: round to what they will say, not to what they cannot.
    return scale.clamp(min=torch.finfo(torch.float16).smallest_normal).half().to(rows.dtype), zero.clamp(0, top)


def to_codes(values: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> Tensor:
    """Round values to their nearest codes, in the dtype of the values."""
    return ((values / scale).round() + zero).clamp(0, 2**scheme.bits - 1)


@torch.no_grad()
def round_to_nearest(
    model: nn.Module,
    scheme: QuantScheme | None = None,
    exclude: Iterable[str] = ("lm_head",),
    convolutions: bool = False,
) -> dict[str, QuantizedWeight]:
    """Quantize linear layers, and with `convolutions` those too, from their weights only, without calibration data.

    The weights of the model are set to the dequantized values. A convolution is the matrix [out, in_channels / groups * kernel].

    Returns:
        By name of the layer, for the functions of `ds_compress.model_export`.
    """
    scheme, codes_by_name, left_out = scheme or QuantScheme(), {}, tuple(exclude)
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or (convolutions and isinstance(module, Convolutions)))
        and not any(re.search(pattern, name) for pattern in left_out)
    }
    for name, module in layers.items():
        refuse_quantised(name, module)
        scheme.size(_matrix(module).shape[1], name)
    for name, module in layers.items():
        matrix, weight = _matrix(module).float(), module.get_parameter("weight")
        size = scheme.size(matrix.shape[1], name)
        rows = matrix.reshape(-1, size)
        scale, zero = row_grid(rows, scheme)
        groups = matrix.shape[1] // size
        codes_by_name[name] = QuantizedWeight(
            scheme,
            to_codes(rows, scale, zero, scheme).view(matrix.shape).to(torch.uint8),
            scale.view(-1, groups),
            zero.view(-1, groups).to(torch.uint8),
            None if weight.dim() == 2 else tuple(weight.shape),
        )
        weight.copy_(codes_by_name[name].weight(weight.dtype))
    return codes_by_name


def _matrix(module: nn.Module) -> Tensor:
    """Return the weight of a layer as the matrix [out, what one output reads]."""
    return module.get_parameter("weight").flatten(1)


@torch.no_grad()
def gptq(
    model: nn.Module,
    batches: Iterable[Any],
    scheme: QuantScheme | None = None,
    exclude: Iterable[str] = ("lm_head",),
    damp: float = 0.01,
) -> dict[str, QuantizedWeight]:
    """Quantize linear layers with GPTQ, so that their outputs on calibration batches change little.

    Args:
        model: On one device. Its weights are set to the dequantized values.
        batches: Inputs; see `run`.
        damp: Added to the diagonal of the inputs' products, times its mean.
    Returns:
        As `round_to_nearest`.
    Raises:
        PlanError: groups do not divide ("compress-scheme"), a layer was given no inputs ("compress-calibration");
        nothing
            was changed.
    Cost: for each layer in^2 floats while it is calibrated, and in^3 + out * in^2 operations.
    """
    scheme, layers = scheme or QuantScheme(), linears_of(model, exclude)
    for name, module in layers.items():
        refuse_quantised(name, module)
        scheme.size(module.in_features, name)
    products: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        x = inputs.double()
        products[name] = products.get(name, 0) + x.T @ x

    training = model.training
    model.eval()
    with observed(layers, note):
        for batch in batches:
            run(model, batch)
    model.train(training)
    missing = [name for name in layers if name not in products]
    if missing:
        raise PlanError(
            f"no calibration batch reached {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
            code="compress-calibration",
            fix="Give batches that the model's every linear layer sees, or exclude these.",
        )
    codes_by_name = {}
    for name, module in layers.items():
        size = scheme.size(module.in_features, name)
        codes_by_name[name] = _gptq_layer(module.weight.double(), products.pop(name), scheme, size, damp)
        module.weight.copy_(codes_by_name[name].weight(module.weight.dtype))
    return codes_by_name


def _gptq_layer(weight: Tensor, product: Tensor, scheme: QuantScheme, size: int, damp: float) -> QuantizedWeight:
    weight, columns = weight.clone(), weight.shape[1]
    diagonal = product.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    weight[:, dead] = 0  # what is never there has no say
    diagonal += damp * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(product))
    upper = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.empty_like(weight)
    scales, zeros = [], []
    for start in range(0, columns, size):
        scale, zero = row_grid(weight[:, start : start + size], scheme)
        scales.append(scale)
        zeros.append(zero)
        for column in range(start, start + size):
            value = weight[:, column : column + 1]
            code = to_codes(value, scale, zero, scheme)
            codes[:, column : column + 1] = code
            error = (value - (code - zero) * scale) / upper[column, column]
            weight[:, column + 1 :] -= error @ upper[column : column + 1, column + 1 :]
    return QuantizedWeight(
        scheme, codes.to(torch.uint8), torch.cat(scales, 1).float(), torch.cat(zeros, 1).to(torch.uint8)
    )


@torch.no_grad()
def codes_of_training(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return codes of the linear layers and convolutions whose weights were quantized in training. Call before `redundancy_clean`.

    For symmetric grids of 3 to 8 bits whose groups lie within rows (`quantize_groups` is a multiple of the layer's
    outputs).
    The dequantized weights are those of the cleaned model, to the bit.

    Raises:
        PlanError: a layer has another grid, or loses weights, rows, heads or channels, too ("compress-scheme").
    """
    codes_by_name = {}
    for name, module, compression in compressed_layers(model):
        weights, recipe = compression.recipe.weights, compression.recipe
        if weights is None or not isinstance(module, nn.Linear | Convolutions):
            continue
        matrix, weight = _matrix(module).float(), module.get_parameter("weight")
        per_row, rest = divmod(weights.groups, matrix.shape[0])
        pruned = any(part is not None for part in (recipe.sparse, recipe.rows, recipe.heads, recipe.channels))
        wrong = rest or not per_row or matrix.shape[1] % max(per_row, 1)
        if wrong or pruned or weights.symmetry != "symmetric" or not 3 <= weights.target <= 8:
            raise PlanError(
                f"{name} has {weights.groups} groups of {weights.target} bits, {weights.symmetry}{', pruned' if pruned else ''}",
                code="compress-scheme",
                fix="Use symmetric grids of 3 to 8 bits with quantize_groups a multiple of the outputs, or quantise after cleaning.",
            )
        size, half = matrix.shape[1] // per_row, 2 ** (weights.target - 1)
        rows = matrix.reshape(-1, size)
        scale = rows.abs().amax(1, keepdim=True) * 2 / 2**weights.target
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = (rows / scale).round().clamp(-half, half - 1) + half
        scheme = QuantScheme(weights.target, size if per_row > 1 else -1)
        zeros = torch.full((matrix.shape[0], per_row), half, dtype=torch.uint8, device="cpu")
        codes_by_name[name] = QuantizedWeight(
            scheme,
            codes.view(matrix.shape).to(torch.uint8),
            scale.view(-1, per_row),
            zeros,
            None if weight.dim() == 2 else tuple(weight.shape),
        )
    return codes_by_name

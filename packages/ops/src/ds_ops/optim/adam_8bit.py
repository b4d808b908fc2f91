"""Adam and AdamW with moments of 8 bits (Dettmers et al. 2022), as bitsandbytes and torchao have them.

A step decodes the moments of a piece of a parameter to fp32, makes the step of `AdamW` with its kernel, and codes them again. Codes and
blocks are those of `ds_ops.dynamic_codes`. Small parameters (norms, biases) have moments in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import UnsupportedError
from ds_ops.dynamic_codes import BLOCK, dequantize_dynamic, dynamic_map, quantize_dynamic
from ds_ops.optim.adam import AdamW
from ds_ops.optim.optimizer_base import NO_FUSION, FusedOps, Group, Params, fused_spec, require_rate
from ds_ops.optim.step_options import StepOptions
from ds_ops.update_rules import UpdateSpec, UpdateTensors

__all__ = ["Adam8bit", "AdamW8bit"]

_PIECE = 1 << 16  # elements; what is decoded at a time stays in the cache
_NESTED = "__bnb_optimizer_quant_state__"  # bitsandbytes puts its tensors there, so that FSDP leaves them alone
_SIGNED = frozenset({"exp_avg"})


class AdamW8bit(AdamW):
    """AdamW whose moments take 2 bytes an element, and 8 bytes for every 256.

    The second moment is dithered and never rounded to zero, see `ds_ops.dynamic_codes`; for the rest the formula and arguments are those
    of `AdamW`. `elementwise` is False: the elements of a block share a scale, so parameters are stepped whole.

    min_8bit_size: parameters with fewer elements have moments in fp32.

    State: `exp_avg_8bit` (uint8, shaped like the parameter) and `exp_avg_absmax` (fp32, one per block), and so of `exp_avg_sq`.
    `load_state_dict` takes states of torch.optim, of bitsandbytes and of torchao, too.
    """

    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        bias_correction: bool = True,
        min_8bit_size: int = 4096,
        **options: Unpack[StepOptions],
    ) -> None:
        require_rate("min_8bit_size", min_8bit_size)
        self.min_8bit_size = min_8bit_size
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            bias_correction=bias_correction,
            **options,
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"min_8bit_size": self.min_8bit_size}

    def coded(self, p: Tensor) -> bool:
        """Whether the moments of `p` have 8 bits."""
        return p.numel() >= max(self.min_8bit_size, 1) and p.dtype in _call.DTYPES

    def states_of(self, group: Group, p: Tensor) -> tuple[str, ...]:
        names = super().states_of(group, p)
        return tuple(f"{n}_{part}" for n in names for part in ("8bit", "absmax")) if self.coded(p) else names

    def state_shape(self, group: Group, p: Tensor, name: str) -> tuple[int, ...] | None:
        # Codes lie in the order of the elements, whatever the memory order of the parameter.
        shapes = {"8bit": tuple(p.shape), "absmax": (-(-p.numel() // BLOCK),)}
        return shapes.get(name.rpartition("_")[2])

    def state_dtype_for(self, p: Tensor, name: str) -> torch.dtype:
        return torch.uint8 if name.endswith("_8bit") else super().state_dtype_for(p, name)

    def step_group(self, group: Group, fusion: FusedOps = NO_FUSION) -> None:
        super().step_group({**group, "params": [p for p in group["params"] if not self.coded(p)]}, fusion)
        coded = [p for p in group["params"] if self.coded(p) and fusion.grad_of(p) is not None]
        self.ensure_state(group, coded)
        for place, p in enumerate(coded):
            self._step_coded(group, p, fusion, place)

    def _remember(self, group: Group, bucket: Any) -> None:
        """Do nothing: the group of small parameters is made anew for every step."""

    def undo(self, params: Sequence[Tensor] | None = None, *, fusion: FusedOps = NO_FUSION) -> None:
        """Raise UnsupportedError: codes of 8 bits do not say what they were ("optimizer-undo")."""
        raise UnsupportedError(
            "undo() of moments in 8 bits: what a step overwrites cannot be computed from codes.",
            code="optimizer-undo",
            fix="Use AdamW.",
        )

    def _step_coded(self, group: Group, p: Tensor, fusion: FusedOps, place: int) -> None:
        state, grad = self.state[p], self.dense_grad(p, fusion)
        number = int(state["step"]) + 1
        spec = fused_spec(self.spec(group, number), group, fusion, number)
        names = super().states_of(group, p)
        contiguous = p.is_contiguous()
        param = p.detach().reshape(-1)  # a copy of another memory order, written back below
        flat_grad = grad.reshape(-1)
        copy = fusion.copies.get(p)
        flat_copy = None if copy is None else copy.view(-1)
        for start in range(0, p.numel(), _PIECE):
            piece, blocks = slice(start, start + _PIECE), slice(start // BLOCK, (start + _PIECE) // BLOCK)
            codes = [(state[f"{n}_8bit"].view(-1)[piece], state[f"{n}_absmax"][blocks]) for n in names]
            moments = [dequantize_dynamic(*c, signed=n in _SIGNED) for n, c in zip(names, codes, strict=True)]
            copies = [] if flat_copy is None else [flat_copy[piece]]
            tensors = UpdateTensors([param[piece]], [flat_grad[piece]], tuple([m] for m in moments), copies)
            self.step_tensors(group, spec, tensors, (number, place + start))
            for name, new, (code, largest) in zip(names, moments, codes, strict=True):
                _code(spec, name, new, code, largest)
        if not contiguous:
            p.copy_(param.view(p.shape))
        if fusion.zero_grads and flat_grad.data_ptr() != grad.data_ptr():
            grad.zero_()
        state["step"] = number

    def _adopt(self, group: Group, p: Tensor, values: Mapping[str, Any]) -> None:
        entries = {**values, **values.get(_NESTED, {})}
        entries.pop(_NESTED, None)
        for place, name in enumerate(super().states_of(group, p), start=1):
            signed = name in _SIGNED
            foreign = _foreign_codes(entries, name, place)
            if foreign is not None and self.coded(p) and foreign.fits(signed):
                entries |= {f"{name}_8bit": foreign.codes.view(p.shape), f"{name}_absmax": foreign.largest}
                continue
            moment = entries.get(name, entries.get(f"state{place}")) if foreign is None else foreign.decode()
            if moment is None:
                continue
            entries[name] = moment.view(p.shape)
            if self.coded(p):
                codes, largest = quantize_dynamic(moment.reshape(-1).float(), signed=signed)
                entries |= {f"{name}_8bit": codes.view(p.shape), f"{name}_absmax": largest}
        super()._adopt(group, p, entries)


class Adam8bit(AdamW8bit):
    """Adam with moments of 8 bits; weight decay, if any, is L2: added to the gradient as wd * p."""

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def _code(spec: UpdateSpec, name: str, new: Tensor, code: Tensor, largest: Tensor) -> None:
    """Store a moment in its codes; the largest v of AMSGrad is no running mean, and needs no dither."""
    signed = name in _SIGNED
    codes, peaks = quantize_dynamic(new, signed=signed, dither=spec.dither if name == "exp_avg_sq" else 0.0)
    code.copy_(codes)
    largest.copy_(peaks)


@dataclass(frozen=True, slots=True)
class _ForeignCodes:
    """A moment as bitsandbytes and torchao have it: codes, the largest magnitude of each block, and the values of the codes."""

    codes: Tensor
    largest: Tensor
    levels: Tensor

    @property
    def block(self) -> int:
        sizes = (64, 128, 256, 512, 1024, 2048, 4096)
        return next(s for s in sizes if -(-self.codes.numel() // s) == self.largest.numel())

    def fits(self, signed: bool) -> bool:
        """Whether they are codes of `ds_ops.dynamic_codes`."""
        return self.block == BLOCK and torch.equal(self.levels.cpu(), dynamic_map(signed))

    def decode(self) -> Tensor:
        values = self.levels.to(self.codes.device)[self.codes.reshape(-1).int()]
        scales = self.largest.to(self.codes.device).repeat_interleave(self.block)
        return values * scales[: values.numel()]


def _foreign_codes(values: Mapping[str, Any], name: str, place: int) -> _ForeignCodes | None:
    """Return the codes of a moment in a state of torchao (a tensor of its own class), or of bitsandbytes (`state1`, `qmap1`, `absmax1`)."""
    moment = values.get(name)
    if hasattr(moment, "qmap"):
        return _ForeignCodes(moment.codes, moment.scale, moment.qmap)  # type: ignore[union-attr]
    if f"qmap{place}" in values:
        return _ForeignCodes(*(values[f"{part}{place}"] for part in ("state", "absmax", "qmap")))
    return None

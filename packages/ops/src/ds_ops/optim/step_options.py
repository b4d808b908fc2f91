"""How an optimizer steps, apart from its formula: by which kernels, how 16-bit parameters are rounded, where states lie.

The names are those of `torch.optim` (`foreach`, `fused`, `capturable`, `differentiable`), torchao (stochastic rounding of bf16 parameters)
and bitsandbytes (paged states). None of them is state: a checkpoint does not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from ds_config.errors import ConfigError, UnsupportedError
from ds_ops.update_rules import StepKernel

__all__ = ["StepOptions", "check_options", "kernel_of", "round_stochastically"]


class StepOptions(TypedDict, total=False):
    """Keywords that every elementwise optimizer takes.

    foreach: step by torch's operations for lists of tensors. fused: True demands a kernel that makes one pass, and raises where there
        is none. Both None (the default): the best kernel that runs. Both False: a loop over tensors in plain torch.
    capturable: False; a step number on the device, for CUDA graphs, is refused. differentiable: False; else refused.
    stochastic_rounding: round bf16 parameters up with the probability of the remainder, so that updates below their spacing add up.
        The random numbers are made of the step's number and the parameter's place in its group: equal on every replica, and after a resume.
    paged: states of CPU parameters lie in files without a name in this folder (True: the system's folder for temporary files), mapped
        to memory: the kernel writes pages out where memory is short. On a device it is refused.
    """

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    stochastic_rounding: bool
    paged: bool | str


_KNOWN = frozenset(StepOptions.__annotations__)


def check_options(kind: str, options: StepOptions) -> StepOptions:
    """Check the step options of an optimizer class named `kind`, and return them.

    Raises:
        ConfigError: `foreach` and `fused` are both true ("optimizer-value").
        UnsupportedError: `capturable` or `differentiable` is true ("optimizer-option").
    """
    unknown = sorted(set(options) - _KNOWN)
    if unknown:
        raise TypeError(f"{kind}.__init__() got an unexpected keyword argument {unknown[0]!r}")
    if options.get("foreach") and options.get("fused"):
        raise ConfigError(
            f"{kind}: foreach=True and fused=True name two kernels for one step.",
            code="optimizer-value",
            fix="Leave one of them out; without both the best kernel runs.",
        )
    refused = {
        "capturable": "step numbers are numbers of the host here, and a CUDA graph would repeat its first one",
        "differentiable": "steps write into parameters and states, which autograd does not record",
    }
    for name, why in refused.items():
        if options.get(name):
            raise UnsupportedError(
                f"{kind}({name}=True): {why}.",
                code="optimizer-option",
                fix=f"Use torch.optim's class with {name}=True, or leave it out.",
            )
    return options


def kernel_of(options: StepOptions) -> StepKernel:
    """Return the kernel that the options ask for. Pure."""
    foreach, fused = options.get("foreach"), options.get("fused")
    if fused:
        return "fused"
    if foreach:
        return "foreach"
    if foreach is None:
        return "best" if fused is None else "foreach"
    return "loop" if fused is False else "best"


def round_stochastically(params: Sequence[Tensor], new: Sequence[Tensor], draw: tuple[int, int]) -> None:
    """Store fp32 tensors in bf16 parameters: p = bits(x + r) without the low 16, r uniform in [0, 2^16) units of x's last place.

    Infinities and NaN are stored as they are.

    Args:
        draw: step and first place; the generator of the i-th tensor is seeded by the step and the first place plus i.
    """
    step, first = draw
    for place, (p, x) in enumerate(zip(params, new, strict=True), start=first):
        generator = torch.Generator(p.device).manual_seed((step << 40) + place)
        noise = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
        up = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
        p.copy_(torch.where(x.isfinite(), up, x))

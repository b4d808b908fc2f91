"""Experts as copies of any module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ds_accel import derive_seed
from ds_config.errors import PlanError
from ds_moe.dispatch import DispatchRows
from ds_moe.grouped_experts import check_grouped, compute_grouped, lay_together, lie_in

__all__ = ["Experts", "draw_seed", "each"]


class Experts(nn.Module):
    """Copies of a module, each for its own rows.

    Every copy is called in every forward, also without rows: a parameter that is gathered when its module is called is then gathered
    by all ranks that hold it, whatever was routed where.

    Args:
        expert: Maps [rows, n] to [rows, m], also with 0 rows; of a tuple the first counts. All copies begin with its values
            until `draw` is called.
        num_local_experts: Copies on this rank.
        grouped: Compute all copies by grouped products (`grouped_experts`).
        expert_group_name: What `param.group_name` becomes; `param.allreduce` becomes False. Optimizers group by them.
    """

    def __init__(
        self,
        expert: nn.Module,
        num_local_experts: int = 1,
        expert_group_name: str | None = None,
        *,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        if grouped:
            check_grouped(expert)
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]

        self.seed: int | None = None  # that values were drawn from
        self.grouped, self._versions = grouped, -1
        self._together = lay_together(self.deepspeed_experts) if grouped else ()
        self._shapes = [param.shape for param in self.deepspeed_experts.parameters()]

    def draw(self, seed: int, first: int = 0) -> None:
        """Draw new values for every copy as its modules' `reset_parameters` does, from `seed` and the copy's number among all experts.

        Args:
            first: Number of this rank's first expert. A later call with another one draws again, unless values were changed since.
        Raises:
            PlanError: a module with parameters has no `reset_parameters` ("moe-experts").
        """
        if self._versions not in (-1, self._value_version()):
            return  # loaded from a checkpoint, or trained
        self.seed = seed
        for number, expert in enumerate(self.deepspeed_experts):
            devices = [p.device for p in expert.parameters() if p.device.type == "cuda"][:1]
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(derive_seed(seed, f"expert {first + number}"))
                for name, module in expert.named_modules():
                    if not any(True for _ in module.parameters(recurse=False)):
                        continue
                    if not callable(reset := getattr(module, "reset_parameters", None)):
                        raise PlanError(
                            f"experts are to begin apart, and {name or 'the expert'} ({type(module).__name__}) cannot draw its values",
                            code="moe-experts",
                            fix="Give it a method reset_parameters(), or leave draw_apart out.",
                        )
                    reset()
        self._versions = self._value_version()

    def _value_version(self) -> int:
        return sum(param._version for param in self.deepspeed_experts.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        together = lie_in(self._together, self.deepspeed_experts)
        super()._apply(fn, recurse)
        self._together = lay_together(self.deepspeed_experts) if together else ()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_together": ()}

    def forward(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Compute y[r] = expert of row r (x[r]); zeros for rows of no expert."""
        experts = self.deepspeed_experts
        # Parameters without their memory are gathered when their modules are called.
        if not self.grouped or [param.shape for param in experts.parameters()] != self._shapes:
            return each(experts, x, rows)
        if self._together and not lie_in(self._together, experts):
            self._together = ()  # somebody else's memory now; do not hold ours any longer
        return compute_grouped(experts, self._together, x, rows)


def draw_seed() -> int:
    """Draw a seed from the CPU's global generator: other experts for each layer, the same ones for the same seed of the program."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def each(experts: Iterable[nn.Module], x: Tensor, rows: DispatchRows) -> Tensor:
    """Compute y[r] = expert of row r (x[r]) for modules; zeros for rows of no expert."""
    bounds = rows.on_host()
    sizes = [end - start for start, end in zip((0, *bounds), bounds, strict=False)]
    # split, because the gradient of each x[a:b] would be as large as x.
    *parts, rest = x.split([*sizes, x.shape[0] - (bounds[-1] if bounds else 0)])
    outputs = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    outs = [out[0] if isinstance(out, tuple) else out for out in outputs]
    if rest.shape[0]:
        outs.append(outs[0].new_zeros(rest.shape[0], *outs[0].shape[1:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)

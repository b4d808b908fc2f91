"""Which tensor was the first that is not finite: a search for the one step that went wrong, not for every step.

with ds_zero.NonfiniteDetector(model) as search:
    loss = model(batch); loss.backward()
print(search.first)          # "blocks.3.mlp: output in forward" or "blocks.3.mlp.up.weight: gradient in backward"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_zero.layout.model_members import named_members
from ds_zero.runtime.forward_backward import tensors_in

__all__ = ["Nonfinite", "NonfiniteDetector"]


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first tensor with an element that is not finite.

    Attributes:
        name: Qualified name of the module or parameter.
        what: `"input"` or `"output"` of a module, or `"gradient"`.
        phase: When it was made.
        rank: Of the process that found it.
    """

    name: str
    what: Literal["input", "output", "gradient"]
    phase: Literal["forward", "backward"]
    rank: int

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.what} in {self.phase}, rank {self.rank}"


class NonfiniteDetector:
    """Inside, outputs of modules and gradients are checked as they are made; each check reads the tensor once.

    Args:
        model: Sharded or not.
    Attributes:
        first: What was found on this rank; None if all is finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first: Nonfinite | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> NonfiniteDetector:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name)))
            self._handles.append(module.register_forward_hook(self._after(name)))
        for name, param in named_members(self.model).items():
            if param.requires_grad:
                self._handles.append(param.register_hook(self._gradient(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._check(Nonfinite(name, "input", "forward", _rank()), args)

    def _after(self, name: str) -> Callable[..., None]:
        def check(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module, args
            self._check(Nonfinite(name, "output", "forward", _rank()), output)
            for tensor in _floats(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(name))

        return check

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda grad: self._check(Nonfinite(name, "gradient", "backward", _rank()), grad)

    def _check(self, location: Nonfinite, value: Any) -> None:
        if self.first is None and not all(bool(t.detach().isfinite().all()) for t in _floats(value)):
            self.first = location


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _floats(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point())

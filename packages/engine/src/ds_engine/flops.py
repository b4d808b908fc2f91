"""How many floating-point operations a model does, module by module, forward, backward and recomputation counted separately.

Counted where torch dispatches an operation, whatever code calls it: `@`, einsum, `nn.functional`, transformers' own kernels. Matrix products
(grouped ones, too), convolutions and attention are counted, a multiply-add as two; elementwise work is not, nor what a kernel of ds-ops
does outside of torch's dispatcher. Attention is counted whole,
not halved for a causal mask, as the literature does. What a checkpointed module computes again in backward is neither its forward nor
the model's backward: an operation in backward is "again" while a module's forward runs there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ds_engine._torch import in_backward

__all__ = ["ForwardCounter", "ModuleFlops", "Operations"]


@dataclass(frozen=True, slots=True)
class ModuleFlops:
    """One module: its qualified name ("" for the model), class, elements of its parameters, operations and seconds of its forwards.

    Seconds are wall-clock time with the counting in it.
    """

    name: str
    kind: str
    numel: int
    flops: int
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Levels below the model."""
        return self.name.count(".") + 1 if self.name else 0


class ForwardCounter:
    """Counts inside `watch`.

    Attributes:
        modules: What the forwards did that are watched, or were last, the model first.
        backward: Operations of watched backwards, without what was computed again.
        again: Operations that watched backwards computed again.
        has_backward: Whether a backward was watched.
    """

    def __init__(self) -> None:
        self._watched: tuple[_Count, nn.Module] | None = None
        self.backward = self.again = 0
        self.has_backward = False

    @property
    def modules(self) -> tuple[ModuleFlops, ...]:
        return () if self._watched is None else self._watched[0].module_flops(self._watched[1])

    @contextmanager
    def watch(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> Iterator[None]:
        """Count what `model` computes here, and outside of its modules. Slows it down several times; results are the same.

        Args:
            ignore: Modules of these classes, and what is in them, count as nothing.
        """
        count = _Count(model, tuple(ignore))
        self._watched = count, model
        with count.watching():
            yield
        self._add(count)

    @contextmanager
    def watch_backward(self, model: nn.Module) -> Iterator[None]:
        """Count a backward whose forward was watched before."""
        count = _Count(model, ())
        with count.watching():
            yield
        self._add(count)
        self.has_backward = True

    def _add(self, count: _Count) -> None:
        self.backward += count.backward
        self.again += count.again
        self.has_backward = self.has_backward or count.backward > 0


class _Count:
    """One stretch of counting: the stack of modules that run, and what each did."""

    def __init__(self, model: nn.Module, ignore: tuple[type[nn.Module], ...]) -> None:
        self._known = {id(module) for module in model.modules()}
        self._ignore = ignore
        self._stack: list[tuple[nn.Module, float]] = []
        self._ignored = 0
        self.flops: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self.total = self.backward = self.again = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        fast = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)  # one operation for a whole layer of nn.Transformer
        try:
            with Operations(self._operation):
                yield
        finally:
            mha.set_fastpath_enabled(fast)
            for handle in handles:
                handle.remove()

    def module_flops(self, model: nn.Module) -> tuple[ModuleFlops, ...]:
        """Each module once, under its first name; the model has all forward operations, also those outside of modules."""
        found = []
        for name, module in model.named_modules():
            flops = self.flops.get(id(module), 0) if name else self.total
            numel = sum(p.numel() for p in module.parameters())
            found.append(ModuleFlops(name, type(module).__name__, numel, flops, self.seconds.get(id(module), 0.0)))
        return tuple(found)

    def _enter(self, module: nn.Module, args: object) -> None:
        if id(module) in self._known:
            self._ignored += isinstance(module, self._ignore)
            self._stack.append((module, time.perf_counter()))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        # A forward that is computed again ends early, by an exception, once it has what backward needs.
        if not self._stack or self._stack[-1][0] is not module:
            return
        _, began_s = self._stack.pop()
        self._ignored -= isinstance(module, self._ignore)
        if not in_backward():
            self.seconds[id(module)] = self.seconds.get(id(module), 0.0) + time.perf_counter() - began_s

    def _operation(self, flops: int) -> None:
        if self._ignored:
            return
        if in_backward():
            if self._stack:
                self.again += flops
            else:
                self.backward += flops
            return
        self.total += flops
        for key in {id(module) for module, _ in self._stack}:  # a module within itself counts once
            self.flops[key] = self.flops.get(key, 0) + flops


class Operations(TorchDispatchMode):
    """Counts the operations of every call that torch dispatches."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: this mode changes nothing, so torch may compile under it (flex attention compiles itself)."""
        return True

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = dict(kwargs or {})
        formula = _formula(func)
        if formula is None and hasattr(func, "decompose") and func is not torch.ops.prim.device.default:
            with self:  # what is made of other operations arrives whole in inference mode
                out = func.decompose(*args, **named)
            if out is not NotImplemented:
                return out
        out = func(*args, **named)
        if formula is not None:
            self._tell(int(formula(*args, **named, out_val=out)))
        return out


def _formula(func: Any) -> Callable[..., int] | None:
    packet = getattr(func, "_overloadpacket", func)
    formula: Callable[..., int] | None = _FORMULAS.get(str(packet)) or flop_registry.get(packet)
    return formula


def _product(a: Tensor, b: Tensor, *args: Any, **named: Any) -> int:
    """Count `mv` and `dot`: two operations for each element of the larger operand."""
    return 2 * max(a.numel(), b.numel())


def _added_product(bias: Tensor, a: Tensor, b: Tensor, *args: Any, **named: Any) -> int:
    return 2 * a.numel()


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> int:
    """Scores and values: [..., heads, s, d] with keys [..., t, d]; keys of fewer heads serve several."""
    rows = math.prod(q.shape[:-1])
    return 2 * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> int:
    """Count five products: the scores again, and the gradients of v, of the probabilities, of q and of k."""
    return _attention(q, k, v) * 5 // 2


def _lstm(x: Tensor, w_input: Tensor, w_hidden: Tensor, *args: Any, **named: Any) -> int:
    """Count one layer and direction: every step multiplies by both weights."""
    return 2 * math.prod(x.shape[:-1]) * (w_input.numel() + w_hidden.numel())


def _cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *args: Any, **named: Any) -> int:
    return 2 * math.prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _grouped(a: Tensor, b: Tensor, *args: Any, **named: Any) -> int:
    """Count a grouped matmul: each row meets the matrix of its group, unless both are stacks of matrices."""
    stacks = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * stacks * a.shape[-2] * a.shape[-1] * b.shape[-1]


# By name: not every version of torch has all of them. torch's own registry has the others.
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten.mv": _product,
    "aten.dot": _product,
    "aten.vdot": _product,
    "aten.addmv": _added_product,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten.mkldnn_rnn_layer": _lstm,
    "aten._cudnn_rnn": _cudnn_rnn,
    "aten._grouped_mm": _grouped,
    "aten._scaled_grouped_mm": _grouped,
}

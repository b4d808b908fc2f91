"""Gradients of whole tensors that are used between a column and a row layer: each rank computes the part of its own activations.

Between these layers a rank has its part of the features. A parameter that every rank holds whole and that is used there (a norm of each
head, a slope of PReLU, a temperature, a gate for all features) gets on each rank the gradient of that rank's features only; the sum over
the ranks is its gradient. No rule need say so: `PartialGradients` finds it in autograd's graph, where a row layer reads its input.

    column layer -> nodes of the cut region -> row layer
                        ^ whole tensors enter here: the gradient on this edge is summed over the ranks

A node is of the cut region if a part of a weight, or the copy that column layers read, is below it. `ReplicaGradientCheck` compares what
came of it: parameters that all ranks hold whole have one gradient on all of them, or the copies would part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

import ds_comm
from ds_comm import Group
from ds_comm.differentiable import reduce, region_edge
from ds_config.errors import PlanError
from ds_parallel._torch import graph_task

__all__ = ["PartialGradients", "ReplicaGradientCheck"]

_SHOWN = 5  # names in a message
_TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 3e-2}  # relative: what orders of summation may change
_EXACT_TOLERANCE = 1e-3
_NOISE = 1e-6  # of the largest gradient: smaller ones are what rounding leaves of zero


class PartialGradients:
    """Sums the gradients of whole tensors that enter the cut region of a row layer.

    Args:
        group: The tensor-parallel ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._parts: frozenset[int] = frozenset()
        self._summed: frozenset[int] = frozenset()
        self._mark = f"ds_parallel.partial_gradients.{id(self)}"  # in the metadata of nodes whose gradients are summed

    def know(self, parts: Iterable[nn.Parameter], summed: Iterable[nn.Parameter]) -> None:
        """Set which parameters are parts, and which have their whole gradient summed by a rule."""
        self._parts, self._summed = frozenset(map(id, parts)), frozenset(map(id, summed))

    def close_region(self, x: Tensor) -> None:
        """Register sums on all edges by which whole tensors enter the graph of `x`, the input of a row layer. Every rank finds the same.

        Cost: a walk over the nodes between the column layers and `x`; for each such edge an all-reduce in backward.
        """
        root = x.grad_fn
        if root is None or self.group.size == 1:
            return
        region = self._region(root)
        for node, is_cut in region.items():
            if not is_cut:
                continue
            edges = [
                index
                for index, (child, _) in enumerate(node.next_functions)
                if child is not None and not region.get(child, False) and not self._is_cut(child)
            ]
            metadata: Any = node.metadata  # torch's annotation is that of a method
            if edges and self._mark not in metadata:  # two row layers may read one region
                metadata[self._mark] = True
                node.register_hook(partial(self._sum, edges))

    def _sum(self, edges: Collection[int], grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            reduce(grad, self.group, unit="partial gradient") if index in edges and grad is not None else grad
            for index, grad in enumerate(grads)
        )

    def _region(self, root: Node) -> dict[Node, bool]:
        """Return the nodes below `root` up to where its region ends, and of each whether it is of the cut region."""
        region: dict[Node, bool] = {}
        todo: list[tuple[Node, bool]] = [(root, False)]
        while todo:
            node, is_done = todo.pop()
            children = [child for child, _ in node.next_functions if child is not None]
            if is_done:
                region[node] = any(region.get(child, False) or self._is_cut(child) for child in children)
            elif node not in region:
                region[node] = False
                todo.append((node, True))
                todo += [(child, False) for child in children if child not in region and not self._is_end(child)]
        if not region[root]:  # column layers and what they read are frozen: only parameters can enter
            region = dict.fromkeys(region, True)
        region[root] = True
        return region

    def _is_end(self, node: Node) -> bool:
        return not node.next_functions or hasattr(node, "tensor_part") or region_edge(node, self.group) is not None

    def _is_cut(self, node: Node) -> bool:
        """Whether a node at the end of a region is of this rank's part, or its gradient is summed there."""
        if hasattr(node, "tensor_part"):  # where a DTensor's local elements enter
            return bool(node.tensor_part)
        variable = getattr(node, "variable", None)
        if variable is not None:
            return id(variable) in self._parts or id(variable) in self._summed
        return region_edge(node, self.group) == "enters"


class ReplicaGradientCheck:
    """Compares the first gradient of every parameter that all ranks of a group hold whole.

    Attributes:
        every: Whether later gradients are compared, too. For tests.
    """

    every = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self._handles: dict[str, RemovableHandle] = {}
        self._digests: dict[int, dict[str, list[Tensor]]] = {}  # of each backward: one that raised is asked no more
        self._tolerance: dict[str, float] = {}

    def watch_first(self, model: nn.Module, parts: list[nn.Parameter]) -> RemovableHandle:
        """Watch from the first forward on, unless a compiler captures it: graphs take another way for gradients that somebody looks at."""

        def begin(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                handle.remove()
                self.watch(model, parts)

        handle = model.register_forward_pre_hook(begin)
        return handle

    def watch(self, model: nn.Module, parts: Iterable[nn.Parameter]) -> None:
        """Watch the parameters of `model` that are not among `parts`, for one backward.

        Not those of which tensor ranks hold others (experts, `copies` of 1), nor those whose gradient is summed over tensor ranks later.
        """
        skipped = set(map(id, parts))
        for name, param in model.named_parameters():
            if id(param) not in skipped and param.requires_grad and not self._may_differ(param):
                self._handles[name] = param.register_hook(partial(self._note, name))

    def _may_differ(self, param: nn.Parameter) -> bool:
        reduction_group = ds_comm.param_sharding(param).family
        if reduction_group is None:
            return False
        return reduction_group.copies == 1 or len(set(reduction_group.group.ranks) & set(self.group.ranks)) > 1

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._digests.clear()

    def _note(self, name: str, grad: Tensor) -> None:
        if torch.compiler.is_compiling() or grad.is_sparse or grad.is_complex() or grad.numel() == 0:
            return
        task = graph_task()
        if task not in self._digests:
            self._digests[task] = {}
            queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
            queue(partial(self._compare, task))
        values = grad.detach()
        wide = torch.promote_types(values.dtype, torch.float32)
        self._digests[task][name] = [
            torch.linalg.vector_norm(values, dtype=wide).float(),
            values.sum(dtype=wide).float(),
        ]
        self._tolerance[name] = _TOLERANCE.get(grad.dtype, _EXACT_TOLERANCE)

    def _compare(self, task: int) -> None:
        self_digests = self._digests.pop(task, {})
        if not self_digests:  # watched no more
            return
        names = list(self_digests)
        local = torch.stack([value for digest in self_digests.values() for value in digest]).tolist()
        rows = {name: [local[2 * i], local[2 * i + 1]] for i, name in enumerate(names)}
        everyones = [_finite(other) for other in ds_comm.all_gather_json(_texts(rows), self.group)]
        common = [name for name in names if all(name in other for other in everyones)]
        floor = _NOISE * max((other[name][0] for other in everyones for name in common), default=0.0)
        different = [
            name for name in common if self._differs([other[name] for other in everyones], self._tolerance[name], floor)
        ]
        if not self.every:
            for name in common:
                if (handle := self._handles.pop(name, None)) is not None:
                    handle.remove()
        if different:
            shown = different[:_SHOWN]
            norms = "; ".join(
                f"{name} (norms {', '.join(f'{other[name][0]:.4g}' for other in everyones)})" for name in shown
            )
            more = f" and {len(different) - len(shown)} more" if len(different) > len(shown) else ""
            raise PlanError(
                f"tensor-parallel ranks {list(self.group.ranks)} hold these parameters whole and have different gradients: {norms}{more}",
                code="tensor-gradients",
                fix="Look at what computes with them: it gives ranks different numbers (random ones, or a part of the features outside "
                "of a column and a row layer). Skip the layers around it, or set grad_allreduce for it in partition_config.",
            )

    @staticmethod
    def _differs(rows: list[list[float]], tolerance: float, floor: float) -> bool:
        largest = max(norm for norm, _ in rows)
        spread = max(norm for norm, _ in rows) - min(norm for norm, _ in rows)
        sums = max(total for _, total in rows) - min(total for _, total in rows)
        size = max(largest, max(abs(total) for _, total in rows))
        return spread > tolerance * largest + floor or sums > tolerance * size + floor


def _texts(rows: dict[str, list[float]]) -> dict[str, list[str]]:
    return {name: [value.hex() for value in row] for name, row in rows.items()}


def _finite(texts: dict[str, list[str]]) -> dict[str, list[float]]:
    """Read digests; those that are not finite (loss scaling) are left for a later backward."""
    rows = {name: [float.fromhex(text) for text in row] for name, row in texts.items()}
    return {name: row for name, row in rows.items() if all(value - value == 0 for value in row)}

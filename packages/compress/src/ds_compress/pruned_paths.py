"""What lies between a pruned layer and the layers that read its output, checked before anything is pruned.

A feature that is dropped must be dropped for itself: an activation, a dropout or a pooling works on each feature alone, so the smaller model computes
what the masked one did. A layer norm or a softmax computes each feature from all, and a layer that keeps its width no longer fits.
The forward is traced by torch.fx; what cannot be traced is not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from ds_compress.layer_kinds import BatchNorms
from ds_config.errors import PlanError

__all__ = ["check_path"]

_MIXERS = {
    "softmax", "log_softmax", "softmin", "gumbel_softmax", "layer_norm", "group_norm", "rms_norm", "instance_norm", "batch_norm",
    "local_response_norm", "normalize", "channel_shuffle", "roll", "flip", "cumsum", "sort", "native_layer_norm",
    "native_group_norm",
}  # fmt: skip
_MIXING_MODULES = (
    nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    nn.ChannelShuffle, nn.CrossMapLRN2d,
)  # fmt: skip


def check_path(model: nn.Module, pruned: str, related: Sequence[str], features: int, functions: bool = True) -> None:
    """Raise PlanError ("compress-between") where the model without some of the `features` that `pruned` computes would not equal the masked one.

    Without `functions` only modules that have parameters of so many features are looked for: from queries, whose softmax is over keys, to an
    attention's output projection.
    """
    ends = (pruned, *related)
    scope = _common_module(ends)
    graph = _trace(model.get_submodule(scope), {_below(name, scope) for name in ends})
    if graph is None:
        return
    found = _obstacles(graph, _below(pruned, scope), {_below(name, scope) for name in related}, features)
    for name, what, sized in found:
        if not (sized or functions):
            continue
        full = f"{scope}.{name}" if scope and name else name or scope
        raise PlanError(
            f"{pruned} loses some of its {features} features, and {full or 'the model'} {what} before {', '.join(related)} reads them",
            code="compress-between",
            fix="Name batch norms and the layers that read the pruned one as related; leave out layers whose output is normalised over features.",
        )


def _common_module(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all of `names`."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _below(name: str, scope: str) -> str:
    return name.removeprefix(f"{scope}.") if scope else name


class _LayerTracer(fx.Tracer):
    """A tracer to which the layers in question are leaves, as torch's own modules are."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def _trace(module: nn.Module, leaves: set[str]) -> tuple[fx.Graph, nn.Module] | None:
    """Trace the forward of a module on shells of it, so that what forward assigns stays away from the model."""
    shell = _shell(module)
    try:
        with torch.random.fork_rng(devices=()):
            return _LayerTracer(leaves).trace(shell), shell
    except Exception:  # the user's forward may raise anything on a proxy
        return None


def _shell(module: nn.Module) -> nn.Module:
    shell = copy.copy(module)
    for attribute in ("_parameters", "_buffers"):
        shell.__dict__[attribute] = dict(module.__dict__[attribute])
    shell.__dict__["_modules"] = {
        name: None if child is None else _shell(child) for name, child in module._modules.items()
    }
    return shell


def _obstacles(
    graph: tuple[fx.Graph, nn.Module], pruned: str, related: set[str], features: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield (module, what it does, whether its own size says so) for each operation that the pruned output reaches before a related layer."""
    nodes, root = graph
    reached: set[fx.Node] = set()
    for node in nodes.nodes:
        if node.op == "call_module" and node.target == pruned:
            reached.add(node)
            continue
        if not reached.intersection(node.all_input_nodes):
            continue
        if node.op != "call_module":
            yield from _functions(node, root, features)
        elif node.target not in related:
            yield from _modules(str(node.target), root.get_submodule(str(node.target)), features)
        elif not _is_batch_norm(root.get_submodule(str(node.target))):
            continue  # a reader: what follows does not have these features
        reached.add(node)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorms)


def _modules(name: str, module: nn.Module, features: int) -> Iterator[tuple[str, str, bool]]:
    for tensor in (*module.parameters(), *module.buffers()):
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        if any(size > 1 and size % features == 0 for size in shape):
            yield name, f"({type(module).__name__}, {list(shape)}) keeps its size", True
            return
    if isinstance(module, _MIXING_MODULES):
        yield name, f"({type(module).__name__}) computes each from all of them", False


def _functions(node: fx.Node, root: nn.Module, features: int) -> Iterator[tuple[str, str, bool]]:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _MIXERS:
        yield "", f"({name}) computes each from all of them", False
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value: Any = root
            for part in str(source.target).split("."):
                value = getattr(value, part)
            shape = tuple(getattr(value, "ds_shape", getattr(value, "shape", ())))
            if features in shape:
                yield str(source.target), f"{list(shape)} keeps its size", True

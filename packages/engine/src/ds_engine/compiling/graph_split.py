"""What the passes `autotp` and `autosp` do to graphs: sums of cut layers are joined, attention is wrapped by exchanges.

Layers and batches are cut by ds_parallel before anything is captured; their moves are operations of the graphs (`graph_moves.py`). `autotp` edits a
backward graph: several layers that read one input (query, key and value; gate and up) each have a sum of its gradient over the ranks, and a
sum of sums is the sum of what is added first. `autosp` edits a forward as it was captured, before it has a backward: each attention of a rank
sees its part of the sequence; between an exchange before and one after it sees the whole, with a part of the heads (Jacobs et al.,
arXiv:2309.14509). An operation that would look past its part is refused: it would train, and be wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ds_config.errors import UnsupportedError
from ds_engine.compiling._torch import group_named
from ds_engine.compiling.graph_moves import MOVES, exchanged
from ds_parallel.heads import HeadCounts
from ds_parallel.sequence.ulysses import assign_heads

__all__ = ["EDITS", "join_sums", "wrap_attention"]


def join_sums(
    graph: fx.Graph,
    number: int,
    numbers: Sequence[tuple[int, bool]],
    measured: Mapping[int, Any],
    budget: int | None,
    params: Mapping[int, Any],
    backward: bool,
) -> None:
    """Add gradients before they are summed over the ranks: one sum for all layers that read one input. In the form of passes of users."""
    del number, numbers, measured, budget, params
    inner = {node for node in graph.nodes if backward and _adds(node)}
    within = {node for node in inner if len(node.users) == 1 and next(iter(node.users)) in inner}
    for root in [node for node in graph.nodes if node in inner - within]:
        terms = list(_terms(root, inner))
        by_group: dict[Any, list[fx.Node]] = {}
        for term in filter(_is_sum, terms):
            by_group.setdefault(term.args[1], []).append(term)
        several = {group: sums for group, sums in by_group.items() if len(sums) > 1}
        if not several:
            continue
        terms = [term for term in terms if not any(term in sums for sums in several.values())]
        with graph.inserting_before(root):
            for group, sums in several.items():
                added = _added(graph, [term.args[0] for term in sums], root)
                terms.append(graph.call_function(MOVES.summed.default, (added, group)))
                terms[-1].meta = dict(root.meta)
            root.replace_all_uses_with(_added(graph, terms, root))
    graph.eliminate_dead_code(lambda node: node not in inner and not _is_sum(node))


def _adds(node: fx.Node) -> bool:
    """Whether a node is the sum of two results of its own shape."""
    sources = [source for source in node.args if isinstance(source, fx.Node)]
    plain = node.target is torch.ops.aten.add.Tensor and len(sources) == 2 and not node.kwargs
    return plain and all(_format(source) == _format(node) for source in sources)


def _format(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ()


def _is_sum(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is MOVES.summed.default and len(node.users) <= 1


def _terms(node: fx.Node, inner: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the terms of a nested sum in a graph."""
    for source in node.args:
        if isinstance(source, fx.Node) and source in inner and len(source.users) == 1:
            yield from _terms(source, inner)
        elif isinstance(source, fx.Node):
            yield source


def _added(graph: fx.Graph, terms: Sequence[Any], like: fx.Node) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, term))
        total.meta = dict(like.meta)
    result: fx.Node = total
    return result


EDITS: Mapping[str, Callable[..., Any]] = {"autotp": join_sums}
"""Passes of our own that edit graphs, by name."""


# ---- sequences


def attention_of_the_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group_name: str,
) -> Tensor:
    """Attend from this rank's part [batch, heads, sequence / N, head size] to the whole sequence.

    Computes `scaled_dot_product_attention` between two all-to-alls (heads for sequence, and back).
    """
    del attn_mask, enable_gqa  # `wrap_attention` refuses the one, and the other follows from the heads
    group = group_named(group_name)
    dealt = assign_heads(HeadCounts(query.shape[1], key.shape[1]), group.size)
    if dealt.sent is not None:
        sent = torch.tensor(dealt.sent, device=key.device)
        key, value = key.index_select(1, sent), value.index_select(1, sent)
    lengths = [query.shape[2]] * group.size
    query = exchanged(query, group, 1, 2, dealt.queries, lengths)
    key, value = (exchanged(t, group, 1, 2, dealt.keys, lengths) for t in (key, value))
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )
    return exchanged(out, group, 2, 1, lengths, dealt.queries)


def wrap_attention(gm: fx.GraphModule, group_name: str, length: int, is_batch: Sequence[bool]) -> int:
    """Let every attention of a captured forward see whole sequences.

    Args:
        group_name: Of the ranks that share sequences.
        length: Of this rank's part.
        is_batch: Of each input whether it is the caller's, and not the model's.
    Returns:
        How many attentions there were.
    Raises:
        UnsupportedError: something else looks past its part, or attention has a mask ("compile-cuts"); all of it at once.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    problems = list(_problems(gm, {node for node, ours in zip(inputs, is_batch, strict=True) if ours}, length))
    if problems:
        raise UnsupportedError(
            f"the pass autosp cannot cut this model: {'; '.join(problems[:8])}",
            code="compile-cuts",
            fix="Attention must be scaled_dot_product_attention without a mask, positions an argument position_ids, labels shift_labels.",
        )
    attentions = [node for node in gm.graph.nodes if node.target is functional.scaled_dot_product_attention]
    for node in attentions:
        node.target = attention_of_the_whole
        node.kwargs = {**node.kwargs, "group_name": group_name}
    gm.graph.lint()
    gm.recompile()
    return len(attentions)


_MIXING = frozenset(
    {
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "unfold", "fold", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "pad",
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "roll", "rot90", "sort", "argsort", "topk", "unique", "bincount",
        "histc", "fft", "rfft", "irfft", "lstm", "gru", "rnn_tanh", "rnn_relu", "einsum", "baddbmm", "batch_norm", "instance_norm",
        "group_norm", "tril", "triu", "tril_", "triu_", "diff", "shift", "multi_head_attention_forward",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"matmul", "bmm", "__matmul__"})
_REDUCTIONS = frozenset(
    {
        "mean",
        "sum",
        "amax",
        "amin",
        "max",
        "min",
        "softmax",
        "log_softmax",
        "logsumexp",
        "norm",
        "var",
        "std",
        "prod",
        "argmax",
    }
)
_RANGES = frozenset({"arange", "linspace", "range"})


def _problems(gm: fx.GraphModule, batch_inputs: set[fx.Node], length: int) -> Iterator[str]:
    """Yield the operations that read beyond a rank's part of a sequence, as far as a single operation shows."""
    ours = set(batch_inputs)  # what depends on the batch
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = [source for source in node.all_input_nodes if source in ours]
        if sources:
            ours.add(node)
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        if node.target is functional.scaled_dot_product_attention:
            yield from _attention_problems(node)
        elif name in _RANGES and length in node.args:
            yield f"{node.name} counts positions from 0 on every rank"
        elif sources and _mixes(node, name, sources, length):
            yield f"{node.name} is {name} over a sequence"
        elif sources and node.target is operator.getitem and _slices(node, length):
            yield f"{node.name} takes a part of a sequence"
        elif name == "cross_entropy" and node.kwargs.get("reduction", "mean") != "mean":
            yield f"{node.name} is not a mean, which losses of parts are"


def _mixes(node: fx.Node, name: str, sources: Sequence[fx.Node], length: int) -> bool:
    if name in _PRODUCTS:
        return len(sources) > 1 and length in _shape(node)
    if name in _REDUCTIONS:
        return 1 in _dims(node) and _shape(sources[0])[1:2] == (length,)
    return name in _MIXING


def _attention_problems(node: fx.Node) -> Iterator[str]:
    query = _shape(node.args[0] if node.args else node.kwargs["query"])
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if len(query) != 4:
        yield f"{node.name} is attention of {query}, not of [batch, heads, sequence, head size]"
    if mask is not None:
        yield f"{node.name} is attention with a mask, {mask}, which says nothing of the whole"


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _dims(node: fx.Node) -> set[Any]:
    """Return the dims that a reduction names, counted from the front."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    count = len(_shape(node.all_input_nodes[0]))
    return {
        dim % count for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)) if isinstance(dim, int) and count
    }


def _slices(node: fx.Node, length: int) -> bool:
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) < 2 or index[0] is Ellipsis or _shape(node.args[0])[1:2] != (length,):
        return False
    at = index[1]
    return isinstance(at, slice) and at not in (slice(None), slice(0, None), slice(None, length), slice(0, length))

"""The links between ranks as data, and how long a collective over them takes. Pure: no torch.

Ranks are numbered node by node. An operation of a group is described by how many of its ranks are on one node and on how many nodes;
the slowest part of its way decides: the links within a node, or the adapters that all ranks of the node share. Times are those of the
algorithms that NCCL and MPI use, the fastest of them at each size (Thakur, Rabenseifner, Gropp 2005; nccl-tests' PERFORMANCE.md):

    ring             bytes once around; m - 1 hops of latency
    tree             the same bytes in pipelined halves up and down a tree; log2 m hops
    all to all       each pair at once; one hop

Several groups that cross nodes at one time share the adapters of their node, as every rank of the node has such a group: of the
node's bandwidth a group gets its ranks' share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ds_config.errors import ConfigError

__all__ = ["Curve", "Fabric", "GroupSpan", "Link", "Passage", "as_json", "fabric_from", "interpolate", "preset_names"]

_GIGA: Final = 1e9
_MICRO: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Link:
    """One way between two ranks, or between a node and the others.

    Attributes:
        gbytes_per_s: Bytes in one direction that collectives reach, in 10**9 per second.
        latency_us: Of one hop, software included, in microseconds.
        source: Where the figures are from.
    """

    gbytes_per_s: float
    latency_us: float
    source: str = ""

    def seconds(self, nbytes: float, hops: float) -> float:
        """Return the time of `nbytes` over this link after `hops` latencies."""
        return nbytes / (self.gbytes_per_s * _GIGA) + hops * self.latency_us * _MICRO


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Where the ranks of a group are.

    Attributes:
        ranks: How many there are.
        nodes: On how many nodes.
        here: The most of them on one node.
    """

    ranks: int
    nodes: int
    here: int


Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """What one operation takes.

    Attributes:
        seconds: Until its result is there.
        link_s: Of these, how long the next operation waits for the links. The rest is latency, which overlaps.
        busy_s: How long a core of the host is busy with it.
    """

    seconds: float
    link_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a cluster.

    Attributes:
        name: Of the preset or file.
        node_size: Ranks of a node.
        inside: Between two ranks of a node, for each rank.
        between: From a node to the others, for all of its ranks together.
        multiprocessors: Of the device, that a collective occupies while it runs.
        curves: Measured times by operation, as (bytes of the whole message, seconds); they count instead of the links. `torch.all_reduce` is
            torch's own where ds-comm's takes another way (gloo).
        flows: Likewise, how long an operation keeps the links from the next one. Without, the whole time: latencies do not overlap.
        busy: Likewise, how long a core of the host is busy with an operation. Without, not at all.
        curve_ranks: Of the world that was measured.
        uneven: Whether ranks wait for each other's uneven steps, as those of the rehearsed rank are (on a CPU). Only where links were measured:
            what a preset's ranks compute on is not this host.
    """

    name: str
    node_size: int
    inside: Link
    between: Link
    multiprocessors: int = 0
    curves: Mapping[str, Curve] = field(default_factory=dict)
    flows: Mapping[str, Curve] = field(default_factory=dict)
    busy: Mapping[str, Curve] = field(default_factory=dict)
    curve_ranks: int = 2
    uneven: bool = False

    def span(self, ranks: Sequence[int]) -> GroupSpan:
        """Return on which nodes `ranks` of the world are."""
        nodes: dict[int, int] = {}
        for rank in ranks:
            nodes[rank // self.node_size] = nodes.get(rank // self.node_size, 0) + 1
        return GroupSpan(len(ranks), len(nodes), max(nodes.values(), default=0))

    def seconds(self, op: str, nbytes: int, ranks: Sequence[int] | GroupSpan, *, by_torch: bool = False) -> float:
        """Return how long a collective takes once all ranks have come to it.

        Args:
            op: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `gather`, `scatter`, `all_to_all`, `barrier`.
            nbytes: Of the whole message: what all ranks end with (all_gather) or begin with (reduce_scatter).
            by_torch: Whether torch.distributed was called rather than ds-comm.
        Raises:
            KeyError: there is no such operation.
        """
        where = ranks if isinstance(ranks, GroupSpan) else self.span(ranks)
        return self.passage(op, nbytes, where, by_torch=by_torch).seconds

    def passage(self, op: str, nbytes: int, ranks: Sequence[int] | GroupSpan, *, by_torch: bool = False) -> Passage:
        """Return what a collective takes of time, of the links and of a core, once all ranks have come to it; see `seconds`."""
        where = ranks if isinstance(ranks, GroupSpan) else self.span(ranks)
        if where.ranks < 2:
            return Passage(0.0, 0.0, 0.0)
        names = (f"torch.{_LIKE.get(op, op)}", _LIKE.get(op, op))
        name = next((name for name in names[not by_torch :] if name in self.curves), None)
        if name is None:
            seconds = min(way[0] for way in self._ways(op, nbytes, where))
            return Passage(seconds, seconds, 0.0)
        received = int(nbytes * (where.ranks - 1) / where.ranks * self.curve_ranks / (self.curve_ranks - 1))
        seconds = interpolate(self.curves[name], received)
        flow, busy = self.flows.get(name), self.busy.get(name)
        link_s = seconds if flow is None else min(seconds, interpolate(flow, received))
        return Passage(seconds, link_s, 0.0 if busy is None else interpolate(busy, received))

    def algorithm(self, op: str, nbytes: int, ranks: Sequence[int] | GroupSpan) -> str:
        """Return which algorithm `seconds` takes: `"ring"`, `"tree"`, `"pairs"`, or `"alone"` for one rank."""
        where = ranks if isinstance(ranks, GroupSpan) else self.span(ranks)
        return "alone" if where.ranks < 2 else min(self._ways(op, nbytes, where))[1]

    def message_seconds(self, nbytes: int, source: int, target: int) -> float:
        """Return how long a message from rank to rank takes."""
        if source // self.node_size == target // self.node_size:
            return self.inside.seconds(nbytes, 1)
        return self._shared(1).seconds(nbytes, 1)

    def wire_bytes(self, op: str, nbytes: int, ranks: Sequence[int] | GroupSpan) -> int:
        """Return the bytes that a rank receives at least: what "the bytes allow" is computed from."""
        where = ranks if isinstance(ranks, GroupSpan) else self.span(ranks)
        return int(_PASSES[op] * nbytes * (where.ranks - 1) / max(1, where.ranks))

    def _shared(self, here: int) -> Link:
        """Return the link to other nodes as a group with `here` ranks on the node has it: all other ranks use theirs as well."""
        return replace(self.between, gbytes_per_s=self.between.gbytes_per_s * here / self.node_size)

    def _ways(self, op: str, nbytes: int, where: GroupSpan) -> list[tuple[float, str]]:
        passes = _PASSES[op]
        out = self._shared(where.here)
        near = nbytes * (where.here - 1) / where.here  # bytes a rank gets from its own node
        far = nbytes * (where.nodes - 1) / where.nodes  # bytes the node gets from others
        if op == "all_to_all":
            # Each rank has nbytes / ranks for every other one; a node's ranks receive theirs over the shared adapters at one time.
            each = nbytes / where.ranks
            inside = self.inside.seconds(each * (where.here - 1), where.here > 1)
            outside = out.seconds(each * (where.ranks - where.here) * where.here, where.nodes > 1)
            return [(max(inside, outside), "pairs")]
        steps = [(where.here - 1, where.nodes - 1, "ring"), (_depth(where.here), _depth(where.nodes), "tree")]
        ways = []
        for inner, outer, name in steps:
            # The parts are pipelined: the slower one decides, and each adds its hops.
            moved = max(self.inside.seconds(near, 0), out.seconds(far, 0))
            hops = (inner * self.inside.latency_us + outer * out.latency_us) * _MICRO
            loss = _TREE_LOSS if name == "tree" else 1.0
            ways.append((passes * (moved * loss + hops), name))
        return ways


_PASSES: Final = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
    "gather": 1.0,
    "scatter": 1.0,
    "all_to_all": 1.0,
    "barrier": 1.0,
}
_LIKE: Final = {"reduce": "broadcast", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Which measured operation stands for one that was not measured."""
_TREE_LOSS: Final = 1.1
"""A tree's inner ranks receive from two and send to one: measured by nccl-tests at 85 to 95 % of a ring for large messages."""


def interpolate(curve: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the seconds of a message by measured (bytes, seconds) in rising order: a line through neighbours, the last one beyond them."""
    if len(curve) == 1 or nbytes <= curve[0][0]:
        return curve[0][1]
    upper = next((at for at in range(1, len(curve)) if nbytes <= curve[at][0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[upper - 1], curve[upper]
    return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def _depth(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


def _per_rank(gbits: float, ranks: int, latency_us: float, source: str) -> Link:
    """Return the link of a node whose every rank has an adapter of `gbits` (10**9 bits per second); 90 % of it is reached."""
    return Link(gbits / 8 * 0.9 * ranks, latency_us, source)


_NVLINK4: Final = Link(
    360.0, 3.0, "NVLink 4: 450 GB/s in one direction; nccl-tests reach 360 to 370 within an H100 node"
)
_NVLINK5: Final = Link(720.0, 3.0, "NVLink 5: 900 GB/s in one direction, at the share that NVLink 4 reaches")
_PCIE5: Final = Link(50.0, 5.0, "PCIe 5.0 x16: 64 GB/s in one direction, of which about 80 % are reached")
_PCIE4: Final = Link(25.0, 5.0, "PCIe 4.0 x16: 32 GB/s in one direction, of which about 80 % are reached")
_IB: Final = "InfiniBand of {} Gb/s a rank; 90 % reached"
_ETHERNET: Final = "Ethernet of {} Gb/s a node; 90 % reached over TCP"

_PRESETS: Final[Mapping[str, Fabric]] = {
    fabric.name: fabric
    for fabric in (
        Fabric("h100-ib400", 8, _NVLINK4, _per_rank(400, 8, 6.0, _IB.format(400)), 24),
        Fabric("h100-ib200", 8, _NVLINK4, _per_rank(200, 8, 6.0, _IB.format(200)), 24),
        Fabric("h100-ib100", 8, _NVLINK4, _per_rank(100, 8, 6.0, _IB.format(100)), 24),
        Fabric("b200-ib800", 8, _NVLINK5, _per_rank(800, 8, 6.0, _IB.format(800)), 24),
        Fabric("b200-ib400", 8, _NVLINK5, _per_rank(400, 8, 6.0, _IB.format(400)), 24),
        Fabric("pcie5-ib400", 8, _PCIE5, _per_rank(400, 1, 6.0, _IB.format("400 / 8")), 8),
        Fabric("pcie4-eth100", 8, _PCIE4, _per_rank(100, 1, 25.0, _ETHERNET.format(100)), 8),
        Fabric("h100-eth400", 8, _NVLINK4, _per_rank(400, 1, 25.0, _ETHERNET.format(400)), 24),
        Fabric("eth10", 1, _PCIE4, _per_rank(10, 1, 50.0, _ETHERNET.format(10))),
        Fabric("eth1", 1, _PCIE4, _per_rank(1, 1, 100.0, _ETHERNET.format(1))),
        Fabric("free", 8, Link(1e6, 0.0, "no time at all"), Link(1e6, 0.0, "no time at all")),
    )
}


def preset_names() -> tuple[str, ...]:
    """Return the names of the fabrics that are known."""
    return tuple(_PRESETS)


def fabric_from(text: str, node_size: int | None = None) -> Fabric:
    """Return the fabric of a preset's name, a JSON file, or figures.

    Args:
        text: A name of `preset_names()`; a file that `ds comm bench --json` wrote or that has this class's fields; or
            `inside=GB/s,us;between=GB/s,us` with bandwidths in 10**9 bytes per second and latencies in microseconds.
        node_size: Ranks of a node, where it is not the preset's.
    Raises:
        ConfigError: it is none of these ("rehearsal-links").
    """
    if text in _PRESETS:
        fabric = _PRESETS[text]
    elif "=" in text:
        fabric = _from_figures(text)
    elif Path(text).is_file():
        fabric = _from_file(Path(text))
    else:
        raise _refusal(
            f"{text!r} is no preset, no file, and no figures", f"Take one of {', '.join(_PRESETS)}, or a file."
        )
    if node_size is None or node_size == fabric.node_size:
        return fabric
    # A node with other ranks has adapters for them.
    per_rank = fabric.between.gbytes_per_s / fabric.node_size
    return replace(fabric, node_size=node_size, between=replace(fabric.between, gbytes_per_s=per_rank * node_size))


def _from_figures(text: str) -> Fabric:
    links: dict[str, Link] = {}
    for part in text.split(";"):
        name, _, figures = part.partition("=")
        try:
            bandwidth, latency = (float(figure) for figure in figures.split(","))
        except ValueError as error:
            raise _refusal(f"{part!r} has no two numbers", "Write inside=GB/s,us;between=GB/s,us.") from error
        links[name.strip()] = _checked(Link(bandwidth, latency, "given by hand"), part)
    if not links or links.keys() - {"inside", "between"}:
        raise _refusal(f"{text!r} names {', '.join(links)}", "Write inside=GB/s,us;between=GB/s,us, or one of them.")
    any_link = next(iter(links.values()))
    return Fabric("given", 8, links.get("inside", any_link), links.get("between", any_link))


def _from_file(file: Path) -> Fabric:
    try:
        data: Any = json.loads(file.read_text())
        if isinstance(data, list):
            return _from_bench(data, file.stem)
        inside, between = (_checked(Link(**data.pop(name)), str(file)) for name in ("inside", "between"))
        return Fabric(**{"name": file.stem, **data}, inside=inside, between=between)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        fix = "Take what `ds comm bench --json` wrote, or an object with inside, between and node_size."
        raise _refusal(f"{file} cannot be read as links: {type(error).__name__}: {error}", fix) from error


def _from_bench(rows: list[Any], name: str) -> Fabric:
    """Return a fabric that has the measured times of `ds comm bench --json`: all ranks as one node, of the first backend and dtype."""
    first = rows[0]
    figures: dict[str, dict[str, dict[int, float]]] = {"median_s": {}, "flow_s": {}, "busy_s": {}}
    for row in rows:
        case = row["case"]
        if case["backend"] == first["case"]["backend"] and case["dtype"] in (first["case"]["dtype"], "float32"):
            for figure, by_op in figures.items():
                if figure in row or figure == "median_s":
                    by_op.setdefault(case["op"], {})[int(case["nbytes"])] = float(row[figure])
    curves = figures["median_s"]
    ranks = int(first["ranks"])
    sizes = curves.get("all_gather") or curves.get("all_reduce") or next(iter(curves.values()))
    (small, least), (large, most) = min(sizes.items()), max(sizes.items())
    speed = (large - small) * (ranks - 1) / ranks / max(most - least, 1e-9) / _GIGA if large > small else 1.0
    link = _checked(Link(speed, least / _MICRO, "ds comm bench"), name)
    ordered = ({op: tuple(sorted(times.items())) for op, times in by_op.items()} for by_op in figures.values())
    times, flows, busy = ordered
    return Fabric(name, ranks, link, link, curves=times, flows=flows, busy=busy, curve_ranks=ranks, uneven=True)


def _checked(link: Link, where: str) -> Link:
    if not (link.gbytes_per_s > 0 and link.latency_us >= 0 and math.isfinite(link.gbytes_per_s + link.latency_us)):
        raise _refusal(
            f"{where}: {link.gbytes_per_s} GB/s, {link.latency_us} us", "Give a bandwidth above 0 and a latency from 0."
        )
    return link


def _refusal(problem: str, fix: str) -> ConfigError:
    return ConfigError(f"links: {problem}", code="rehearsal-links", fix=fix)


def as_json(fabric: Fabric) -> dict[str, Any]:
    """Return the fabric as plain data, as a file of links has it."""
    return asdict(fabric)

"""A train batch size that as many numbers of ranks as possible can share, found in integers. Pure.

Words: a *base* is a microbatch size, or the least common multiple of all; a *candidate* is a base times the largest highly
composite number (Ramanujan 1915) that keeps it within the limit, since such a number has the most divisors; a candidate's
*counts* are the numbers of ranks that divide it into whole microbatches. The candidate with the most counts wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_config.errors import PlanError
from ds_engine.batch import BatchRequest
from ds_engine.feature_table import ElasticityConfig

__all__ = ["elastic_batch", "elastic_counts", "rank_counts"]

_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160, 25200,
    27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


def rank_counts(batch: int, micros: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Return every number of ranks from `low` to `high` that splits `batch` into microbatches of a size in `micros`."""
    counts: set[int] = set()
    for micro in micros:
        if batch % micro == 0:
            rows = batch // micro
            for small in range(1, math.isqrt(rows) + 1):
                if rows % small == 0:
                    counts |= {small, rows // small}
    return tuple(sorted(n for n in counts if low <= n <= high))


def elastic_batch(section: ElasticityConfig, world: int) -> BatchRequest:
    """Choose the train and microbatch sizes on `world` ranks.

    The train size is the same for every world size that divides it.

    Raises:
        PlanError: no size suits this number of ranks ("elasticity-world").
    """
    share = section.model_parallel_size if section.version >= 0.2 else 1
    data_ranks = world // share
    micros = sorted(section.micro_batch_sizes)
    batch, counts = elastic_counts(section)
    if data_ranks not in counts:
        if section.version < 0.2 or data_ranks < 1 or not section.min_gpus <= world <= section.max_gpus:
            raise _unfit(section, world, batch, counts)
        sizes = [section.max_train_batch_size // (m * data_ranks) * m * data_ranks for m in micros]
        usable = [size for size in sizes if size > 0]
        if not usable:
            raise _unfit(section, world, batch, counts)
        batch = max(usable) if section.prefer_larger_batch else min(usable)
    fitting = [m for m in micros if batch // data_ranks % m == 0]
    micro = max(fitting) if section.prefer_larger_batch or section.version < 0.2 else min(fitting)
    return BatchRequest(batch, micro)


def elastic_counts(section: ElasticityConfig) -> tuple[int, tuple[int, ...]]:
    """Choose the train batch size, and return the numbers of data-parallel ranks that divide it.

    Raises:
        PlanError: nodes do not hold whole model-parallel groups, or no size suits any number ("elasticity-world").
    """
    per_node = _ranks_per_node(section)
    micros, limit = sorted(section.micro_batch_sizes), section.max_train_batch_size // per_node
    nodes = section.num_gpus_per_node if section.version >= 0.2 else 1
    low, high = max(1, -(-section.min_gpus // nodes)), section.max_gpus // nodes
    batch, counts = _best(section, limit, micros, (low, high))
    return batch * per_node, tuple(n * per_node for n in counts)


def _ranks_per_node(section: ElasticityConfig) -> int:
    if section.version < 0.2:
        return 1
    if section.num_gpus_per_node % section.model_parallel_size:
        raise PlanError(
            f"elasticity.num_gpus_per_node = {section.num_gpus_per_node} is no multiple of "
            f"model_parallel_size = {section.model_parallel_size}",
            code="elasticity-world",
            fix="Give a model-parallel size that divides the ranks of a node.",
        )
    return section.num_gpus_per_node // section.model_parallel_size


def _best(
    section: ElasticityConfig, limit: int, micros: Sequence[int], counted: tuple[int, int]
) -> tuple[int, tuple[int, ...]]:
    candidates = set()
    for base in {*micros, math.lcm(*micros)}:
        if base <= limit:
            candidates.add(base * max(n for n in _HIGHLY_COMPOSITE if n <= limit // base))
    ranked = [(rank_counts(batch, micros, *counted), batch) for batch in candidates]
    if not ranked:
        return 0, ()
    sign = 1 if section.prefer_larger_batch else -1
    counts, batch = max(ranked, key=lambda found: (len(found[0]), sign * found[1]))
    return batch, counts


def _unfit(section: ElasticityConfig, world: int, batch: int, counts: Sequence[int]) -> PlanError:
    near = sorted(counts, key=lambda n: abs(n - world))[:4]
    alternatives = (
        f"batch {batch} suits {len(counts)} numbers of ranks, near {world}: {sorted(near)}" if counts else "none does"
    )
    return PlanError(
        f"no train batch size up to {section.max_train_batch_size} suits {world} ranks with microbatches of "
        f"{list(section.micro_batch_sizes)} ({alternatives})",
        code="elasticity-world",
        fix="Start another number of ranks, or widen micro_batch_sizes, max_train_batch_size, min_gpus and max_gpus.",
    )

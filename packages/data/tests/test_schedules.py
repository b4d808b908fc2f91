"""Schedules and batches by length, beside their formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_data.difficulty_schedules import make_schedule
from ds_data.seqlens import batch_by_seqlens, pack_by_seqlens, scale_lr
from ds_data.variable import VariableBatchSizeLR


@given(
    st.integers(1, 64),
    st.integers(0, 500),
    st.integers(1, 300),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(0, 400),
)
def test_roots_are_the_formula(low: int, more: int, total: int, multiple: int, degree: int, step: int) -> None:
    options = {"total_curriculum_step": total, "difficulty_step": multiple, "root_degree": degree}
    got = make_schedule("fixed_root", low, low + more, options)(step)
    value = math.floor((step / total) ** (1 / degree) * more + low)
    least = min(d for d in range(0, low + multiple, multiple) if d >= low)  # never below min: 0 tokens are no sequence
    assert got == min(max(value - value % multiple, least), low + more)
    if degree == 1:
        del options["root_degree"]
        assert make_schedule("fixed_linear", low, low + more, options)(step) == got


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 120), st.data())
def test_stairs_are_the_first_that_holds(hard: list[int], step: int, data: st.DataObject) -> None:
    size = len(hard) - 1
    steps = sorted(data.draw(st.lists(st.integers(0, 100), min_size=size, max_size=size)))
    got = make_schedule("fixed_discrete", 1, 50, {"difficulty": hard, "max_step": steps})(step)
    assert got == next((d for d, last in zip(hard, steps, strict=False) if step <= last), hard[-1])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fixed_lineal", {}),
        ("fixed_linear", {"total_curriculum_step": 5}),
        ("fixed_linear", {"total_curriculum_step": 0, "difficulty_step": 8}),
        ("fixed_linear", {"total_curriculum_step": 5, "difficulty_step": 8, "step": 1}),
        ("fixed_discrete", {"difficulty": [1, 2], "max_step": [5, 6]}),
        ("fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [6, 5]}),
        ("custom", {}),
    ],
)
def test_schedules_that_say_nothing(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        make_schedule(kind, 1, 10, options)
    assert error.value.code == "data-schedule"
    assert make_schedule("custom", 1, 10, {}, lambda step: step * 2)(4) == 8


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(5, 60),
    st.sampled_from(["dataloader", "random", "seqlen"]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([(1, None), (1, 3), (2, 4)]),
)
def test_batches_keep_their_limits(
    lengths: list[int], room: int, order: Any, per_batch: int, same: bool, sizes: tuple[int, int | None]
) -> None:
    try:
        packed = pack_by_seqlens(lengths, room, sizes=sizes, order=order, per_batch=per_batch, same_size=same)
    except ConfigError as error:
        assert "not one batch" in str(error)  # noqa: PT017 - either is right
        return
    taken = [i for micro in packed.microbatches for i in micro]
    assert len(taken) == len(set(taken))
    assert len(taken) + packed.dropped + packed.left_out == len(lengths)
    assert packed.dropped == sum(n > room for n in lengths)
    assert len(packed.microbatches) == len(packed.sizes) * per_batch
    for micro in packed.microbatches:
        assert sum(lengths[i] for i in micro) <= room
        assert sizes[0] <= len(micro) <= (sizes[1] or len(lengths))
    for at, (size, longest) in enumerate(zip(packed.sizes, packed.longest, strict=True)):
        batch = packed.microbatches[at * per_batch : (at + 1) * per_batch]
        assert size == sum(map(len, batch))
        assert longest == max(lengths[i] for micro in batch for i in micro)
        assert not same or len({len(micro) for micro in batch}) == 1
    if order == "dataloader" and not same:
        assert taken == sorted(taken)
    if order == "seqlen" and not same:
        assert [lengths[i] for i in taken] == sorted(lengths[i] for i in taken)


def test_the_last_sample_is_taken_too() -> None:
    """Upstream loses it: its range ends one early."""
    micro, sizes, longest = batch_by_seqlens([3, 4, 5, 6, 7], 7)
    assert micro == [(0, [0, 1]), (1, [2]), (2, [3]), (3, [4])]
    assert (sizes, longest) == ([2, 1, 1, 1], [4, 5, 6, 7])
    # As a filter of samples, which DeepSpeed's loader passes on: one number a sample.
    micro, sizes, longest = batch_by_seqlens([9, 1, 2, 9, 3], 4, np.array([1, 2, 4]))
    assert (micro, sizes, longest) == ([(0, [1, 2]), (1, [4])], [2, 1], [2, 3])
    micro, sizes, _ = batch_by_seqlens([1, 1, 2, 2], 4, [[0, 2], [1, 3]], effective_batch_size=2)
    assert micro == [(0, [0, 2]), (0, [1, 3])]
    assert sizes == [4]


def test_rates_follow_batches() -> None:
    assert [scale_lr(4, 8, 0.1, m) for m in ("linear", "sqrt", "none")] == [0.2, 0.1 * math.sqrt(2), 0.1]
    with pytest.raises(ConfigError):
        scale_lr(4, 8, 0.1, "cubic")
    assert np.isclose(scale_lr(10, 5), 0.5)


def test_random_batches_and_rates_are_deepspeeds() -> None:
    """Recorded from DeepSpeed 0.19.8: the shuffle of Python's generator, and a schedule that stands at 0 for the first batch."""
    batches, _, _ = batch_by_seqlens([3, 9, 4, 7, 2, 8, 5, 6], 16, sequence_picking_order="random", seed=3)
    order = [sample for _, samples in batches for sample in samples]
    assert order == [0, 5, 7, 2, 1, 6, 4, 3]
    assert scale_lr(4, 8, 0.1, None) == scale_lr(4, 8, 0.1, "NONE") == 0.1

    class Warmup:
        last_batch_iteration = -1

        def __init__(self) -> None:
            self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])

        def step(self, t: int | None = None) -> None:
            self.last_batch_iteration = self.last_batch_iteration + 1 if t is None else t
            self.optimizer.param_groups[0]["lr"] = 0.1 * self.last_batch_iteration

    schedule = VariableBatchSizeLR(Warmup(), 4, [8, 4])
    rates = []
    for _ in range(3):
        rates += schedule.get_lr()
        optimizer = schedule.optimizer
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]  # as torch's `load_state_dict` does
        schedule.step()
    assert rates == pytest.approx([0.0, 0.1, 0.4])

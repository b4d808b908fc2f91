"""Batch arithmetic: every case of the schema, and errors that carry the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import ConfigError, DsError, PlanError
from ds_engine.batch import BatchRequest, BatchSizes, resolve_batch

small = st.integers(1, 64)


def numbers(batch: BatchSizes) -> tuple[int, int, int]:
    return batch.train, batch.micro, batch.accumulation


@given(small, small, small)
def test_any_two_give_the_third(micro: int, steps: int, ranks: int) -> None:
    train = micro * steps * ranks
    for asked in (
        BatchRequest(train, micro, steps),
        BatchRequest(train, micro, None),
        BatchRequest(train, None, steps),
        BatchRequest(None, micro, steps),
    ):
        batch = resolve_batch(asked, ranks)
        assert numbers(batch) == (train, micro, steps)
        named = {key for key, _ in batch.derived}
        assert len(named) == [asked.train, asked.micro, asked.accumulation].count(None)


@given(small, small)
def test_one_alone_means_no_accumulation(micro: int, ranks: int) -> None:
    assert numbers(resolve_batch(BatchRequest(train=micro * ranks), ranks)) == (micro * ranks, micro, 1)
    assert numbers(resolve_batch(BatchRequest(micro=micro), ranks)) == (micro * ranks, micro, 1)


optional = st.none() | st.integers(-2, 40)


@given(optional, optional, optional, st.integers(1, 9))
def test_exact_or_refused(train: int | None, micro: int | None, steps: int | None, ranks: int) -> None:
    """What is accepted satisfies the identity and keeps every given number; what is refused names the numbers."""
    try:
        batch = resolve_batch(BatchRequest(train, micro, steps), ranks)
    except DsError as error:
        told = str(error)
        for value in (train, micro, steps):
            assert value is None or str(value) in told or error.code == "batch-positive"  # noqa: PT017
        assert error.fix  # noqa: PT017
        return
    assert batch.train == batch.micro * batch.accumulation * batch.ranks
    assert min(numbers(batch)) >= 1
    for asked, found in zip((train, micro, steps), numbers(batch), strict=True):
        assert asked is None or asked == found


@pytest.mark.parametrize(
    ("asked", "ranks", "kind", "code", "said"),
    [
        (BatchRequest(), 4, ConfigError, "batch-missing", "none of the three"),
        (BatchRequest(accumulation=2), 4, ConfigError, "batch-missing", "gradient_accumulation_steps = 2"),
        (BatchRequest(train=-8), 4, ConfigError, "batch-positive", "train_batch_size = -8"),
        (
            BatchRequest(micro=0, accumulation=-1),
            4,
            ConfigError,
            "batch-positive",
            "train_micro_batch_size_per_gpu = 0, gradient_accumulation_steps = -1",
        ),
        (BatchRequest(train=10), 4, PlanError, "batch-arithmetic", "10 / (accumulation 1 x ranks 4) = 2.5"),
        (BatchRequest(16, 8, 1), 1, PlanError, "batch-arithmetic", "8 x 1 x 1 = 8"),
        (BatchRequest(train=4, micro=8), 1, PlanError, "batch-arithmetic", "4 / (micro 8 x ranks 1) = 0.5"),
        (BatchRequest(train=8), 0, PlanError, "batch-arithmetic", "got 0"),
    ],
)
def test_errors_say_the_numbers(asked: BatchRequest, ranks: int, kind: type[DsError], code: str, said: str) -> None:
    with pytest.raises(kind) as caught:
        resolve_batch(asked, ranks)
    assert caught.value.code == code
    assert said in caught.value.message


def test_the_fix_is_a_batch_size_that_works() -> None:
    with pytest.raises(PlanError) as caught:
        resolve_batch(BatchRequest(train=10, micro=2), 3)
    assert "multiple of 6 (6 or 12)" in caught.value.fix
    assert numbers(resolve_batch(BatchRequest(train=12, micro=2), 3)) == (12, 2, 2)

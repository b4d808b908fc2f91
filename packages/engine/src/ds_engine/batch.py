"""Batch arithmetic: how many samples make a step, and which rank runs them. Pure.

    train = micro x accumulation x ranks

*train* is `train_batch_size`, samples in one optimizer step over all ranks; *micro* is `train_micro_batch_size_per_gpu`,
samples of one forward on one rank; *accumulation* is `gradient_accumulation_steps`, forwards a step; *ranks* is the
number of data-parallel ranks (the world divided by tensor, pipeline and sequence degrees). Any two of the three keys
give the third; one of the first two alone means accumulation 1. Everything is an integer, nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_config.errors import ConfigError, PlanError
from ds_config.option_checks import check_options

__all__ = ["BatchRequest", "BatchSizes", "resolve_batch"]

_KEYS = {
    "train": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What the configuration says; None is not given."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The resolved numbers, with why each that was not given has its value.

    Attributes:
        train: Samples per optimizer step, all ranks together.
        micro: Samples per forward on one rank.
        accumulation: Microbatches per step on one rank.
        ranks: Data-parallel ranks.
        derived: (key, reason) of every number that the configuration does not give.
    """

    train: int
    micro: int
    accumulation: int
    ranks: int
    derived: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.train} = {self.micro} per rank x {self.accumulation} microbatches x {self.ranks} data-parallel ranks"


def resolve_batch(request: BatchRequest, ranks: int) -> BatchSizes:
    """Resolve the three batch sizes for `ranks` data-parallel ranks.

    Raises:
        ConfigError: a number is not positive ("batch-positive"); neither train nor micro is given ("batch-missing").
        PlanError: the numbers do not fit each other or the number of ranks ("batch-arithmetic").
    """
    _check_given(request, ranks)
    train, micro, steps = request.train, request.micro, request.accumulation
    if train is not None and micro is not None:
        if steps is None:
            steps = _divide(train, micro * ranks, f"micro {micro} x ranks {ranks}", "accumulation", request, ranks)
            return BatchSizes(
                train, micro, steps, ranks, _because("accumulation", "train_batch_size / (micro x ranks)")
            )
        if train != micro * steps * ranks:
            raise _does_not_fit(request, ranks, f"{micro} x {steps} x {ranks} = {micro * steps * ranks}")
        return BatchSizes(train, micro, steps, ranks)
    if train is not None:
        why = _because("micro", "train_batch_size / (accumulation x ranks)")
        if steps is None:
            steps, why = 1, _because("accumulation", "one microbatch a step unless given") + why
        micro = _divide(train, steps * ranks, f"accumulation {steps} x ranks {ranks}", "micro", request, ranks)
        return BatchSizes(train, micro, steps, ranks, why)
    if micro is None:
        provided = f"gradient_accumulation_steps = {steps}" if steps is not None else "none of the three batch keys"
        raise ConfigError(
            f"the batch size is not known: the configuration gives {provided}",
            code="batch-missing",
            fix="Set train_batch_size, or train_micro_batch_size_per_gpu.",
        )
    why = _because("train", "micro x accumulation x ranks")
    if steps is None:
        steps, why = 1, _because("accumulation", "one microbatch a step unless given") + why
    return BatchSizes(micro * steps * ranks, micro, steps, ranks, why)


def _because(name: str, reason: str) -> tuple[tuple[str, str], ...]:
    return ((_KEYS[name], reason),)


def _check_given(request: BatchRequest, ranks: int) -> None:
    if ranks < 1:
        raise PlanError(
            f"batch arithmetic needs at least one data-parallel rank, got {ranks}",
            code="batch-arithmetic",
            fix="Check the mesh degrees: their product must divide the world size.",
        )
    sizes = {key: getattr(request, name) for name, key in _KEYS.items()}
    bad = [f"{key} = {value}" for key, value in sizes.items() if value is not None and value < 1]
    if bad:
        raise ConfigError(
            f"batch sizes must be positive, found {', '.join(bad)}",
            code="batch-positive",
            fix="Give a whole number of samples (or microbatches), 1 or more.",
        )


def _divide(total: int, by: int, by_text: str, name: str, request: BatchRequest, ranks: int) -> int:
    quotient, rest = divmod(total, by)
    if rest or quotient == 0:
        raise _does_not_fit(request, ranks, f"{_KEYS[name]} would be {total} / ({by_text}) = {total / by:g}", unit=by)
    return quotient


def _does_not_fit(request: BatchRequest, ranks: int, computed: str, unit: int | None = None) -> PlanError:
    provided = ", ".join(
        f"{key} = {getattr(request, name)}" for name, key in _KEYS.items() if getattr(request, name) is not None
    )
    train = request.train or 0
    if unit is None:
        product = (request.micro or 1) * (request.accumulation or 1) * ranks
        fix = f"Set train_batch_size = {product}, or give only two of the three keys."
    else:
        near = sorted({max(unit, train // unit * unit), (train // unit + 1) * unit})
        fix = f"Set train_batch_size to a multiple of {unit} ({' or '.join(map(str, near))}), or change the divisor."
    return PlanError(
        "train_batch_size must equal train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks:\n"
        f"  asked {provided}, on {ranks} data-parallel ranks; {computed}.",
        code="batch-arithmetic",
        fix=fix,
    )

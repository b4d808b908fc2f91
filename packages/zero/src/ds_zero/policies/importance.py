"""Updates split by importance (ZenFlow, Lan et al. 2025): a few columns of each matrix in every step, all others now and then.

Words: the *chosen* columns of a matrix are those whose gradients are largest; what is no matrix (biases, norms) is *always* chosen.
Chosen elements are stepped in every step, with moments and a step count that begin when they are chosen. Of the *rest*, gradients add up, and
their mean is stepped at the end of every *interval*. One pair of moments an element: chosen ones use it in every step, others at the
end of intervals.

    warm-up      everything in every step
    choose       the first step after it, and every so many steps: columns by the sum of |g| over ranks
    end          an interval is so many steps long, or, "auto", as long as the rest's gradients stay below the chosen ones'; before columns are
                 chosen anew it ends, too

Which columns, and when an interval ends, follows from sums over the ranks: all decide alike. This module is the rules, pure; `splitting.py`
follows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["Calendar", "Importance", "Turn", "Votes", "bad", "columns_of", "top_columns"]


@dataclass(frozen=True, slots=True)
class Importance:
    """How updates are split.

    Attributes:
        ratio: Share of a matrix's columns that are stepped in every step; at least one.
        choose_every: Steps until columns are chosen anew; 0: never.
        interval: Steps of an interval; 0: found out, see `auto_ratio`.
        auto_ratio: Share of the matrices whose rest must have grown large for an interval to end.
        warm_up: Steps at the beginning in which everything is stepped.
    Raises:
        PlanError: numbers that say nothing ("zero-importance").
    """

    ratio: float = 0.1
    choose_every: int = 0
    interval: int = 4
    auto_ratio: float = 0.99
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not (
            0 < self.ratio <= 1
            and 0 <= self.auto_ratio <= 1
            and min(self.choose_every, self.interval, self.warm_up) >= 0
        ):
            raise bad(f"{self}", "Give a ratio in (0, 1], and steps of 0 or more.")
        if 0 < self.choose_every < self.interval:
            raise bad(
                f"columns are chosen anew every {self.choose_every} steps, within intervals of {self.interval}",
                "Choose no more often than intervals end.",
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step does.

    Attributes:
        whole: Everything is stepped.
        choose: Columns are chosen first.
        end: The rest is stepped, too.
    """

    whole: bool = False
    choose: bool = False
    end: bool = False


@dataclass(slots=True)
class Calendar:
    """Counts steps. Pure.

    Attributes:
        told: The rules.
        step: Steps made.
        since: Of them, those since the rest was stepped last.
        fast: Of them, those since columns were chosen.
    """

    told: Importance
    step: int = 0
    since: int = 0
    fast: int = 0

    def chooses(self) -> bool:
        """Whether the coming step chooses columns."""
        after, every = self.step - self.told.warm_up, self.told.choose_every
        return after == 0 or (after > 0 and every > 0 and after % every == 0)

    def next(self, *, voted: bool = False) -> Turn:
        """Go one step on.

        Args:
            voted: Whether the rest has grown large; asked where intervals have no length.
        """
        if self.step < self.told.warm_up:
            self.step += 1
            return Turn(whole=True)
        choose = self.chooses()
        self.step, self.since, self.fast = self.step + 1, self.since + 1, 1 if choose else self.fast + 1
        end = self.chooses() or (voted if self.told.interval == 0 else self.since >= self.told.interval)
        return Turn(choose=choose, end=end)

    def ended(self) -> None:
        """The interval's last step was made."""
        self.since = 0


@dataclass(slots=True)
class Votes:
    """Of one matrix: whether the rest's gradients have outgrown the chosen ones'. Pure."""

    mean: float = 0.0
    rest: float = 0.0

    def add(self, chosen: float, total: float, steps: int, ratio: float) -> bool:
        """Take one step's sums of |g|; `steps` is how many the interval has, with this one. Whether it votes for the end."""
        self.mean = (self.mean * (steps - 1) + chosen) / steps / (ratio * 10)
        if ratio < 1:
            self.rest += (total - chosen) / ((1 - ratio) * 10)
        return self.rest >= self.mean


def columns_of(values: Tensor, begin: int, columns: int) -> Tensor:
    """[n] consecutive elements of a matrix, from element `begin` -> [columns]: sums of their absolute values by column."""
    out = values.new_zeros(columns)
    head = min(-begin % columns, values.numel())
    body = (values.numel() - head) // columns * columns
    for at, part in ((begin % columns, values[:head]), (0, values[head + body :])):
        out[at : at + part.numel()] += part.abs()
    return out if body == 0 else out + values[head : head + body].view(-1, columns).abs().sum(0)


def top_columns(sums: Tensor, ratio: float) -> Tensor:
    """[columns] -> int64 [k], rising: the k columns with the largest sums, k a share of them and at least 1."""
    return sums.topk(max(1, int(sums.numel() * ratio))).indices.sort().values


def bad(what: str, fix: str) -> PlanError:
    """An update that cannot be split so."""
    return PlanError(what, code="zero-importance", fix=fix)

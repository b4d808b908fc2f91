"""The error classes of every ds package, by who must act.

Words: a *code* is a short stable name (`mesh-size`) that `ds explain` knows (the page docs/reference/errors.md, too); the *message*
says what was asked and what was found, with values; the *fix* says what to do next; the *place* is the rank that raised,
set once per process where it is known (`set_place`), so that a line in a log of 1,000 ranks names its origin.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DsError",
    "KernelError",
    "LaunchError",
    "PlanError",
    "ShardedAccessError",
    "TrainingError",
    "UnsupportedConfigError",
    "UnsupportedError",
    "set_place",
]

_place: list[str] = []


def set_place(text: str) -> None:
    """Set the description of this process in error messages (`"rank 3/8 data=1 pipeline=1"`); empty text clears it."""
    _place[:] = [text] if text else []


class DsError(Exception):
    """Base of every error that a user of these packages can cause.

    Args:
        message: What was asked and what was found, with values. May have several lines.
        code: What `ds explain` explains it by.
        fix: What to do, as an imperative sentence.
    """

    def __init__(self, message: str, *, code: str, fix: str = "") -> None:
        self.message, self.code, self.fix = message, code, fix
        self.place = _place[0] if _place else ""
        super().__init__(message)

    def __str__(self) -> str:
        head = f"[{self.place}] " if self.place else ""
        lines = [f"{head}{self.message}"]
        if self.fix:
            lines.append(f"  {self.fix}")
        lines.append(f"  ds explain {self.code}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (worker pools, launchers); keyword arguments do not survive the default protocol.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[DsError], message: str, state: dict[str, object]) -> DsError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class ConfigError(DsError, ValueError):
    """The configuration, or a file it names, must change.

    Attributes:
        issues: One `ds_config.Issue` per problem, where a document was checked; else empty.
    """

    issues: tuple[object, ...]

    def __init__(self, message: str, *, code: str, fix: str = "", issues: tuple[object, ...] = ()) -> None:
        super().__init__(message, code=code, fix=fix)
        self.issues = issues


class PlanError(DsError, ValueError):
    """The configuration is well formed but does not fit this model or this world size."""


class CommError(DsError, RuntimeError):
    """Ranks disagree, or one did not come."""


class KernelError(DsError, RuntimeError):
    """A native operation was given something it cannot take, or failed."""


class CheckpointError(DsError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not match what is loaded into."""


class TrainingError(DsError, RuntimeError):
    """The numbers of a run went wrong: its data or its rates must change. The weights are those before the step that says so."""


class LaunchError(DsError, RuntimeError):
    """Processes could not be started, or one of them failed."""


class ShardedAccessError(DsError, RuntimeError):
    """A parameter was used while this rank holds only its shard of it."""


class UnsupportedError(DsError, RuntimeError):
    """What was asked for does not exist here (yet); the message names it and what to use."""


class UnsupportedConfigError(ConfigError, UnsupportedError):
    """The configuration is well formed, but asks for nothing else than what does not exist here."""

"""What a test asks for: how many ranks, over which backend, for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["ATTRIBUTE", "DEVICES", "MAX_RANKS", "World", "world"]

MAX_RANKS = 4
ATTRIBUTE = "__ds_world__"
DEVICES = ("cpu", "cuda")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class World:
    """One request for ranks.

    Attributes:
        size: Number of ranks, 1 to MAX_RANKS.
        backend: What `torch.distributed.init_process_group` is given; None leaves it to the body, which then finds
            RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment as a launcher would set them.
        timeout: Hard deadline of the test in seconds, the import of its file included.
        device: `cuda`: each rank has a card, or they share one; a test is skipped where there is none. A parameter of the test called
            `device` with the value `cuda` says the same for one case.
        cards: How many cards this machine has, once the plugin has looked; 0 on the CPU.
    """

    size: int
    backend: str | None = "gloo"
    timeout: float = 180.0
    device: str = "cpu"
    cards: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= MAX_RANKS:
            raise ValueError(f"a world has 1 to {MAX_RANKS} ranks, not {self.size!r}")
        if not self.timeout > 0:
            raise ValueError(f"a world test needs a positive timeout in seconds, not {self.timeout!r}")
        if self.device not in DEVICES:
            raise ValueError(f"a world is on one of {DEVICES}, not on {self.device!r}")


def world(size: int, backend: str | None = "gloo", timeout: float = 180.0, *, device: str = "cpu") -> Callable[[F], F]:
    """Mark a test so that its body runs on every rank of a world.

    The function itself is returned unchanged: the plugin sends its name to the ranks, and each of them imports the file
    and calls it. Arguments (parameters, fixtures such as `tmp_path`) are pickled; the test passes when every rank passes.
    """
    spec = World(size, backend, timeout, device)

    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, spec)
        return function

    return mark

"""What an optimizer sees of a unit."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.parameter import Parameter

__all__ = ["Part"]


@dataclass(slots=True, eq=False)
class Part:
    """A range of the shard that the optimizer sees as one parameter.

    Attributes:
        tensor: View of shard[start:stop], flat or in the parameter's shape.
        start, stop: In the shard.
        members: Numbers of the parameters with elements in it.
    """

    tensor: Parameter
    start: int
    stop: int
    members: tuple[int, ...]

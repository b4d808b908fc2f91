"""`Group`: ranks that communicate, named after what they share.

A group of one has no link to other ranks, and every collective runs the same path for it. What torch hands out (a
ProcessGroup, or None for the world) is looked up and becomes a Group, too. The other way round, `Group.pg` is what torch's
own functions take: for a group of one a process group of this rank alone, because None is the world to torch.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ds_comm._torch import backend_names, is_alive, named_group
from ds_comm.launch import read_launch
from ds_comm.single import SINGLE
from ds_comm.transports import Transport, transports
from ds_config.errors import CommError

__all__ = [
    "DEFAULT_TIMEOUT",
    "Group",
    "GroupLike",
    "OpSequence",
    "as_group",
    "check_fork",
    "common_group",
    "destroy_group",
    "destroy_when_dropped",
    "duplicate_group",
    "new_group",
    "new_local_group",
    "node_groups",
    "self_group",
    "use_timeout",
    "world_group",
]


DEFAULT_TIMEOUT = timedelta(minutes=10)
_timeout: list[timedelta | None] = [None]  # of process groups made here; None: torch's own


_parents: list[weakref.ref[Any]] = []  # in a forked child: the world that its parent communicates through


def _note_fork() -> None:
    _parents[:] = [weakref.ref(dist.group.WORLD)] if dist.is_initialized() else []


os.register_at_fork(after_in_child=_note_fork)


def check_fork(what: object) -> None:
    """Raise in a child that was forked from a rank, whose connections and shared memory the rank itself goes on using.

    Raises:
        CommError: "comm-forked". A child that makes a process group of its own may communicate.
    """
    if _parents and dist.is_initialized() and _parents[0]() is dist.group.WORLD:
        raise CommError(
            f"{what} in process {os.getpid()}, which was forked from a rank (process {os.getppid()}) and is no rank itself",
            code="comm-forked",
            fix="Communicate in the rank, before or after; or start the process by multiprocessing's spawn, with a process group of its own.",
        )


def use_timeout(timeout: timedelta | None) -> None:
    """Set the operation timeout of groups created from now on; None: torch's default."""
    _timeout[0] = timeout


@dataclass(slots=True, eq=False)
class OpSequence:
    """The order of operations on one process group, as this process sees it. Lives as long as the group.

    Attributes:
        key: torch's name of the group, the same on all its ranks and unique among them.
        name: The name it was first known by.
        ranks: Ranks of the world, in group order.
        mark: Operations started so far; ranks that agree have the same operation at the same mark.
        transports: How tensors of each device type travel.
        sums: Gradients of all models that were sent to be summed since one of the models was sharded or stepped; sharded models count them.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    transports: dict[str, type[Transport]]
    mark: int = 0
    sums: int = 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Group:
    """Ranks that communicate.

    Attributes:
        name: What the ranks share (`"data"`, `"tensor"`), as messages and traces show it.
        ranks: Their ranks in the world, in group order.
        rank: This process's index in `ranks`.
        link: torch's group that carries the collectives; None for a group of one, which has nobody to send to.
        order: What all Groups over `link` share in this process; None for a group of one.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    link: dist.ProcessGroup | None = None
    order: OpSequence | None = field(init=False)
    _alone: dist.ProcessGroup | None = field(init=False, default=None)  # torch's group of one that this one was made of

    def __post_init__(self) -> None:
        size = len(self.ranks)
        if not 0 <= self.rank < size or (self.link is None and size > 1):
            raise ValueError(
                f"group {self.name!r}: rank {self.rank} of {self.ranks}; a process group is needed above one rank"
            )
        if size == 1:
            object.__setattr__(self, "_alone", self.link)
            object.__setattr__(self, "link", None)
        object.__setattr__(self, "order", None if self.link is None else _order(self.link, self.name))

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={_short(self.ranks)}, rank={self.rank})"

    def __deepcopy__(self, memo: object) -> Group:
        return self  # a copy of a model talks to the same ranks over the same connections

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """The group as torch's own functions take it: `DistributedDataParallel(model, process_group=group.pg)`.

        A group of one has a process group of this rank alone, which all groups of one of a process share; it is made when it is
        first asked for, without any other rank. None only where no process group was initialised, so that torch has no world.
        """
        if self.link is not None:
            return self.link
        return _single() if self._alone is None or not is_alive(self._alone) else self._alone

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self.ranks[self.rank]

    def backend(self, device_type: str) -> str:
        """Return the name of the backend that carries tensors of a device type; empty for a group of one, or where none does."""
        return "" if self.link is None else backend_names(self.link).get(device_type, "")

    def index(self, global_rank: int) -> int:
        """Index in this group of a rank of the world."""
        if global_rank not in self.ranks:
            raise CommError(
                f"rank {global_rank} is not in group {self.name!r}, which has ranks {_short(self.ranks)}",
                code="comm-rank",
                fix="Pass a rank of the world as src or dst, or a rank within the group as group_src or group_dst.",
            )
        return self.ranks.index(global_rank)


GroupLike = Group | dist.ProcessGroup | None


def self_group(name: str = "single", rank: int = 0) -> Group:
    """Return a group of this process only, as rank `rank` of the world."""
    return Group(name, (rank,), 0)


def world_group() -> Group:
    """Return the group of all ranks; a group of one rank when no process group was initialized."""
    if not dist.is_initialized():
        return self_group("world")
    return as_group(dist.group.WORLD)


def as_group(group: GroupLike | Any) -> Group:
    """Return the Group for `group`: itself, the Group of a ProcessGroup, or the world for None.

    Raises:
        CommError: None in one of several processes that have joined no process group ("comm-world"): each would be a world of one.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        launch = None if dist.is_initialized() else read_launch(os.environ)
        if launch is not None and launch.world_size > 1:
            raise CommError(
                f"this is rank {launch.rank} of {launch.world_size} by {launch.launcher}, and it is in no process group",
                code="comm-world",
                fix="Call init_distributed() first, and destroy_process_group() last.",
            )
        return world_group()
    if not isinstance(group, dist.ProcessGroup):
        raise CommError(
            f"this process is not in the group it was asked to use ({group!r})",
            code="comm-not-member",
            fix="Call collectives of a group on its members only.",
        )
    order = _order(group, "world" if group is dist.group.WORLD else group.group_desc)
    return Group(order.name, order.ranks, group.rank(), group)


def new_group(ranks: Sequence[int], name: str, backend: str | None = None) -> Group | None:
    """Create a group of `ranks`; return None on ranks outside it.

    Collective over the world: all ranks call this function, in the same order. No process group is created for a single
    rank, nor a second for all ranks of the world. `backend` is torch's name of another backend than the world's.
    """
    world = world_group()
    members = tuple(sorted(ranks))
    if any(rank not in world.ranks for rank in members):
        raise CommError(
            f"group {name!r} with ranks {_short(members)} in a world of {world.size}",
            code="comm-rank",
            fix="Use ranks below the world size.",
        )
    if members == world.ranks and (backend is None or world.link is None or backend == dist.get_backend(world.link)):
        return Group(name, members, world.rank, world.link)
    inside = world.global_rank in members
    if len(members) == 1:
        return Group(name, members, 0) if inside else None
    pg = dist.new_group(list(members), backend=backend, group_desc=name, timeout=_timeout[0])
    if not inside:
        return None
    return Group(name, members, members.index(world.global_rank), pg)


def common_group(ranks: Sequence[int], name: str) -> Group | None:
    """Return the group `name` of `ranks` that this process created before; create it like `new_group` the first time.

    For groups that follow from the layout of a job and that every model of the job may use one after the other, so that the hundredth model
    has no hundredth connection. Nobody destroys such a group; it ends with the world. Collective over `ranks`: others return None at once, so
    that a rank makes the groups that it is in, not those of thousands of ranks.
    """
    world = world_group()
    members = tuple(sorted(ranks))
    if world.link is None or members == world.ranks or world.global_rank not in members:
        return new_group(ranks, name) if world.link is None or members == world.ranks else None
    common = _common.setdefault(world.link, {})
    key = (members, name, _timeout[0])
    group = common.get(key)
    if group is None or (group.link is not None and not is_alive(group.link)):
        group = common[key] = new_local_group(members, name)
    return group


def new_local_group(ranks: Sequence[int], name: str, backend: str | None = None, *, urgent: bool = False) -> Group:
    """Create a group that only its members create (local synchronization). Collective over `ranks`.

    Other ranks may create other groups meanwhile, or none. Every member creates its groups of these ranks in the same
    order. `destroy_group` ends the group; a new group of the same ranks may follow.

    Args:
        ranks: Of the world, the calling rank among them; the group has them in this order.
        backend: torch's name of another backend than the world's.
        urgent: NCCL runs the group's collectives on a stream of high priority, unless `BackendOptions.high_priority` says otherwise.
    """
    members = tuple(ranks)
    world = world_group()
    if world.global_rank not in members or any(rank not in world.ranks for rank in members):
        raise CommError(
            f"rank {world.global_rank} makes group {name!r} with ranks {_short(members)} in a world of {world.size}",
            code="comm-rank",
            fix="Make it on its members only, with ranks below the world size.",
        )
    place = members.index(world.global_rank)
    if len(members) == 1 or world.link is None:
        return Group(name, members, place)
    number = _number(world.link, members)
    digest = hashlib.sha1(f"{members} {number}".encode(), usedforsecurity=False).hexdigest()
    return Group(
        name, members, place, named_group(members, f"part-{digest}", name, backend, _timeout[0], urgent=urgent)
    )


def node_groups(group: Group, size: int, names: tuple[str, str], *, urgent: bool = False) -> tuple[Group, Group]:
    """Create the groups of this rank's node (`size` consecutive ranks) and of its peers across nodes. Collective.

    Args:
        size: Divides the ranks of the group.
        names: Of the two groups.
        urgent: As for `new_local_group`.
    """
    number, place = divmod(group.rank, size)
    inside = new_local_group(group.ranks[number * size : (number + 1) * size], names[0], urgent=urgent)
    return inside, new_local_group(group.ranks[place::size], names[1], urgent=urgent)


def duplicate_group(group: GroupLike, name: str, backend: str | None = "gloo", *, urgent: bool = False) -> Group:
    """Duplicate `group`: the same ranks over a separate process group (MPI_Comm_dup). Collective over `group`.

    Another thread, or another order of operations, may use the duplicate at any time. A group of one rank is returned
    unchanged. `destroy_group` ends the duplicate.

    Args:
        backend: For host tensors by default; None: that of the world.
        urgent: As for `new_local_group`.
    """
    group = as_group(group)
    return group if group.link is None else new_local_group(group.ranks, name, backend, urgent=urgent)


def destroy_group(group: Group) -> None:
    """Destroy the process group of `group`, which nobody may use any more. A group of one has none."""
    if group.link is not None:
        dist.destroy_process_group(group.link)


def destroy_when_dropped(owner: object, groups: list[Group]) -> None:
    """Destroy what is in the list `groups` when `owner` is collected as garbage; an owner that was closed empties the list before.

    For groups whose operations are on host tensors: to end such a group sends nothing, so each rank may collect its owner at another time.
    What ends a communicator of a device may wait for the other ranks.
    """
    weakref.finalize(owner, _destroy_all, groups).atexit = False


def _destroy_all(groups: list[Group]) -> None:
    while groups:
        group = groups.pop()
        if dist.is_initialized() and group.link is not None and is_alive(group.link):
            destroy_group(group)


def _single() -> dist.ProcessGroup | None:
    """torch's group of this rank alone; None without a world."""
    if not dist.is_initialized():
        return None
    world: Any = dist.group.WORLD
    if dist.get_world_size() == 1:
        return world
    found = _singles.get(world)
    if found is None or not is_alive(found):
        rank = dist.get_rank()
        name = f"single-{rank}-{_number(world, (rank,))}"
        found = _singles[world] = named_group((rank,), name, SINGLE, SINGLE)
    return found


def _number(world: dist.ProcessGroup, members: tuple[int, ...]) -> int:
    """How many groups of these ranks there are with the one that comes."""
    made = _made.setdefault(world, {})
    made[members] = made.get(members, 0) + 1
    return made[members]


# Of each world, this rank's group of one.
_singles: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

# Of each world, the groups of `common_group` by ranks, name and timeout.
_common: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str, timedelta | None], Group]] = (
    WeakKeyDictionary()
)

# Of each world, how many groups its members made of the same ranks: a name is never used twice.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = WeakKeyDictionary()

# Nothing here keeps a process group alive: destroy_process_group() ends it, and its order with it.
_orders: WeakKeyDictionary[dist.ProcessGroup, OpSequence] = WeakKeyDictionary()


def _order(pg: dist.ProcessGroup, name: str) -> OpSequence:
    order = _orders.get(pg)
    if order is None:
        order = OpSequence(pg.group_name, name, tuple(dist.get_process_group_ranks(pg)), transports(pg))
        _orders[pg] = order
    return order


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return str(tuple(ranks))
    return f"({', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}: {len(ranks)} in all)"

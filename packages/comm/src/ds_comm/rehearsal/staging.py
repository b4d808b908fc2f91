"""Put the rehearsal in the place of torch's backends, for one process: every process group that is made from then on is one of it.

Whatever backend a script names, whatever store and addresses it uses to meet the others, it gets a rank of a world that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ds_comm._torch import backend_names
from ds_comm.rehearsal.fabric import Fabric
from ds_comm.rehearsal.lone_store import LoneStore
from ds_comm.rehearsal.message_book import MessageBook
from ds_comm.rehearsal.pacing import HostPacer, Pacer
from ds_comm.rehearsal.peer_skew import PeerSkew
from ds_comm.rehearsal.rehearsal_group import LABEL, MissingRankError, RehearsalGroup
from ds_comm.rehearsal.traffic import LinkTransfer
from ds_comm.single import SINGLE
from ds_comm.transports import TRANSPORTS, Transport
from ds_config.errors import CommError
from ds_config.option_checks import check_options
from ds_config.rehearsing import is_rehearsal, set_rehearsal

__all__ = [
    "RehearsalOptions",
    "asked_backends",
    "end_rehearsed_step",
    "is_rehearsal",
    "rehearsal_traffic",
    "start_rehearsal",
    "stop_rehearsal",
]

BACKEND: Final = "rehearsal"


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """Which rank of which world this process is.

    Attributes:
        fabric: The links.
        world_size: Ranks of the world.
        rank: This one.
        messages: Folder of what ranks of this world that were rehearsed before have sent; None: nothing is known of them.
    Raises:
        CommError: there is no such rank ("comm-rank").
    """

    fabric: Fabric
    world_size: int
    rank: int = 0
    messages: Path | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.rank < self.world_size:
            raise CommError(
                f"rank {self.rank} of a world of {self.world_size}", code="comm-rank", fix="Take a rank of the world."
            )

    def environment(self) -> dict[str, str]:
        """Return the variables that a launcher would set for this rank."""
        node = min(self.fabric.node_size, self.world_size)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.rank % node),
            "LOCAL_WORLD_SIZE": str(node),
            "GROUP_RANK": str(self.rank // node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }


class _Staging:
    """What is in the place of torch's functions while a rehearsal runs."""

    def __init__(self, options: RehearsalOptions) -> None:
        self.options = options
        self.pacers: dict[str, Pacer] = {}
        self.skew = PeerSkew(options.world_size - 1) if options.fabric.uneven else None
        self.store = LoneStore()
        self.book = MessageBook(options.messages, options.rank)
        self.script_backend = ""
        self.cpu_backend = ""  # of the group that is being made
        self.backend_by_group: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._environment: dict[str, str | None] = {}

    def pacer(self, device_type: str) -> Pacer:
        if device_type not in self.pacers:
            self.pacers[device_type] = self._pacer(device_type)
        return self.pacers[device_type]

    def _pacer(self, device_type: str) -> Pacer:
        fabric = self.options.fabric
        if device_type == "cpu":
            return HostPacer(self.skew)
        if device_type != "cuda":
            raise CommError(
                f"a rehearsal with tensors on {device_type}",
                code="comm-device",
                fix="Rehearse on a CPU or on a CUDA or ROCm device.",
            )
        from ds_comm.rehearsal.device_pacing import DevicePacer

        return DevicePacer(torch.device("cuda", torch.cuda.current_device()), fabric.multiprocessors)

    def raise_curtain(self) -> None:
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(BACKEND, _group, devices=list(dist.Backend.default_device_backend_map))
        for device in dist.Backend.default_device_backend_map:
            TRANSPORTS.setdefault((BACKEND, device), RehearsalTransport)
        self._replace(c10d, "_new_process_group_helper", _rehearsed_helper(c10d._new_process_group_helper, self))
        self._replace(c10d, "rendezvous", self._rendezvous)
        self._replace(dist, "rendezvous", self._rendezvous)
        begin = _rehearsed_begin(c10d.init_process_group, self)
        self._replace(c10d, "init_process_group", begin)
        self._replace(dist, "init_process_group", begin)
        objects = _rehearsed_objects(c10d.broadcast_object_list, self.book)
        self._replace(c10d, "broadcast_object_list", objects)
        self._replace(dist, "broadcast_object_list", objects)
        for name, value in self.options.environment().items():
            self._environment[name] = os.environ.get(name)
            os.environ[name] = value

    def drop_curtain(self) -> None:
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for pacer in self.pacers.values():
            pacer.close()

    def _replace(self, module: Any, name: str, value: Any) -> None:
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        yield self.store, self.options.rank, self.options.world_size


_stage: list[_Staging] = []


def start_rehearsal(options: RehearsalOptions) -> None:
    """Let this process be one rank of a world that is not there, from now on. Process groups that exist stay what they are.

    Raises:
        CommError: a rehearsal runs already, or a process group was made before ("rehearsal-late").
    """
    if _stage or dist.is_initialized():
        raise CommError(
            "a rehearsal begins in a process that communicates already",
            code="rehearsal-late",
            fix="Begin it before init_process_group, once a process: `ds rehearse` does.",
        )
    stage = _Staging(options)
    stage.raise_curtain()
    _stage.append(stage)
    set_rehearsal(True)


def stop_rehearsal() -> list[LinkTransfer]:
    """End the rehearsal and its process groups; return what was sent. Does nothing if none runs."""
    if not _stage:
        return []
    records = rehearsal_traffic()
    if dist.is_initialized():
        dist.destroy_process_group()
    stage = _stage.pop()
    stage.book.save()
    stage.drop_curtain()
    set_rehearsal(False)
    return records


def rehearsal_traffic() -> list[LinkTransfer]:
    """Return the records of all operations so far, once those under way have ended. Synchronizes with the device."""
    return [record for stage in _stage for pacer in stage.pacers.values() for record in pacer.settle()]


def end_rehearsed_step() -> None:
    """Note that a training step has ended: the other ranks are followed step by step."""
    for stage in _stage:
        if stage.skew is not None:
            stage.skew.end_step()


def asked_backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type that was asked for when `pg` was made: in a rehearsal another one carries the tensors.

    A rehearsal over links that were not measured stands for NCCL, whatever was asked for.
    """
    names = backend_names(pg)
    for stage in _stage:
        backend_name = stage.backend_by_group.get(pg, "")
        if ":" in backend_name:
            return _by_device(backend_name)
        return names | {device: name for device, name in _by_device(backend_name).items() if device in names}
    return names


def _by_device(backend_name: str) -> dict[str, str]:
    """Return the backend of each device type: of `gloo`, of `cpu:gloo,cuda:nccl`, or torch's choice where nothing is named."""
    if ":" in backend_name:
        return dict(part.split(":", 1) for part in backend_name.split(","))
    default = dist.Backend.default_device_backend_map
    return {device: backend_name or name for device, name in default.items()}


class RehearsalTransport(Transport):
    """torch.distributed on the backend `rehearsal`; records say what ds-comm's callers communicate."""

    __slots__ = ()

    def __init__(self, pg: dist.ProcessGroup, mark: int, unit: str, asynchronous: bool) -> None:
        super().__init__(pg, mark, unit, asynchronous)
        LABEL.unit, LABEL.is_ours = unit, True

    def batch(self, messages: Any) -> Any:
        LABEL.unit = ""
        return super().batch(messages)


def _group(store: dist.Store, rank: int, size: int, timeout: Any) -> RehearsalGroup:
    (stage,) = _stage
    return RehearsalGroup(rank, size, stage.options.fabric, stage.pacer, stage.book, cpu_backend=stage.cpu_backend)


def _rehearsed_helper(helper: Callable[..., Any], stage: _Staging) -> Callable[..., Any]:
    """Return torch's function that makes every process group, with the backend replaced."""

    def make(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: Any,
        backend: Any,
        store: Any,
        group_name: Any,
        **options: Any,
    ) -> Any:
        backend_name = stage.script_backend if str(backend) == BACKEND else str(backend)
        if not stage.options.fabric.curves:
            # Who has no device here asks for gloo, but rehearses a cluster of devices: gloo's ways are only true over links measured with it.
            backend_name = "nccl"
        if str(backend) != SINGLE:
            backend, options["backend_options"] = dist.Backend(BACKEND), None
        options["device_id"] = None
        stage.cpu_backend = _by_device(backend_name).get("cpu", "")
        created = helper(group_size, group_rank, global_ranks_in_group, backend, stage.store, group_name, **options)
        if isinstance(created[0], dist.ProcessGroup):
            stage.backend_by_group[created[0]] = backend_name
        return created

    return make


def _rehearsed_objects(broadcast: Callable[..., Any], book: MessageBook) -> Callable[..., Any]:
    """Return `broadcast_object_list`, which says whose objects are not known."""

    def broadcast_object_list(
        object_list: Any, src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        source = ranks[group_src] if group_src is not None else src or 0
        if source == dist.get_rank() or book.knows(source):
            broadcast(object_list, src, group, device, group_src)
            return
        raise MissingRankError(
            f"broadcast_object_list from rank {source}, which was not rehearsed",
            code="rehearsal-foreign",
            fix=f"Rehearse rank {source} before this one: `ds rehearse` does.",
            rank=source,
        )

    return broadcast_object_list


def _rehearsed_begin(begin: Callable[..., Any], stage: _Staging) -> Callable[..., Any]:
    """Return `init_process_group` as this rank of the world, whatever a script says of backend, store, rank and size."""

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, *_: Any, **options: Any
    ) -> Any:
        kept = {name: options[name] for name in ("group_name",) if name in options}
        place = {"rank": stage.options.rank, "world_size": stage.options.world_size}
        stage.script_backend = str(backend or "").lower()
        return begin(BACKEND, timeout=timeout, store=stage.store, **place, **kept)

    return init_process_group

"""Which backend a world communicates over, when the caller does not say. Pure: facts in, a choice with its reason out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ds_comm.launch import LaunchedProcess
from ds_config.errors import CommError

__all__ = ["BACKEND_VARIABLE", "BackendChoice", "choose_backend", "settle"]

BACKEND_VARIABLE = "DS_COMM_BACKEND"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What to use, and why.

    Attributes:
        name: torch's name: `"shm"`, `"gloo"`, `"cpu:gloo,cuda:nccl"`.
        otherwise: What all ranks use when one of them cannot use `name`; empty: then it is an error.
    """

    name: str
    why: str
    otherwise: str = ""


def choose_backend(
    requested: str | None, env: Mapping[str, str], launch: LaunchedProcess, device: tuple[str, str]
) -> BackendChoice:
    """Choose the backend: `requested`, else DS_COMM_BACKEND, else the best for the device and the ranks' hosts.

    Args:
        requested: The caller's choice.
        device: Type of the accelerator and torch's backend for it: `("cuda", "nccl")`, `("cpu", "gloo")`.
    """
    kind, backend = device
    if requested:
        return BackendChoice(_with_host(requested, device), "asked for")
    if env.get(BACKEND_VARIABLE):
        return BackendChoice(_with_host(_known(env[BACKEND_VARIABLE]), device), f"{BACKEND_VARIABLE} is set")
    if kind != "cpu":
        return BackendChoice(f"cpu:gloo,{kind}:{backend}", f"the accelerator is {kind}")
    if launch.world_size == 1:
        return BackendChoice(backend, "there is one rank")
    if not launch.one_host:
        ranks_here = (
            f"{launch.local_size} of {launch.world_size} ranks are" if launch.local_size else "nobody told how many are"
        )
        return BackendChoice(backend, f"{ranks_here} on this host")
    return BackendChoice("shm", f"all {launch.world_size} ranks are on this host", otherwise=backend)


def _with_host(name: str, device: tuple[str, str]) -> str:
    """Return a bare backend of the accelerator ("nccl") with gloo for tensors of the host beside it; others as they are."""
    kind, backend = device
    return f"cpu:gloo,{kind}:{name}" if kind != "cpu" and name.lower() == backend else name


def _known(text: str) -> str:
    """Return the value of DS_COMM_BACKEND when its words are backends of this torch.

    Raises:
        CommError: one is not ("comm-env").
    """
    names = [part.rpartition(":")[2].strip().lower() for part in text.split(",")]
    known = {"shm", *dist.Backend.backend_list}
    if unknown := [name for name in names if name not in known]:
        raise CommError(
            f"{BACKEND_VARIABLE} is {text[:80]!r}; this torch knows no backend {unknown[0][:80]!r}",
            code="comm-env",
            fix=f"Use one of {', '.join(sorted(known - {'undefined'}))}, or unset it.",
        )
    return text


def settle(choice: BackendChoice, refusals: Sequence[str]) -> BackendChoice:
    """Return `choice`, or its fallback when any rank refused the backend.

    `refusals` has each rank's reason, in rank order; an empty reason accepts.
    """
    refused = [f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why]
    if not refused:
        return choice
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return BackendChoice(choice.otherwise, f"{choice.name} cannot be used, {refused[0]}{more}")

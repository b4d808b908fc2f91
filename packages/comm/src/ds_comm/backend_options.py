"""Options of gloo and NCCL for the groups of a job: which network interfaces, and how NCCL's kernels and connections are set up.

torch has no options for gloo but the variable that names interfaces, and an object for NCCL whose fields are NCCL's (`ncclConfig_t`). An option
that the backend of the job does not have is an error: it would have no effect.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_config.errors import CommError
from ds_config.option_checks import check_options

__all__ = ["BackendOptions", "group_options", "use_backend_options"]

_CONFIG = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "net_name", "split_share")
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options for `init_distributed`. None leaves what the library does.

    Attributes:
        interfaces: Network interfaces, "eth0,eth1": GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. An existing variable must be the same.
        high_priority: NCCL: run collectives on streams of high priority; None: those that gather parameters.
        blocking: NCCL: whether calls of communicators block.
        cga_cluster_size: NCCL: thread blocks that share memory.
        min_ctas: NCCL: least thread blocks of a kernel.
        max_ctas: NCCL: most thread blocks of a kernel, which leaves more of the device to computation.
        net_name: NCCL: name of the network module, such as "IB" or "Socket".
        split_share: NCCL: communicators split from the world's share its resources.
    """

    interfaces: str | None = None
    high_priority: bool | None = None
    blocking: bool | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None

    def __post_init__(self) -> None:
        check_options(self, cga_cluster_size=">= 0", min_ctas=">= 1", max_ctas=">= 1")

    def requested(self) -> dict[str, Any]:
        """Return the options that are set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


_requested: list[BackendOptions] = []


def use_backend_options(options: BackendOptions | None, backend: str) -> None:
    """Apply options to this process: sets the variable of interfaces, and what `group_options` gives from now on.

    Args:
        backend: torch's name of the job's backend, such as "nccl" or "cpu:gloo,cuda:nccl". None for the options forgets earlier ones.
    Raises:
        CommError: the backend has no such option, an interface does not exist, or a variable says otherwise ("comm-options").
    """
    _requested.clear()
    if options is None:
        return
    kinds = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    requested = options.requested()
    without = [name for name in requested if not kinds & ({"gloo", "nccl"} if name == "interfaces" else {"nccl"})]
    if without:
        raise CommError(
            f"options {', '.join(without)} for backend {backend!r}, which has none of these",
            code="comm-options",
            fix='Leave them out, or choose the backend that has them: init_distributed("nccl"), or "gloo" for interfaces.',
        )
    if options.interfaces is not None:
        _set_interfaces(options.interfaces, [_VARIABLES[kind] for kind in sorted(kinds & set(_VARIABLES))])
    _requested.append(options)


def _set_interfaces(interfaces: str, variables: list[str]) -> None:
    known = [name for _, name in socket.if_nameindex()]
    # NCCL also has prefixes, exclusions and exact names: "ib", "^docker", "=eth0".
    missing = (
        [] if interfaces[:1] in "^=" else [n for n in interfaces.split(",") if not any(k.startswith(n) for k in known)]
    )
    if missing or not interfaces:
        raise CommError(
            f"interfaces {interfaces!r}; this host has {', '.join(known)}",
            code="comm-options",
            fix="Name interfaces of this host, with commas between them.",
        )
    for variable in variables:
        if os.environ.get(variable, interfaces) != interfaces:
            raise CommError(
                f"interfaces {interfaces!r} beside {variable}={os.environ[variable]}",
                code="comm-options",
                fix=f"Unset {variable}, or leave interfaces out.",
            )
        os.environ[variable] = interfaces


def group_options(
    backend: str, timeout: timedelta, make: Callable[[], Any] | None = None, *, urgent: bool = False
) -> Any:
    """Return a fresh options object for a process group, as torch's `pg_options`; None where the options have nothing for it.

    Args:
        backend: Of the group.
        make: Builds NCCL's options; by default torch's class, which a build without NCCL does not have.
        urgent: The group's collectives run on a stream of high priority, where the options do not say.
    """
    requested = _requested[0].requested() if _requested else {}
    requested.pop("interfaces", None)
    if not (requested or urgent) or "nccl" not in backend.lower():
        return None
    options: Any = (make or dist.ProcessGroupNCCL.Options)()
    options._timeout = timeout
    options.is_high_priority_stream = bool(requested.pop("high_priority", urgent))
    for name in _CONFIG:
        if name in requested:
            value = requested[name]
            setattr(options.config, name, int(value) if isinstance(value, bool) else value)
    return options

"""`deepspeed.comm`: torch.distributed's functions under upstream's names and arguments, through ds-comm.

Every collective takes upstream's three trailing arguments (`prof`, `log_name`, `debug`); `log_name` becomes the unit that a
hang report names, the other two ask for what the sinks of ds-monitor show for every collective.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist

import ds_comm
from deepspeed._ours.base.forwarding import method
from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.communication.comms_log import collected, collector, print_collected, switch
from ds_accel import get_accelerator
from ds_comm.config import CommsLoggerConfig
from ds_comm.launch import read_launch
from ds_comm.process_group import DEFAULT_TIMEOUT

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
_log = logging.getLogger("DeepSpeed")


# ---- start and end


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int =
    TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True, timeout: timedelta | None = None, init_method: str | None =
    None, dist_init_required: bool | None = None, config: Any = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Make torch's default process group, once; a group that exists is used.

    Where no launcher said anything, a group of this one process is made, so that what reads the world size works.

    Args:
        dist_backend: torch's name; by default ds-comm's choice for the device.
        auto_mpi_discovery, verbose: MPI's variables are always read; what is chosen is logged.
        distributed_port: Of the rendezvous, where no launcher gave one.
        timeout: Of the rendezvous, of torch's collectives, and how long ranks may wait for one that is busy or diverged; default ten
            minutes, or DEEPSPEED_TIMEOUT minutes. Where neither is given, `ds_comm.init_distributed` says how long ranks wait.
        init_method, rank, world_size: As for torch.distributed.init_process_group, where given.
        dist_init_required: False says that a group exists.
        config: Not read.
    Raises:
        CommError: `dist_init_required=False` and there is no group ("comm-world"); an AssertionError, too.
    """
    del auto_mpi_discovery, verbose, config
    if dist_init_required is False and not dist.is_initialized():
        raise refused("no-process-group")
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    limit = timeout or (timedelta(minutes=float(minutes)) if minutes else DEFAULT_TIMEOUT)
    if not dist.is_initialized() and init_method is not None:
        chosen = dist_backend or get_accelerator().comm_backend
        dist.init_process_group(chosen, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    if distributed_port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    # A wait that the caller allows is no hang; DS_COMM_DEADLINE_S, which whoever starts the job sets, counts more.
    allowed = (timeout or minutes) and not os.environ.get("DS_COMM_DEADLINE_S")
    ds_comm.init_distributed(dist_backend, timeout=limit, deadline_s=limit.total_seconds() if allowed else None)
    if not dist.is_initialized():
        dist.init_process_group(
            dist_backend or get_accelerator().comm_backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
        )


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Initialize the process group from MPI's variables, which `init_distributed` reads."""
    init_distributed(distributed_port=distributed_port, verbose=verbose)


class TorchBackend:
    """torch's process group under the class that upstream keeps its functions in: its methods are those of this module.

    Args:
        backend, timeout, init_method, rank, world_size: As for torch.distributed.init_process_group; a group that exists is used.
    """

    initialized = True

    def __init__(
        self, backend: str | None, timeout: timedelta | None, init_method: str | None, rank: int = -1, world_size: int =
        -1, name: str = "torch",
    ) -> None:  # fmt: skip
        self.name = name
        init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)

    get_all_gather_function: Any = classmethod(
        method(lambda cls: dist.all_gather_into_tensor, "Return torch's function that gathers into one tensor.")
    )
    get_reduce_scatter_function: Any = classmethod(
        method(lambda cls: dist.reduce_scatter_tensor, "Return torch's function that sums and scatters one tensor.")
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("deepspeed.comm"), name)


def destroy_process_group(group: Any = None) -> None:
    """End one of torch's groups; all of them by default, with what was made beside them."""
    if group is None:
        ds_comm.destroy_process_group()
    else:
        dist.destroy_process_group(group)


# ---- who is there


_group = raising(AssertionError, "comm-world")(ds_comm.as_group)
get_rank = method(
    lambda group=None: _group(group).rank,
    "Return this process's rank in the group; 0 in a process alone before a process group exists.",
)
get_world_size = method(
    lambda group=None: _group(group).size,
    "Return the number of ranks of the group; 1 in a process alone before there is one.",
)
get_world_rank_from_launcher = method(
    lambda: 0 if (launch := read_launch(os.environ)) is None else launch.rank,
    "Return this process's rank in the world, as whatever started it says; 0 where nothing did.",
)
get_world_size_from_launcher = method(
    lambda: 1 if (launch := read_launch(os.environ)) is None else launch.world_size,
    "Return the number of processes that were started with this one.",
)
get_global_rank = method(
    lambda group=None, group_rank=0: _group(group).ranks[group_rank],
    "Return the world rank of a rank of the group.",
)
get_all_ranks_from_group = method(
    lambda group=None: list(_group(group).ranks), "Return the ranks in the world of all members."
)
new_group = method(
    lambda ranks: dist.new_group(list(ranks)), "Create torch's process group of these ranks. Collective over the world."
)
in_aml = method(lambda: "AZUREML_EXPERIMENT_ID" in os.environ, "Whether this job runs on Azure Machine Learning.")
in_aws_sm = method(lambda: "SM_TRAINING_ENV" in os.environ, "Whether this job runs on SageMaker.")


# ---- collectives


def _adapted(function: Callable[..., Any], keywords: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Wrap `function` so that it accepts upstream's trailing arguments and keyword names.

    `keywords` maps upstream's names to ours.
    """
    names = keywords or {}

    @wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **options: Any) -> Any:
        del prof, debug
        if log_name:
            options.setdefault("unit", log_name)
        return function(*args, **{names.get(name, name): value for name, value in options.items()})

    return call


_KEYWORDS: Mapping[str, Mapping[str, str]] = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "all_to_all_single": {"tensor": "input"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
}
for _name in (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv",
):  # fmt: skip
    globals()[_name] = _adapted(getattr(ds_comm, _name), _KEYWORDS.get(_name, {}))
allgather_fn = _adapted(ds_comm.all_gather_into_tensor)


def has_all_gather_into_tensor() -> bool:
    """Return True: all-gather into a tensor is always available."""
    return True


# ---- logging


def configure(
    deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None, prof_ops: Sequence[str] |
    None = None, verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """Switch the comms logger of this process on or off. What is not given is as in the configuration, or its default.

    Args:
        deepspeed_config: An object with `comms_logger`, a mapping with that key, or None.
    """
    section = deepspeed_config.get("comms_logger") if isinstance(deepspeed_config, Mapping) else None
    section = section or getattr(deepspeed_config, "comms_logger", None) or {}
    base = dict(section) if isinstance(section, Mapping) else section.model_dump()
    arguments = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    chosen = {name: value for name, value in arguments.items() if value is not None}
    switch(CommsLoggerConfig(**{**base, **chosen}))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print what the comms logger collected, on rank 0; or an engine's, where `comms_logger` of its configuration is on.

    Args:
        show_straggler: Compare with the fastest rank of each operation. Collective then, as upstream is always.
        return_dict: Give the numbers of this rank, too.
    """
    if collector() is None:
        _log.warning("no comms logger listens: call deepspeed.comm.configure(enabled=True), or enable comms_logger")
    report = collected(collector(), show_straggler)
    print_collected(report)
    return report if return_dict else None


def has_comm_data() -> bool:
    """Whether the comms logger collected anything."""
    logger = collector()
    return logger is not None and logger.has_data()


def get_logged_comm_ops() -> list[str]:
    """Names of the operations that it collected."""
    return list(collected(collector())["summary"])


def get_comm_operation_count(operation_name: str | None = None) -> int:
    """Return the number of operations that the comms logger collected, of a given name or of all names."""
    summary = collected(collector())["summary"]
    names = summary if operation_name is None else [name for name in summary if name == operation_name]
    return sum(row["count"] for name in names for row in summary[name].values())


def reset_log() -> None:
    """Forget what the comms logger collected."""
    logger = collector()
    if logger is not None:
        logger.reset()


def start_profiling_comms() -> None:
    """Collect every operation from now on."""
    switch(CommsLoggerConfig(enabled=True, prof_all=True))


def stop_profiling_comms() -> None:
    """Collect no more."""
    switch(CommsLoggerConfig(enabled=False))

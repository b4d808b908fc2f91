"""What Kubernetes says of this pod's place in its job, as options of `ds run`. Pure, but for the wait for a name.

Who sets what, in each pod, which is one host of the job:

    Kubeflow's PyTorchJob    RANK (the pod's number), WORLD_SIZE, MASTER_ADDR, MASTER_PORT; of newer operators also torchrun's
                             options as variables: PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_RDZV_ENDPOINT, ...
    Kubeflow's TrainJob      PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    JobSet, an Indexed Job   JOB_COMPLETION_INDEX; the rest is the manifest's (`ds_launcher.manifests`)

What the command line says wins. A rank has LOCAL_RANK: then another launcher was here, and RANK is no pod's number.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from ds_config.errors import ConfigError, LaunchError
from ds_launcher.launch_options import RunOptions, parse_nnodes

__all__ = ["await_name", "in_pod", "pod_options"]

_NAME_S, _AGAIN_S = 300.0, 1.0


def in_pod(env: Mapping[str, str]) -> bool:
    """Whether this is a process of a pod that nobody made a rank of yet."""
    marks = ("KUBERNETES_SERVICE_HOST", "PET_NODE_RANK", "PET_NNODES", "PET_RDZV_ENDPOINT", "JOB_COMPLETION_INDEX")
    return "LOCAL_RANK" not in env and any(env.get(name) for name in marks)


def pod_options(options: RunOptions, env: Mapping[str, str]) -> RunOptions:
    """Fill the options that the command line leaves open from the pod's environment.

    Raises:
        ConfigError: a variable that must be a number is none ("launch-pod").
    """
    if not in_pod(env) or options.hostfile or options.world_info or options.include or options.exclude:
        return options
    nnodes = options.nnodes or env.get("PET_NNODES", "")
    if not nnodes and "PET_NODE_RANK" not in env and "RANK" in env:
        nnodes = env.get("WORLD_SIZE", "")  # an operator that starts one rank a pod
    low, high = parse_nnodes(nnodes)
    resolved = replace(options, nnodes=nnodes, nproc=_nproc(options, env))
    endpoint = options.rdzv_endpoint or env.get("PET_RDZV_ENDPOINT", "")
    if low != high or endpoint:
        restarts = options.max_restarts or _number(env, 0, "PET_MAX_RESTARTS")
        run_id = options.run_id or env.get("PET_RDZV_ID", "")
        return replace(resolved, rdzv_endpoint=endpoint, max_restarts=restarts, run_id=run_id)
    if low <= 1:
        return resolved
    index = _number(env, -1, "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
    return replace(
        resolved,
        node_rank=str(index) if options.node_rank == "auto" and index >= 0 else options.node_rank,
        master_addr=options.master_addr or env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", ""),
        master_port=options.master_port or _number(env, 0, "PET_MASTER_PORT", "MASTER_PORT"),
    )


def _nproc(options: RunOptions, env: Mapping[str, str]) -> int:
    configured = env.get("PET_NPROC_PER_NODE") or env.get("PET_N_PROC_PER_NODE", "")
    # "auto", "gpu" and "cpu" leave it to who starts the ranks: the devices that are visible here.
    return options.nproc if options.nproc != -1 or not configured.isdecimal() else int(configured)


def _number(env: Mapping[str, str], default: int, *names: str) -> int:
    """Return the first of these variables that is set, as a number; else `default`."""
    for name in names:
        if value := env.get(name, ""):
            if not value.isdecimal():
                raise ConfigError(
                    f"{name} is {value!r} in this pod; it is a number",
                    code="launch-pod",
                    fix="Correct the manifest, or say it on the command line of `ds run`.",
                )
            return int(value)
    return default


def await_name(host: str, seconds: float = _NAME_S) -> None:
    """Wait until `host` has an address: a pod's name is known once that pod is.

    Raises:
        LaunchError: it has none after `seconds` ("launch-pod").
    """
    deadline_s = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{host}, the pod of rank 0, has no address after {seconds:g} s ({error})",
                    code="launch-pod",
                    fix="Look whether that pod runs (kubectl get pods), and whether MASTER_ADDR names it and its service.",
                ) from error
        time.sleep(_AGAIN_S)

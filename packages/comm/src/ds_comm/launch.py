"""Where this process stands in its job, read from the variables that launchers set. Pure: environment in, record out.

In order, the first launcher whose variables are there:

    Kubernetes  one rank a pod: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT without LOCAL_RANK (PyTorchJob); PET_NODE_RANK and
                PET_NNODES (TrainJob); JOB_COMPLETION_INDEX with WORLD_SIZE (JobSet)
    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (also `ds run`, by hand)
    SageMaker   SM_TRAINING_ENV, over OpenMPI
    AzureML     AZUREML_EXPERIMENT_ID and AZ_BATCH_* or AZ_BATCHAI_*, over OpenMPI
    OpenMPI     OMPI_COMM_WORLD_*
    MPICH       PMI_RANK, PMI_SIZE; also Intel MPI (MPI_LOCALRANKID), Cray PALS (PALS_*)
    Slurm       SLURM_PROCID and SLURM_STEP_NUM_TASKS, which only processes that srun started have

MASTER_ADDR and MASTER_PORT, when set, win over what a launcher implies.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ds_config.errors import CommError

__all__ = ["LaunchedProcess", "first_host", "read_launch"]

_MOST_DIGITS = 9
_PORTS = range(20_000, 32_000)  # below the ephemeral range of Linux, which a busy host hands out to anyone


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One process of a job.

    Attributes:
        launcher: Who started it, as in the table above.
        rank: Rank in the world.
        local_rank: Index among the processes of this host.
        local_size: Processes on this host; 0 when the launcher does not tell.
        address: Host of rank 0; empty when all processes are on one host and the launcher does not tell.
        port: Where the rendezvous listens there; 0 when the ranks of one host shall agree on a free one.
        job: Distinguishes this job from others of the same user on the same hosts; may be empty.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    job: str

    @property
    def one_host(self) -> bool:
        """Whether it is known that all ranks are on this host."""
        return self.local_size == self.world_size

    def environment(self) -> dict[str, str]:
        """Return the variables that torch's functions read, for launchers that do not set them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            **({"LOCAL_WORLD_SIZE": str(self.local_size)} if self.local_size else {}),
        }


def read_launch(env: Mapping[str, str]) -> LaunchedProcess | None:
    """Read which launcher started this process, and its ranks; None (a world of one rank) without a launcher.

    Raises:
        CommError: some variables of a launcher are missing or not numbers ("comm-env").
    """
    for reader in (_kubernetes, _torchrun, _sagemaker, _azure, _openmpi, _mpich, _slurm):
        launch = reader(env)
        if launch is not None:
            _check(launch)
            return launch
    return None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[07-09,12],login1` gives `gpu07`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,\[]*))?", nodelist.strip())
    if not match:
        raise CommError(
            f"SLURM_STEP_NODELIST={nodelist!r} has no first host",
            code="comm-env",
            fix="Set MASTER_ADDR to the host of rank 0.",
        )
    prefix, numbers, suffix = match.groups()
    return prefix if numbers is None else f"{prefix}{re.split('[-,]', numbers)[0]}{suffix}"


def _kubernetes(env: Mapping[str, str]) -> LaunchedProcess | None:
    """Read the launch of a pod that runs a single process; None in any other environment.

    Launchers that start several ranks in a pod set LOCAL_RANK for each.
    """
    index = next((name for name in ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX") if env.get(name)), "")
    size = next((name for name in ("WORLD_SIZE", "PET_NNODES") if env.get(name)), "")
    pod = any(env.get(name) for name in ("KUBERNETES_SERVICE_HOST", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"))
    # The index alone, of one of many jobs that have nothing to do with each other, makes no world.
    if "LOCAL_RANK" in env or not pod or not index or not size:
        return None
    read = _ProcReader("Kubernetes", env)
    ranks = read.number("PET_NPROC_PER_NODE", default=1) if env.get("PET_NPROC_PER_NODE", "").isdigit() else 1
    if ranks > 1:
        raise CommError(
            f"PET_NPROC_PER_NODE is {ranks}: this is the process of a pod in which {ranks} ranks were to be started",
            code="comm-env",
            fix="Let the pod's command be `ds run SCRIPT` or `torchrun SCRIPT`, which read these variables.",
        )
    world = read.number(index), read.number(size)
    address, port = env.get("PET_MASTER_ADDR", ""), read.number("PET_MASTER_PORT", default=0)
    if world[1] > 1:
        read.text("MASTER_ADDR", "PET_MASTER_ADDR")
    return read.launch(world, (0, 1), env.get("PET_RDZV_ID", ""), address, port)


def _torchrun(env: Mapping[str, str]) -> LaunchedProcess | None:
    if "RANK" not in env and not ("WORLD_SIZE" in env and "LOCAL_RANK" in env):
        return None
    read = _ProcReader("torchrun", env)
    rank, size = read.number("RANK"), read.number("WORLD_SIZE")
    local = read.number("LOCAL_RANK", default=rank if size == 1 else None)
    if size > 1:
        read.text("MASTER_ADDR")
        read.text("MASTER_PORT")
    return read.launch(
        (rank, size), (local, read.number("LOCAL_WORLD_SIZE", default=0)), env.get("TORCHELASTIC_RUN_ID", "")
    )


def _sagemaker(env: Mapping[str, str]) -> LaunchedProcess | None:
    if "SM_TRAINING_ENV" not in env:
        return None
    try:
        hosts = sorted(json.loads(env["SM_TRAINING_ENV"])["hosts"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommError(
            "SM_TRAINING_ENV is not JSON with a list `hosts`",
            code="comm-env",
            fix="Start through SageMaker's MPI launcher, or with torchrun.",
        ) from error
    return _ProcReader("SageMaker", env).over_mpi(hosts[0], _port(env.get("TRAINING_JOB_NAME", "sagemaker")))


def _azure(env: Mapping[str, str]) -> LaunchedProcess | None:
    if "AZUREML_EXPERIMENT_ID" not in env or "OMPI_COMM_WORLD_RANK" not in env:
        return None
    read = _ProcReader("AzureML", env)
    if "AZ_BATCH_MASTER_NODE" in env:
        host, _, port = env["AZ_BATCH_MASTER_NODE"].partition(":")
        return read.over_mpi(host, int(port) if port.isdigit() else _port(env["AZUREML_EXPERIMENT_ID"]))
    return read.over_mpi(read.text("AZ_BATCHAI_MPI_MASTER_NODE"), _port(env["AZUREML_EXPERIMENT_ID"]))


def _openmpi(env: Mapping[str, str]) -> LaunchedProcess | None:
    return _ProcReader("OpenMPI", env).over_mpi("", 0) if "OMPI_COMM_WORLD_RANK" in env else None


def _mpich(env: Mapping[str, str]) -> LaunchedProcess | None:
    if "PMI_RANK" not in env and "PALS_RANKID" not in env:
        return None
    read = _ProcReader("MPICH", env)
    rank = read.number("PMI_RANK", "PALS_RANKID")
    size = read.number("PMI_SIZE", "PALS_SIZE")
    alone = 0 if size == 1 else None
    local = read.number("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID", default=alone)
    on_host = read.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", default=size if size == 1 else 0)
    return read.launch((rank, size), (local, on_host), env.get("PALS_APID", ""))


def _slurm(env: Mapping[str, str]) -> LaunchedProcess | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    read = _ProcReader("Slurm", env)
    size = read.number("SLURM_STEP_NUM_TASKS")
    nodes = read.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=0)
    job = f"{read.text('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', '0')}"
    address = env.get("MASTER_ADDR") or first_host(
        read.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    )
    here = (read.number("SLURM_LOCALID"), size if nodes == 1 else 0)
    return read.launch((read.number("SLURM_PROCID"), size), here, job, address, _port(job))


@dataclass(frozen=True, slots=True)
class _ProcReader:
    launcher: str
    env: Mapping[str, str]

    def text(self, *names: str) -> str:
        """Return the first of these variables that is set; raise CommError if none is."""
        for name in names:
            if self.env.get(name):
                return self.env[name]
        raise CommError(
            f"{self.launcher} started this process, but {' or '.join(names)} is not set",
            code="comm-env",
            fix=f"Set {names[0]}, or start with torchrun or `ds run`, which set everything.",
        )

    def number(self, *names: str, default: int | None = None) -> int:
        if default is not None and not any(self.env.get(name) for name in names):
            return default
        value = self.text(*names)
        if not value.strip().isdecimal() or len(value.strip()) > _MOST_DIGITS:
            raise CommError(
                f"{' or '.join(names)} is {value[:80]!r}, which is no number",
                code="comm-env",
                fix="Set it to a number from 0.",
            )
        return int(value)

    def over_mpi(self, address: str, port: int) -> LaunchedProcess:
        world = self.number("OMPI_COMM_WORLD_RANK"), self.number("OMPI_COMM_WORLD_SIZE")
        here = self.number("OMPI_COMM_WORLD_LOCAL_RANK"), self.number("OMPI_COMM_WORLD_LOCAL_SIZE", default=0)
        job = self.env.get("PMIX_NAMESPACE", self.env.get("OMPI_MCA_ess_base_jobid", ""))
        return self.launch(world, here, job, address, port)

    def launch(
        self, world: tuple[int, int], here: tuple[int, int], job: str, address: str = "", port: int = 0
    ) -> LaunchedProcess:
        address = self.env.get("MASTER_ADDR") or address
        port = self.number("MASTER_PORT", default=port)
        if not port and here[1] != world[1]:  # no common host on which to agree on a free one
            port = _port(job)
        return LaunchedProcess(self.launcher, *world, *here, address, port, job)


def _port(job: str) -> int:
    """Derive the port of a job whose ranks cannot agree on a free port.

    The port is the same on all hosts, and usually another for the next job.
    """
    number = int(job.split(".")[0]) if job.split(".")[0].isdigit() else zlib.crc32(job.encode())
    return _PORTS[number % len(_PORTS)]


def _check(launch: LaunchedProcess) -> None:
    if not 0 <= launch.rank < launch.world_size:
        raise CommError(
            f"{launch.launcher} says rank {launch.rank} in a world of {launch.world_size}",
            code="comm-env",
            fix="Start all processes with the same world size and ranks from 0.",
        )
    if launch.port >= 1 << 16:
        raise CommError(
            f"MASTER_PORT is {launch.port}; ports end at 65535",
            code="comm-env",
            fix="Set it to a free port of rank 0's host, from 1024 to 65535, on all ranks.",
        )
    if launch.world_size > 1 and not launch.address and not launch.one_host:
        raise CommError(
            f"{launch.launcher} started {launch.world_size} ranks on several hosts and does not tell where rank 0 is",
            code="comm-env",
            fix="Set MASTER_ADDR (and MASTER_PORT) to the host of rank 0 and a free port there, on all ranks.",
        )

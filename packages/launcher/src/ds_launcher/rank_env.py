"""Which rank is where, and the environment it gets. Pure.

The variables are those of torchrun, so that a script cannot tell the difference, and the three (`LOCAL_SIZE`, `CROSS_RANK`,
`CROSS_SIZE`) that scripts for DeepSpeed's and Horovod's launchers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_config.errors import ConfigError

__all__ = ["World", "node_rank_from", "omp_threads", "rank_env"]


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a job, seen from one of its nodes.

    Attributes:
        local_sizes: ranks on each node, by node rank.
        node_rank: this node.
        master_addr, master_port: where rank 0 listens.
        run_id: unique per job.
    """

    local_sizes: tuple[int, ...]
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return sum(self.local_sizes)

    @property
    def first_rank(self) -> int:
        """Global rank of this node's first rank."""
        return sum(self.local_sizes[: self.node_rank])


def rank_env(world: World, local_rank: int) -> dict[str, str]:
    """Return the environment variables of one rank of this node."""
    rank, local_size = world.first_rank + local_rank, world.local_sizes[world.node_rank]
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": len(world.local_sizes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world.size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": world.node_rank,
        "CROSS_SIZE": len(world.local_sizes),
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in values.items()}


def omp_threads(cores: int, local_size: int) -> int:
    """Return the number of threads for each of `local_size` ranks that share `cores`."""
    return max(1, cores // max(1, local_size))


def node_rank_from(env: Mapping[str, str], names: tuple[str, ...], hostname: str) -> int:
    """Find this node's rank, where the command line says `auto`: by name if known, else by number.

    The name comes from a scheduler or the host, the number from variables of Slurm or MPI.

    Raises:
        ConfigError: several nodes and nothing identifies this node ("launch-node-rank").
    """
    for name in (env.get("SLURMD_NODENAME"), hostname, hostname.split(".")[0]):
        if name in names:
            return names.index(name)
    for variable in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if env.get(variable, "").isdecimal():
            return int(env[variable])
    if len(names) <= 1:
        return 0
    raise ConfigError(
        f"the job has {len(names)} nodes ({', '.join(names)}) and nothing says which one {hostname!r} is",
        code="launch-node-rank",
        fix="Give --node-rank.",
    )

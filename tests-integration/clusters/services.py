"""What runs on the hosts of a cluster: OpenSSH's server, Slurm with munge. Real programs, with settings of their own folder."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time

from machines import Cluster

__all__ = ["PACKAGES", "absent", "found", "start_slurm", "start_sshd"]

# What to install, by what is looked for.
PACKAGES = {
    "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "srun": "slurm-wlm", "slurmd": "slurm-wlm",
    "munged": "munge", "mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich",
}  # fmt: skip


def absent(*tools: str) -> str:
    """The line to have what is missing; empty: nothing is."""
    lacking = [tool for tool in tools if found(tool) is None]
    return (
        f"no {', '.join(lacking)}: apt-get install {' '.join(sorted({PACKAGES[t] for t in lacking}))}"
        if lacking
        else ""
    )


def found(tool: str) -> str | None:
    """Its path; servers live where a user's PATH does not look."""
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def start_sshd(cluster: Cluster) -> None:
    """A server on every node, which root of every host may enter with a key."""
    home = cluster.folder / "home" / ".ssh"
    for name in ("id_ed25519", "host_key"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(made, check=True)
    shutil.copy(home / "id_ed25519.pub", home / "authorized_keys")
    public = (home / "host_key.pub").read_text().split()[:2]
    (home / "known_hosts").write_text(
        "".join(f"{node.name},{node.address} {' '.join(public)}\n" for node in cluster.nodes)
    )
    settings = f"""
HostKey {home}/host_key
AuthorizedKeysFile {home}/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
AcceptEnv *
"""
    (cluster.folder / "sshd_config").write_text(settings)
    for node in cluster.nodes:
        node.run("mkdir", "-p", "/run/sshd")
        subprocess.Popen(
            node.words(str(found("sshd")), "-D", "-e", "-f", str(cluster.folder / "sshd_config")),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    for node in cluster.nodes:
        _until(
            lambda node=node: (
                cluster.hub.run("ssh", "-o", "BatchMode=yes", node.name, "true", check=False).returncode == 0
            )
        )


def start_slurm(cluster: Cluster, cpus: int = 2) -> dict[str, str]:
    """munged and slurmctld on the hub, slurmd on every node; the variables that its commands need."""
    folder = cluster.folder / "slurm"
    folder.mkdir(mode=0o755)
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = ",".join(node.name for node in cluster.nodes)
    settings = f"""
ClusterName=test
SlurmctldHost=hub({cluster.hub.address})
AuthType=auth/munge
AuthInfo=socket={socket}
CryptoType=crypto/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000
ReturnToService=2
MpiDefault=none
KillWait=2
SlurmdTimeout=300
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName={names} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
    conf = folder / "slurm.conf"
    conf.write_text(settings)
    # One munged for all: its socket is a file. Its user must own its folders.
    shutil.chown(folder, "root")
    env = {"SLURM_CONF": str(conf)}
    hub = cluster.hub
    hub.run(
        str(found("munged")), "--force", f"--key-file={key}", f"--socket={socket}", f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    )  # fmt: skip
    (folder / "state").mkdir()
    hub.run("env", f"SLURM_CONF={conf}", str(found("slurmctld")))
    for node in cluster.nodes:
        (folder / f"spool.{node.name}").mkdir()
        node.run("env", f"SLURM_CONF={conf}", str(found("slurmd")), "-N", node.name)
    _until(lambda: _idle(cluster, env) == len(cluster.nodes))
    return env


def _idle(cluster: Cluster, env: dict[str, str]) -> int:
    words = [f"{name}={value}" for name, value in env.items()]
    shown = cluster.hub.run("env", *words, "sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout
    return len(set(shown.split()))


def _until(ready, seconds: float = 30) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s")
        time.sleep(0.1)

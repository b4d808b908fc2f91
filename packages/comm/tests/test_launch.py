"""The variables of every launcher, as it sets them."""

from __future__ import annotations

import pytest

from ds_comm.launch import LaunchedProcess, first_host, read_launch
from ds_config.errors import CommError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "job7",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
PALS = {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_APID": "app-1", "MASTER_ADDR": "x1000"}
AZURE = {
    **OPENMPI,
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "AZUREML_EXPERIMENT_ID": "e",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}
AZURE_BATCHAI = {**OPENMPI, "AZUREML_EXPERIMENT_ID": "e", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}
SAGEMAKER = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SM_TRAINING_ENV": '{"hosts": ["algo-2", "algo-1"]}'}


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == LaunchedProcess("torchrun", 3, 8, 1, 2, "node0", 29501, "job7")


PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "gpt-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "2",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "gpt-master-0",
    "PET_MASTER_PORT": "23456",
}


def test_a_pod_of_a_pytorchjob_is_a_rank() -> None:
    launch = read_launch(PYTORCHJOB)
    assert launch == LaunchedProcess("Kubernetes", 2, 4, 0, 1, "gpt-master-0", 23456, "")
    assert launch.environment()["LOCAL_RANK"] == "0"
    old = {name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")}
    assert read_launch(old) == launch
    assert read_launch({**PYTORCHJOB, "PET_NPROC_PER_NODE": "auto"}) == launch


def test_a_pod_of_a_trainjob_is_a_rank() -> None:
    pod = {name: value for name, value in PYTORCHJOB.items() if name.startswith("PET_")}
    assert read_launch(pod) == LaunchedProcess("Kubernetes", 2, 4, 0, 1, "gpt-master-0", 23456, "")


def test_a_pod_that_was_to_start_ranks_says_how() -> None:
    with pytest.raises(CommError, match="8 ranks were to be started") as caught:
        read_launch({**PYTORCHJOB, "WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8"})
    assert "`ds run SCRIPT`" in caught.value.fix
    rank = {"LOCAL_RANK": "5", "RANK": "21", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    launch = read_launch({**PYTORCHJOB, "PET_NPROC_PER_NODE": "8", **rank})
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.local_rank) == ("torchrun", 21, 5)


def test_an_indexed_job_is_a_world_where_its_manifest_says_the_size() -> None:
    pod = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert read_launch(pod) is None
    said = {"WORLD_SIZE": "2", "MASTER_ADDR": "gpt-workers-0-0.gpt", "MASTER_PORT": "29500"}
    assert read_launch({**pod, **said}) == LaunchedProcess("Kubernetes", 1, 2, 0, 1, "gpt-workers-0-0.gpt", 29500, "")
    with pytest.raises(CommError, match="MASTER_ADDR or PET_MASTER_ADDR is not set"):
        read_launch({**pod, "WORLD_SIZE": "2"})


def test_slurm() -> None:
    launch = read_launch(SLURM)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("Slurm", 5, 8, 1)
    assert launch.address == "gpu07"
    assert not launch.one_host
    other = read_launch({**SLURM, "SLURM_JOB_ID": "4712"})
    assert other is not None
    assert 20_000 <= launch.port < 32_000
    assert launch.port != other.port, "two jobs of a day do not share a port"


def test_slurm_on_one_node_is_known_to_be_one_host() -> None:
    launch = read_launch({**SLURM, "SLURM_STEP_NUM_NODES": "1"})
    assert launch is not None
    assert launch.one_host


def test_a_batch_script_without_srun_is_a_world_of_one() -> None:
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_openmpi_on_one_host_agrees_on_a_free_port() -> None:
    launch = read_launch(OPENMPI)
    assert launch == LaunchedProcess("OpenMPI", 1, 4, 1, 4, "", 0, "prterun-host-17@1")


def test_openmpi_over_hosts_needs_an_address_only() -> None:
    launch = read_launch({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n0"})
    assert launch is not None
    assert launch.address == "n0"
    assert launch.port >= 20_000
    with pytest.raises(CommError, match="does not tell where rank 0 is") as caught:
        read_launch({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert "MASTER_ADDR" in caught.value.fix


def test_mpich_and_intel_mpi() -> None:
    assert read_launch(HYDRA) == LaunchedProcess("MPICH", 2, 4, 2, 4, "", 0, "")


def test_pals() -> None:
    launch = read_launch(PALS)
    assert launch is not None
    assert (launch.rank, launch.world_size, launch.local_rank, launch.address) == (5, 8, 1, "x1000")


def test_azureml() -> None:
    launch, old = read_launch(AZURE), read_launch(AZURE_BATCHAI)
    assert launch is not None
    assert old is not None
    assert (launch.launcher, launch.rank, launch.address, launch.port) == ("AzureML", 1, "10.0.0.4", 6000)
    assert old.address == "10.0.0.5"


def test_sagemaker() -> None:
    launch = read_launch(SAGEMAKER)
    assert launch is not None
    assert (launch.launcher, launch.address) == ("SageMaker", "algo-1")
    with pytest.raises(CommError, match="SM_TRAINING_ENV"):
        read_launch({**SAGEMAKER, "SM_TRAINING_ENV": "{}"})


def test_torchrun_inside_slurm_is_torchrun() -> None:
    launch = read_launch({**SLURM, **TORCHRUN})
    assert launch is not None
    assert launch.launcher == "torchrun"


def test_given_address_and_port_win() -> None:
    launch = read_launch({**SLURM, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "1234"})
    assert launch is not None
    assert (launch.address, launch.port) == ("10.1.1.1", 1234)


def test_nobody_started_us() -> None:
    assert read_launch({"PATH": "/bin", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("env", "name"),
    [(TORCHRUN, n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    + [(SLURM, n) for n in ("SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")]
    + [(OPENMPI, n) for n in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")]
    + [(HYDRA, n) for n in ("PMI_SIZE", "MPI_LOCALRANKID")],
)
def test_a_missing_variable_is_named(env: dict[str, str], name: str) -> None:
    with pytest.raises(CommError, match=name) as caught:
        read_launch({key: value for key, value in env.items() if key != name})
    assert caught.value.code == "comm-env"


def test_a_single_process_of_torchrun_needs_no_rendezvous() -> None:
    launch = read_launch({"RANK": "0", "WORLD_SIZE": "1"})
    assert launch is not None
    assert (launch.local_rank, launch.address) == (0, "")


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("RANK", "8"), ("WORLD_SIZE", "-1")])
def test_a_variable_that_is_no_rank_is_refused(name: str, value: str) -> None:
    with pytest.raises(CommError, match=value) as caught:
        read_launch({**TORCHRUN, name: value})
    assert caught.value.code == "comm-env"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a[3,5].x.org", "a3.x.org"),
        (" c-1-[1-3]", "c-1-1"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_no_first_host() -> None:
    with pytest.raises(CommError, match="no first host"):
        first_host("")


def test_what_torch_reads_is_set() -> None:
    launch = read_launch(HYDRA)
    assert launch is not None
    assert launch.environment() == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


def test_mpich_alone_needs_no_place_on_its_host() -> None:
    found = read_launch({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (0, 1, 0)


def test_a_rank_outside_of_its_world_is_refused() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(CommError, match="rank 2 in a world of 2"):
        read_launch(env)

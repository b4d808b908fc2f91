"""From a command line to what would be started, without starting anything."""

from __future__ import annotations

import argparse
import base64
import json
import shlex
from dataclasses import replace

import pytest

from ds_config.errors import ConfigError
from ds_launcher.devices import Devices
from ds_launcher.inventory import Host, decode, encode
from ds_launcher.job import HostFacts, make_launch, remote_hosts
from ds_launcher.launch_options import RunOptions, joined, options_of, parse_nnodes, register, without_option
from ds_launcher.launch_plan import LaunchPlan, Process, describe, from_json, to_json
from ds_launcher.shim import LOCAL_RANK_WORD

FACTS = HostFacts(
    env={}, hostname="head", cores=8, devices=Devices(), python="/venv/bin/python", cwd="/home/me/my job",
    run_id="id1", port=40000,
)  # fmt: skip
CLUSTER = (Host("n1", (0, 1)), Host("n2", (0, 1, 2)))


def asked(line: str) -> RunOptions:
    parser = argparse.ArgumentParser(exit_on_error=False)
    register(parser)
    return options_of(parser.parse_args(joined(shlex.split(line))))


def launch(line: str, **facts: object) -> LaunchPlan:
    return make_launch(asked(line), replace(FACTS, **facts))  # type: ignore[arg-type]


def test_two_ranks_here() -> None:
    one, two = launch("--nproc 2 train.py --deepspeed_config cfg.json -x --nproc 9").processes
    assert one.argv == ("/venv/bin/python", "-u", "train.py", "--deepspeed_config", "cfg.json", "-x", "--nproc", "9")
    assert (one.name, one.prefix, one.stdin) == ("rank 0", "", "inherit")
    assert (two.name, two.prefix, two.stdin) == ("rank 1", "[rank1] ", "null")
    assert (two.env["RANK"], two.env["WORLD_SIZE"], two.env["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    assert (two.env["MASTER_PORT"], two.env["OMP_NUM_THREADS"], two.env["DS_RUN_ID"]) == ("40000", "4", "id1")


def test_threads_are_left_alone_where_they_are_chosen_or_the_rank_is_alone() -> None:
    assert "OMP_NUM_THREADS" not in launch("--nproc 2 t.py", env={"OMP_NUM_THREADS": "3"}).processes[0].env
    assert "OMP_NUM_THREADS" not in launch("t.py").processes[0].env


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("-m pkg.train a", ("/venv/bin/python", "-u", "-m", "pkg.train", "a")),
        ("--module pkg.train", ("/venv/bin/python", "-u", "-m", "pkg.train")),
        ("--no_python ./run.sh a", ("./run.sh", "a")),
        ("--local-rank-arg t.py", ("/venv/bin/python", "-u", "t.py", "--local_rank=0")),
        ("--local-rank-arg t.py sub -- x", ("/venv/bin/python", "-u", "t.py", "--local_rank=0", "sub", "--", "x")),
        ("--local-rank-arg --no_python ./run.sh a", ("./run.sh", "--local_rank=0", "a")),
        ("--no_local_rank t.py", ("/venv/bin/python", "-u", "t.py")),
        ("--no_ssh_check t.py", ("/venv/bin/python", "-u", "t.py")),
    ],
)
def test_how_the_script_is_called(line: str, argv: tuple[str, ...]) -> None:
    (process,) = launch(line).processes
    assert process.argv == argv
    assert process.group == ("no_python" in line)


@pytest.mark.parametrize(
    "flag", ["--nproc", "--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num_accelerators"]
)
def test_the_number_of_ranks_under_all_its_names(flag: str) -> None:
    assert len(launch(f"{flag} 3 t.py").processes) == 3


def test_one_rank_per_visible_device_by_default() -> None:
    devices = Devices("cuda", "CUDA_VISIBLE_DEVICES", ("4", "5"))
    processes = launch("t.py", devices=devices).processes
    assert len(processes) == 2
    assert "CUDA_VISIBLE_DEVICES" not in processes[0].env  # inherited as it is


def test_slots_choose_among_the_visible_devices() -> None:
    devices = Devices("cuda", "CUDA_VISIBLE_DEVICES", ("4", "5", "6"))
    processes = launch("--include localhost:0,2 t.py", devices=devices).processes
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in processes] == ["4,6", "4,6"]
    assert [p.env["LOCAL_RANK"] for p in processes] == ["0", "1"]
    assert launch("--exclude localhost:0 t.py", devices=devices).processes[0].env["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_logs_hide_all_but_rank_0() -> None:
    processes = launch("--nproc 2 --log-dir logs t.py").processes
    assert [(p.shown, p.log) for p in processes] == [(True, "logs/rank0.log"), (False, "logs/rank1.log")]


def test_a_node_of_a_job_that_is_started_by_hand() -> None:
    processes = launch("--nnodes 2 --node-rank 1 --nproc 2 --master-addr head --master-port 5 t.py", port=5).processes
    assert [p.env["RANK"] for p in processes] == ["2", "3"]
    assert (processes[0].env["MASTER_ADDR"], processes[0].env["CROSS_SIZE"]) == ("head", "2")


def test_no_ssh_takes_this_hosts_part_of_the_hostfile() -> None:
    processes = launch("--hostfile h --no_ssh --node_rank 1 t.py", hosts=CLUSTER).processes
    assert [p.env["RANK"] for p in processes] == ["2", "3", "4"]
    assert processes[0].env["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--nproc 0 t.py", "launch-options", "--nproc is 0"),
        ("--module --no-python t.py", "launch-options", "both given"),
        ("--launcher rsh t.py", "launch-options", "'rsh'; known are ssh"),
        ("--include a --nproc 2 t.py", "launch-options", "each says how many"),
        ("--grace -1 t.py", "launch-options", "cannot be negative"),
        ("--grace nan t.py", "launch-options", "cannot be negative"),
        ("--host-timeout inf t.py", "launch-options", "nor more than 1000000 seconds"),
        ("--nproc 1000000 t.py", "launch-options", "at most 65536"),
        ("--max-restarts -1 t.py", "launch-options", "cannot be negative"),
        ("--master-port 70000 t.py", "launch-options", "ports are"),
        ("--node-rank x t.py", "launch-options", "'x'"),
        ("--nnodes 2:1 t.py", "launch-options", "'2:1'"),
        ("--nnodes two t.py", "launch-options", "'two'"),
        ("--nnodes 2 t.py", "launch-node-rank", "needs --master-addr"),
        ("--nnodes 2 --node-rank 2 --master-addr a t.py", "launch-node-rank", "node rank 2"),
        ("--nnodes 1:2 t.py", "launch-options", "needs a place where the hosts meet"),
        ("--max-restarts 1 --include a t.py", "launch-options", "come and go"),
    ],
)
def test_what_cannot_be_is_said(line: str, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        launch(line)
    assert caught.value.code == code


def test_all_problems_of_a_line_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        asked("--nproc 0 --grace -1 --launcher rsh t.py")
    assert caught.value.message.count("\n") == 2


@pytest.mark.parametrize("name", ["mpich", "impi", "MVAPICH"])
def test_the_family_of_mpich_starts_one_task_a_host(name: str) -> None:
    made = launch(f"--launcher {name} --launcher_args '-v' t.py a", hosts=CLUSTER, exports={"A": "1", "MY_TOKEN": "s"})
    (process,) = made.processes
    assert process.argv[:11] == (
        "mpirun", "-n", "2", "-ppn", "1", "-hosts", "n1,n2", "-wdir", "/home/me/my job", "-genvlist", "MY_TOKEN",
    )  # fmt: skip
    given = process.argv.index("-v")
    assert process.argv[given : given + 3] == ("-v", "env", "A=1")
    assert process.argv[-2:] == ("t.py", "a")
    assert (dict(process.env), "s" in process.argv) == ({"MY_TOKEN": "s"}, False)


def test_arguments_for_the_launcher_may_begin_with_a_dash() -> None:
    assert joined(["--launcher_args", "-mca b eth1", "t.py", "-m"]) == ["--launcher_args=-mca b eth1", "t.py", "-m"]
    assert joined(["--launcher-args", "plain", "t.py", "--launcher-args"]) == [
        "--launcher-args", "plain", "t.py", "--launcher-args",
    ]  # fmt: skip


def test_ranks_get_cores_of_their_own() -> None:
    one, two = launch("--nproc 2 --bind_cores_to_rank t.py", core_ids=(0, 1, 2, 5, 6)).processes
    assert (one.cores, two.cores) == ((0, 1), (2, 5))
    assert (one.env["OMP_NUM_THREADS"], two.env["OMP_NUM_THREADS"]) == ("2", "2")
    assert "(cores 2, 5)" in describe(LaunchPlan((two,)))
    assert from_json(to_json(LaunchPlan((one, two)))).processes[1].cores == (2, 5)
    (alone,) = launch("--core-list 4-6 t.py", core_ids=tuple(range(8))).processes
    assert alone.cores == (4, 5, 6)
    chosen = launch("--bind-cores t.py", core_ids=(0, 1), env={"OMP_NUM_THREADS": "1"}).processes[0]
    assert ("OMP_NUM_THREADS" in chosen.env, chosen.cores) == (False, (0, 1))
    remote = launch("--core-list 0-3 --bind-cores t.py", hosts=CLUSTER).processes[0]
    assert "--bind-cores --core-list 0-3" in remote.argv[-1]


@pytest.mark.parametrize(
    ("line", "said", "facts"),
    [
        ("--nproc 3 --bind-cores t.py", "3 ranks share 2 cores", {}),
        ("--core-list 1,5 t.py", "has 5, which", {}),
        ("--core-list 3-1 t.py", "bad range", {}),
        ("--core-list 1,0 t.py", "ascend", {}),
        ("--bind-cores t.py", "KMP_AFFINITY", {"env": {"KMP_AFFINITY": "x"}}),
        ("--bind-cores --max-restarts 1 t.py", "fixed number of hosts", {}),
    ],
)
def test_cores_that_cannot_be_given(line: str, said: str, facts: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(line, core_ids=(0, 1), **facts)


@pytest.mark.parametrize(("text", "pair"), [("", (-1, -1)), ("-1", (-1, -1)), ("3", (3, 3)), ("1:4", (1, 4))])
def test_nnodes(text: str, pair: tuple[int, int]) -> None:
    assert parse_nnodes(text) == pair


# -- other hosts


def shell_of(process: Process) -> list[str]:
    return shlex.split(process.argv[-1])


def test_ssh_starts_one_node_each_and_quotes_what_travels() -> None:
    exports = {"A": 'it\'s $HOME; rm -rf / "x"', "NCCL_DEBUG": "INFO"}
    found = launch(
        "--hostfile h --ssh_port 2222 --launcher_args '-v -4' 'my train.py' 'a b'", hosts=CLUSTER, exports=exports
    )
    first, second = found.processes
    assert (first.name, second.name) == ("host n1", "host n2")
    assert first.argv[0] == "ssh"
    assert "-p 2222 -v -4 n1" in " ".join(first.argv[:-1])
    assert first.stdin == "hold"
    words = shell_of(second)
    assert words[:4] == ["cd", "/home/me/my job", "&&", "exec"]
    assert 'A=it\'s $HOME; rm -rf / "x"' in words
    assert words[-2:] == ["my train.py", "a b"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "n1"
    assert words[words.index("--master-port") + 1] == "29500"
    assert decode(words[words.index("--world-info") + 1]) == CLUSTER
    assert "--stop-on-eof" in words


def test_the_node_reads_back_what_the_front_says() -> None:
    words = shell_of(launch("--hostfile h --log-dir logs --module pkg.train a", hosts=CLUSTER).processes[1])
    node = asked(shlex.join(words[words.index("run") + 1 :]))
    assert (node.module, node.script, node.script_args, node.log_dir) == (True, "pkg.train", ("a",), "logs")
    processes = make_launch(node, replace(FACTS, hostname="n2", port=29500)).processes
    assert [p.env["RANK"] for p in processes] == ["2", "3", "4"]
    assert {p.env["DS_RUN_ID"] for p in processes} == {"id1"}
    assert all(p.stdin == "null" for p in processes)  # standard input belongs to the watch


def test_pdsh_numbers_the_nodes_and_keeps_percent_signs() -> None:
    (process,) = launch("--hostfile h --launcher pdsh t.py 100% %h", hosts=CLUSTER).processes
    assert process.argv[:7] == ("pdsh", "-S", "-N", "-f", "1024", "-w", "n1,n2")
    assert process.env["PDSH_RCMD_TYPE"] == "ssh"
    words = shlex.split(process.argv[-1])
    assert words[words.index("--node-rank") + 1] == "%n"
    assert words[-2:] == ["100%%", "%%h"]
    assert "--stop-on-eof" in words


def test_slurm_and_openmpi_start_one_task_a_node() -> None:
    exports = {"A": "1,2"}
    (srun,) = launch(
        "--hostfile h --launcher slurm --launcher_args '--comment x' t.py", hosts=CLUSTER, exports=exports
    ).processes
    assert srun.argv[:9] == ("srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--nodelist", "n1,n2")
    assert srun.argv[srun.argv.index("--comment") + 1] == "x"
    assert srun.argv[srun.argv.index("env") + 1] == "A=1,2"
    assert srun.argv[srun.argv.index("--node-rank") + 1] == "auto"
    (mpirun,) = launch("--hostfile h --launcher openmpi t.py", hosts=CLUSTER).processes
    assert mpirun.argv[:5] == ("mpirun", "-n", "2", "--host", "n1:1,n2:1")
    assert "env" not in mpirun.argv


def test_slurm_takes_its_own_allocation_without_a_hostfile() -> None:
    env = {"SLURM_JOB_NODELIST": "gpu[1-2]"}
    options = asked("--launcher slurm --nproc 4 t.py")
    assert remote_hosts(options, replace(FACTS, env=env)) == (Host("gpu1", (0, 1, 2, 3)), Host("gpu2", (0, 1, 2, 3)))
    assert remote_hosts(asked("--nproc 4 t.py"), replace(FACTS, env=env)) == ()


@pytest.mark.parametrize("name", ["localhost", "head", "127.0.0.1"])
def test_a_hostfile_that_names_only_this_host_runs_here(name: str) -> None:
    hosts = (Host(name, (0, 1)),)
    assert [p.name for p in launch("--hostfile h t.py", hosts=hosts).processes] == ["rank 0", "rank 1"]
    assert [p.name for p in launch("--hostfile h --force_multi t.py", hosts=hosts).processes] == [f"host {name}"]


def test_filters_and_limits_apply_to_the_hostfile() -> None:
    def hosts(line: str) -> tuple[Host, ...]:
        return remote_hosts(asked(f"--hostfile h {line} t.py"), replace(FACTS, hosts=CLUSTER))

    assert hosts("--num_nodes 1") == (CLUSTER[0],)
    assert hosts("--num_gpus 1") == (Host("n1", (0,)), Host("n2", (0,)))
    assert hosts("--exclude n1@n2:1") == (Host("n2", (0, 2)),)


def test_elastic_hands_everything_to_the_agent() -> None:
    line = "--nnodes 1:4 --nproc 2 --max-restarts 3 --rdzv-endpoint h:1 --local-rank-arg t.py a"
    (process,) = launch(line).processes
    spec = json.loads(process.argv[-1])
    assert process.argv[1:4] == ("-P", "-m", "ds_launcher.elastic_launch")
    assert (spec["min_nodes"], spec["max_nodes"], spec["nproc"], spec["max_restarts"]) == (1, 4, 2, 3)
    assert (spec["endpoint"], spec["run_id"]) == ("h:1", "ds")
    assert spec["command"] == ["/venv/bin/python", "-u", "t.py", LOCAL_RANK_WORD, "a"]
    assert process.env["OMP_NUM_THREADS"] == "4"


# -- the launch itself


def test_a_launch_survives_the_socket() -> None:
    found = launch("--nproc 2 --grace 1.5 t.py 'ünï' $'\\xff'")
    assert from_json(to_json(found)) == found


def test_the_description_is_a_line_a_shell_would_take() -> None:
    text = describe(LaunchPlan((Process("rank 0", ("python", "t.py", "a b"), {"RANK": "0", "X": "$Y"}, log="my log"),)))
    assert text == "# rank 0\nenv RANK=0 'X=$Y' python t.py 'a b'  > 'my log'"


def test_world_info_is_readable_by_a_person_with_base64() -> None:
    words = shell_of(launch("--hostfile h t.py", hosts=CLUSTER).processes[0])
    raw = base64.urlsafe_b64decode(words[words.index("--world-info") + 1])
    assert json.loads(raw) == [["n1", [0, 1]], ["n2", [0, 1, 2]]]


SECRETS = {"NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_PASSWORD": "hunter2"}


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi"])
def test_no_secret_stands_on_a_command_line_or_is_shown(launcher: str) -> None:
    found = launch(f"--hostfile h --launcher {launcher} t.py", hosts=CLUSTER, exports=SECRETS)
    for process in found.processes:
        assert "hunter2" not in " ".join(process.argv)
        assert "NCCL_DEBUG=INFO" in " ".join(process.argv)
        assert {**process.env, **process.secrets}["MLFLOW_TRACKING_PASSWORD"] == "hunter2"
        assert bool(process.secrets) == (launcher == "ssh")
    text = describe(found)
    assert "hunter2" not in text
    assert "MLFLOW_TRACKING_PASSWORD" in text
    if launcher == "openmpi":
        assert "-x MLFLOW_TRACKING_PASSWORD" in " ".join(found.processes[0].argv)


def test_the_ranks_of_a_job_share_a_secret_that_nobody_else_knows() -> None:
    given: dict[str, object] = {"secret": "hunter2"}
    assert [p.env["DS_JOB_SECRET"] for p in launch("--nproc 2 t.py", **given).processes] == ["hunter2", "hunter2"]
    assert launch("--max-restarts 1 --nproc 2 t.py", **given).processes[0].env["DS_JOB_SECRET"] == "hunter2"
    # What the environment has wins; nodes that are started by hand cannot agree on one; nodes of a job are told.
    outer = {"DS_JOB_SECRET": "outer"}
    by_hand = "--nnodes 2 --nproc 1 --node-rank 1 --master-addr h t.py"
    of_a_node = f"--world-info {encode((Host('head', (0, 1)),))} t.py"
    for line, env in (("--nproc 2 t.py", outer), (by_hand, {}), (of_a_node, {})):
        assert all("DS_JOB_SECRET" not in p.env for p in launch(line, env=env, **given).processes)


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "pdsh"])
@pytest.mark.parametrize("outer", [{}, {"DS_JOB_SECRET": "hunter2"}])
def test_the_jobs_secret_travels_where_nobody_reads_it(launcher: str, outer: dict[str, str]) -> None:
    line = f"--hostfile h --launcher {launcher} t.py"
    found = launch(line, hosts=CLUSTER, env=outer, exports=outer, secret="hunter2")
    assert "hunter2" not in describe(found)
    for process in found.processes:
        assert "hunter2" not in " ".join(process.argv)
        held = {**process.env, **process.secrets}.get("DS_JOB_SECRET")
        assert held == (None if launcher == "pdsh" else "hunter2")


def test_pdsh_cannot_carry_a_secret() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        launch("--hostfile h --launcher pdsh t.py", hosts=CLUSTER, exports=SECRETS)
    assert caught.value.code == "launch-secrets"
    assert "hunter2" not in str(caught.value)


def test_an_option_and_its_value_are_left_out() -> None:
    words = ("--nproc", "2", "--autotuning", "run", "--grace", "1", "--autotuning=tune")
    assert without_option(words, "--autotuning") == ("--nproc", "2", "--grace", "1")


def test_mpi_and_slurm_leave_all_cores_of_a_node_to_its_ranks() -> None:
    def line(name: str, **env: str) -> str:
        return shlex.join(launch(f"--launcher {name} t.py", hosts=CLUSTER, exports={}, env=env).processes[0].argv)

    assert "--bind-to none" in line("openmpi")
    assert "-genv I_MPI_PIN 0" in line("impi")
    assert "-genv MV2_ENABLE_AFFINITY 0" in line("mvapich")
    assert "-genv" not in line("mpich")  # which binds nothing
    assert "--cpu-bind=none --cpus-per-task 16" in line("slurm", SLURM_CPUS_ON_NODE="16")
    assert "--cpus-per-task" not in line("slurm")


def test_slots_of_an_allocation_come_from_slurm() -> None:
    env = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    assert remote_hosts(asked("--launcher slurm t.py"), replace(FACTS, env=env)) == (
        Host("n1", (0, 1, 2, 3)),
        Host("n2", (0, 1, 2, 3)),
    )


def test_a_file_is_sourced_before_each_rank_on_every_host() -> None:
    (here, _) = launch("--nproc 2 --venv_script env.sh t.py a").processes
    assert here.argv == (
        "bash", "-c", 'source "$0" && exec "$@"', "env.sh", "/venv/bin/python", "-u", "t.py", "a",
    )  # fmt: skip
    assert not here.fork
    (there, *_) = launch("--venv_script env.sh t.py", hosts=CLUSTER).processes
    assert "--venv-script env.sh" in there.argv[-1]


def test_elastic_training_in_the_words_of_the_agent() -> None:
    options = asked("--elastic_training --min_elastic_nodes 2 --max_elastic_nodes 4 --master_addr n1 t.py")
    assert (options.nnodes, options.rdzv_endpoint, options.max_restarts) == ("2:4", "n1:29500", 100)
    alone = asked("--elastic_training t.py")
    assert (alone.nnodes, alone.rdzv_endpoint) == ("1:1", "")
    with pytest.raises(ConfigError, match="max_elastic_nodes"):
        asked("--max_elastic_nodes 4 t.py")

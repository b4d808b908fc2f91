"""The quickstart's training on three nodes, through everything that starts jobs; and on one, through torchrun and Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import DS, Site, marked
from ways import WAYS, way

from repo import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt"
STEPS = 3
Wait = Callable[[Callable[[], object], float], float]
# What the three ranks of any launcher must come to is what the first came to.
LOSSES: dict[int, float] = {}


def training(folder: Path) -> list[str]:
    """The script and its arguments: few steps of a batch that 2, 3 and 4 ranks can share, on a small text."""
    config = {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    (folder / "cfg.json").write_text(json.dumps(config))
    text = folder / "text"
    text.mkdir()
    for number in range(40):  # some are for validation, by their names
        (text / f"part{number}.py").write_text(Path(json.__file__).read_text())
    words = ["--deepspeed_config", "cfg.json", "--steps", str(STEPS), "--data", "text", "--validation", "1"]
    return [str(EXAMPLE / "train.py"), *words, "--result", "result.json"]


def judged(folder: Path, job: subprocess.Popen[str], ranks: int) -> None:
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, out[-2000:] + err[-4000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["step"] == STEPS
    assert result["validation_loss"] == pytest.approx(LOSSES.setdefault(ranks, result["validation_loss"]), rel=1e-4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WAYS)
def test_it_runs_on_three_nodes(site: Site, name: str, request: pytest.FixtureRequest) -> None:
    way(name, site, request)
    judged(site.folder, site.run(name, *training(site.folder)), 3)
    assert not site.alive()
    assert not site.segments()


@pytest.mark.timeout(180)
def test_sbatch_starts_it_in_its_allocation(site: Site, slurm: dict[str, str]) -> None:
    site.env |= slurm
    command = [*DS, "run", "--launcher", "slurm", "--nproc", "1", "-x", "DS_TEST_MARK", *training(site.folder)]
    script = site.folder / "job.sh"
    script.write_text("#!/bin/sh\nexec " + " ".join(command) + "\n")
    job = site.start("sbatch", "--wait", "--nodes", "3", "--ntasks-per-node", "1", "-o", "out.txt", str(script))
    out, err = job.communicate(timeout=150)
    assert job.returncode == 0, out + err + (site.folder / "out.txt").read_text()[-3000:]
    result = json.loads((site.folder / "result.json").read_text())
    assert result["step"] == STEPS


@pytest.mark.timeout(180)
def test_torchrun_starts_it_on_three_nodes(site: Site) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "3", "--nproc-per-node", "1"]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "alpha:29511", "--rdzv-id", "t"]
    line = " ".join(
        ["cd", str(site.folder), "&&", f"DS_TEST_MARK={site.mark}", *torchrun, *where, *training(site.folder)]
    )
    jobs = [site.start("ssh", node.name, line) for node in site.cluster.nodes]
    judged(site.folder, jobs[0], 3)
    for job in jobs[1:]:
        job.communicate(timeout=200)
        assert job.returncode == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["slurm", "openmpi", "mpich"])
def test_ranks_that_ds_run_did_not_start_find_each_other(site: Site, name: str, request: pytest.FixtureRequest) -> None:
    way(name, site, request)
    words = {
        "slurm": ["srun", "--nodes", "3", "--ntasks", "3", "--ntasks-per-node", "1"],
        "openmpi": ["mpirun", "-n", "3", "--host", "alpha:1,beta:1,gamma:1", "-x", "DS_TEST_MARK", "-x", "MASTER_ADDR"],
        "mpich": ["mpirun", "-n", "3", "-ppn", "1", "-hosts", "alpha,beta,gamma"],
    }[name]
    job = site.start(*words, sys.executable, *training(site.folder), env={"MASTER_ADDR": "alpha"})
    judged(site.folder, job, 3)


@pytest.mark.timeout(240)
def test_ray_starts_it_and_resumes_after_a_kill(tmp_path: Path) -> None:
    python = os.environ.get("DS_RAY_PYTHON")
    if not python:
        pytest.skip(
            "no Ray: pip install ray, in an environment of its own, named by DS_RAY_PYTHON (`nox -s clusters` makes it)"
        )
    script = Path(__file__).parent / "ray_trainer.py"
    training(tmp_path)
    mark = uuid.uuid4().hex
    variables = {"DS_TEST_MARK": mark, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "out.txt").open("w+") as out:  # a pipe would stay open as long as anything of Ray's lives
        job = subprocess.Popen(
            [python, str(script)], cwd=tmp_path, env={**os.environ, **variables}, stdout=out, stderr=out
        )
        try:
            code = job.wait(timeout=220)
        finally:
            job.kill()
            left = marked(mark)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    told = (tmp_path / "out.txt").read_text()
    assert code == 0, told[-6000:]
    said = json.loads(told.splitlines()[-1])
    assert said == {"step": 6, "resumed_from": 3}
    assert not left

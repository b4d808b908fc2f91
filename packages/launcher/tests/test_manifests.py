"""Manifests have the fields that the API's types have, with the values that their controllers take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_launcher.cli import main
from ds_launcher.manifests import as_yaml

# Types of the objects, as kubeflow.org/v1, jobset.x-k8s.io/v1alpha2, batch/v1 and core/v1 declare them: the fields that are used
# here, what they hold, and those that must be there. A name refers to another object; a set holds the values allowed.
SECRET = {"secretKeyRef!": {"name!": str, "key!": str, "optional": bool}}
CONTAINER = {
    "name!": str, "image!": str, "command": [str], "env": [{"name!": str, "value": str, "valueFrom": SECRET}],
    "ports": [{"name": str, "containerPort!": int}], "resources": {"limits": {"*": str}},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}  # fmt: skip
POD = {
    "containers!": [CONTAINER], "restartPolicy": {"Never", "OnFailure"},
    "volumes": [{"name!": str, "emptyDir": {"medium": {"Memory", ""}}}],
}  # fmt: skip
REPLICA = {
    "replicas!": int,
    "restartPolicy!": {"Always", "OnFailure", "Never", "ExitCode"},
    "template!": {"spec!": POD},
}
META = {"name!": str, "namespace": str}
PYTORCHJOB = {
    "apiVersion!": {"kubeflow.org/v1"}, "kind!": {"PyTorchJob"}, "metadata!": META,
    "spec!": {
        "nprocPerNode": str,
        "runPolicy!": {"cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int},
        "elasticPolicy": {
            "rdzvBackend": {"c10d", "etcd", "etcd-v2"}, "rdzvId": str, "minReplicas": int, "maxReplicas": int, "maxRestarts": int,
        },
        "pytorchReplicaSpecs!": {"Master": REPLICA, "Worker": REPLICA},
    },
}  # fmt: skip
JOB = {
    "parallelism": int, "completions": int, "completionMode": {"Indexed", "NonIndexed"}, "backoffLimit": int,
    "template!": {"spec!": POD},
}  # fmt: skip
JOBSET = {
    "apiVersion!": {"jobset.x-k8s.io/v1alpha2"}, "kind!": {"JobSet"}, "metadata!": META,
    "spec!": {
        "failurePolicy": {"maxRestarts": int},
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
    },
}  # fmt: skip


def wrong(value: Any, shape: Any, path: str = "") -> list[str]:
    """Where `value` is not of `shape`."""
    if isinstance(shape, set):
        return [] if value in shape else [f"{path}: {value!r} is none of {sorted(shape)}"]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [problem for i, item in enumerate(value) for problem in wrong(item, shape[0], f"{path}[{i}]")]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no object"]
        if "*" in shape:
            return [problem for key, item in value.items() for problem in wrong(item, shape["*"], f"{path}.{key}")]
        known = {key.rstrip("!"): inner for key, inner in shape.items()}
        missing = [f"{path}: no {key[:-1]}" for key in shape if key.endswith("!") and key[:-1] not in value]
        unknown = [f"{path}: there is no field {key}" for key in value if key not in known]
        inner = [p for key, item in value.items() if key in known for p in wrong(item, known[key], f"{path}.{key}")]
        return missing + unknown + inner
    return [] if type(value) is shape else [f"{path}: {value!r} is no {shape.__name__}"]


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert main(["run", "--print-manifest", *words]) == status
    shown = capsys.readouterr()
    return json.loads(shown.out) if status == 0 else shown.err


BASE = ("--json", "--image", "site/train:1", "--nproc", "8")


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


def test_the_check_finds_what_is_wrong() -> None:
    made = {"apiVersion": "kubeflow.org/v2", "kind": "PyTorchJob", "metadata": {"nam": "x"}, "spec": {"runPolicy": 3}}
    assert wrong(made, PYTORCHJOB) == [
        ".apiVersion: 'kubeflow.org/v2' is none of ['kubeflow.org/v1']",
        ".metadata: no name",
        ".metadata: there is no field nam",
        ".spec: no pytorchReplicaSpecs",
        ".spec.runPolicy: 3 is no object",
    ]


def test_a_pytorchjob(capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(capsys, "pytorchjob", *BASE, "--nnodes", "4", "-x", "SEED=3", "My_train.py", "--lr", "1")
    assert wrong(made, PYTORCHJOB) == []
    assert made["metadata"] == {"name": "my-train"}
    spec = made["spec"]
    assert (spec["nprocPerNode"], spec["runPolicy"]["backoffLimit"]) == ("8", 0)
    assert {name: part["replicas"] for name, part in spec["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    one = container(spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    assert one["name"] == "pytorch"
    assert one["command"][:6] == ["ds", "run", "--nnodes", "4", "--nproc", "8"]
    assert one["command"][-3:] == ["My_train.py", "--lr", "1"]
    assert one["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert {"name": "SEED", "value": "3"} in one["env"]
    assert one["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]


def test_one_host_has_no_workers_and_a_restart_is_the_pods(capsys: pytest.CaptureFixture[str]) -> None:
    spec = printed(capsys, "pytorchjob", *BASE, "--max-restarts", "2", "t.py")["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
    assert spec["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "OnFailure"
    assert spec["runPolicy"]["backoffLimit"] == 2


def test_hosts_that_come_and_go_are_an_elastic_policy(capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(capsys, "pytorchjob", *BASE, "--nnodes", "2:4", "--max-restarts", "9", "t.py")
    assert wrong(made, PYTORCHJOB) == []
    policy = made["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 9)
    assert list(made["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    one = container(made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    assert one["command"][2:6] == ["--nnodes", "2:4", "--max-restarts", "9"]


def test_a_jobset(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nnodes", "2", "--max-restarts", "3", "--job-name", "gpt", "--namespace", "team", "--resource", "cpu=32")
    made = printed(capsys, "jobset", *BASE, *words, "t.py")
    assert wrong(made, JOBSET) == []
    assert made["metadata"] == {"name": "gpt", "namespace": "team"}
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (2, 2, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    one = container(spec["template"]["spec"])
    assert one["command"][2:8] == ["--nnodes", "2", "--master-addr", "gpt-workers-0-0.gpt", "--master-port", "29500"]
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in one["env"]


def test_what_a_manifest_says_is_what_the_pods_command_line_means(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of a pod, given to `ds run` in that pod's environment, are this pod's ranks."""
    made = printed(capsys, "jobset", *BASE, "--nnodes", "2", "--start", "spawn", "--grace", "7", __file__)
    command = container(made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])["command"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK", raising=False)
        patch.setenv("JOB_COMPLETION_INDEX", "1")
        assert main([command[1], "--dry-run", "--json", *command[2:]]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [process["env"]["RANK"] for process in told["processes"]] == list(map(str, range(8, 16)))
    assert told["grace_s"] == 7.0
    assert told["processes"][0]["env"]["MASTER_ADDR"] == "test-manifests-workers-0-0.test-manifests"


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of `given` another reading of it does not have, or has otherwise."""
    if isinstance(given, dict):
        kept = kept if isinstance(kept, dict) else {}
        return [problem for key, item in given.items() for problem in lost(item, kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [problem for i, (one, other) in pairs for problem in lost(one, other, f"{path}[{i}]")]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


def test_kubeflows_own_models_take_them_whole(capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    words = (*BASE, "--nnodes", "3", "--max-restarts", "2", "--resource", "cpu=8", "-x", "A=1", "t.py")
    made = printed(capsys, "jobset", *words)
    assert lost(made, json.loads(models.JobsetV1alpha2JobSet.from_dict(made).to_json())) == []
    (part, *_) = printed(capsys, "pytorchjob", *words)["spec"]["pytorchReplicaSpecs"].values()
    pod = part["template"]
    assert lost(pod, json.loads(models.IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_json())) == []
    assert lost({"a": [{"b": 1}]}, {"a": [{}]}) == [".a[0].b: 1 became None"]


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--job-name", "4you", "--resource", "cpu", "-x", "WANDB_API_KEY=x", "-x", "DS_UNSET", "t.py")
    told = printed(capsys, "jobset", *words, status=1)
    for part in ("--image", "--nproc", "'4you'", "--resource cpu=", "WANDB_API_KEY is a secret", "DS_UNSET is not set"):
        assert part in told
    assert "launch-manifest" in told
    assert "fixed number of pods" in printed(capsys, "jobset", *BASE, "--nnodes", "1:2", "t.py", status=1)


def test_yaml_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    odd = {
        "a": ["yes", "1", 1, True, "x: y", "", "- b", 'q"', "\u00fc", [], {}, ["c", ["d"]]],
        "b": {"c": [{"d": 1, "e": []}]},
    }
    assert yaml.safe_load(as_yaml(odd)) == odd
    words = ("jobset", "--image", "i", "--nproc", "2", "--nnodes", "2", "t.py", "--lr", "1e-3")
    made = printed(capsys, *words[:1], "--json", *words[1:])
    assert main(["run", "--print-manifest", *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == made

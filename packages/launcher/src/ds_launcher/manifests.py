"""A job for Kubernetes as its manifest: `ds run --print-manifest pytorchjob|jobset`. Pure: nothing is asked of a cluster.

One pod a host; in it `ds run` starts the ranks, from the environment that Kubernetes sets (`ds_launcher.pods`).

    pytorchjob   kubeflow.org/v1: Master is pod 0, Worker the others; MIN:MAX hosts are its elasticPolicy
    jobset       jobset.x-k8s.io/v1alpha2: one Indexed Job `workers`; a failure starts all of its pods again, up to --max-restarts
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_config.errors import ConfigError, UnsupportedError
from ds_launcher.exports import is_secret
from ds_launcher.launch_options import RunOptions, own_options, parse_nnodes

__all__ = ["KINDS", "Wanted", "as_yaml", "manifest", "register", "wanted_of"]

_SECRET = "DS_JOB_SECRET"
_LONGEST_NAME = 40  # pods' names add to it, and end at 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?")
_PYTORCHJOB_PORT, _JOBSET_PORT = 23456, 29500
_WORKERS = "workers"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a manifest needs beside the options of `ds run`.

    Attributes:
        kind: a key of KINDS.
        resources: of each pod, by their names in Kubernetes.
        env: variables of the ranks.
    """

    kind: str
    image: str
    name: str
    namespace: str
    resources: Mapping[str, str]
    env: Mapping[str, str]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    pods = parser.add_argument_group("Kubernetes")
    pods.add_argument(
        "--print-manifest",
        choices=tuple(KINDS),
        default="",
        help="print the job's manifest as YAML (or --json) and start nothing",
    )
    pods.add_argument("--image", default="", metavar="IMAGE", help="of the pods; it has Python, `ds` and the script")
    pods.add_argument("--job-name", default="", metavar="NAME", help="of the job (default: made of the script's)")
    pods.add_argument("--namespace", default="", metavar="NAME", help="of the job (default: kubectl's)")
    pods.add_argument(
        "--resource", action="append", default=[], metavar="NAME=AMOUNT",
        help="of each pod, as cpu=16, memory=64Gi, nvidia.com/gpu=8 (default: nvidia.com/gpu, one a rank)",
    )  # fmt: skip


def wanted_of(args: argparse.Namespace, options: RunOptions, env: Mapping[str, str]) -> Wanted:
    """Build the description of the wanted manifest from the arguments.

    Args:
        env: Source of the values of `-x NAME`.

    Raises:
        ConfigError: an argument is missing, or cannot appear in a manifest ("launch-manifest"); all problems at once.
    """
    amounts = {name: amount for name, _, amount in (word.partition("=") for word in args.resource)}
    resources = amounts or {"nvidia.com/gpu": str(max(0, options.nproc))}
    variables = {
        name: value if equal else env.get(name) for name, equal, value in (w.partition("=") for w in options.export)
    }
    name = args.job_name or _name_of(options.script)
    problems = []
    if not args.image:
        problems.append("--image is not given, and a pod needs one")
    if options.nproc < 1:
        problems.append("--nproc is not given, and how many devices a pod will see is not known here")
    if options.hostfile or options.include or options.exclude:
        problems.append("--hostfile, --include and --exclude name hosts, which Kubernetes chooses")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        problems.append(
            f"--job-name {name!r} is no name there: up to {_LONGEST_NAME} of a-z, 0-9 and -, a letter first"
        )
    problems += [
        f"--resource {n}={v} is not NAME=AMOUNT" for n, v in resources.items() if not _AMOUNT.fullmatch(v) or not n
    ]
    problems += [f"-x {n} is not set here" for n, value in variables.items() if value is None]
    problems += [f"-x {n} is a secret, which would stand in the manifest" for n in variables if is_secret(n)]
    if problems:
        raise ConfigError(
            "\n  ".join(problems),
            code="launch-manifest",
            fix="See `ds run --help`. A secret of the cluster reaches the ranks by envFrom or secretKeyRef, added to the manifest.",
        )
    exported = {n: value for n, value in variables.items() if value is not None}
    return Wanted(args.print_manifest, args.image, name, args.namespace, resources, exported)


def _name_of(script: str) -> str:
    word = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return word[:_LONGEST_NAME].strip("-") or "train"


def manifest(options: RunOptions, wanted: Wanted) -> dict[str, Any]:
    """Build the Kubernetes manifest of the job.

    Raises:
        ConfigError, UnsupportedError: a manifest cannot express the job ("launch-options", "launch-manifest").
    """
    head = {"name": wanted.name, **({"namespace": wanted.namespace} if wanted.namespace else {})}
    api, kind, spec = KINDS[wanted.kind]
    return {"apiVersion": api, "kind": kind, "metadata": head, "spec": spec(options, wanted)}


def _pytorchjob(options: RunOptions, wanted: Wanted) -> dict[str, Any]:
    low, high = _hosts(options)
    restarts = options.max_restarts
    policy = {"cleanPodPolicy": "Running", "backoffLimit": restarts}
    port = options.master_port or _PYTORCHJOB_PORT
    elastic = low != high
    hosts = ["--nnodes", f"{low}:{high}", "--max-restarts", str(restarts)] if elastic else ["--nnodes", str(low)]
    pod = _pod(options, wanted, tuple(hosts), port)

    def replicas(count: int) -> dict[str, Any]:
        again = "OnFailure" if elastic or restarts else "Never"
        return {"replicas": count, "restartPolicy": again, "template": {"spec": pod}}

    if elastic:
        scale = {"rdzvBackend": "c10d", "rdzvId": wanted.name, "minReplicas": low, "maxReplicas": high}
        return {
            "nprocPerNode": str(options.nproc),
            "runPolicy": policy,
            "elasticPolicy": {**scale, "maxRestarts": restarts},
            "pytorchReplicaSpecs": {"Worker": replicas(high)},
        }
    others = {"Worker": replicas(low - 1)} if low > 1 else {}
    return {
        "nprocPerNode": str(options.nproc),
        "runPolicy": policy,
        "pytorchReplicaSpecs": {"Master": replicas(1), **others},
    }


def _jobset(options: RunOptions, wanted: Wanted) -> dict[str, Any]:
    low, high = _hosts(options)
    if low != high:
        raise UnsupportedError(
            f"--nnodes {options.nnodes}: a JobSet has a fixed number of pods",
            code="launch-manifest",
            fix="Give one number, or --print-manifest pytorchjob, whose elasticPolicy takes a range.",
        )
    port = options.master_port or _JOBSET_PORT
    first = f"{wanted.name}-{_WORKERS}-0-0.{wanted.name}"
    where = ("--nnodes", str(low), "--master-addr", first, "--master-port", str(port))
    pod = {**_pod(options, wanted, where if low > 1 else ("--nnodes", "1"), port), "restartPolicy": "Never"}
    job = {
        "parallelism": low,
        "completions": low,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "failurePolicy": {"maxRestarts": options.max_restarts},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": wanted.name},
        "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": job}}],
    }


def _hosts(options: RunOptions) -> tuple[int, int]:
    low, high = parse_nnodes(options.nnodes)
    return (1, 1) if low < 1 else (low, high)


def _pod(options: RunOptions, wanted: Wanted, hosts: tuple[str, ...], port: int) -> dict[str, Any]:
    command = ["ds", "run", *hosts, "--nproc", str(options.nproc), *own_options(options), options.script]
    cores = wanted.resources.get("cpu", "")
    # Threads are counted by the cores of the whole node else, whatever share of them the pod may use.
    threads = {"OMP_NUM_THREADS": str(max(1, int(cores) // options.nproc))} if cores.isdecimal() else {}
    shown = [{"name": name, "value": value} for name, value in sorted({**threads, **wanted.env}.items())]
    key = {"name": f"{wanted.name}-secret", "key": _SECRET, "optional": True}
    container = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": wanted.image,
        "command": [*command, *options.script_args],
        "env": [*shown, {"name": _SECRET, "valueFrom": {"secretKeyRef": key}}],
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        "resources": {"limits": dict(wanted.resources)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # Ranks of a host share memory there, and a pod has 64 MiB of it unless it says otherwise.
    return {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


KINDS: dict[str, tuple[str, str, Callable[[RunOptions, Wanted], dict[str, Any]]]] = {
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob", _pytorchjob),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet", _jobset),
}
"""By name: the version and kind of the object, and what makes its spec."""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
_NOT_PLAIN = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def as_yaml(value: Any, indent: int = 0) -> str:
    """Render mappings, lists, texts, integers and booleans as YAML.

    Texts that YAML could take for something else are quoted as in JSON.
    """
    pad = "  " * indent
    lines = []
    for key, item in value.items() if isinstance(value, Mapping) else ((None, item) for item in value):
        head = f"{pad}- " if key is None else f"{pad}{_scalar(key)}:"
        if not isinstance(item, Mapping | list):
            lines.append(f"{head}{'' if key is None else ' '}{_scalar(item)}\n")
        elif not item:
            lines.append(f"{head}{'' if key is None else ' '}{json.dumps(item)}\n")
        elif key is None:
            lines.append(head + as_yaml(item, indent + 1).removeprefix("  " * (indent + 1)))
        else:
            lines.append(f"{head}\n{as_yaml(item, indent + isinstance(item, Mapping))}")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _NOT_PLAIN):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)

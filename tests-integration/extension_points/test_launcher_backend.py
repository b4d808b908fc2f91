"""A way to reach hosts: a queueing system's `submit`. This file and one row; nothing in ds-launcher knows of it."""

from __future__ import annotations

import argparse
from unittest import mock

from ds_launcher.backends import BACKENDS, LaunchBackend, LaunchJob, node_command
from ds_launcher.devices import Devices
from ds_launcher.inventory import Host
from ds_launcher.job import HostFacts, make_launch
from ds_launcher.launch_options import joined, options_of, register
from ds_launcher.launch_plan import Process


def submit(job: LaunchJob) -> tuple[Process, ...]:
    """One `submit` a host; it passes the environment on and ends with its command's status."""
    return tuple(
        Process(f"host {host.name}", ("submit", "--on", host.name, *job.launcher_args, *node_command(job, str(index))))
        for index, host in enumerate(job.inventory)
    )


def test_two_hosts_are_started_by_it():
    facts = HostFacts(
        env={}, hostname="head", cores=8, devices=Devices(), python="/venv/bin/python", cwd="/job", run_id="id1",
        port=40000, hosts=(Host("n1", (0, 1)), Host("n2", (0, 1))), exports={},
    )  # fmt: skip
    with mock.patch.dict(BACKENDS, {"queue": LaunchBackend("submit", submit)}):
        parser = argparse.ArgumentParser(exit_on_error=False)
        register(parser)
        options = options_of(parser.parse_args(joined(["--launcher", "queue", "train.py", "--epochs", "3"])))
        one, two = make_launch(options, facts).processes
    assert one.argv[:3] == ("submit", "--on", "n1")
    assert two.argv[two.argv.index("--node-rank") + 1] == "1"
    assert two.argv[-3:] == ("train.py", "--epochs", "3")

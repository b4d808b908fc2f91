"""The classes of `deepspeed.autotuning` over this package, for programs that use them; the facade's table names them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_config import read
from ds_config.errors import ConfigError
from ds_engine import Shapes
from ds_tune.search import NextTrial, Result, value_of
from ds_tune.space import SearchLimits, TuningTask, candidates_of
from ds_tune.trial_runner import TrialRunner, run_trial
from ds_tune.upstream import autotune, section_of

__all__ = ["Autotuner", "ResourceManager", "get_val_by_key", "set_val_by_key"]

_CONFIG = ("--deepspeed_config", "--deepspeed")


class Autotuner:
    """A tuning of the script that a command line of `deepspeed` starts.

    Args:
        args: As `deepspeed.launcher.runner.parse_args` gives them.
        active_resources: Hosts and their slots. Every experiment takes all hosts, and of each as many slots as the smallest has.
    """

    def __init__(self, args: Any, active_resources: Mapping[str, Sequence[int]]) -> None:
        self.args = args
        self.exp_num_nodes = len(active_resources)
        self.exp_num_gpus = min(len(slots) for slots in active_resources.values())
        words = list(args.user_args)
        named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in _CONFIG]
        if not named:
            raise ConfigError(
                "the script's arguments name no configuration",
                code="tune-config",
                fix="Start it with --deepspeed_config FILE.",
            )
        self.user_config = dict(read(named[0]).data)
        self.autotuning_config = section_of(self.user_config)

    def _launch(self) -> tuple[str, ...]:
        hosts = ["--hostfile", self.args.hostfile] if self.args.hostfile else []
        return (*hosts, "--nproc", str(self.exp_num_gpus), "--nnodes", str(self.exp_num_nodes))

    def tune(self) -> int:
        """Try, and write the best configuration to the section's `results_dir`."""
        return autotune("tune", self._launch(), self.args.user_script, tuple(self.args.user_args))

    def run_after_tuning(self) -> int:
        """Start the script with the best configuration; trials that were made are not made again unless `overwrite` says so."""
        return autotune("run", self._launch(), self.args.user_script, tuple(self.args.user_args))

    def print_tuning_results(self) -> None:
        """Print the summary of the last tuning."""
        print((Path(self.autotuning_config.results_dir) / "summary.txt").read_text())


class ResourceManager:
    """Runs experiments from files, one after the other, each on all hosts.

    Args:
        args: As `deepspeed.launcher.runner.parse_args` gives them.
        hosts, num_gpus_per_node: What experiments run on.
        results_dir, exps_dir: Where experiments' files are.
        arg_mappings: Options of the script that get a value of the configuration, by key.
    """

    def __init__(
        self, args: Any, hosts: Any, num_gpus_per_node: int, results_dir: Any, exps_dir: Any, arg_mappings: Mapping[str, str] | None
    ) -> None:  # fmt: skip
        self.args, self.hosts, self.num_gpus_per_node = args, hosts, num_gpus_per_node
        self.results_dir, self.exps_dir = results_dir, exps_dir
        self.arg_mappings = {key.strip(): flag.strip() for key, flag in (arg_mappings or {}).items()}
        self.experiments: list[dict[str, Any]] = []
        self.finished_experiments: dict[str, tuple[Result, int]] = {}

    def schedule_experiments(self, exp_paths: Sequence[str]) -> None:
        """Read files with `name` and `ds_config`; `run` starts them."""
        self.experiments += [json.loads(Path(path).read_text()) for path in exp_paths]

    def run(self) -> None:
        """Run what was scheduled. An experiment that dies is a result."""
        while self.experiments:
            experiment = self.experiments.pop(0)
            config, name = experiment["ds_config"], experiment["name"]
            (candidate, *_), _left = candidates_of(
                TuningTask(config, Shapes((), ()), self.num_gpus_per_node), {"steps_per_print": (None,)}, SearchLimits()
            )
            words = [word for i, word in enumerate(self.args.user_args) if i and self.args.user_args[i - 1] in _CONFIG]
            job = TrialRunner(
                config, tuple(words), ("--nproc", str(self.num_gpus_per_node)), self.args.user_script, tuple(self.args.user_args),
                Path(self.results_dir) / name, Path(self.exps_dir), mappings=self.arg_mappings,
            )  # fmt: skip
            result = run_trial(job, NextTrial(candidate, 0, 3, "scheduled"), len(self.finished_experiments))
            self.finished_experiments[name] = (result, candidate.plan.batch.train)

    def parse_results(self, metric: str) -> tuple[str | None, float | None]:
        """Return the best experiment's name and its value."""
        values = {
            name: value_of(result.measured, samples, metric)  # type: ignore[arg-type]
            for name, (result, samples) in self.finished_experiments.items()
            if result.measured is not None
        }
        best = max(values, key=lambda name: values[name], default=None)
        return best, None if best is None else abs(values[best])


def _holders(config: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        if key in config:
            yield config
        for value in config.values():
            yield from _holders(value, key)


def get_val_by_key(d: dict[str, Any], key: str) -> Any:
    """Return the first value of a key in a dict or its nested dicts; None if the key is missing."""
    return next((holder[key] for holder in _holders(d, key)), None)


def set_val_by_key(d: dict[str, Any], key: str, value: Any) -> None:
    """Set a key wherever it is, in a dict and in those inside it."""
    for holder in list(_holders(d, key)):
        holder[key] = value

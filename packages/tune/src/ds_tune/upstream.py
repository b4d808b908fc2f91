"""DeepSpeed's `--autotuning tune|run`: a tuning as the section `autotuning` of the script's own configuration asks for it."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from ds_config import validate
from ds_config.config_file import read
from ds_config.errors import ConfigError
from ds_config.json_files import read_json
from ds_engine import Shapes
from ds_engine.autotuning import AutotuningConfig
from ds_engine.memory_fit import shapes_of_numbers
from ds_tune.cli import devices_here, show, teller
from ds_tune.request import asked_by_section
from ds_tune.trial_runner import TrialRunner, command_of
from ds_tune.tuning import Tuning

__all__ = ["autotune", "section_of"]

_FLAGS = ("--deepspeed_config", "--deepspeed")


def section_of(config: dict[str, Any]) -> AutotuningConfig:
    """Validate and return the autotuning section. Raises ConfigError: every problem of the section."""
    return validate(AutotuningConfig, read(dict(config.get("autotuning") or {})))


def autotune(mode: str, launch: tuple[str, ...], script: str, script_args: tuple[str, ...]) -> int:
    """Tune, write DeepSpeed's files, and with mode `run` start the script with the best configuration; its exit status.

    Raises:
        ConfigError: the script's arguments name no configuration ("tune-config").
    """
    words = [w for i, w in enumerate(script_args) if i and script_args[i - 1] in _FLAGS]
    words += [w.partition("=")[2] for w in script_args if w.partition("=")[0] in _FLAGS and "=" in w]
    if not words:
        raise ConfigError(
            f"--autotuning needs the configuration that {script} is started with",
            code="tune-config",
            fix="Give the script's --deepspeed_config FILE after it.",
        )
    config = dict(read(words[0]).data)
    section = section_of(config)
    request = asked_by_section(config, section)
    job = TrialRunner(
        request.config, tuple(words), launch, script, script_args, Path(section.results_dir), Path(section.exps_dir),
        mappings=section.arg_mappings or {}, warmup=max(0, section.start_profile_step - 1),
    )  # fmt: skip
    tuning = Tuning(request, job, _ranks(launch), on_trial=teller(), shapes=_shapes(section))
    if section.overwrite:
        tuning.forget()
    else:
        tuning.resume()
    outcome = tuning.run()
    files = tuning.write(outcome)
    show(outcome, files, request, False)
    if section.metric_path and outcome.best is not None:
        best = job.results / outcome.best[0].name / "metrics.json"
        Path(section.metric_path).parent.mkdir(parents=True, exist_ok=True)
        Path(section.metric_path).write_text(best.read_text())
    if mode == "run" and outcome.best is not None:
        return subprocess.call(command_of(job, files["optimal"], outcome.best[0].settings))
    return 0


def _ranks(launch: tuple[str, ...]) -> int:
    """Ranks of this host; a first trial corrects it."""
    flags = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus", "--num_accelerators")
    for i, word in enumerate(launch[:-1]):
        if word in flags and launch[i + 1].isdecimal():
            return int(launch[i + 1])
    return devices_here()


def _shapes(section: AutotuningConfig) -> Shapes | None:
    """Return the section's model shapes: from a file that a `model_info.profile` run wrote, or from its numbers."""
    info = section.model_info
    numel, layers = info.num_params, info.num_layers
    if section.model_info_path and not info.profile and Path(section.model_info_path).is_file():
        wrong = partial(ConfigError, code="tune-config", fix="Give the file that a model_info.profile run wrote.")
        numel = int(read_json(section.model_info_path, wrong)["num_params"])
    return None if numel is None else shapes_of_numbers(numel, layers or 1)

"""The quickstart's training as a function under Ray Train: two workers, one killed once, resumed from the last checkpoint.

Run by test_quickstart_runs.py in the environment that has Ray; its last line is JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import ds_ckpt

HERE = Path.cwd()
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_gpt"
HALF, ALL = 3, 6


def train(settings: dict[str, str]) -> None:
    """What each worker does. Ray has set torchrun's variables and joined the process group; the engine takes what is there."""
    here = Path(settings["folder"])
    os.chdir(here)
    sys.path.insert(0, settings["example"])
    saved = ds_ckpt.find_latest(here / "checkpoints") is not None
    words = ["--deepspeed_config", "cfg.json", "--data", "text", "--validation", "1", "--result", "result.json"]
    sys.argv = ["train.py", *words, "--steps", str(ALL if saved else HALF), *(["--resume"] if saved else [])]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(f"{settings['example']}/train.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        print(said.getvalue(), flush=True)
    if not saved and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)  # the checkpoint of step 3 is written
    if not saved:
        signal.pause()  # as a collective would: until Ray ends the group
    if os.environ["RANK"] == "0" and (resumed := re.search(r"resumed from \S+ at step (\d+)", said.getvalue())):
        (here / "resumed").write_text(resumed[1])


def main() -> int:
    """Run it on two workers of this machine."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(HERE), "example": str(EXAMPLE)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="quickstart", storage_path=str(HERE / "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    )
    trainer.fit()
    ray.shutdown()
    step = json.loads((HERE / "result.json").read_text())["step"]
    print(json.dumps({"step": step, "resumed_from": int((HERE / "resumed").read_text())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

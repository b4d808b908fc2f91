"""What a newcomer gets wrong first: each is one clear error of the example script, before anything is trained."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_config.errors import ConfigError, DsError
from repo import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's train.py, imported as if it had been started, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("train", "data", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("train")
    for name in ("train", "data", "model"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # undone at the end
    return found


def config(**changes: object) -> str:
    return json.dumps({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}} | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 16,, }', ":1:25:"),
        (config(train_batch_size=-16), "train_batch_size"),
        (config(train_batch_size=7, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), "7"),
        (config(gradient_cliping=1.0), "gradient_clipping"),
    ],
    ids=["not JSON", "negative batch", "arithmetic", "typo"],
)
def test_bad_configurations(script: ModuleType, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cfg.json"
    path.write_text(text)
    with pytest.raises(DsError) as caught:
        script.main(script.arguments(["--deepspeed_config", str(path)]))
    assert said in str(caught.value)


def test_a_missing_configuration(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cfg.json").write_text(config())
    with pytest.raises(ConfigError, match=r"cgf\.json") as caught:
        script.main(script.arguments(["--deepspeed_config", str(tmp_path / "cgf.json")]))
    assert "cfg.json" in str(caught.value).replace("cgf.json", "")


def test_missing_data_is_one_message_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "cfg.json").write_text(config())
    command = [sys.executable, str(EXAMPLE / "train.py"), "--deepspeed_config", str(tmp_path / "cfg.json")]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "nowhere")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "--data FOLDER" in done.stderr
    assert "Traceback" not in done.stderr

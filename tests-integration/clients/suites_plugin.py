"""A pytest plugin: adds how each test ended to SUITES_OUT, and lets a host without accelerators and hub run what does without them."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

# Functions that turn a test into a skipped one on a CPU, though its body asks for no device.
LIFTED = {
    "accelerate.test_utils.testing": ("require_non_cpu", "require_fp16", "require_multi_device"),
    "transformers.testing_utils": ("require_torch_accelerator", "require_torch_fp16"),
}

LIFTED_SUITES = ("accelerate", "transformers")

# Small models of the same kind in place of those of the hub.
GPT2 = ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 1000, "n_positions": 64})
STANDINS = {
    "sshleifer/tiny-gpt2": GPT2,
    "hf-internal-testing/tiny-random-gpt2": GPT2,
    "gpt2": GPT2,
    "patrickvonplaten/t5-tiny-random": (
        "t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 1000},
    ),
    "apple/mobilevit-xx-small": ("mobilevit", {"hidden_sizes": [16, 32, 64], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 64]}),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
        "qwen2_moe",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "vocab_size": 1000,
        },
    ),
}  # fmt: skip


@cache
def _folder(name: str) -> str:
    """A model in place of `name`, as save_pretrained writes it."""
    import transformers

    kind, sizes = STANDINS[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    folder = Path(tempfile.mkdtemp()) / name.replace("/", "--")
    maker = transformers.AutoModel if kind in ("mobilevit", "t5") else transformers.AutoModelForCausalLM
    maker.from_config(config).save_pretrained(folder)
    return str(folder)


def _stand_in(kind: type) -> None:
    plain = kind.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: type, name: Any, *args: Any, **options: Any) -> Any:
        return plain(cls, _made.get(name, name), *args, **options)

    kind.from_pretrained = classmethod(from_pretrained)  # type: ignore[attr-defined]


_made: dict[str, str] = {}


def _write(name: str, outcome: str, why: str) -> None:
    with open(os.environ["SUITES_OUT"], "a") as file:
        row = {**json.loads(os.environ["SUITES_ROW"]), "test": name, "outcome": outcome, "why": why[-1500:]}
        file.write(json.dumps(row) + "\n")


def pytest_configure() -> None:
    """Lift the marks of what is installed."""
    suite = json.loads(os.environ["SUITES_ROW"])["suite"]
    for home, names in LIFTED.items():
        if home.startswith(suite):
            module = importlib.import_module(home)
            for name in names:
                if hasattr(module, name):
                    setattr(module, name, lambda test: test)
    if suite in LIFTED_SUITES:
        import transformers

        _made.update({name: _folder(name) for name in STANDINS})
        for kind in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
            _stand_in(kind)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what has its row."""
    row, out = json.loads(os.environ["SUITES_ROW"]), Path(os.environ["SUITES_OUT"])
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    done = {old["test"] for old in rows if (old["suite"], old["who"]) == (row["suite"], row["who"])}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: Any) -> None:
    """The call, or the setup that did not come to it."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        _write(report.nodeid, report.outcome, "" if report.outcome == "passed" else str(report.longrepr))


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _write(report.nodeid, "failed", str(report.longrepr))

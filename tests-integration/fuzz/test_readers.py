"""Each reader of what others write is given drawn and damaged input, for DS_FUZZ_S seconds (60; a second in the default suite).

A find is an error that is not ours, an input that takes more than two seconds of processor time, or memory above 1 GB. It is printed
with the seed that draws it again, and becomes a test of the reader's package.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import ds_ckpt
from ds_ckpt.convert.deepspeed_folders import CHECKSUMS, check_files, usable_tag
from ds_ckpt.convert.deepspeed_layout import open_deepspeed
from ds_ckpt.convert.regular import Regular, write_regular
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource
from ds_ckpt.format import decode
from ds_config.errors import DsError
from ds_engine.config import load_config
from ds_inference import SchedulerConfig, load
from ds_inference.serve.app import ServerLimits, make_app
from ds_inference.serve.worker import Worker
from ds_inference.text import read_tokenizer
from ds_launcher.exports import parse_env_file
from ds_launcher.inventory import expand_nodelist, parse_filter, parse_hostfile, read_hostfile

SECONDS = float(os.environ.get("DS_FUZZ_S", "60"))
SEED = int(os.environ.get("DS_FUZZ_SEED", "0"))
MOST_CPU_S, MOST_KIB = 2.0, 1 << 20
pytestmark = pytest.mark.timeout(SECONDS + 300)

Try = Callable[[random.Random], object]

PIECES = [
    "{", "}", "[", "]", ":", ",", '"', "'", "'''", "\\", "#", "//", "/*", "*/", "\n", "\t", "\0", " ", "-", "--", "=", "@", ";",
    "null", "true", "NaN", "Infinity", "-1", "0", "1e400", "9" * 40, "9" * 5000, "auto", "a", "node", "slots", "slots=8", "[0-9]",
    "[01-03,7]", "..", "../x", "/etc/passwd", "\u00e9", "\U0001f642", "\ufeff", "\u202e", "x" * 3000, "-oProxyCommand=id", "%n",
]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**40, 1.5, float("inf"), float("nan"), "", "a", "..", "../x", "auto", "\0", "\ud800", "x" * 5000, [], [0],
    [[]], {}, {"a": 1}, [None] * 50, {"~": "dtype", "value": "os"},
]  # fmt: skip


def _text(draw: random.Random, seeds: list[str]) -> str:
    """Draw a text from pieces, or change a good one."""
    if draw.random() < 0.4 or not seeds:
        return "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))
    text = draw.choice(seeds)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(PIECES) + text[at + draw.randrange(4) :]
    return text


def _bytes(draw: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or replace bytes."""
    out = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(4)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del out[at : at + draw.randrange(1, 64)]
        elif kind == 2:
            out[at:at] = draw.randbytes(draw.randrange(1, 16))
        else:
            out = out[:at]
    return bytes(out)


def _value(draw: random.Random, value: Any) -> Any:
    """Replace, remove or add something inside a JSON value."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.2:
            return rest
        if draw.random() < 0.1:
            return value | {draw.choice(PIECES): draw.choice(ODD)}
        return rest | {key: _value(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _value(draw, value[at]), *value[at + 1 :]]
    return draw.choice(ODD)


def _run(trial: Try, request: pytest.FixtureRequest) -> None:
    """Repeat a trial until the time is over. Every input is drawn from a seed that a find names."""
    until = time.monotonic() + (
        SECONDS if "DS_FUZZ_S" in os.environ or request.config.option.markexpr != "not slow" else 1.0
    )
    number = SEED
    while time.monotonic() < until:
        began = time.process_time()
        try:
            trial(random.Random(number))
        except DsError:
            pass
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} at DS_FUZZ_SEED={number}: {str(error)[:300]}") from error
        took = time.process_time() - began
        assert took < MOST_CPU_S, f"{took:.1f} s at DS_FUZZ_SEED={number}"
        number += 1
    print(f"{number - SEED} inputs")


def _peak_kib() -> int:
    """Return the peak of this process's resident memory; `ru_maxrss` would count what its parent held when it forked."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.fixture(autouse=True)
def memory():
    """Memory stays what it was, but for a gigabyte."""
    before = _peak_kib()
    yield
    assert _peak_kib() - before < MOST_KIB


CONFIGURATION = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "activation_checkpointing": {"partition_activations": False},
    "curriculum_learning": {"enabled": False},
}


def test_configurations(request, caplog):
    caplog.set_level(100)
    seeds = [json.dumps(CONFIGURATION), json.dumps(CONFIGURATION, indent=2)]

    def trial(draw: random.Random) -> object:
        if draw.random() < 0.5:
            return load_config("{" + _text(draw, seeds) + "\n}")
        value: Any = CONFIGURATION
        for _ in range(draw.randrange(1, 4)):
            value = _value(draw, value)
        return load_config(value)

    _run(trial, request)


def test_hostfiles_and_node_lists(request, tmp_path):
    hosts = ["node1 slots=8\nnode2 slots=4 # fast\n", "a slots=1"]
    lists = ["n[01-03,7],login", "a[1-2]b[1-2],c"]

    def trial(draw: random.Random) -> object:
        kind = draw.randrange(5)
        if kind == 0:
            return parse_hostfile(_text(draw, hosts))
        if kind == 1:
            return expand_nodelist(_text(draw, lists))
        if kind == 2:
            return parse_filter(_text(draw, ["a:0,1@b", "node1"]))
        if kind == 3:
            return parse_env_file(_text(draw, ["A=1\nB=2"]), "file")
        (tmp_path / "hosts").write_bytes(_bytes(draw, hosts[0].encode()))
        return read_hostfile(tmp_path / "hosts")

    _run(trial, request)


def _checkpoint(path: Path) -> Path:
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(0, 2), "c": torch.tensor(7)}
    ds_ckpt.save(path, ds_ckpt.full_shards(state), {"step": 1, "list": [1, "x", None]}, aliases={"d": "a"})
    return path


def test_manifests(request, tmp_path):
    good = (_checkpoint(tmp_path / "root" / "a") / "manifest.json").read_bytes()
    files = {path.name: path.read_bytes() for path in (tmp_path / "root" / "a").iterdir()}

    def trial(draw: random.Random) -> object:
        if draw.random() < 0.7:
            return decode(_bytes(draw, good))
        folder = tmp_path / "root" / "b"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        name = draw.choice(list(files))
        for each, data in files.items():
            (folder / each).write_bytes(_bytes(draw, data) if each == name else data)
        assert ds_ckpt.find_latest(tmp_path / "root") is not None
        return ds_ckpt.verify(folder)

    _run(trial, request)


def _deepspeed(root: Path) -> Path:
    entries, names = {}, ["w", "v"]
    for name in names:
        for key in (f"param/{name}", f"optim/{name}/exp_avg", f"optim/{name}/exp_avg_sq"):
            entries[key] = TensorEntry((4, 6), "float32", lambda: torch.ones(4, 6))
    optimizer = {
        "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}],
        "names": [names],
        "scalars": {"step": dict.fromkeys(names, 1.0)},
    }
    source = TensorSource(
        entries, {}, {"optimizer": optimizer, "counters": {"steps": 1}, "config": {}, "client": {"epoch": 1}}
    )
    return write_regular(source, root, "t", Regular(1, 2, "float32"), allow_pickle=True)


def test_deepspeeds_folders_and_latest(request, tmp_path, caplog):
    caplog.set_level(100)
    folder = _deepspeed(tmp_path)
    files = {path: path.read_bytes() for path in [*folder.iterdir(), tmp_path / "latest"]}
    sums = folder / CHECKSUMS
    files[sums] = b'{"sequence": 1, "files": {}}'

    def trial(draw: random.Random) -> object:
        for path, data in files.items():
            path.write_bytes(data)
        path = draw.choice(list(files))
        path.write_bytes(
            draw.choice([b"", b"../t", b"/", b"\xff", b"x" * 5000])
            if draw.random() < 0.2
            else _bytes(draw, files[path])
        )
        if draw.random() < 0.3:
            usable_tag(tmp_path)
        if draw.random() < 0.3:
            check_files(folder)
        opened = open_deepspeed(tmp_path, allow_pickle=True)
        return [entry.read() for entry in opened.entries.values()]

    _run(trial, request)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    inner = Tokenizer(models.BPE(unk_token=None))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    inner.train_from_iterator([Path(__file__).read_text()], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_model_folders(request, tmp_path, model_folder):
    files = {
        path.name: path.read_bytes() for path in model_folder.iterdir() if path.suffix in (".json", ".safetensors")
    }
    config = json.loads(files["config.json"])

    def trial(draw: random.Random) -> object:
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        if draw.random() < 0.6:
            (tmp_path / "config.json").write_text(json.dumps(_value(draw, config)))
        else:
            name = draw.choice(["config.json", "model.safetensors"])
            head = files[name][:4096]
            (tmp_path / name).write_bytes(_bytes(draw, head) + files[name][4096:])
        return load(tmp_path, cache_tokens=256)

    _run(trial, request)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 1.0, "n": 1, "stop": ["x"], "seed": 1, "logprobs": 1, "logit_bias": {"3": 1}}),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 1, "stream": True, "top_p": 0.5, "echo": False}),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": False, "top_logprobs": 1, "logprobs": True}),
]  # fmt: skip


def test_bodies_of_requests(request, model_folder):
    tokenizer = read_tokenizer(model_folder)
    engine = load(model_folder, cache_tokens=2048, budget=SchedulerConfig(64, 32), tokenizer=tokenizer)
    app = make_app(Worker(engine), tokenizer, "tiny", ServerLimits())
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:

        def trial(draw: random.Random) -> object:
            path, body = draw.choice(BODIES)
            for _ in range(draw.randrange(1, 4)):
                changed = _value(draw, body)
                body = changed if isinstance(changed, dict) else body
            try:
                data = json.dumps(body).encode()
            except ValueError:
                return None
            answer = client.post(
                path,
                content=_bytes(draw, data) if draw.random() < 0.3 else data,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code in (200, 400, 404, 413, 422), (answer.status_code, answer.text[:300])
            assert client.get("/health").status_code == 200
            return answer.text

        _run(trial, request)

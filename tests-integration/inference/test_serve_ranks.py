"""`ds serve` on two ranks, as a user starts it: one rank leads; the loss of one ends all and says so."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    where: Path = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(where)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.4)
    model.save_pretrained(where)
    return where


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ds_launcher", "run", "--nproc", "2", "--module", "ds_launcher"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            [*command, "serve", str(folder), "--port", str(port)], stdout=out, stderr=out, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 150
    while True:
        try:
            httpx.get(f"{url}/health", timeout=200)
            break
        except httpx.TransportError:
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
    yield job, url, log
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def ask(url: str, count: int = 9) -> Any:
    body = {"prompt": "hello", "max_tokens": count, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=200)


@pytest.mark.slow
def test_two_ranks_answer_as_one(served: Any, folder: Path) -> None:
    from ds_inference import SamplingParams, load
    from ds_inference.text import read_tokenizer

    job, url, log = served
    (wanted,) = load(folder, tokenizer=read_tokenizer(folder)).generate(["hello"], SamplingParams(9))
    for _ in range(2):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == wanted.text
    job.send_signal(signal.SIGINT)
    assert job.wait(60) in (0, 130, -signal.SIGINT), log.read_text()


def test_a_rank_that_is_killed_ends_all(served: Any) -> None:
    job, url, log = served
    assert ask(url).status_code == 200
    ranks = [pid for pid in _children(job.pid) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) >= 2, ranks
    rank = {_variable(pid, "RANK"): pid for pid in ranks}
    os.kill(rank["1"], signal.SIGKILL)
    assert job.wait(60) != 0
    assert re.search(r"rank 1|SIGKILL", log.read_text()), log.read_text()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=200)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def _variable(pid: int, name: str) -> str | None:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(name.encode() + b"="):
            return entry.split(b"=", 1)[1].decode()
    return None

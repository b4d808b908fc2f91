"""Text becomes the tokens that the library makes of it, in order; what cannot be read is said, and leaves nothing behind."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ds_config.errors import ConfigError
from ds_data import tokenizing
from ds_data.cli import main, register
from ds_data.tokenizing import DocumentSource, documents, open_tokenizer, tokenize
from ds_data.tokens import TokenFile

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

TEXTS = ["one two three", "", "two\ntwo\n", "grüße, three " * 50, "one"]
END = "<|end|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> object:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return open_tokenizer(tmp_path)


def written(tokenizer: object, prefix: Path) -> list[str]:
    end = tokenizer.token_to_id(END)
    out = []
    for item in TokenFile(prefix):
        assert item[-1] == end
        assert end not in item[:-1]
        out.append(tokenizer.decode(item[:-1].tolist()))
    return out


@pytest.mark.parametrize("batch", [1, 40, 1 << 21])
def test_documents_come_back_in_order(
    tokenizer: object, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are batched; text, JSONL and gzip in one run."""
    monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", batch)
    lines = "\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text(TEXTS[3], encoding="utf-8-sig")
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]
    read: list[int] = []
    made = tokenize(files, tmp_path / "out", tokenizer, end=END, progress=read.append)
    full = [text for text in TEXTS if text]
    assert written(tokenizer, tmp_path / "out") == [*full, *full, TEXTS[3]]
    assert (made.documents, made.empty, made.tokens) == (9, 2, TokenFile(tmp_path / "out").num_tokens)
    assert (TokenFile(tmp_path / "out").dtype, made.dtype) == (np.uint16, "uint16")
    # The blank line at the end of the first file is no document, and nobody waits for it.
    assert sum(file.stat().st_size for file in files) - 2 <= sum(read) <= sum(file.stat().st_size for file in files)


def test_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\r\n\n  \ntwo\nthree")
    assert [text for text, _ in documents(tmp_path / "a.txt", DocumentSource(lines=True))] == ["one", "two", "three"]
    assert [text for text, _ in documents(tmp_path / "a.txt")] == ["one\r\n\n  \ntwo\nthree"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"body": "two"}\n', r"a.jsonl:2 has no text under 'text'; found: body"),
        ("a.jsonl", b'{"text": 3}\n', r"a.jsonl:1 has no text"),
        ("a.jsonl", b'["text"]\n', r"a.jsonl:1 has no text"),
        ("a.jsonl", b'{"text": "one"}\n{"text": \n', r"a.jsonl:2 is no JSON"),
        ("a.jsonl", b'\n{"text": "\xff"}\n', r"a.jsonl:2 is not UTF-8"),
        ("a.txt", b"one \xff", r"a.txt is not UTF-8"),
        ("a.txt.gz", b"one", r"a.txt.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n' * 50, mtime=0)[:-12], r"a.jsonl.gz cannot be read"),
    ],
)
def test_bad_text_is_said_and_leaves_nothing(
    tokenizer: object, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        tokenize([tmp_path / name], tmp_path / "out", tokenizer)
    assert error.value.code == "data-text"
    assert not list(tmp_path.glob("out*"))


def test_bad_tokenizers(tokenizer: object, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "bad.json").write_text("{}")
    for call, code, said in (
        (lambda: open_tokenizer(tmp_path / "none"), "data-tokenizer", "there is no"),
        (lambda: open_tokenizer(tmp_path / "bad.json"), "data-tokenizer", "is no tokenizer"),
        (lambda: tokenize([tmp_path / "a.txt"], tmp_path / "o", tokenizer, end="<eos>"), "data-tokenizer", "<eos>"),
        (lambda: tokenize([tmp_path / "b.txt"], tmp_path / "o", tokenizer), "data-file", "b.txt"),
        (lambda: tokenize([], tmp_path / "o", tokenizer), "data-file", "file to read"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            call()
        assert error.value.code == code


def test_a_large_vocabulary_is_written_for_both_tables(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 70_000}, unk_token="one"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "a.txt").write_text("two one")
    for table, dtype in (("megatron", np.int32), ("deepspeed", np.uint32)):
        tokenize([tmp_path / "a.txt"], tmp_path / table, model, table=table)
        file = TokenFile(tmp_path / table, table=table)
        assert file.dtype == dtype
        assert file[0].tolist() == [70_000, 0]


def test_the_command(tokenizer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one two"}\n{"body": ""}\n')
    parser = argparse.ArgumentParser()
    register(parser)
    command = ["tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(parser.parse_args([*command, "--key", "body", "--end", END])) == 0
    assert "1 documents (uint16); 1 empty" in capsys.readouterr().out
    assert written(tokenizer, tmp_path / "out") == ["one two"]
    assert main(parser.parse_args([*command, "--key", "body", "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prefix"], told["documents"], told["dtype"]) == (str(tmp_path / "out"), 1, "uint16")
    assert main(parser.parse_args(command)) == 1
    assert "--key" in capsys.readouterr().err

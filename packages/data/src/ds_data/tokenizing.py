"""Text files to a token file. The `tokenizers` library cuts on all cores, while the next texts are read.

A *text file* is one document, or one a line; a *JSONL file* has one object a line, with the text under one key. Both may be compressed
with gzip. Documents stand in the order of the files.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_config.errors import ConfigError
from ds_config.option_checks import check_options
from ds_data.codes import Table, smallest_int_dtype
from ds_data.token_writer import TokenWriter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["DocumentSource", "Tokenized", "documents", "open_tokenizer", "tokenize"]

_BATCH_CHARACTERS = 1 << 21  # texts that are cut together
_JSON = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """How documents lie in files.

    Attributes:
        key: Of the text, in a JSONL file.
        lines: Whether every line of a text file that is not blank is a document; otherwise the file is one.
    """

    key: str = "text"
    lines: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What became of the texts.

    Attributes:
        prefix: Common name of the token file.
        documents, tokens: Counts; the end tokens are counted.
        empty: Documents without a token; they are left out.
        dtype: Format of the values: the smallest that holds the vocabulary.
    """

    prefix: str
    documents: int
    tokens: int
    empty: int
    dtype: str


def open_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Open a tokenizer from a `tokenizer.json`, or from the folder of a model that contains such a file.

    Raises:
        ConfigError: the library or the file is not there, or the file is no tokenizer ("data-tokenizer").
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"the library tokenizers cannot be imported: {error}",
            code="data-tokenizer",
            fix="Install ds-data[text].",
        ) from error
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ConfigError(
            f"there is no {file}", code="data-tokenizer", fix="Give a tokenizer.json, or a model's folder with one."
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"{file} is no tokenizer: {error}", code="data-tokenizer", fix="Give a file that tokenizers has saved."
        ) from error


def documents(path: str | PathLike[str], source: DocumentSource = DocumentSource()) -> Iterator[tuple[str, int]]:
    """Yield the documents of a file, each with the bytes of the file that were read so far (as stored on disk).

    Raises:
        ConfigError: not UTF-8, a line that is no JSON object with a text under the key; says where ("data-text").
    """
    name = fspath(path)
    packed = name.endswith(".gz")
    kind = name.removesuffix(".gz")
    with open(name, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        if not kind.endswith(_JSON) and not source.lines:
            yield _decoded(_read(stream.read, name), name), raw.tell()
            return
        lines = iter(stream)
        number = 0
        while line := _read(lambda: next(lines, b""), name):
            number += 1
            if not line.strip():
                continue
            text = _decoded(line, f"{name}:{number}")
            yield (
                (_member(text, source.key, f"{name}:{number}") if kind.endswith(_JSON) else text.rstrip("\r\n")),
                raw.tell(),
            )


def tokenize(
    files: Iterable[str | PathLike[str]],
    path: str | PathLike[str],
    tokenizer: Tokenizer,
    *,
    source: DocumentSource = DocumentSource(),
    end: str | None = None,
    table: Table = "megatron",
    progress: Callable[[int], None] | None = None,
) -> Tokenized:
    """Cut texts into tokens and write them as a token file. Nothing is left behind when it does not come to an end.

    Args:
        files: Text and JSONL files.
        path: Common name of the token file.
        tokenizer: Of the `tokenizers` library; adds no special tokens.
        source: How documents lie in the files.
        end: A token to put behind every document; models learn from it where a text is over.
        table: As for `TokenWriter`.
        progress: Called with the bytes that were read since the last call.
    Raises:
        ConfigError: a file is missing ("data-file") or cannot be read ("data-text"), the vocabulary has no `end` ("data-tokenizer").
    Cost: all cores, as the library does it; memory for a few million characters, or for the longest document.
    """
    names = [fspath(file) for file in files]
    missing = [name for name in names if not Path(name).is_file()]
    if missing or not names:
        raise ConfigError(
            f"there is no {' and no '.join(missing) or 'file to read'}",
            code="data-file",
            fix="Give text or JSONL files.",
        )
    last = None if end is None else tokenizer.token_to_id(end)
    if end is not None and last is None:
        raise ConfigError(
            f"the vocabulary has no token {end!r}", code="data-tokenizer", fix="Give one that it has, or none."
        )
    behind = [] if last is None else [last]
    dtype = smallest_int_dtype(0, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0))
    if dtype == np.uint32 and table == "megatron":
        dtype = np.dtype("<i4")  # Megatron-LM's table has no unsigned 32 bits; ids of 2**31 do not exist
    written = tokens = empty = 0
    with TokenWriter(path, dtype, table=table) as out:
        for rows, read in _ahead(_batches(names, source), tokenizer):
            full = [row + behind for row in rows if row]
            sizes = [len(row) for row in full]
            values = np.fromiter(chain.from_iterable(full), dtype, sum(sizes))
            out.add_flat(values, sizes)
            written, tokens, empty = written + len(full), tokens + len(values), empty + len(rows) - len(full)
            if progress is not None:
                progress(read)
    return Tokenized(out.prefix, written, tokens, empty, str(dtype))


def _ahead(batches: Iterable[tuple[list[str], int]], tokenizer: Tokenizer) -> Iterator[tuple[list[list[int]], int]]:
    """Tokenize every batch on a thread, and yield the tokens in order.

    While a batch is tokenized, the next is read and the previous written.
    """
    cutter = ThreadPoolExecutor(1, thread_name_prefix="ds-data-tokenize")
    waiting: tuple[Future[list[list[int]]], int] | None = None
    try:
        for texts, read in batches:
            before, waiting = waiting, (cutter.submit(_cut, tokenizer, texts), read)
            if before is not None:
                yield before[0].result(), before[1]
        if waiting is not None:
            yield waiting[0].result(), waiting[1]
    finally:
        cutter.shutdown(
            wait=False, cancel_futures=True
        )  # the collector, which may come anywhere, must not wait for a thread


def _cut(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _batches(names: Sequence[str], source: DocumentSource) -> Iterator[tuple[list[str], int]]:
    """Yield batches of documents to tokenize, each with the bytes that were read since the batch before."""
    texts: list[str] = []
    characters = read = 0
    for name in names:
        position = 0
        for text, at in documents(name, source):
            texts.append(text)
            characters += len(text)
            read, position = read + at - position, at
            if characters >= _BATCH_CHARACTERS:
                yield texts, read
                texts, characters, read = [], 0, 0
    if texts:
        yield texts, read


def _read(do: Callable[[], bytes], name: str) -> bytes:
    try:
        return do()
    except (EOFError, OSError, zlib.error) as error:
        raise ConfigError(
            f"{name} cannot be read: {error}", code="data-text", fix="Is it whole, and what its name says?"
        ) from error


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: {error}", code="data-text", fix="Convert it to UTF-8.") from error


def _member(line: str, key: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where} is no JSON: {error}", code="data-text", fix="Give files with one JSON object a line."
        ) from error
    text = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
        raise ConfigError(
            f"{where} has no text under {key!r}; found: {keys}",
            code="data-text",
            fix="Name the key of the text (--key).",
        )
    return text

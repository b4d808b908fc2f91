"""Token files below fsspec URLs as one data set: indexes are read at once, data files when a sequence of theirs is first needed.

A data file is copied whole into a folder of this host, under a name that says which version of which object it is; it appears there only when it
is complete. All ranks of a host share the folder, later runs too. Nothing is removed from it: a shuffled epoch reads from every shard.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.packed_sequences import PackedSequences
from ds_data.token_index import parse_index
from ds_data.tokens import TokenFile, prefix_of

__all__ = ["RemoteSequences", "RemoteTokenFile"]


class RemoteTokenFile:
    """One token file below an fsspec URL (`s3://bucket/corpus/0`, `gs://...`, `memory://...`). Needs the extra `remote`.

    Args:
        url: Common name of the two files; `.bin` or `.idx` at its end is ignored.
        cache: Folder of this host that copies go to.
        options: Of the file system, as fsspec has them (`{"anon": True}`).
    Attributes:
        index: Where items are.
        digest: Name of the copy: of the URL and of the version of both objects.
    Raises:
        ConfigError: fsspec or one of the two objects is missing ("data-file"), or the index is not usable ("data-index").
    """

    def __init__(self, url: str, cache: str | PathLike[str], options: dict[str, Any] | None = None) -> None:
        self.url, self._cache, self._lock = prefix_of(url), Path(cache), threading.Lock()
        self._options = dict(options or {})
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                f"{url} needs fsspec, which is not installed", code="data-file", fix="pip install 'ds-data[remote]'"
            ) from None
        self._fs, self._path = fsspec.core.url_to_fs(self.url, **self._options)
        try:
            versions = [self._fs.ukey(f"{self._path}.{end}") for end in ("idx", "bin")]
            data_bytes = int(self._fs.size(f"{self._path}.bin"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no {error} below {self.url}",
                code="data-file",
                fix="Give the common name of a .bin and a .idx object.",
            ) from error
        self.digest = hashlib.blake2b(repr((self.url, *versions)).encode(), digest_size=16).hexdigest()
        raw = np.fromfile(self._copy("idx"), np.uint8)
        self.index = parse_index(raw, data_bytes, name=f"{self.url}.idx")
        self.fingerprint = hashlib.blake2b(raw.tobytes() + str(data_bytes).encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self._cache, self._options)

    def open(self) -> TokenFile:
        """Open the copy, after copying the data file if this host does not have it yet. Threads and processes may do so at once."""
        with self._lock:
            self._copy("bin")
            return TokenFile(self._cache / self.digest)

    def _copy(self, end: str) -> Path:
        target = self._cache / f"{self.digest}.{end}"
        if not target.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
            try:
                with self._fs.open(f"{self._path}.{end}", "rb") as source, open(part, "xb") as out:
                    shutil.copyfileobj(source, out, 1 << 22)
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
        return target


class RemoteSequences(Sequence[dict[str, NDArray[Any]]]):
    """Packed sequences of many token files below URLs, one after the other; each file is a shard, packed for itself.

    Args:
        urls: Common names of the token files.
        length: Tokens of a sequence.
        cache: Folder of this host for copies; needs room for all of them in the end.
        options: Of the file system, as fsspec has them.
    Raises:
        ConfigError: a file is missing ("data-file"), or fills not one sequence ("data-packing").
    Cost: the indexes at once; a data file when one of its sequences is first read, in the loader's threads.
    """

    def __init__(
        self, urls: Sequence[str], length: int, cache: str | PathLike[str], options: dict[str, Any] | None = None
    ) -> None:
        self.length = length
        self.shards = tuple(RemoteTokenFile(url, cache, options) for url in urls)
        counts = [(int(shard.index.sizes.sum()) - 1) // length for shard in self.shards]
        short = [shard.url for shard, count in zip(self.shards, counts, strict=True) if count < 1]
        if short or not counts:
            raise ConfigError(
                f"{short or 'no token files'} do not fill one sequence of {length} and its last label",
                code="data-packing",
                fix="Leave them out, or give a smaller length.",
            )
        self._ends = np.cumsum(counts)
        self._opened: dict[int, PackedSequences] = {}
        key = " ".join(shard.fingerprint for shard in self.shards)
        self.fingerprint = f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}/{length}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: Any) -> Any:
        """Return the four arrays of a sequence, [length] each; see `PackedSequences`."""
        at = range(len(self))[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[Any]]:
        """Read sequences, int64 [k], of any shards, as four arrays int64 [k, length]."""
        ids = np.asarray(sequences, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sequences {int(ids.min())} to {int(ids.max())} of {len(self)}")
        shard_of = np.searchsorted(self._ends, ids, "right")
        out: dict[str, NDArray[Any]] = {}
        for number in np.unique(shard_of).tolist():
            inside, first = shard_of == number, int(self._ends[number - 1]) if number else 0
            for name, rows in self._shard(number).batch(ids[inside] - first).items():
                out.setdefault(name, np.empty((len(ids), self.length), np.int64))[inside] = rows
        return out

    def _shard(self, number: int) -> PackedSequences:
        """Return the sequences of a shard, whose data file is copied to this host now if it is not there."""
        opened = self._opened.get(number)
        if opened is None:
            opened = self._opened[number] = PackedSequences(self.shards[number].open(), self.length)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the copies itself.
        return {**self.__dict__, "_opened": {}}

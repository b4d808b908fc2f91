"""Fewer bytes: blocks that are stored already are referred to, the others are encoded, one after the other, into one file a rank.

Between the stream of a save (see `writer`) and the storage: what is written to the stream comes by here, block by block. A block is
named by its digest; one that a checkpoint of the same root holds is not written again (`incremental`), whatever its tensor is called
now. So files of blocks are shared by checkpoints: they lie beside them, and go when the last checkpoint that refers to them does
(see `checkpoint_list.prune`). Without `incremental` the file lies in the checkpoint, as others do.

Costs one more copy of the bytes, and BLAKE2b of them where saves are incremental.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import ds_monitor
from ds_ckpt.block_codecs import CODECS, LOSSY, encode, require
from ds_ckpt.checkpoint_index import Kind, Leaf
from ds_ckpt.checkpoint_list import newest_tag, read_for
from ds_ckpt.coordinator import Coordinator
from ds_ckpt.crc import crc32
from ds_ckpt.local_storage import CheckpointRef
from ds_ckpt.protocols import Draft, WriteFile
from ds_ckpt.records import BlockLocation, FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord
from ds_ckpt.save_plan import Item
from ds_comm.placement import Box, TensorShard
from ds_config.errors import CheckpointError
from ds_config.option_checks import check_options

__all__ = ["BlockPacker", "SaveOptions"]

_EMPTY_CRC: Final = "00000000"


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What of a save is written, and how. The default: all of it, as it is.

    Attributes:
        incremental: Blocks that a checkpoint of the same root holds are referred to.
        codecs: Codec by the start of a tensor's name; the longest that fits counts. `{"optim/": "zstd"}`. The lossy ones, "bf16" and
            "int8", are for float32 moments: their names start with "optim/".
    """

    incremental: bool = False
    codecs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        for prefix, codec in self.codecs.items():
            if codec not in CODECS or (codec in LOSSY and not prefix.startswith("optim/")):
                raise CheckpointError(
                    f"the codec {codec!r} for tensors named {prefix}...",
                    code="ckpt-codec",
                    fix="Use zstd for anything, and bf16 or int8 for names that start with optim/.",
                )
            require(codec)

    def codec_of(self, item: Item) -> str:
        """Return the codec for an entry; the empty codec where a lossy codec would meet a dtype other than float32."""
        fits = [prefix for prefix in self.codecs if item.name.startswith(prefix)]
        codec = self.codecs[max(fits, key=len)] if fits else ""
        # Counters and flags among the moments are as they are; they cost nothing.
        return "" if codec in LOSSY and item.dtype != "float32" else codec


_Key = tuple[str, str, str]  # digest, codec, dtype
_Place = tuple[str, int, int, str]  # file, byte, bytes there, checksum of what comes out


class BlockPacker:
    """What one rank knows of the blocks that are stored, from save to save. One save at a time."""

    def __init__(self, recipe: SaveOptions) -> None:
        self.recipe = recipe
        self._known: dict[_Key, _Place] = {}
        self._files: dict[str, FileRecord] = {}
        self._looked = ""
        self._file: _BlockFile | None = None

    def look(self, ranks: Coordinator, at: CheckpointRef, shards: Sequence[TensorShard]) -> None:
        """Refresh the list of blocks that this root stores, before a save. Collective.

        Cost: the first time the leaves of the newest checkpoint that this rank needs; later only a look at each file.
        """
        if not self.recipe.incremental:
            return
        root = at.storage.where("")
        if root != self._looked:
            tag = ranks.first(lambda: newest_tag(at.storage))
            ranks.settle(lambda: self._learn(CheckpointRef(at.storage, tag), shards) if tag is not None else None)
            self._looked = root
        there = set(ranks.first(lambda: [name for name, _ in at.storage.shared()]))
        self.forget(set(self._files) - there)

    def begin(self, draft: Draft, items: Sequence[Item], block_bytes: int) -> Draft:
        """Return a draft whose data file is packed.

        Afterwards `leaf` returns the entries that were written.
        """
        return _PackingDraft(self, draft, items, block_bytes)

    def opened(self, draft: Draft, rank: int, items: Sequence[Item], sizes: tuple[int, int]) -> WriteFile:
        """Open the block file of this save for a stream laid out by `sizes`.

        `sizes`: (bytes of header in front, bytes of a block).
        """
        name = draft.blocks_name(rank)
        shared = self.recipe.incremental
        self._file = _BlockFile(
            self, name, lambda: draft.write_shared(name) if shared else draft.write_file(name, 0), (items, sizes)
        )
        return self._file

    def find(self, key: _Key) -> _Place | None:
        """Return where a block is stored already; None where no file stores the block or saves are not incremental."""
        return self._known.get(key) if self.recipe.incremental else None

    def leaf(self) -> Leaf:
        """Return the leaf of the save, with the blocks that the save wrote and refers to, after its file is closed."""
        if self._file is None:
            raise CheckpointError(
                "nothing was packed", code="ckpt-storage", fix="Report this: the leaf is asked for before the file."
            )
        return self._file.leaf(self._files)

    def committed(self) -> None:
        """Register the blocks of the finished save so that later saves can refer to them."""
        if self._file is not None and self.recipe.incremental:
            self._known.update(self._file.fresh)
            if self._file.record is not None:
                self._files[self._file.name] = self._file.record
        self._file = None

    def forget(self, names: set[str]) -> None:
        """Forget the removed files `names` and their blocks."""
        if names:
            self._known = {key: place for key, place in self._known.items() if place[0] not in names}
            self._files = {name: record for name, record in self._files.items() if name not in names}

    def _learn(self, at: CheckpointRef, shards: Sequence[TensorShard]) -> None:
        manifest: Manifest = read_for(at, shards)
        self._files = {f.name: f for f in manifest.files if f.shared}
        for tensor in manifest.tensors.values():
            for part in tensor.parts:
                for piece in part.pieces:
                    for block, crc in zip(piece.blocks, piece.crc32, strict=False):
                        name = manifest.files[block.file].name
                        if block.digest and name in self._files:
                            place = (name, block.at, block.nbytes, crc)
                            self._known[(block.digest, block.codec, tensor.dtype)] = place


class _PackingDraft:
    """The draft of a packed save, as the stream sees it."""

    def __init__(self, packing: BlockPacker, draft: Draft, items: Sequence[Item], block_bytes: int) -> None:
        self._packing, self._draft, self._items, self._block_bytes = packing, draft, items, block_bytes
        self._rank = 0

    def file_name(self, rank: int) -> str:
        self._rank = rank
        return self._draft.blocks_name(rank)

    def leaf_name(self, rank: int) -> str:
        return self._draft.leaf_name(rank)

    def blocks_name(self, rank: int) -> str:
        return self._draft.blocks_name(rank)

    def create(self) -> None:
        self._draft.create()

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        header = nbytes - sum(item.nbytes for item in self._items)
        return self._packing.opened(self._draft, self._rank, self._items, (header, self._block_bytes))

    def write_shared(self, name: str) -> WriteFile:
        return self._draft.write_shared(name)

    def commit(self, manifest: bytes) -> None:
        self._draft.commit(manifest)

    def abort(self) -> None:
        self._draft.abort()


class _BlockFile:
    """A WriteFile that takes a stream (header, entries end to end) and writes those of its blocks that are new."""

    def __init__(
        self,
        packing: BlockPacker,
        name: str,
        make: Callable[[], WriteFile],
        what: tuple[Sequence[Item], tuple[int, int]],
    ) -> None:
        self._packing, self.name, self._make = packing, name, make
        self._items, (self._header, self._block_bytes) = what
        self._target: WriteFile | None = None
        self._at = 0  # bytes of the stream so far
        self._nbytes = 0  # bytes written
        self._cuts = self._plan()
        self._next = 0
        self._block = bytearray()
        self.fresh: dict[_Key, _Place] = {}
        self._places: list[list[tuple[_Key, _Place]]] = [[] for _ in self._items]
        self.record: FileRecord | None = None

    def _plan(self) -> list[tuple[int, int]]:
        """List (entry, bytes) of each block, in the order of the stream."""
        out = []
        for entry, item in enumerate(self._items):
            for low in range(0, item.nbytes, self._block_bytes):
                out.append((entry, min(self._block_bytes, item.nbytes - low)))
        return out

    def write(self, offset: int, data: memoryview) -> None:
        if offset != self._at:
            raise CheckpointError(
                f"{self.name}: a write at byte {offset} where {self._at} comes next",
                code="ckpt-storage",
                fix="Report this: blocks are packed in order.",
            )
        self._at += data.nbytes
        data = data[max(0, self._header - offset) :]
        while data.nbytes:
            entry, size = self._cuts[self._next]
            take = min(size - len(self._block), data.nbytes)
            self._block += data[:take]
            data = data[take:]
            if len(self._block) == size:
                self._put(entry, memoryview(self._block))
                self._block = bytearray()
                self._next += 1

    def _put(self, entry: int, data: memoryview) -> None:
        item = self._items[entry]
        codec = self._packing.recipe.codec_of(item)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest() if self._packing.recipe.incremental else ""
        key = (digest, codec, item.dtype)
        place = (self._packing.find(key) or self.fresh.get(key)) if digest else None
        if place is None:
            stored, back = encode(codec, data)
            if self._target is None:
                self._target = self._make()
            view = memoryview(stored).cast("B")
            ended = self._target.write(self._nbytes, view)
            if ended is not None:
                ended()
            place = (self.name, self._nbytes, view.nbytes, f"{crc32(back):08x}")
            self._nbytes += view.nbytes
            if digest:
                self.fresh[key] = place
        self._places[entry].append((key, place))

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self.record = FileRecord(self.name, self._nbytes, 0, _EMPTY_CRC, self._packing.recipe.incremental)
        total = sum(item.nbytes for item in self._items)
        ds_monitor.event("ckpt.packed", nbytes=total, written=self._nbytes)

    def abandon(self) -> None:
        if self._target is not None:
            self._target.abandon()

    def leaf(self, known: Mapping[str, FileRecord]) -> Leaf:
        """Build the leaf: blocks written to this file, and referenced blocks of the `known` files."""
        files: dict[str, int] = {}
        records = {**known, **({self.name: self.record} if self.record is not None else {})}
        pieces_by_name: dict[str, dict[Box, list[PieceRecord]]] = {}
        kinds: dict[str, Kind] = {}
        for item, places in zip(self._items, self._places, strict=True):
            blocks = tuple(
                BlockLocation(files.setdefault(name, len(files)), at, nbytes, key[1], key[0])
                for key, (name, at, nbytes, _) in places
            )
            piece = PieceRecord(0, 0, item.piece.numel, tuple(crc for _, (_, _, _, crc) in places), item.at, blocks)
            pieces_by_name.setdefault(item.name, {}).setdefault(item.box, []).append(piece)
            kinds[item.name] = (item.dtype, item.total)
        tensors = {
            name: TensorRecord(*kinds[name], tuple(PartRecord(box, tuple(pieces)) for box, pieces in boxes.items()))
            for name, boxes in pieces_by_name.items()
        }
        return Leaf(tuple(records[name] for name in files), tensors)

"""Folders of DeepSpeed's checkpoints: which tag is meant, whether its files are sound, and how a new one takes its place.

`latest` is a text file that anyone may write, and that a crash may leave empty: what it names is used when it is the name of a sound
checkpoint in the same folder. Files that were written here have their sizes and checksums beside them (`checksums.json`, which
DeepSpeed does not look at); of others, the checksums inside the zip archives that `torch.save` writes are proven.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ds_ckpt.checkpoint_list import is_complete
from ds_ckpt.crc import crc32
from ds_ckpt.jsontext import Json
from ds_ckpt.local import REPLACED, Disk, LocalDraft, LocalStorage, link_others, new_token
from ds_ckpt.manifest_owner import has_manifest
from ds_config.errors import CheckpointError
from ds_config.regular_file import leads_out, open_regular, read_regular, read_regular_text, replace_text

__all__ = [
    "CHECKSUMS",
    "check_files",
    "check_tag",
    "check_target",
    "named_tag",
    "newest_sound",
    "publish_folder",
    "tag_folder",
    "usable_tag",
]

CHECKSUMS: Final = "checksums.json"
_MAX_TAG_BYTES: Final = 1024
_MAX_SUMS_BYTES: Final = 2**28
_PART_BYTES: Final = 2**24
_log = logging.getLogger("ds_ckpt")


def check_tag(root: str | os.PathLike[str], tag: str) -> None:
    """Check that `root/tag` is a place below `root`.

    Raises:
        CheckpointError: "ckpt-outside".
    """
    text = os.fspath(root)
    wrong = _is_no_path(tag) or ".." in Path(tag).parts if "://" in text else leads_out(text, tag)
    if wrong:
        raise CheckpointError(
            f"the tag {tag[:200]!r} leads out of the directory {text}",
            code="ckpt-outside",
            fix="Give the directory that holds the checkpoint, and the name it has there.",
        )


def _is_no_path(tag: str) -> bool:
    return not tag or tag.startswith("/") or "\0" in tag


def named_tag(root: str | os.PathLike[str], pointer: str = "latest") -> str | None:
    """Read the tag in the file `root/latest`; None where there is no such file.

    Raises:
        CheckpointError: "ckpt-latest": it is empty, no text, no file, or no name of a folder in `root`.
    """
    path = Path(root) / pointer
    try:
        tag = read_regular_text(path, _MAX_TAG_BYTES).strip()
        why = "is empty" if not tag else "names a place outside of its folder" if leads_out(root, tag) else ""
        if not why and (not tag.isprintable() or Path(tag).name != tag):
            why = "holds no name of a folder"
        if not why and not (Path(root) / tag).is_dir():
            why = f"names {tag!r}, which is not there"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        tag, why = "", f"cannot be read ({error})"
    if why:
        raise CheckpointError(
            f"{path} {why}", code="ckpt-latest", fix="Write the name of a checkpoint's folder into it, or give a tag."
        )
    return tag


def usable_tag(root: str | os.PathLike[str]) -> str | None:
    """Return the tag that `latest` names, when its files are sound, else the newest sound one; None without a `latest`.

    Of a checkpoint of this package's own format the manifest is read, and the sizes of its files; a load proves the rest.

    Raises:
        CheckpointError: "ckpt-latest": nothing in the folder is sound.
    Cost: reads the files of the checkpoint.
    """
    try:
        tag = named_tag(root)
        if tag is None:
            return None
        if not has_manifest(Path(root) / tag):
            check_files(Path(root) / tag)
        elif not is_complete(Path(root) / tag):
            raise CheckpointError(
                f"{Path(root) / 'latest'} names {tag!r}, which is not complete",
                code="ckpt-latest",
                fix="Give the tag of another checkpoint.",
            )
        return tag
    except CheckpointError as error:
        sound = newest_sound(root)
        if sound is None:
            raise
        _log.warning("%s; going on with the newest sound checkpoint, %s", error.message, sound)
        return sound


def tag_folder(path: Path, tag: str | None) -> Path:
    """Return the folder of a tag in `path`, of the one that `latest` or `latest_universal` names without it; `path` itself where there is none.

    Raises:
        CheckpointError: "ckpt-not-found", "ckpt-latest", "ckpt-outside".
    """
    if tag is None:
        tag = usable_tag(path) or named_tag(path, "latest_universal")
    if tag is not None:
        check_tag(path, tag)
    folder = path / tag if tag is not None else path
    if not folder.is_dir():
        raise CheckpointError(f"there is no directory {folder}", code="ckpt-not-found", fix="Give the folder of a tag.")
    return folder


def newest_sound(root: str | os.PathLike[str]) -> str | None:
    """Return the tag of the newest checkpoint of DeepSpeed's in `root` whose files are sound; None where there is none."""
    try:
        folders = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
    except OSError:
        return None
    found = [Path(entry.path) for entry in folders if _has_model(entry.path)]
    for folder in sorted(found, key=_age, reverse=True):
        try:
            if not has_manifest(folder):
                check_files(folder)
                return folder.name
        except CheckpointError as error:
            _log.warning("%s is passed over: %s", folder, error.message)
    return None


def _has_model(folder: str) -> bool:
    return any(name.endswith("model_states.pt") for name in os.listdir(folder))


def _age(folder: Path) -> tuple[int, int]:
    """Return when a checkpoint was written; of one moment, the number that a save of ours gave it decides."""
    try:
        number = int(_sums(folder).get("sequence", 0))
    except (CheckpointError, ValueError, TypeError):
        number = 0
    times = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(folder)]
    return (max(times, default=0), number)


def check_files(folder: str | os.PathLike[str]) -> None:
    """Prove every `.pt` file of a checkpoint: by the checksums beside them, else by those inside of them.

    Raises:
        CheckpointError: "ckpt-damaged": lists every file that is missing, has another size, or other bytes.
    Cost: reads every file once.
    """
    here, sums = Path(folder), _sums(Path(folder))
    listed = sums.get("files", {})
    present = sorted(str(path.relative_to(here)) for path in here.rglob("*.pt"))
    problems = [f"{name} is missing" for name in listed if name not in present]
    if not _has_model(str(here)):
        problems.append("it has no *_model_states.pt file")
    for name in present:
        problem = _sum_problem(here / name, listed[name]) if name in listed else _zip_problem(here / name)
        if problem:
            problems.append(f"{name} {problem}")
    if problems:
        raise CheckpointError(
            f"{here} is damaged:\n  " + "\n  ".join(problems), code="ckpt-damaged", fix="Use another checkpoint."
        )


def _sums(folder: Path) -> dict[str, Json]:
    try:
        record = json.loads(read_regular(folder / CHECKSUMS, _MAX_SUMS_BYTES))
        rows = record["files"].values()
        if all(type(n) is int and n >= 0 and type(crc) is str for n, crc in rows) and type(record["sequence"]) is int:
            return dict(record)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(
        f"{folder / CHECKSUMS} is damaged", code="ckpt-damaged", fix="Use another checkpoint, or remove that file."
    )


def _sum_problem(path: Path, expected: Json) -> str:
    try:
        nbytes, crc = _checksum(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if [nbytes, crc] != list(expected):
        return f"has {nbytes} bytes with the checksum {crc}; {expected[0]} bytes with {expected[1]} were written"
    return ""


def _checksum(path: Path, sync: bool = False) -> tuple[int, str]:
    fd = open_regular(path)
    nbytes = crc = 0
    try:
        while part := os.read(fd, _PART_BYTES):
            nbytes, crc = nbytes + len(part), crc32(part, crc)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    return nbytes, f"{crc:08x}"


def _zip_problem(path: Path) -> str:
    try:
        fd = open_regular(path)
        with os.fdopen(fd, "rb") as file:
            if not zipfile.is_zipfile(file):
                return ""  # torch's format before 1.6, which has no checksums
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                if not any(entry.CRC for entry in archive.infolist()):
                    return ""  # written with torch.serialization.set_crc32_options(False)
                bad = archive.testzip()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"is no whole file: {error}"
    return "" if bad is None else f"is damaged at {bad}"


def check_target(root: str | os.PathLike[str], tag: str) -> None:
    """Check that a checkpoint may be written to `root/tag`: nothing is there, or a folder; one that is a checkpoint is replaced.

    Raises:
        CheckpointError: "ckpt-outside"; "ckpt-target-exists".
    """
    check_tag(root, tag)
    if Path(tag).name != tag:
        raise CheckpointError(
            f"the tag {tag[:200]!r} is a path; DeepSpeed's layout has one folder per tag",
            code="ckpt-tag",
            fix="Give the directory as the first argument, and a plain name as the tag.",
        )
    target = Path(root) / tag
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"{target} exists and is not a folder; saving there would delete it",
            code="ckpt-target-exists",
            fix="Choose another tag or directory, or move what is there.",
        )


def publish_folder(root: str | os.PathLike[str], tag: str, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a folder `tag`, give it checksums, put it at `root/tag` and its name into `latest`. Returns its path.

    An older checkpoint at that place stays until the new one is complete; what a program put beside its files stays for good.

    Args:
        write: Is called with a folder in which it makes the folder `tag`.
    Raises:
        CheckpointError: as `check_target`.
    """
    check_target(root, tag)
    target = Path(root) / tag
    disk = Disk()
    draft = LocalDraft(LocalStorage(root, disk), tag, new_token())
    draft.make_locked()
    here = Path(draft.data_path(""))
    try:
        write(here)
        files = {
            str(path.relative_to(here / tag)): list(_checksum(path, sync=True)) for path in (here / tag).rglob("*.pt")
        }
        record = {"sequence": _next_number(Path(root)), "files": files}
        replace_text(here / tag / CHECKSUMS, json.dumps(record))
        link_others(str(target), str(here / tag))
        if not target.exists():
            (here / tag).rename(target)
        elif not disk.exchange(str(here / tag), str(target)):
            target.rename(here / REPLACED)
            (here / tag).rename(target)
        disk.sync_directory(str(root))
        replace_text(Path(root) / "latest", tag)
    finally:
        if not target.exists() and (here / REPLACED).exists():
            (here / REPLACED).rename(target)
        shutil.rmtree(here, ignore_errors=True)
        draft.unlock()
    return target


def _next_number(root: Path) -> int:
    numbers = [0]
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            try:
                numbers.append(int(_sums(Path(entry.path)).get("sequence", 0)))
            except CheckpointError:
                continue
    return 1 + max(n for n in numbers if n < 2**53)

"""`nox -s bench -- io [FOLDER]`: our transfers as a share of fio, same block size, depth and bytes, in one run.

fio (Debian package `fio`) uses the same kernel interface (io_uring, libaio, psync) with O_DIRECT, and the same block size and
depth; it moves all blocks through depth x block bytes of memory, we move 512 MiB of it, in huge pages as `PinnedPool` and
`zeros_huge` have them. Runs alternate; the share is the median of pairwise ratios. Without fio only ours is measured.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import records
from in_turn import ratio

from ds_ops.io import AsyncIO, IOSettings, backends
from ds_ops.io_bench import aligned_bytes, uncached

TOTAL = 512 << 20
LOOPS = 7
ENGINE = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync"}


def fio_once(path: Path, backend: str, write: bool, block: int, depth: int) -> float:
    """Bytes a second that fio reports for one pass over the file."""
    jobs = depth if backend == "threads" else 1
    command = [
        "fio", "--name=x", f"--filename={path}", f"--ioengine={ENGINE[backend]}", "--direct=1", "--output-format=json",
        f"--rw={'write' if write else 'read'}", f"--bs={block}", f"--iodepth={1 if jobs > 1 else depth}",
        f"--size={TOTAL // jobs}", f"--numjobs={jobs}", "--group_reporting", "--invalidate=1", "--overwrite=1", "--thread",
    ]  # fmt: skip
    if jobs > 1:
        command.append(f"--offset_increment={TOTAL // jobs}")
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    side = report["jobs"][0]["write" if write else "read"]
    return float(side["io_bytes"]) / (side["runtime"] / 1e3)


def ours_once(path: Path, io: AsyncIO, write: bool, data: object) -> float:
    with uncached(path):
        start = time.perf_counter()
        (io.write(path, data) if write else io.read(path, data)).wait()
        return TOTAL / (time.perf_counter() - start)


def main() -> None:
    parser = records.parser_of("io", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    folder = parser.parse_args().folder
    path, data = folder / "ds-bench-io", aligned_bytes(TOTAL)
    data.random_(0, 256)
    have_fio = shutil.which("fio") is not None
    if not have_fio:
        print("fio is not installed (Debian package fio): ours only")
    rows = []
    try:
        with AsyncIO() as io:
            io.write_file(path, data, sync=True).wait()
        for backend in [b for b, why in backends().items() if not why and b in ENGINE]:
            for write in (True, False):
                for block, depth in ((1 << 20, 8), (1 << 20, 32), (128 << 10, 32)):
                    seen: dict[str, list[float]] = {"ours": [], "fio": []}
                    with AsyncIO(IOSettings(block, depth, 1, backend)) as io:
                        for _ in range(LOOPS):
                            seen["ours"].append(ours_once(path, io, write, data))
                            if have_fio:
                                seen["fio"].append(fio_once(path, backend, write, block, depth))
                    row = {"backend": backend, "direction": "write" if write else "read", "block_bytes": block, "depth": depth,
                           "ours_gb_s": statistics.median(seen["ours"]) / 1e9,
                           "fio_gb_s": statistics.median(seen["fio"]) / 1e9 if have_fio else None,
                           "share_of_fio": ratio(seen, "ours", "fio") if have_fio else None,
                           "share_of_best_fio": max(seen["ours"]) / max(seen["fio"]) if have_fio else None}  # fmt: skip
                    rows.append(row)
                    print(row, flush=True)
    finally:
        path.unlink(missing_ok=True)
    records.write("io", bytes=TOTAL, loops=LOOPS, rows=rows)


if __name__ == "__main__":
    main()

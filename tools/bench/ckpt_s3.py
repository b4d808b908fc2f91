"""Saves into and loads from a server that speaks S3, beside plain transfers of the same bytes by the same client (s3fs).

usage: nox -s bench -- ckpt_s3 [--rounds N] [--megabytes N]

The server is moto's, in a process of its own, on loopback; it is the slower part of both sides. A plain transfer is s3fs's `put_file`
and `get_file` of a file in memory (/dev/shm), with its default of 10 parts at a time. Both alternate; medians of the rounds, the first
is left out. A save ends when the manifest is there, a load when every block is proven.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt_page
import s3fs
import torch

import ds_ckpt

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "ckpt_s3.json"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--megabytes", type=int, default=256)
    args = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if server.stdout is None or server.stdin is None:
        raise SystemExit("the server has no pipes")
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{int(server.stdout.readline())}"}
    fs = s3fs.S3FileSystem(**options)
    fs.mkdir("bench")
    storage = ds_ckpt.ObjectStorage("s3://bench/run", **options)
    numel = args.megabytes * 10**6 // 4 // 8
    state = {f"t{i}": torch.rand(numel) for i in range(8)}
    back = {name: torch.zeros_like(t) for name, t in state.items()}
    nbytes = 8 * numel * 4
    source, target = Path("/dev/shm/ds-ckpt-bench.bin"), Path("/dev/shm/ds-ckpt-bench.out")
    source.write_bytes(os.urandom(nbytes))
    times: dict[str, list[float]] = {"put": [], "save": [], "get": [], "load": []}
    try:
        for _ in range(args.rounds + 1):
            times["put"].append(timed(lambda: fs.put_file(str(source), "bench/plain")))
            times["save"].append(
                timed(lambda: ds_ckpt.save(ds_ckpt.CheckpointRef(storage, "a"), ds_ckpt.full_shards(state), {}))
            )
            times["get"].append(timed(lambda: fs.get_file("bench/plain", str(target))))
            times["load"].append(
                timed(lambda: ds_ckpt.load(ds_ckpt.CheckpointRef(storage, "a"), ds_ckpt.full_shards(back)))
            )
            if not all(torch.equal(back[name], t) for name, t in state.items()):
                raise SystemExit("other bytes came back")
            for tensor in state.values():
                tensor.add_(1)
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        server.stdin.close()
        server.wait(20)
    rate = {name: nbytes / statistics.median(found[1:]) / 1e6 for name, found in times.items()}
    ratios = {
        "save / put": statistics.median(p / s for p, s in zip(times["put"][1:], times["save"][1:], strict=True)),
        "load / get": statistics.median(g / n for g, n in zip(times["get"][1:], times["load"][1:], strict=True)),
    }
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "nbytes": nbytes,
        "rounds": args.rounds,
        "mb_s": rate,
        "ratios": ratios,
        "seconds": times,
    }
    DATA.write_text(json.dumps(record, indent=1) + "\n")
    ckpt_page.fill()
    print(json.dumps({"MB/s": rate, **ratios}, indent=1))


if __name__ == "__main__":
    main()

"""Saves into and loads from a server that speaks S3, beside plain transfers of the same bytes by the same client (s3fs).

usage: nox -s bench -- ckpt_s3 [--rounds N] [--megabytes N]

The server is moto's, in a process of its own, on loopback; it is the slower part of both sides. A plain transfer is s3fs's `put_file`
and `get_file` of a file in memory (/dev/shm), with its default of 10 parts at a time. Both alternate; medians of the rounds, the first
is left out. A save ends when the manifest is there, a load when every block is proven.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import records
import s3fs
import tables
import torch
from in_turn import in_turn, ratio, seconds

import ds_ckpt

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def main() -> None:
    args = records.parser_of("ckpt_s3", __doc__, rounds=6, megabytes=256).parse_args()
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
    saved, loaded = ds_ckpt.CheckpointRef(storage, "a"), ds_ckpt.full_shards(back)

    def looked_at() -> float:
        if not all(torch.equal(back[name], t) for name, t in state.items()):
            raise SystemExit("other bytes came back")
        for tensor in state.values():
            tensor.add_(1)
        return 0.0

    try:
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: fs.put_file(str(source), "bench/plain"),
            "save": lambda: ds_ckpt.save(saved, ds_ckpt.full_shards(state), {}),
            "get": lambda: fs.get_file("bench/plain", str(target)),
            "load": lambda: ds_ckpt.load(saved, loaded),
        }
        measures = {name: partial(seconds, call) for name, call in calls.items()}
        times = in_turn({**measures, "looked at": looked_at}, args.rounds)
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        server.stdin.close()
        server.wait(20)
    del times["looked at"]
    rate = {name: nbytes / statistics.median(found) / 1e6 for name, found in times.items()}
    ratios = {"save / put": ratio(times, "put", "save"), "load / get": ratio(times, "get", "load")}
    records.write("ckpt_s3", nbytes=nbytes, rounds=args.rounds, mb_s=rate, ratios=ratios, seconds=times)
    tables.fill("ckpt")
    print({"MB/s": rate, **ratios})


if __name__ == "__main__":
    main()

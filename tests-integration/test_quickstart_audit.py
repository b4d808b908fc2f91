"""A run of the quickstart, watched: no pickle goes between ranks, and no other user can read what it leaves in shared folders."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from repo import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt"

WATCH = '''
"""In every rank: who pickles or unpickles, by the file that asked for it."""
import atexit, json, os, pickle, sys

if "RANK" in os.environ:
    seen = []

    def note(what):
        frame, files = sys._getframe(2), []
        while frame is not None and len(files) < 12:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        seen.append([what, files])

    def told(name, function):
        def called(*args, **kwargs):
            note(name)
            return function(*args, **kwargs)
        return called

    for name in ("dump", "dumps", "load", "loads"):
        setattr(pickle, name, told(name, getattr(pickle, name)))
    for name in ("Pickler", "Unpickler"):
        base = getattr(pickle, name)
        class Told(base):
            def __init__(self, *args, _name=name, **kwargs):
                note(_name)
                super().__init__(*args, **kwargs)
        setattr(pickle, name, Told)
    pickle.dumps({"itself": 1})
    atexit.register(lambda: open(os.environ["AUDIT"] + "/rank-" + os.environ["RANK"], "w").write(json.dumps(seen)))
'''
BETWEEN = (
    "/ds_comm/",
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rendezvous.py",
    "/ds_zero/",
    "/ds_ckpt/",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_pickle_between_ranks_and_nothing_for_others_to_read(tmp_path: Path) -> None:
    audit, shared, out, data = (tmp_path / name for name in ("audit", "shared", "out", "data"))
    for folder in (audit, shared, out, data):
        folder.mkdir()
    (audit / "sitecustomize.py").write_text(WATCH)
    for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py"))[:40]:  # a little of what it trains on by default
        shutil.copy(path, data)
    readable: dict[str, str] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            for folder, _, names in os.walk(shared):
                for name in names:
                    try:
                        found = os.lstat(os.path.join(folder, name))
                    except OSError:
                        continue  # gone meanwhile
                    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 and not _is_closed(Path(folder), shared):
                        readable[os.path.join(folder, name)] = oct(found.st_mode)

    watcher = threading.Thread(target=look)
    watcher.start()
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(audit), os.environ.get("PYTHONPATH", "")]),
        "AUDIT": str(audit),
        "TMPDIR": str(shared),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "ds_launcher", "run", "--nproc", "2", str(EXAMPLE / "train.py")]
    command += [
        "--deepspeed_config",
        str(EXAMPLE / "ds_config.json"),
        "--data",
        str(data),
        "--steps",
        "4",
        "--validation",
        "1",
    ]
    try:
        for more in ((), ("--resume",)):
            done = subprocess.run(
                [*command, *more],
                cwd=out,
                env=env,
                umask=0o022,
                capture_output=True,
                text=True,
                check=False,
                timeout=250,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            for rank in range(2):
                events = json.loads((audit / f"rank-{rank}").read_text())
                assert ["dumps" in what for what, _ in events][:1] == [True], "nothing was watched"
                crossing = [
                    (what, files[:4]) for what, files in events if any(b in file for file in files for b in BETWEEN)
                ]
                assert crossing == []
                (audit / f"rank-{rank}").unlink()
    finally:
        over.set()
        watcher.join()
    assert readable == {}


def _is_closed(folder: Path, root: Path) -> bool:
    """Whether a folder on the way is its user's alone."""
    return any(
        not folder.stat().st_mode & 0o077 for folder in [folder, *folder.parents][: len(folder.relative_to(root).parts)]
    )

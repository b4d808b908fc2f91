"""Run by conftest.py: imports torch once, then forks a child per trial that saves and is killed at a given system call.

An order with "decoupled" saves twice through a writer process instead, stops that process in the second, and kills itself.
One with "audited" loads a checkpoint under an audit hook and says what that saw.
stdin: one JSON trial a line; stdout: one JSON line with how the child ended. No pytest here.
"""

import json
import os
import signal
import sys
import threading

import torch

import ds_ckpt
from ds_ckpt.local import Disk


class Deadly(Disk):
    """Counts system calls and dies in front of number `last` (a write first puts half of its bytes down)."""

    def __init__(self, last, log):
        self.last, self.count, self.log, self.lock_, self.paths = last, 0, log, threading.Lock(), {}

    def _point(self, before=None):
        with self.lock_:
            self.count += 1
            if self.count == self.last:
                if before:
                    before()
                os.kill(os.getpid(), signal.SIGKILL)

    def make_directory(self, path):
        self._point()
        super().make_directory(path)

    def lock(self, path):
        self._point()
        return super().lock(path)

    def open_new(self, path):
        self._point()
        fd = super().open_new(path)
        self.paths[fd] = path
        return fd

    def allocate(self, fd, nbytes):
        self._point()
        super().allocate(fd, nbytes)

    def write(self, fd, data, offset):
        self._point(lambda: os.pwrite(fd, data[: data.nbytes // 2], offset))
        return super().write(fd, data, offset)

    def begin_write(self, io, path, data, offset):
        self._point(lambda: super(Deadly, self).begin_write(io, path, data[: data.nbytes // 2], offset).wait())
        return super().begin_write(io, path, data, offset)

    def end_write(self, transfer):
        self._point()
        super().end_write(transfer)

    def sync(self, fd):
        self._point()
        super().sync(fd)
        os.write(self.log, (self.paths[fd] + "\n").encode())

    def close(self, fd):
        self._point()
        super().close(fd)

    def sync_directory(self, path):
        self._point()
        super().sync_directory(path)

    def rename(self, old, new):
        self._point()
        super().rename(old, new)

    def remove_tree(self, path):
        for folder, _, files in os.walk(path, topdown=False):
            for name in files:
                self._point()
                os.unlink(os.path.join(folder, name))
            self._point()
            os.rmdir(folder)


def state(step):
    return {f"t{i}": torch.full((10_000 + i,), float(step * 100 + i)) for i in range(6)}


def trial(order):
    ds_ckpt.save_job.BLOCK_BYTES = 256
    ds_ckpt.writer.SLAB_BYTES = 12288  # many small writes: many points
    ds_ckpt.local_files._DIRECT_BYTES = 0
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    disk = Deadly(order["last"], log)
    storage = ds_ckpt.LocalStorage(order["root"], disk)
    ds_ckpt.save(
        ds_ckpt.CheckpointRef(storage, order["tag"]), ds_ckpt.full_shards(state(order["step"])), {"step": order["step"]}
    )
    return disk.count


def decoupled(order):
    """Killed in the middle of a save that another process writes; the number of that process."""
    engine = ds_ckpt.AsyncCheckpointer(decoupled=True)
    tensors = {"w": torch.ones(1_200_000)}
    engine.save(os.path.join(order["root"], "a"), ds_ckpt.full_shards(tensors), {}).wait()
    writer = engine._place._process.pid
    os.kill(writer, signal.SIGSTOP)
    engine.save(os.path.join(order["root"], "b"), ds_ckpt.full_shards(tensors), {})
    return writer


def audited(order):
    """Load, find and verify under an audit hook: what ran that could be code, and what was opened."""
    root, path = order["root"], os.path.join(order["root"], order["audited"])
    target = {n: torch.zeros(s, dtype=getattr(torch, d)) for n, s, d in order["tensors"]}
    ds_ckpt.load(path, ds_ckpt.full_shards(target))  # imports whatever is imported late
    seen, opened = [], []

    def hook(event, args):
        if event in (
            "pickle.find_class",
            "exec",
            "compile",
            "import",
            "os.system",
            "subprocess.Popen",
            "marshal.loads",
        ):
            seen.append(f"{event} {args}"[:200])
        if event == "open":
            opened.append(str(args[0]))

    sys.addaudithook(hook)
    meta = ds_ckpt.load(path, ds_ckpt.full_shards(target))
    found, sound = ds_ckpt.find_latest(root), ds_ckpt.verify(path).num_files
    return json.dumps({"seen": list(seen), "opened": list(opened), "meta": meta, "found": found, "files": sound})


def main():
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            if "decoupled" in order:
                os.write(write, str(decoupled(order)).encode())
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(write, str(audited(order) if "audited" in order else trial(order)).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        answer = os.read(read, 2**16).decode()
        os.close(read)
        sys.stdout.write(json.dumps({"killed": os.WIFSIGNALED(status), "status": status, "answer": answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Run by test_near.py: forks a child per trial that trains with near copies and is killed -9 at a drawn point. No pytest here.

stdin: one JSON trial a line; stdout: one JSON line with how the child ended and the last step that it had offered.
"""

import json
import os
import signal
import sys
import threading

import torch

import ds_ckpt
from ds_ckpt.local_checkpoints import DrainOptions, LocalCheckpointer

EVERY, DRAIN, STEPS = 2, 4, 12


def state(step):
    return {f"t{i}": torch.full((3_000 + i,), float(step * 10 + i)) for i in range(4)}


class Points:
    """Counts the system calls of all storages, and dies at number `last`."""

    def __init__(self, last):
        self.last, self.count, self.lock = last, 0, threading.Lock()

    def __call__(self):
        with self.lock:
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def deadly(points):
    """The disk, with a point in front of each call."""

    class Deadly(ds_ckpt.local.Disk):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name.startswith("_"):
                return found

            def call(*args):
                points()
                return found(*args)

            return call

    return Deadly


def trial(order):
    torch.set_num_threads(1)
    points = Points(order["last"])
    ds_ckpt.local.Disk = deadly(points)
    told = os.open(order["told"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    copies = LocalCheckpointer(order["near"], order["far"], every=EVERY, draining=DrainOptions(every=DRAIN, keep=2))
    tensors = state(0)
    found = copies.restore(ds_ckpt.full_shards(tensors))
    start = 0 if found is None else found[0]
    if found is not None and not all(torch.equal(tensors[n], t) for n, t in state(start).items()):
        os.write(told, b"wrong\n")
    for step in range(start + 1, STEPS + 1):
        if step % DRAIN == 0:
            copies.wait()  # these steps take no time; the store of a run that trains keeps up with its intervals
        for name, t in state(step).items():
            tensors[name].copy_(t)
        if copies.offer(step, ds_ckpt.full_shards(tensors), {"step": step}):
            os.write(told, f"{step}\n".encode())
    copies.close()
    os.write(told, b"end\n")
    return points.count


def main():
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, str(trial(order)).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        answer = os.read(read, 2**16).decode()
        os.close(read)
        sys.stdout.write(json.dumps({"killed": os.WIFSIGNALED(status), "status": status, "answer": answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

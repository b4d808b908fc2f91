"""What a process of the environment runs first (a .pth file imports it): emulation begins as soon as torch has been imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class _After(importlib.abc.MetaPathFinder):
    """Calls `then` with a module after its import."""

    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self._then(module)

        spec.loader.exec_module = exec_module
        return spec


def _emulate(torch):
    importlib.import_module("emulated_cuda")


def _ranks_on_cards(worker):
    """Let the body of every test of ranks begin with its card as the current and cuda as the default device."""
    body = worker._Rank._body

    def on_card(self, job):
        import torch

        torch.cuda.set_device(job.rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
        try:
            return body(self, job)
        finally:
            torch.set_default_device(None)

    worker._Rank._body = on_card


def _run_kernels_of_ours(launches):
    importlib.import_module("emulated_launch").install(launches)


if os.environ.get("EMULATED_CUDA"):
    # What the driver of ds-ops' emulated kernels lists.
    os.environ.setdefault("DS_FAKE_DEVICES", ",".join(["9.0 132"] * int(os.environ.get("EMULATED_CUDA_DEVICES", "1"))))
    sys.meta_path.insert(0, _After("torch", _emulate))
    sys.meta_path.insert(0, _After("ds_ops.cuda_launch", _run_kernels_of_ours))
if os.environ.get("EMULATED_CUDA_EVERYWHERE"):
    sys.meta_path.insert(0, _After("ds_testing.worker", _ranks_on_cards))

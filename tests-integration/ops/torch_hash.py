"""A built `_cpu` module beside one version of torch, on that torch's tensors: its version and digests of what came out.

usage: python torch_hash.py PATH_OF_THE_MODULE

Prints JSON: torch's version, a digest of what the module made, how far AdamW is from that torch's own. Needs nothing but
torch, of any version: ds-ops itself asks for a newer one than Debian has.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import sys
from array import array

import torch

SIZES = (40_003, 64, 5)  # two threads work on the first
ADAM = (
    1 - 1e-3 * 0.01,
    0.0,
    0.1,
    0.999,
    0.001,
    1e-3,
    1.0,
    1e-8,
)  # betas 0.9, 0.999, decay 0.01, before bias correction


def bits(tensors: list[torch.Tensor]) -> bytes:
    """What the tensors hold; no numpy, which an old torch may not find."""
    return b"".join(array("f", t.flatten().tolist()).tobytes() for t in tensors)


def columns(streams: list[list[torch.Tensor]]) -> array[int]:
    """The module's table: lengths, then a row of addresses for each stream; -1 starts a row that is absent, of copies."""
    table = array("q", (t.numel() for t in streams[0]))
    for stream in streams:
        table.extend(t.data_ptr() for t in stream)
    table.extend(-1 for _ in streams[0])
    return table


def main(path: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader("_cpu", path)
    spec = importlib.util.spec_from_loader("_cpu", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    torch.set_num_threads(2)

    values = [
        [torch.arange(n, dtype=torch.float32).mul(0.37 + 0.11 * s).remainder(2.0) - 1.0 for n in SIZES]
        for s in range(2)
    ]
    params, grads = values
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    states = [[torch.zeros(n) for n in SIZES] for _ in range(2)]
    table = columns([params, grads, *states])
    statuses = []
    for step in (1, 2, 3):
        for q, g in zip(theirs, grads):  # noqa: B905  (strict is newer than some pythons here)
            q.grad = g.clone()
        optimizer.step()
        corrected = (*ADAM[:5], 1e-3 / (1 - 0.9**step), (1 - 0.999**step) ** 0.5, ADAM[7])
        where = table.buffer_info()[0]
        statuses.append(module.update(0, corrected, 1.0, False, where, len(SIZES), 0, 0, 0, 2))
    tensors = [*params, *states[0], *states[1]]
    apart = max(float((p - q.detach()).abs().max()) for p, q in zip(params, theirs))  # noqa: B905
    partials = torch.zeros(64).double()
    status, squares = module.sum_squares(params[0].data_ptr(), 0, SIZES[0], partials.data_ptr(), 2)
    digest = hashlib.sha256(bits(tensors)).hexdigest()
    said = {"torch": str(torch.__version__), "statuses": [*statuses, status], "digest": digest, "squares": squares}
    print(json.dumps({**said, "apart": apart}))


if __name__ == "__main__":
    main(sys.argv[1])

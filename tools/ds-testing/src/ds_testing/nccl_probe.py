"""One rank of the question whether NCCL sums on these cards: prints its version as JSON, or fails with NCCL's words."""

from __future__ import annotations

import json
import os
from datetime import timedelta

__all__ = ["main"]


def main() -> None:
    """Sum one number over the world that the environment names."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    if value.item() != dist.get_world_size():
        raise ValueError(f"a sum of ones over {dist.get_world_size()} ranks is {value.item()}")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    dist.destroy_process_group()
    print(json.dumps({"version": version}), flush=True)


if __name__ == "__main__":
    main()

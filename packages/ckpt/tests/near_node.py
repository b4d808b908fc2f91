"""Run by test_near_nodes.py: one rank of a job whose nodes are network namespaces. Trains with near copies, or says what it goes on from.

usage: near_node.py FOLDER_OF_THE_NODE STORE STEPS. Prints a JSON line for each step that was offered, and one for what was restored.
"""

import json
import sys

import torch

import ds_ckpt
import ds_comm
from ds_ckpt.local_checkpoints import DrainOptions, LocalCheckpointer


class Shard:
    def __init__(self, rank, numel=50_000):
        whole = ds_ckpt.zone_maps.Box.whole((2 * numel,))
        self.shard = ds_comm.placement.TensorShard(
            "param/w", (2 * numel,), "float32", whole, ds_ckpt.peer_reads.Interval(rank * numel, (rank + 1) * numel)
        )
        self.data = torch.zeros(numel)


def main():
    folder, store, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ds_comm.init_distributed("gloo")
    rank = ds_comm.world_group().rank
    copies = LocalCheckpointer(folder, store, every=2, draining=DrainOptions(every=100))
    mine = Shard(rank)
    found = copies.restore([mine])
    values = sorted(set(mine.data.tolist()))
    print(json.dumps({"restored": None if found is None else found[0], "values": values}), flush=True)
    for step in range(0 if found is None else found[0], steps):
        mine.data.fill_((step + 1) * 10 + rank)
        if copies.offer(step + 1, [mine], {"step": step + 1}):
            print(json.dumps({"offered": step + 1}), flush=True)
    if steps:
        sys.stdin.readline()  # it trains on, as far as anybody can see
    copies.close()


if __name__ == "__main__":
    main()

"""A reduction that adds in double precision: this file and one row; ds-comm and what trains over it know nothing of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ds_comm
from ds_comm.transports import TRANSPORTS, GlooTransport, Started
from ds_testing import world


class Wide(GlooTransport):
    """Each rank gets all terms of its part, adds them in float64 and rounds once."""

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Any) -> Started:
        terms = [torch.empty_like(inp) for _ in range(self.size)]
        dist.all_gather(terms, inp.contiguous(), group=self.pg)
        mine = [term.chunk(self.size)[self.rank].double() for term in terms]
        total = torch.stack(mine).sum(0)
        out.copy_(total / self.size if op == dist.ReduceOp.AVG else total)
        return Started([])


@world(3)
def test_what_float32_loses_is_kept():
    terms = (1e8, 1.0, -1e8)
    inp = torch.full((6,), terms[dist.get_rank()])

    def summed() -> float:
        out = torch.empty(2)
        ds_comm.reduce_scatter_single(out, inp, group=ds_comm.world_group())
        return out[0].item()

    with mock.patch.dict(TRANSPORTS, {("gloo", "cpu"): Wide}):
        assert summed() == 1.0

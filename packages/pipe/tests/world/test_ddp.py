"""torch's DistributedDataParallel around the stages of a pipeline: over ranks with the same stage, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_config.errors import PlanError
from ds_pipe import LayerSpec, PipelineModule
from ds_testing import world


def build() -> PipelineModule:
    """Stages of which all parameters have the same shapes, so that torch sees no difference."""
    return PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], num_stages=2, partition_method="uniform")


@world(2)
def test_ddp_over_stages_is_refused() -> None:
    """It made the layers of all stages those of the first."""
    cut = build()
    before = [p.detach().clone() for p in cut.parameters()]
    for wrapped in (cut, nn.Sequential(cut)):
        with pytest.raises(PlanError, match="would overwrite 4 tensors") as error:
            DistributedDataParallel(wrapped)
        assert error.value.code == "comm-ddp"
    assert all(torch.equal(a, b) for a, b in zip(cut.parameters(), before, strict=True))


@world(4)
def test_ddp_over_the_data_ranks_of_a_stage() -> None:
    cut = build()
    DistributedDataParallel(cut, process_group=cut.places.data.pg)
    with pytest.raises(PlanError, match="comm-ddp"):
        DistributedDataParallel(cut)


@world(2)
def test_ddp_where_every_rank_has_all_stages() -> None:
    cut = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], num_stages=1)
    DistributedDataParallel(cut)

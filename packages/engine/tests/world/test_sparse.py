"""`sparse_gradients`: training is the same, and the rows are what travels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ds_engine
import ds_monitor
from ds_config.errors import PlanError
from ds_monitor import MemorySink
from ds_testing import world


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed, self.head = nn.Embedding(500, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


def trained(sparse: bool) -> tuple[dict[str, Tensor], int]:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
              "optimizer": {"type": "Adam"}, "sparse_gradients": sparse}  # fmt: skip
    engine, *_ = ds_engine.initialize(model=Model(), config=config)
    generator, sink = torch.Generator().manual_seed(engine.mesh.rank), MemorySink()
    ds_monitor.attach([sink])
    try:
        for _ in range(3):
            engine.train_batch(iter([torch.randint(0, 500, (2, 3), generator=generator) for _ in range(2)]))
    finally:
        ds_monitor.detach([sink])
    found = engine.full_state_dict()
    engine.close()
    return found, sum(
        r.attrs["nbytes"] for r in sink.records if r.name in ("comm/all_reduce", "comm/all_gather_single")
    )


@world(2)
def test_training_is_the_same_and_sends_less() -> None:
    (dense, dense_bytes), (sparse, sparse_bytes) = trained(False), trained(True)
    assert all(torch.equal(value, sparse[name]) for name, value in dense.items())
    assert sparse_bytes < dense_bytes / 10


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_cut_gradients_refuse_it(stage: int) -> None:
    config = {"train_batch_size": 4, "sparse_gradients": True, "zero_optimization": {"stage": stage}}
    with pytest.raises(PlanError) as caught:
        ds_engine.make_plan(ds_engine.load_config(config), ds_engine.shapes_of(Model()), 2)
    assert caught.value.code == "zero-sparse"

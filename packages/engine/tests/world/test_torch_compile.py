"""torch.compile without passes of ours: every way to ask for it trains as an eager model, at every stage and on both transports."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import ds_engine
from ds_testing import world

_LEFT = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
torch.hub.tqdm.monitor_interval = 0  # else torch.fx starts a thread that outlives the test


class Block(nn.Module):
    """A residual block. Its forward stands here: dynamo begins no graph in a file of torch's, so of nn.Sequential it compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(form: str, stage: int, compiler: str = "eager") -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of three steps of two microbatches; `form` is the call that compiles, or "eager"."""
    model = Model()
    engine, *_ = ds_engine.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    call = engine
    if form == "engine.compile":
        engine.compile(backend=compiler)
    elif form == "module.compile":
        engine.module.compile(backend=compiler)
    elif form == "torch.compile(engine)":
        call = torch.compile(engine, backend=compiler)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    with inductor.patch(compile_threads=1):  # more would be a pool of threads for the rest of the process
        for _ in range(6):
            loss = call(torch.randn(4, 12, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.close()
    return losses, [param.detach().clone() for param in model.parameters()]


def compare(form: str, stage: int, compiler: str) -> None:
    """Compare a run that `form` compiles with an eager one, and check that graphs were captured at all."""
    with (
        pytest.MonkeyPatch.context() as environment
    ):  # torch's inductor leaves the address of a table there, for kernels that it loads
        environment.setenv(_LEFT, os.environ.get(_LEFT, ""))
        _compare(form, stage, compiler)


def _compare(form: str, stage: int, compiler: str) -> None:
    eager = train("eager", stage)
    torch._dynamo.reset()
    counters.clear()
    compiled = train(form, stage, compiler)
    assert counters["stats"]["unique_graphs"] > 0
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    for ours, theirs in zip(compiled[1], eager[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


FORMS = ("engine.compile", "module.compile", "torch.compile(engine)")
DRAWN = {("engine.compile", 3, "eager"), ("module.compile", 2, "aot_eager"), ("torch.compile(engine)", 3, "aot_eager")}
CASES = [
    pytest.param(*case, marks=() if case in DRAWN else pytest.mark.slow, id="-".join(map(str, case)))
    for case in product(FORMS, range(4), ("eager", "aot_eager", "inductor"))
]


@pytest.mark.parametrize(("form", "stage", "compiler"), CASES)
@world(2, timeout=300)
def test_every_form_trains_as_an_eager_model_over_gloo(form: str, stage: int, compiler: str) -> None:
    compare(form, stage, compiler)


@pytest.mark.parametrize(("form", "stage", "compiler"), CASES)
@world(2, "shm", timeout=300)
def test_every_form_trains_as_an_eager_model_over_shared_memory(form: str, stage: int, compiler: str) -> None:
    compare(form, stage, compiler)

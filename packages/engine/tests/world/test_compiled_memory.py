"""Compiled runs whose optimizer state or parameters rest in host memory, and whose small reductions are one: the numbers of an eager run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor

import ds_comm as comm
import ds_engine
from ds_engine.compiling.parking import Parking
from ds_engine.compiling.verbs import Graphs
from ds_testing import world

torch.hub.tqdm.monitor_interval = 0  # else torch.fx starts a thread that outlives the test


class Model(nn.Module):
    """Three residual layers; the loss is its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def configured(stage: int, **compiled: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": True, **compiled},
    }


def trained(
    config: dict[str, Any],
    steps: int,
    look: Callable[[Any], None] = lambda engine: None,
    bucket: int | None = None,
    **compiled: Any,
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights afterwards; eager without `compiled`. `look` is called before each step."""
    model = Model()
    engine, *_ = ds_engine.initialize(model=model, config=config)
    if bucket is not None:
        engine.compiled.plan = replace(engine.compiled.plan, bucket=bucket)
    if compiled:
        engine.compile(**compiled)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps * config["gradient_accumulation_steps"]):
        loss = engine(torch.randn(2, 12, generator=generator))
        engine.backward(loss)
        look(engine)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses, [param.detach().clone() for param in model.parameters()]


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("stage", [2, 3, pytest.param(1, marks=pytest.mark.slow)])
@world(2)
def test_small_reductions_are_one_message(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    for name in ("all_to_all_pieces", "all_reduce"):
        call = getattr(comm, name)

        def counted(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            sent.append(kwargs.get("unit", ""))
            return call(*args, **kwargs)

        monkeypatch.setattr(comm, name, counted)
    config = configured(stage)
    base = ["reduce", *(["gather"] if stage == 3 else [])]
    expected = trained(config, 3, backend="eager", schedule=[(0, base)])
    assert not [unit for unit in sent if "+" in unit]
    # The key says how large a unit is, too: messages of the same size join units of other groups and formats only.
    larger = partial(trained, config, 3, bucket=10**6, backend="eager")
    same(expected, larger(schedule=[(0, base), (1, [*base, "bucket"])]))
    assert [unit for unit in sent if "+" in unit]


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@world(2)
def test_optimizer_state_is_on_the_host_while_graphs_run(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parked, seen = configured(stage, offload_opt_states=True), [], []
    there: list[int] = []
    put = Parking.put
    monkeypatch.setattr(Parking, "put", lambda self, number: [put(self, number), parked.append(dict(self.bytes))][0])

    def look(engine: Any) -> None:
        storages = [
            v.untyped_storage() for of in engine.optimizer.state.values() for v in of.values() if isinstance(v, Tensor)
        ]
        seen.append(sum(storage.nbytes() for storage in storages))
        there.append(len(engine.sharding.units))

    expected = trained(configured(stage), 7)
    same(expected, trained(config, 7, look, backend="eager"))
    assert all(seen[3::2])  # before an update it is there
    assert stage == 3 or not any(seen[2::2])  # and not where another microbatch comes
    assert any(parked)
    units = max(len(found) for found in parked)
    assert units == there[0]  # all of it was away at once: no budget is known
    # With memory for everything nothing leaves once the graphs were measured.
    parked.clear()
    schedule = [(0, ["reduce", *(["gather"] if stage == 3 else [])])]
    schedule.append((2, [*schedule[0][1], "offload_opt_states"]))
    same(expected, trained(config, 7, backend="eager", schedule=schedule, budget_bytes=10**9))
    assert parked == []
    # With memory for nothing all of it does.
    same(expected, trained(config, 7, backend="eager", schedule=schedule, budget_bytes=1))
    assert max(len(found) for found in parked) == units


@world(2)
def test_parameters_on_the_host_are_loaded_before_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    load = Graphs.load

    def counted(self: Graphs, number: int) -> None:
        before = self.loads
        load(self, number)
        loads.append(self.loads - before)

    monkeypatch.setattr(Graphs, "load", counted)
    config = configured(3, offload_parameters=True)
    expected = trained(configured(3), 7)
    same(expected, trained(config, 7, backend="eager"))
    assert sum(loads) > 0.9 * len(loads) > 10  # what is loaded twice, or is there, has nothing to copy
    engine, *_ = ds_engine.initialize(model=Model(), config=config)
    units = engine.sharding.units
    assert {str(unit.plan.offload_params) for unit in units} == {"host"}
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["offload_opt_states", "offload_parameters"])
@world(2, timeout=300)
def test_the_compiler_keeps_the_moves_in_their_places(key: str) -> None:
    expected = trained(configured(3), 8)
    with inductor.patch(compile_threads=1):  # more would be a pool of threads for the rest of the process
        compiled = trained(configured(3, **{key: True}), 8, backend="inductor")
    assert compiled[0] == pytest.approx(expected[0], rel=5e-6)

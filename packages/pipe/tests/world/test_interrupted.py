"""A step that ends in the middle, on one rank or on all: nobody computes with what it left, nobody waits for its reason, nothing stays."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_pipe
from ds_config.errors import CommError, DsError, PlanError
from ds_pipe import recompute
from ds_testing import world
from ds_testing.device_worlds import device_world

SECONDS = 20.0  # of a test whose ranks would wait for each other


def raise_at(step: ds_pipe.Pipeline, stage: int, microbatch: int) -> None:
    """Let the forward of `stage` for the n-th microbatch from now raise, as Ctrl-C would."""
    if stage not in step.executor.stages:
        return
    plain, count = step.executor.stages[stage].forward, [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == microbatch + 1:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    step.executor.stages[stage].forward = forward  # type: ignore[method-assign]


@world(2, timeout=SECONDS)
def test_messages_of_an_interrupted_step_are_not_those_of_the_next(bench: Any) -> None:
    """The next step was computed from activations of the one that was interrupted, in silence."""
    step = ds_pipe.pipeline(bench.cut("plain"), 4, schedule="gpipe")
    raise_at(step, 0, 2)  # two microbatches were sent
    raise_at(step, 1, 0)  # one of them was received
    with pytest.raises(KeyboardInterrupt):
        step(bench.batches(4))
    for call in (step, step.evaluate):
        with pytest.raises(CommError) as caught:
            call(bench.batches(4, seed=1))
        assert caught.value.code == "pipe-interrupted"
    dist.barrier()  # closing gives up what the other has not received
    step.close()


@world(2, timeout=SECONDS)
def test_an_interrupted_evaluation_is_one_as_well(bench: Any) -> None:
    step = ds_pipe.pipeline(bench.cut("plain"), 4, schedule="gpipe")
    raise_at(step, 0, 2)
    raise_at(step, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        step.evaluate(bench.batches(4))
    with pytest.raises(CommError, match="pipe-interrupted"):
        step(bench.batches(4))
    dist.barrier()
    step.close()


@world(2, timeout=SECONDS)
def test_a_step_that_failed_before_its_first_message_is_forgotten(bench: Any) -> None:
    step = ds_pipe.pipeline(bench.cut("plain"), 4)
    if dist.get_rank() == 0:
        with pytest.raises(PlanError, match="pipe-data"):
            step([], 4)
    data = bench.batches(4)
    assert float(step(data)) == pytest.approx(bench.Single("plain").step(data), rel=1e-6)
    step.close()


class Data(list[Any]):
    """A list that can be referred to weakly."""


@pytest.mark.parametrize("fails", [False, True])
@world(1)
def test_an_evaluation_keeps_nothing(fails: bool, bench: Any) -> None:
    """The caller's data were kept until the next step, and activations where it failed."""
    step = ds_pipe.pipeline(bench.cut("plain", schedule="zbv"), 4)
    data = Data(bench.batches(4))
    kept = weakref.ref(data)
    feed = step._feed(data)
    calls = [0]

    def done(microbatch: int, out: Any, labels: Any) -> None:
        calls[0] += 1
        if fails:
            raise ValueError("a loss of the user's")

    try:
        step.executor.evaluate(step.forwards(4), feed, done)
    except ValueError:
        assert fails
    del data, feed
    gc.collect()
    assert calls[0] == (1 if fails else 4)
    assert kept() is None
    assert not step.executor._values
    step.close()


def seen(call: Any) -> str:
    with pytest.raises(DsError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("stages", [2, 1])
@world(2, timeout=SECONDS)
def test_weights_that_do_not_fit_end_the_step_on_every_rank(stages: int, bench: Any) -> None:
    """The last stage, or one replica, raised; the others waited for its step."""
    step = ds_pipe.pipeline(bench.cut("plain", num_stages=stages), 2)
    data = bench.batches(2)
    ignored = [(tokens, torch.full_like(labels, -100)) for tokens, labels in data]
    assert seen(lambda: step(ignored, weights=ds_pipe.count_tokens)) == "pipe-weights"
    assert seen(lambda: step.evaluate(ignored, weights=ds_pipe.count_tokens)) == "pipe-weights"
    last = dist.get_rank() == 1

    def broken(labels: Any) -> float:
        if last:
            raise KeyError("attention_mask")
        return 1.0

    assert seen(lambda: step(data, weights=[1.0, -1.0] if last else [1.0, 1.0])) == "pipe-weights"
    if stages == 2:
        code = "KeyError" if last else "comm-peer-failed"
        with pytest.raises(KeyError if last else CommError, match="attention_mask") as caught:
            step(data, weights=broken)
        assert last or getattr(caught.value, "code", code) == code
    found = float(step(data, weights=[1.0, 1.0]))
    assert found == pytest.approx(bench.Single("plain").step(data), rel=1e-6)
    step.close()


class Measured(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        torch.rand(3)
        if value.dim() == 1:
            raise ValueError("a sample of another shape")
        return value


@world(2, timeout=SECONDS)
def test_a_layer_that_cannot_be_measured(bench: Any) -> None:
    """Rank 0 raised, with the random state where it was; the others waited for its times."""
    layers = [ds_pipe.LayerSpec(Measured), ds_pipe.LayerSpec(nn.Linear, 4, 4)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError if dist.get_rank() == 0 else CommError, match="a sample of another shape"):
        ds_pipe.PipelineModule(layers, num_stages=2, partition_method="profile", sample=torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)


@device_world(2)
def test_one_stage_of_two_replicas(bench: Any, device: torch.device) -> None:
    """The loss was summed on the host, where groups of devices take none."""
    bench.check("plain", 4, num_stages=1, device=device)


GENERATOR = torch.Generator()


class Dropped(nn.Module):
    """Drops by numbers of a generator that stands for a device's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (torch.rand(x.shape, generator=GENERATOR) < 0.5)


def dropped(interval: int) -> list[Tensor]:
    GENERATOR.manual_seed(3)
    cut = ds_pipe.PipelineModule(
        [ds_pipe.LayerSpec(Dropped) for _ in range(3)], loss_fn=lambda out, labels: out.square().mean(), num_stages=1,
        seed_layers=True, activation_checkpoint_interval=interval,
    )  # fmt: skip
    step = ds_pipe.pipeline(cut, 2)
    step([(torch.ones(4, 8), torch.ones(4, 8))] * 2)
    step.close()
    return [*(p.grad for p in cut.parameters() if p.grad is not None), torch.rand(2, generator=GENERATOR)]


@world(1)
def test_a_segment_draws_the_same_numbers_of_its_device_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment on a device was computed again with other dropout than in its forward."""
    module = SimpleNamespace(
        get_rng_state=lambda device: GENERATOR.get_state(),
        set_rng_state=lambda state, device: GENERATOR.set_state(state),
    )
    expected = dropped(0)
    monkeypatch.setattr(recompute, "_device_of", lambda tensors: torch.device("cuda", 1), raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for found, wanted in zip(dropped(1), expected, strict=True):
        torch.testing.assert_close(found, wanted)

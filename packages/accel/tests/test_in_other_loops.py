"""The accelerator in a training loop that was written for torch's own calls: streams of random numbers, staged batches, autocast, a resume."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import ds_accel

STEPS = 6


def parts() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(STEPS * 4, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, num_workers=0)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain() -> list[float]:
    """The loop as torch has it: a generator state of its own, swapped in for the dropout."""
    model, optimizer = parts()
    seed = ds_accel.derive_seed(7, "dropout")
    state, losses = torch.Generator().manual_seed(seed).get_state(), []
    for x, y in batches():
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        losses.append(update(model, optimizer, x, y))
        state = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.rand(3)  # what the rest of a program draws
    return losses


def test_a_loop_with_a_stream_and_staged_batches_equals_torchs_own() -> None:
    accelerator = ds_accel.detect({"DS_ACCELERATOR": "cpu"}).accelerator
    streams, pool = accelerator.rng(seed=7), accelerator.pinned(limit_bytes=1 << 16)
    model, optimizer = parts()
    losses = []
    for x, y in batches():
        staged = pool.take(x.nbytes)
        values = staged.view(x.dtype)[: x.numel()].view_as(x)
        values.copy_(x)
        with streams.fork("dropout"):
            losses.append(update(model, optimizer, values.to(accelerator.device()), y))
        staged.release()
        torch.rand(3)
    assert losses == plain()
    assert pool.stats().in_use_bytes == 0


def test_a_loop_that_ends_in_the_middle_goes_on_with_an_average_and_its_stream() -> None:
    accelerator = ds_accel.detect({"DS_ACCELERATOR": "cpu"}).accelerator
    whole: list[float] = []
    last: list[Tensor] = []
    saved = ""
    kept: dict[str, Any] = {}
    for begin in (0, 3):
        (model, optimizer), streams = parts(), accelerator.rng(seed=7)
        average = AveragedModel(model)
        if begin:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            average.load_state_dict(kept["average"])
            streams.load_state_dict(json.loads(saved))
        losses = []
        for step, (x, y) in enumerate(batches()):
            if step < begin:
                continue
            if step == 3 and not begin:
                saved = json.dumps(streams.state_dict())
                kept = copy.deepcopy(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}
                )
            with streams.fork("dropout"):
                losses.append(update(model, optimizer, x, y))
            average.update_parameters(model)
        if begin:
            assert losses == whole[begin:]
            for a, b in zip(average.state_dict().values(), last, strict=True):
                assert torch.equal(a, b)
        whole, last = losses, list(average.state_dict().values())


def test_a_loop_in_the_format_that_a_verdict_chooses_equals_autocasts() -> None:
    accelerator = ds_accel.detect({"DS_ACCELERATOR": "cpu"}).accelerator
    verdict = accelerator.supports(torch.bfloat16)
    assert verdict.reason
    results = []
    for dtype in (torch.bfloat16 if verdict else torch.float32, torch.bfloat16):
        model, optimizer = parts()
        model.eval()
        losses = []
        for x, y in batches():
            with torch.autocast(accelerator.device().type, dtype), accelerator.timer() as timer:
                losses.append(update(model, optimizer, x, y))
            assert timer.elapsed_ms() > 0
        results.append(losses)
    assert results[0] == results[1]

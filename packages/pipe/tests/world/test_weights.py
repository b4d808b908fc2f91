"""Losses weighted by tokens over unlike microbatches, and GradScaler over stages: beside one process with all data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_pipe
from ds_config.errors import PlanError
from ds_testing import world


def layers() -> list[object]:
    return [
        ds_pipe.LayerSpec(nn.Embedding, 13, 8),
        ds_pipe.LayerSpec(nn.Linear, 8, 8),
        torch.tanh,
        ds_pipe.LayerSpec(nn.Linear, 8, 13),
    ]


def build(**options: object) -> ds_pipe.PipelineModule:
    return ds_pipe.PipelineModule(
        layers(), seed_layers=True, loss_fn=cross_entropy, partition_method="uniform", **options
    )


def whole() -> nn.Sequential:
    modules = []
    for index, layer in enumerate(layers()):
        torch.manual_seed(1234 + index)
        modules.append(layer.build() if isinstance(layer, ds_pipe.LayerSpec) else nn.Tanh())
    return nn.Sequential(*modules)


def cross_entropy(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def ragged(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Microbatches of 1 to 4 rows and 2 to 9 tokens, half of which do not count; the last one has none that counts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        rows, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 5), (2, 10)))
        tokens, labels = (torch.randint(13, (rows, length), generator=generator) for _ in range(2))
        hidden = torch.rand(rows, length, generator=generator) < (0.5 if number + 1 < count else 1.1)
        found.append((tokens, labels.masked_fill(hidden, -100)))
    return found


def check(schedule: str, stages: int, as_iterator: bool) -> None:
    cut = build(num_stages=stages, schedule=schedule)
    copies = cut.places.data
    data = [ragged(4, 10 + d) for d in range(copies.size)]
    step = ds_pipe.pipeline(cut, 4)
    mine = data[copies.rank]
    loss = step(iter(mine) if as_iterator else mine, weights=ds_pipe.count_tokens)
    model = whole()
    everything = [batch for part in data for batch in part]
    summed = [F.cross_entropy(model(t).flatten(0, 1), y.flatten(), reduction="sum") for t, y in everything]
    expected = torch.stack(summed).sum() / sum(int((y != -100).sum()) for _, y in everything)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    named = {n: p.grad for n, p in model.named_parameters()}
    for name, param in cut.staged.named_logical():
        assert (param.grad - named[name]).norm() <= 2e-6 * named[name].norm(), name
    _, evaluated = step.evaluate(iter(mine) if as_iterator else mine, 4, weights=ds_pipe.count_tokens)
    assert float(evaluated) == pytest.approx(float(expected), rel=1e-6)
    numbers = [ds_pipe.count_tokens(y) for _, y in mine]
    assert float(step(mine, weights=numbers)) == pytest.approx(float(expected), rel=1e-6)
    step.close()


@pytest.mark.parametrize(
    ("schedule", "stages", "as_iterator"),
    [("1f1b", 2, True), ("zb-h1", 2, False), ("1f1b", 1, True), ("zbv", 1, False)],
)
@world(2)
def test_the_mean_is_over_tokens(schedule, stages, as_iterator):
    check(schedule, stages, as_iterator)


@world(1)
def test_weights_that_do_not_fit():
    step = ds_pipe.pipeline(build(num_stages=1), 2)
    data = ragged(2, 1)
    for bad in ([1.0], [1.0, -1.0], [1.0, float("nan")], [0.0, 0.0]):
        with pytest.raises(PlanError, match="pipe-weights"):
            step(data, weights=bad)
    assert ds_pipe.count_tokens({"labels": torch.tensor([1, -100, 2])}) == 2
    step.close()


def scaled_run(overflow: int, steps: int) -> tuple[list[torch.Tensor], list[float]]:
    """One process with torch's GradScaler; the first linear layer's gradient overflows in one step."""
    model = whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for number in range(steps):
        data = ragged(3, number)[:2]
        optimizer.zero_grad()
        for tokens, labels in data:
            scaler.scale(cross_entropy(model(tokens), labels) / 2).backward()
        if number == overflow:
            model[1].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach() for p in model.parameters()], scales


@pytest.mark.parametrize("fused", [False, True])
@world(2)
def test_a_scaler_over_stages_is_one_of_one_process(fused):
    cut = build(num_stages=2)
    step = ds_pipe.pipeline(cut, 2)
    scaler = ds_pipe.StageGradScaler(cut, init_scale=2.0**10, growth_interval=2)
    step.scale_with(scaler)
    optimizer = torch.optim.SGD(cut.parameters(), lr=0.1, fused=fused)
    wanted, scales = scaled_run(overflow=2, steps=5)
    for number in range(5):
        optimizer.zero_grad()
        step(ragged(3, number)[:2])
        weight = dict(cut.staged.named_logical()).get("1.weight")
        if number == 2 and weight is not None:  # on the first stage only
            weight.grad[0, 0] = torch.inf
        if not fused:
            scaler.unscale_(optimizer)
            ds_pipe.clip_grad_norm_(cut, 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scales[number], (number, dist.get_rank())
    names = [n for n, _ in whole().named_parameters()]
    for name, param in cut.staged.named_logical():
        if not fused:  # which steps without clipping
            torch.testing.assert_close(param, dict(zip(names, wanted, strict=True))[name], rtol=1e-5, atol=1e-6)
    step.close()


@world(1)
def test_one_loss_scale_only():
    class Reducing:
        def reduce(self) -> None: ...

    cut = build(num_stages=1)
    step = ds_pipe.pipeline(cut, 2)
    step.scale_with(ds_pipe.StageGradScaler(cut))
    with pytest.raises(PlanError, match="pipe-scaler"):
        step.reduce_with(Reducing())
    other = ds_pipe.pipeline(build(num_stages=1), 2)
    other.reduce_with(Reducing())
    with pytest.raises(PlanError, match="pipe-scaler"):
        other.scale_with(ds_pipe.StageGradScaler(cut))
    assert ds_pipe.StageGradScaler(cut, enabled=False).get_scale() == 1.0
    step.close()
    other.close()

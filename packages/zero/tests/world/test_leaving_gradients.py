"""With the optimizer off the device gradients leave it, weights come back while others are updated, and every number stays."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import ds_ops.optim
import ds_zero
from ds_ops.stream import differs_from_cast
from ds_testing import world
from ds_testing.late_device import late_device
from ds_zero import OffloadPolicy, Precision
from ds_zero.layout.dtypes_plan import LossScale
from ds_zero.offload.host_gradients import GradientCopies
from ds_zero.offload.weight_copies import WeightCopies
from ds_zero.runtime import param_storage
from ds_zero.update.apply_step import Updater

UNITS = ds_zero.UnitSizePolicy(max_numel=64, persist_numel=0)
BF16 = Precision(param=torch.bfloat16, skip_nonfinite=True)
FP16 = Precision(param=torch.float16, scale=LossScale(initial=2.0**20, hysteresis=1), skip_nonfinite=True)


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def build(precision=BF16, kind=ds_ops.optim.AdamW, stage=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))).to(precision.param)
    inner = kind(model.parameters(), lr=0.05)
    options = {"offload_optimizer": OffloadPolicy("host"), "clip": 0.5} | options
    return model, ds_zero.shard(model, inner, stage=stage, precision=precision, policy=UNITS, **options)


def train(steps=3, microbatches=1, shown=True, **options):
    """Returns the weights and the norms of every step."""
    model, optimizer = build(**options)
    if not shown:
        optimizer.show_gradients(sharded=False)
    norms = []
    for step in range(steps):
        for part in range(microbatches):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + part)).to(model[0].weight.dtype)
            optimizer.scale(model(x).float().square().mean()).backward()
        optimizer.divisor = microbatches
        optimizer.step()
        optimizer.zero_grad()
        norms.append((optimizer.last.norm, optimizer.last.skipped))
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], norms


CASES = [
    dict(zip(("stage", "precision", "microbatches", "kind", "shown"), case, strict=True))
    for case in itertools.product(
        (1, 2, 3), (BF16, FP16, Precision()), (1, 3), (ds_ops.optim.AdamW, torch.optim.AdamW), (True, False)
    )
]
for case in CASES:
    case["precision"] = Precision(param=torch.float32) if case["precision"] == Precision() else case["precision"]


@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n % 15 == 7 else pytest.mark.slow) for n in range(72)])
def test_numbers_are_those_without_a_device(number):
    expected, norms = train(**CASES[number])
    with late_device(number):
        weights, late_norms = train(**CASES[number])
    for (norm, skipped), (late_norm, late_skipped) in zip(norms, late_norms, strict=True):
        assert skipped == late_skipped
        assert late_norm == pytest.approx(norm, rel=1e-9, nan_ok=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_numbers_are_those_without_a_device_on_two_ranks(stage, monkeypatch):
    monkeypatch.setenv("DS_OPS", "reference")
    for microbatches in (1, 2):
        expected, _ = train(stage=stage, microbatches=microbatches, steps=2)
        with late_device(microbatches):
            weights, _ = train(stage=stage, microbatches=microbatches, steps=2)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_files_too(tmp_path):
    options = {"offload_optimizer": OffloadPolicy("file", str(tmp_path), buffer_count=2)}
    expected, _ = train(**options)
    with late_device(1):
        weights, _ = train(**options)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_units_of_gradients_are_on_the_device_at_most(stage, monkeypatch):
    peaks = []
    send = GradientCopies.send

    def counted(copies, sources, places):
        copied = send(copies, sources, places)
        peaks.append(pool[0].bytes + copies.lent_bytes)
        return copied

    monkeypatch.setattr(GradientCopies, "send", counted)
    with late_device(0):
        model, optimizer = build(stage=stage)
        pool = [optimizer.sharding.pool]
        model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
        units = [unit for unit in optimizer.sharding.units if unit.spec.trained]
        assert len(units) == 6
        unit_bytes = units[0].layout.numel * 2
        assert not any(unit.gradients.tensors for unit in units)  # it was all of them until the step
        assert max(peaks) <= 3 * unit_bytes
        optimizer.step()
        optimizer.zero_grad()
        assert sum(unit.gradients.host.copies.lent_bytes for unit in units) == 0
        optimizer.close()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_plan_says_what_the_host_holds(microbatches):
    with late_device(0):
        policy = OffloadPolicy("host", accumulates=microbatches > 1)
        model, optimizer = build(stage=2, offload_optimizer=policy, clip=None)
        optimizer.show_gradients(sharded=False)
        for _ in range(2):
            for _ in range(microbatches):
                model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        units, numel = optimizer.sharding.units, sum(p.numel() for p in model.parameters())
        states = sum(
            v.nbytes for of in optimizer.inner.state.values() for v in of.values() if isinstance(v, torch.Tensor)
        )
        gradients = sum(unit.gradients.host.nbytes for unit in units)
        kept = states + gradients + sum(unit.shard.nbytes for unit in units)
        slots = 3 * max(unit.layout.shard_numel for unit in units) * 2
        assert kept / numel == (14 if microbatches == 1 else 18)
        assert abs(optimizer.sharding.plan.host - (kept + slots)) <= 0.05 * kept
        optimizer.close()


def test_weights_go_back_while_the_next_unit_is_updated(monkeypatch):
    events: list[tuple[str, torch.dtype]] = []
    update, send, land = Updater.update_fused, WeightCopies.send, GradientCopies.send

    def updated(updater, fusion):
        (grad,) = fusion.grads.values()
        events.append(("update", grad.dtype))
        update(updater, fusion)

    def sent(copies, staged, places):
        events.append(("send", staged.dtype))
        return send(copies, staged, places)

    def landed(copies, sources, places):
        events.append(("land", places[0].dtype))
        return land(copies, sources, places)

    monkeypatch.setattr(Updater, "update_fused", updated)
    monkeypatch.setattr(WeightCopies, "send", sent)
    monkeypatch.setattr(GradientCopies, "send", landed)
    with late_device(3):
        model, optimizer = build(stage=3, clip=None)
        optimizer.show_gradients(sharded=False)
        for _ in range(2):
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # 16 bits on the link both ways; each unit's weights are under way before the next unit is updated.
            assert events == [("land", torch.bfloat16)] * 6 + [("update", torch.bfloat16), ("send", torch.bfloat16)] * 6
            events.clear()
        optimizer.close()


class Bytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, *(kwargs or {}).values(), out) if isinstance(t, torch.Tensor)]
        views = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        self.count += 0 if views else sum(t.nbytes for t in tensors)
        return out


def edited(edit, monkeypatch, kernel, stage=2):
    """Returns the bytes an element that the second step's search moves, and the weights.

    kernel: Whether the comparison counts as where a kernel is compiled: one read of both.
    """
    model, optimizer = build(stage=stage, offload_optimizer="device", clip=None)
    count = Bytes()

    def compared(full, shard):
        before = count.count
        differs = differs_from_cast(full, shard)
        if kernel and count.count > before:
            count.count = before + full.nbytes + shard.nbytes + differs.nbytes
        return differs

    monkeypatch.setattr(param_storage, "differs_from_cast", compared)
    for step in range(3):
        model(torch.ones(2, 8).bfloat16()).float().square().mean().backward()
        if step == 1:
            edit(model[2].weight)
            with count:
                optimizer.sharding.adopt_edits()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return count.count / sum(p.numel() for p in model.parameters()), [p.detach().clone() for p in model.parameters()]


def by_slice(param):
    param.data[0, 0] += 1


def by_numpy(param):
    param.data.view(torch.int16).numpy()[3, 1] += 64  # of bf16, past torch


def by_other_memory(param):
    param.data = param.data * 2


def by_set(param):
    with torch.no_grad():
        param.set_(param.data.clone().neg_())


def by_name(param):
    with torch.no_grad():
        param.add_(1)


WAYS = [lambda p: p.data.mul_(0.5), by_slice, by_numpy, by_other_memory, by_set, by_name]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("edit", WAYS, ids=["data", "slice", "numpy", "other memory", "set_", "name"])
def test_edits_are_found_however_they_are_made(edit, stage, monkeypatch):
    _, untouched = edited(lambda p: None, monkeypatch, False, stage)
    _, expected = edited(edit, monkeypatch, False, stage)
    with late_device(2):
        nbytes, weights = edited(edit, monkeypatch, True, stage)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert not torch.equal(weights[2], untouched[2])
    assert nbytes < 15


@pytest.mark.parametrize(("kernel", "most"), [(True, 6.1), (False, 12.1)], ids=["kernel", "torch"])
def test_edits_are_looked_for_with_6_bytes_an_element(kernel, most, monkeypatch):
    with late_device(2):
        nbytes, _ = edited(lambda p: None, monkeypatch, kernel)
    assert most - 0.2 < nbytes < most  # 12 with a kernel before, and once 30

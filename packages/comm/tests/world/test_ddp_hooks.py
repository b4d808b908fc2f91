"""Quantized all-reduce, and DDP with compressed gradients: beside c10d's exact all-reduce and torch's own hooks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm import ReduceOp
from ds_comm.backend_options import group_options, use_backend_options
from ds_comm.codecs.compressed import ErrorFeedback, Quantized
from ds_comm.codecs.ddp_hooks import compress_ddp
from ds_comm.codecs.hierarchy import Hierarchy
from ds_config.errors import CommError
from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantSpec
from ds_testing import world


def sent(rank: int, n: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * salt + rank))


def check_all_reduce(size: int, hierarchy: Hierarchy | None) -> None:
    rank = dist.get_rank()
    for n, dtype in (
        (1000, torch.float32),
        (7, torch.float32),
        (1, torch.float32),
        (515, torch.bfloat16),
        (0, torch.float32),
    ):
        exact = sent(rank, n).to(dtype)
        dist.all_reduce(exact)
        for spec, bound in ((QuantSpec(INT8), 0.02), (QuantSpec(INT4, 64), 0.3), (QuantSpec(FP8_E4M3, 128), 0.1)):
            for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVG, size)):
                for asynchronous in (False, True):
                    x = sent(rank, n).to(dtype)
                    Quantized(spec, hierarchy).all_reduce(x, op, async_op=asynchronous, unit="w").wait()
                    error = (x.float() * divisor - exact.float()).norm()
                    assert error <= bound * exact.float().norm(), (n, spec.format.name, op)
                    every = [torch.empty_like(x) for _ in range(size)]
                    dist.all_gather(every, x)
                    assert all(torch.equal(x, other) for other in every)


@world(3)
def test_an_all_reduce_is_close_and_the_same_on_all_ranks():
    check_all_reduce(3, None)


@world(4)
def test_an_all_reduce_over_a_hierarchy():
    check_all_reduce(4, Hierarchy.split(ds_comm.world_group(), 2))


@world(2)
def test_all_reduce_refuses_and_feeds_back():
    with pytest.raises(CommError, match="comm-quantized-op"):
        Quantized().all_reduce(torch.ones(3), ReduceOp.MAX)
    fed, plain = Quantized(QuantSpec(INT4, 64), feedback=ErrorFeedback(decay=0.0)), Quantized(QuantSpec(INT4, 64))
    sums = {}
    for name, quantized in (("fed", fed), ("plain", plain)):
        total = torch.zeros(256)
        for _ in range(64):
            x = sent(dist.get_rank(), 256)
            quantized.all_reduce(x, ReduceOp.AVG, unit="u")
            total += x
        sums[name] = total / 64
    exact = sum(sent(r, 256) for r in range(2)) / 2
    assert (sums["fed"] - exact).norm() < 0.8 * (sums["plain"] - exact).norm()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def train(net: nn.Module, steps: int = 8) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(16, 20, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), x[:, :3]).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def wrapped(megabytes: float = 0.01) -> DistributedDataParallel:
    return DistributedDataParallel(model(), bucket_cap_mb=megabytes)  # several buckets


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
@world(2)
def test_codes_train_like_exact_gradients(method):
    exact, net = train(wrapped()), wrapped()
    compress_ddp(net, method)
    found = train(net)
    bound = {"int8": 0.03, "fp8": 0.1, "int4": 0.4}[method]
    flat, wanted, start = (torch.cat([p.detach().flatten() for p in ps]) for ps in (found, exact, model().parameters()))
    assert (flat - wanted).norm() <= bound * (wanted - start).norm()
    everyone = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(everyone, flat)
    assert torch.equal(*everyone)
    assert any(not torch.equal(p, q) for p, q in zip(found, exact, strict=True))


def in_bf16(state, bucket):
    low = bucket.buffer().bfloat16() / dist.get_world_size()
    dist.all_reduce(low)
    future = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(low))
    return future


@pytest.mark.parametrize("method", ["fp16", "bf16", "powersgd"])
@world(2)
def test_torchs_hooks_are_torchs(method):
    # With several buckets torch's PowerSGD hangs on CPU backends: ranks all-reduce from threads in different orders.
    net, twin = wrapped(25.0), wrapped(25.0)
    state = {"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    if method == "powersgd":
        compress_ddp(net, PowerSGDState(**state))
        twin.register_comm_hook(PowerSGDState(**state), powerSGD_hook)
    elif method == "fp16":
        compress_ddp(net, method)
        twin.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:  # torch's bf16 hook needs NCCL: its formula
        compress_ddp(net, method)
        twin.register_comm_hook(None, in_bf16)
    exact = train(wrapped())
    found = train(net)
    for p, q, r in zip(found, train(twin), exact, strict=True):
        assert torch.equal(p, q)
        assert (p - r).norm() <= 0.2 * r.norm()


@world(2)
def test_powersgd_of_several_buckets():
    net = wrapped()
    compress_ddp(net, PowerSGDState(process_group=None, matrix_approximation_rank=8, start_powerSGD_iter=2))
    for p, q in zip(train(net), train(wrapped()), strict=True):
        assert (p - q).norm() <= 0.2 * q.norm()


@world(2)
def test_another_quantized_and_another_method():
    net = wrapped()
    compress_ddp(net, Quantized(QuantSpec(INT8, 32), Hierarchy.split(ds_comm.world_group(), 2)))
    for p, q in zip(train(net), train(wrapped()), strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.01)
    with pytest.raises(CommError, match="comm-ddp-method"):
        compress_ddp(wrapped(), "int3")


# ---- options of backends ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_options(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
        monkeypatch.delenv(name)
    yield
    use_backend_options(None, "")


def test_nccl_options_are_those_of_torch(no_options: None) -> None:
    def make() -> Any:
        return SimpleNamespace(config=SimpleNamespace())

    options = ds_comm.BackendOptions(high_priority=True, min_ctas=4, max_ctas=16, split_share=True, net_name="IB")
    use_backend_options(options, "cpu:gloo,cuda:nccl")
    built = group_options("cpu:gloo,cuda:nccl", timedelta(seconds=5), make)
    assert built.is_high_priority_stream is True
    assert built._timeout == timedelta(seconds=5)
    assert vars(built.config) == {"min_ctas": 4, "max_ctas": 16, "split_share": 1, "net_name": "IB"}
    assert group_options("gloo", timedelta(seconds=5), make) is None
    use_backend_options(None, "nccl")
    assert group_options("nccl", timedelta(seconds=5), make) is None


@pytest.mark.parametrize("wanted", [None, False, True])
def test_gathers_go_first_unless_options_say_otherwise(wanted: bool | None, no_options: None) -> None:
    def make() -> Any:
        return SimpleNamespace(config=SimpleNamespace())

    use_backend_options(ds_comm.BackendOptions(high_priority=wanted), "cpu:gloo,cuda:nccl")
    built = group_options("cpu:gloo,cuda:nccl", timedelta(seconds=5), make, urgent=True)
    assert built.is_high_priority_stream is (wanted is not False)
    assert group_options("gloo", timedelta(seconds=5), make, urgent=True) is None


def test_options_without_an_effect_are_refused(no_options: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for _, name in socket.if_nameindex())
    for options, backend in (
        (ds_comm.BackendOptions(high_priority=True), "gloo"),
        (ds_comm.BackendOptions(interfaces=loopback), "shm"),
        (ds_comm.BackendOptions(interfaces="nosuch0"), "gloo"),
        (ds_comm.BackendOptions(interfaces=""), "gloo"),
    ):
        with pytest.raises(CommError, match="comm-options"):
            use_backend_options(options, backend)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_backend_options(ds_comm.BackendOptions(interfaces=loopback), "gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    with pytest.raises(CommError, match="NCCL_SOCKET_IFNAME"):
        use_backend_options(ds_comm.BackendOptions(interfaces=loopback), "nccl")


@world(1)
def test_options_come_before_the_world():
    with pytest.raises(CommError, match="comm-options"):
        ds_comm.init_distributed(options=ds_comm.BackendOptions(interfaces="lo"))

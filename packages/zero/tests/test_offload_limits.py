"""Runs in processes of their own under the kernel's limits: little memory, a full disk, no locked pages, a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

START = """
import logging, os, resource, sys
import torch
from torch import nn
import ds_zero, ds_ops.optim
from ds_zero import OffloadPolicy
torch.set_num_threads(1)

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

def model(layers, width):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

def step(net, optimizer):
    width = net[0].in_features
    loss = net(torch.ones(2, width, dtype=next(net.parameters()).dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""


# Without the fixed threshold glibc keeps what was freed between longer-lived blocks: half of a small limit.
def run(code: str, *, wait: bool = True) -> subprocess.Popen[str]:
    done = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    if wait:
        done.wait(120)
    return done


@pytest.mark.slow
def test_states_of_four_times_the_memory_train_through_files(tmp_path: Path) -> None:
    """14 bytes a parameter in files, a memory limit (RLIMIT_DATA) of a quarter of it above what an imported torch has."""
    done = run(f"""
        warm = model(2, 64)
        optimizer = ds_zero.shard(warm, ds_ops.optim.AdamW(warm.parameters()), stage=3, precision="bf16",
            offload_optimizer=OffloadPolicy("file", {str(tmp_path)!r}), offload_params=OffloadPolicy("file", {str(tmp_path)!r}),
            policy=ds_zero.UnitSizePolicy(max_numel=4096, persist_numel=0))
        step(warm, optimizer)  # what a first step of any model takes: threads, tables
        optimizer.close()
        layers, width = 96, 512
        states = 14 * layers * width * width
        before = status("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (before + states // 4,) * 2)
        try:
            kept = [bytearray(states // 8) for _ in range(3)]
        except MemoryError:
            kept = []
            print("limited")
        with ds_zero.Init(meta=True):
            net = model(layers, width)
        file = OffloadPolicy("file", {str(tmp_path)!r}, buffer_count=2)
        precision = ds_zero.Precision(param=torch.bfloat16, accumulate=torch.bfloat16)
        optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters(), lr=1e-5), stage=3, precision=precision,
            offload_optimizer=file, offload_params=file, policy=ds_zero.UnitSizePolicy(max_numel=width * width, persist_numel=0))
        for unit in optimizer.sharding.units:
            unit.state_store.fetch()
            unit.shard.copy_(torch.eye(width).view(-1))
            unit.storage.publish()
            unit.state_store.store()
        optimizer.sharding.unloaded.clear()
        losses = [step(net, optimizer) for _ in range(3)]
        print(losses[0] > losses[1] > losses[2] > 0, (status("VmData") - before) / states)
        # close() would make the whole model again, which does not fit
    """)
    out, err = done.communicate()
    assert done.returncode == 0, err
    assert out.splitlines()[0] == "limited"
    told, share = out.splitlines()[1].split()
    assert told == "True"
    assert float(share) < 0.25
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "file"])
def test_steady_memory_is_the_formula(tmp_path: Path, tier: str) -> None:
    """RssAnon above what the imports took: at most 1.10 x the plan's, and the same after 4 steps and after 16."""
    place = 'OffloadPolicy("host")' if tier == "host" else f'OffloadPolicy("file", {str(tmp_path)!r}, buffer_count=2)'
    done = run(f"""
        warm = model(2, 64)
        optimizer = ds_zero.shard(warm, ds_ops.optim.AdamW(warm.parameters()), stage=2, precision="bf16", offload_optimizer={place})
        step(warm, optimizer)
        optimizer.close()
        del warm, optimizer
        before = status("RssAnon")
        net = model(16, 1024)
        optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters()), stage=2, precision="bf16", offload_optimizer={place},
            policy=ds_zero.UnitSizePolicy(max_numel=1024 * 1024))
        plan = optimizer.sharding.plan
        found = []
        for _ in range(16):
            step(net, optimizer)
            found.append(status("RssAnon") - before)
        # what the plan says is kept, on the device (here: in memory, too) and on the host, and buffers that units share
        formula = sum(plan.persistent_bytes.values()) + plan.host + optimizer.sharding.pool.bytes
        print(found[-1] / formula, found[-1] / found[3])
        optimizer.close()
    """)
    out, err = done.communicate()
    assert done.returncode == 0, err
    of_formula, growth = map(float, out.split())
    assert of_formula <= 1.10
    assert growth <= 1.02


@pytest.mark.slow
def test_a_small_memlock_limit_costs_one_warning(tmp_path: Path) -> None:
    """Page-locking is refused beyond RLIMIT_MEMLOCK, as a driver would; the run goes on in plain memory."""
    done = run(f"""
        import contextlib, math
        from unittest import mock
        from ds_ops import scratch
        from ds_zero.offload import host_gradients, state_stores, weight_copies
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        locked, zeros, given = [0], torch.zeros, scratch.host_bytes

        def lock(*size, pin_memory=False, **rest):
            if not pin_memory:
                return zeros(*size, **rest)
            locked[0] += math.prod(torch.Size(*size) if isinstance(size[0], tuple) else size)
            if locked[0] > resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]:
                raise RuntimeError("page-locking failed: Cannot allocate memory")
            return zeros(*size, **rest)

        class Device:
            type = "slow"

        def of_device(nbytes, device, *, pin):
            return given(nbytes, Device(), pin=pin)

        logging.basicConfig(level=logging.WARNING)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "zeros", lock))
            for module in (host_gradients, scratch, state_stores, weight_copies):
                stack.enter_context(mock.patch.object(module, "host_bytes", of_device))
            for place in (OffloadPolicy("host"), OffloadPolicy("file", {str(tmp_path)!r}, buffer_count=2)):
                net = model(4, 128)
                optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters()), stage=1, offload_optimizer=place,
                    policy=ds_zero.UnitSizePolicy(max_numel=128 * 128))
                print(step(net, optimizer) > step(net, optimizer))
                optimizer.close()
        print(locked[0] > 1 << 16)
    """)
    out, err = done.communicate()
    assert done.returncode == 0, err
    assert out.split() == ["True"] * 3
    assert err.count("WARNING") == 1
    assert "plain memory is used" in err


def test_a_full_disk_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    done = run(f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        net = model(8, 256)
        optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters()), stage=1,
            offload_optimizer=OffloadPolicy("file", {str(tmp_path)!r}), policy=ds_zero.UnitSizePolicy(max_numel=1 << 16))
        step(net, optimizer)
    """)
    _, err = done.communicate()
    assert done.returncode == 1
    last = err.strip().splitlines()
    assert any("has no room for" in line and str(tmp_path) in line for line in last), err
    assert any("nvme_path" in line for line in last)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_leaves_no_file(tmp_path: Path, how: signal.Signals) -> None:
    going = run(
        f"""
        net = model(4, 512)
        optimizer = ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters()), stage=1,
            offload_optimizer=OffloadPolicy("file", {str(tmp_path)!r}, buffer_count=2), policy=ds_zero.UnitSizePolicy(max_numel=1 << 18))
        while True:
            step(net, optimizer)
            print("stepped", flush=True)
        """,
        wait=False,
    )
    assert going.stdout is not None
    for _ in range(3):
        assert going.stdout.readline() == "stepped\n"
    going.send_signal(how)
    going.communicate()
    assert going.returncode == -how
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_drawn_sizes_interrupted_beside_another_process(tmp_path: Path) -> None:
    """Two processes in one folder that is not there yet, each interrupted by a timer every half millisecond."""
    code = """
        import random, signal
        from ds_ops.io import IOSettings
        from ds_ops.scratch import ScratchFile
        beats = [0]
        signal.signal(signal.SIGALRM, lambda *_: beats.__setitem__(0, beats[0] + 1))
        signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
        chance = random.Random({seed})
        for _ in range(6):
            settings = IOSettings(block_bytes=4096 * chance.randint(1, 300), workers=chance.randint(1, 3))
            scratch = ScratchFile({folder!r}, settings)
            sizes = [1, 10**7 if _ == 0 else 4097, *(int(10 ** chance.uniform(0, 6.5)) | 1 for _ in range(8))]
            data = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
            places = [scratch.reserve(n) for n in sizes]
            for moving in [scratch.write(d, at) for d, at in zip(data, places)]:
                moving.wait()
            for value, at in chance.sample(list(zip(data, places)), len(sizes)):
                back = torch.zeros_like(value)
                scratch.read(back, at).wait()
                assert torch.equal(back, value), value.numel()
            scratch.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(beats[0] > 20)
    """
    folder = str(tmp_path / "not" / "there")
    both = [run(code.replace("{seed}", str(i)).replace("{folder!r}", repr(folder)), wait=False) for i in range(2)]
    for one in both:
        out, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
        assert out == "True\n"
    assert os.listdir(folder) == []

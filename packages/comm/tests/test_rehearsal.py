"""One process as a rank of a world that is not there: torch's own functions, DDP and FSDP2 run, and a script is rehearsed unchanged."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from itertools import pairwise

import pytest

from ds_comm.rehearsal import rehearse_cli
from ds_comm.rehearsal.fabric import Passage
from ds_comm.rehearsal.pacing import HostPacer, Trip
from ds_comm.rehearsal.peer_skew import PeerSkew
from ds_comm.rehearsal.rehearsal_report import result_from, table
from ds_comm.rehearsal.rehearse_cli import rehearse
from ds_config.errors import CommError, ConfigError

START = """
    import sys, torch, torch.distributed as dist
    from ds_comm.rehearsal import RehearsalOptions, fabric_from, rehearsal_traffic, start_rehearsal, stop_rehearsal
    torch.set_num_threads(1)
    start_rehearsal(RehearsalOptions(fabric_from("free"), 16, 5))
"""
MEASURED = START.replace(
    'fabric_from("free")', 'replace(fabric_from("free"), curves={"barrier": ((0, 0.0),)})'
).replace("import sys,", "from dataclasses import replace\n    import sys,")


@pytest.fixture
def staged(forked, tmp_path):
    def run(body: str, start: str = START) -> str:
        file = tmp_path / "staged.py"
        file.write_text(textwrap.dedent(start) + textwrap.dedent(body))
        (ended,) = forked([([str(file)], {})])
        assert ended.code == 0, ended.output
        return ended.output

    return run


def test_collectives_leave_what_equal_ranks_would(staged):
    staged("""
        dist.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://10.9.8.7:1")  # whatever a script says
        assert (dist.get_rank(), dist.get_world_size()) == (5, 16)
        total = torch.ones(4); dist.all_reduce(total)
        assert total.tolist() == [16.0] * 4
        mean = torch.ones(4); dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [1.0] * 4
        rows = torch.full((16, 2), float("nan")); dist.all_gather(list(rows), torch.tensor([1.0, 2.0]))
        assert rows.tolist() == [[1.0, 2.0]] * 16
        part = torch.empty(1); dist.reduce_scatter(part, list(torch.arange(16.0).split(1)))
        assert part.item() == 5.0 * 16
        out = torch.empty(32); dist.all_to_all_single(out, torch.arange(32.0))
        assert out.tolist() == list(range(32))
        objects = [None] * 16; dist.all_gather_object(objects, {"rank": dist.get_rank()})
        assert objects == [{"rank": 5}] * 16
        got = torch.full((3,), float("nan")); dist.recv(got, 4)
        assert got.isfinite().all()
        group = dist.new_group([5, 7], backend="gloo")
        assert dist.get_world_size(group) == 2
        dist.barrier(group); dist.barrier()
        records = stop_rehearsal()
        assert [r.op for r in records][:2] == ["all_reduce", "all_reduce"] and all(r.end_s >= r.start_s for r in records)
        assert not dist.is_initialized()
    """)


@pytest.mark.parametrize(
    ("asked", "of_group", "found"),
    [
        ("gloo", None, "gloo"),
        ("SHM", None, "shm"),
        ("cpu:shm,cuda:nccl", None, "shm"),
        (None, None, "gloo"),
        ("shm", "gloo", "gloo"),
    ],
)
def test_what_a_script_asked_for_is_known_over_measured_links(staged, asked, of_group, found):
    body = f"""
        import ds_comm.shm
        from ds_comm.rehearsal.staging import asked_backends
        dist.init_process_group({asked!r})
        group = dist.new_group(list(range(16)), backend={of_group!r})
        assert asked_backends(group)["cpu"] == FOUND, asked_backends(group)
        assert dist.get_backend(group) == "rehearsal"
    """
    staged(body.replace("FOUND", repr(found)), MEASURED)
    staged(body.replace("FOUND", "'nccl'"))  # a preset is a cluster of devices, also where this host has none


@pytest.mark.parametrize(
    ("backend", "copies"), [("gloo", True), ("cpu:gloo,cuda:nccl", True), (None, True), ("mpi", False)]
)
def test_gloo_reduces_a_copy_of_what_it_scatters(staged, backend, copies):
    """torch's gloo has no reduce-scatter: it needs memory for another input, and so does its rehearsal."""
    staged(
        f"""
        from ds_comm.rehearsal.rehearsal_group import RehearsalGroup
        dist.init_process_group({backend!r})
        own, parts = RehearsalGroup._part, []
        RehearsalGroup._part = lambda self, out, inp, op: (parts.append(inp), own(self, out, inp, op))
        out, inp = torch.empty(2), torch.arange(32.0)
        dist.reduce_scatter_tensor(out, inp)
        assert (parts[0].data_ptr() != inp.data_ptr()) == {copies}
        assert out.equal(16 * inp[2 * dist.get_rank() :][:2]), out
    """,
        MEASURED,
    )


def test_memory_of_an_operation_that_ended_is_free_for_the_next(staged):
    staged("""
        import weakref
        dist.init_process_group("gloo")
        out, part = torch.empty(16 << 10), torch.ones(1 << 10)
        memory = [weakref.ref(t.untyped_storage()) for t in (out, part)]
        work = dist.all_gather_into_tensor(out, part, async_op=True)
        work.wait()
        assert work.result()[0] is not None
        del out, part, work
        assert [ref() for ref in memory] == [None, None]
        assert len(stop_rehearsal()) == 1
    """)


@pytest.mark.parametrize(("share", "least_s"), [(1.0, 0.08), (0.5, 0.05), (0.0, 0.02)])
def test_who_computes_on_the_core_of_a_transport_delays_it(share, least_s, monkeypatch):
    """The thread of an operation gets a quarter of its core here: what it computes takes four times as long, what links carry does not."""
    own = time.thread_time
    monkeypatch.setattr("ds_comm.rehearsal.pacing.time.thread_time", lambda: own() / 4)
    pacer = HostPacer()
    trip = Trip("all_reduce", "world", "", 2, 0, Passage(0.02, 0.02, 0.02 * share), lambda: None, ())
    pacer.start(trip).wait()
    pacer.close()
    assert trip.end_s - trip.start_s >= least_s * 0.95


def test_latencies_of_operations_overlap():
    pacer = HostPacer()
    trips = [Trip("all_reduce", "world", "", 2, 0, Passage(0.5, 0.01, 0.0), lambda: None, ()) for _ in range(5)]
    works = [pacer.start(trip) for trip in trips]
    assert not works[0].is_completed()
    for work in works:
        work.wait()
    starts, ends = [t.start_s for t in trips], [t.end_s for t in trips]
    assert all(b - a >= 0.0099 for a, b in pairwise(starts))
    assert all(end - start >= 0.495 for start, end in zip(starts, ends, strict=True))
    assert ends == sorted(ends)
    assert starts[-1] < ends[0]  # one after the other they would take 2.5 s
    assert [record.end_s for record in pacer.settle()] == ends
    pacer.close()


def test_an_operation_begins_when_the_last_rank_comes_to_it():
    skew = PeerSkew(1)
    pacer = HostPacer(skew)

    def step(computing_s: float) -> Trip:
        trip = Trip("all_reduce", "world", "", 2, 8, Passage(0.001, 0.001, 0.0), lambda: None, ())
        time.sleep(computing_s)
        pacer.start(trip).wait()
        skew.end_step()
        return trip

    for computing_s in (0.05, 0.05, 0.05):  # two of warming up and one to draw from
        step(computing_s)
    began_s = pacer.now()
    trip = step(0.01)
    assert trip.start_s - began_s >= 0.045
    pacer.close()


def test_what_only_another_rank_knows_is_an_error_by_name(staged):
    output = staged("""
        from ds_config.errors import CommError
        dist.init_process_group()
        for call in (lambda: dist.broadcast_object_list([None], src=0), lambda: dist.distributed_c10d._get_default_store().get("x")):
            try:
                call()
            except CommError as error:
                print(error.code)
    """)
    assert output.count("rehearsal-foreign") == 2


@pytest.mark.slow
def test_data_parallel_wrappers_of_torch_train(staged):
    staged("""
        import warnings; warnings.simplefilter("ignore")
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        torch.manual_seed(0)
        layers = lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("outer", "inner"))
        sharded = layers()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh["inner"])
        x = torch.randn(8, 32)
        for model in (torch.nn.parallel.DistributedDataParallel(layers()), sharded):
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(); optimizer.zero_grad()
        groups = {(r.group, r.ranks) for r in rehearsal_traffic()}
        assert ("mesh_inner", 4) in groups and ("default_pg", 16) in groups, groups
    """)


def test_a_process_that_communicates_cannot_begin(staged):
    assert "rehearsal-late" in staged("""
        from ds_config.errors import CommError
        try:
            start_rehearsal(RehearsalOptions(fabric_from("free"), 2))
        except CommError as error:
            print(error.code)
    """)


SCRIPT = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=10**6)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(args.width, args.width))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(args.steps):
    for _ in range(args.accumulate):
        model(torch.ones(4, args.width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_script_is_rehearsed_unchanged(script, tmp_path):
    links = "inside=0.001,0;between=0.001,0"  # 1 MB/s: 16 KiB of gradients take a while, whatever else the machine does
    trace = tmp_path / "trace.json"
    result = rehearse(script, ["--accumulate", "2"], world_size=4, links=links, rank=3, steps=3, warm_up=1, trace=trace)
    sent = 2 * (64 * 64 + 64) * 4  # two backwards a step
    assert (result.steps, result.world_size, result.rank) == (3, 4, 3)
    assert result.wire_bytes == pytest.approx(sent, rel=0.05)
    least_s = 2 * 3 / 4 * sent / 1e6
    assert result.link_s >= 0.99 * least_s
    assert result.step_s >= least_s
    assert result.exposed_s > 0.8 * least_s
    assert "default_pg all_reduce" in table([result])
    events = json.loads(trace.read_text())
    assert events["rehearsal"]
    assert {"step 0", "forward", "backward", "update"} <= {event["name"] for event in events["traceEvents"]}


@pytest.mark.slow
def test_the_command_repeats_for_arguments(script, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    words = ["--world", "2", "--links", "free", "--compare=--width=16,32", "--steps", "1", "--warm-up", "1"]
    assert _run([*words, "--json", str(out), "--picture", str(picture), str(script), "--accumulate", "1"]) == 0
    rows = json.loads(out.read_text())
    assert [(row["world_size"], row["label"]) for row in rows] == [(2, "--width=16"), (2, "--width=32")]
    assert rows[1]["wire_bytes"] > 3 * rows[0]["wire_bytes"]
    assert picture.read_text().startswith("<?xml")
    assert "exposed" in capsys.readouterr().out


def test_worlds_ranks_and_values_are_all_combined():
    words = [
        "--links",
        "free",
        "--sweep",
        "world=8..32",
        "--rank",
        "first,last",
        "--compare",
        "stage=1,2",
        "--compare=--lr=1",
        "x.py",
        "-v",
    ]
    points = list(rehearse_cli._points(_parsed(words)))
    assert [(point["world_size"], point["rank"]) for point in points[::4]] == [(8, 0), (16, 0), (32, 0)]
    assert points[3] == {
        "world_size": 8,
        "rank": 7,
        "links": "free",
        "node_size": None,
        "steps": 8,
        "warm_up": 2,
        "changes": {"zero_optimization.stage": 2},
        "label": "stage=2 --lr=1",
        "arguments": ["-v", "--lr=1"],
    }


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rehearse_cli.register(parser)
    return parser.parse_args(words)


def _run(words: list[str]) -> int:
    return rehearse_cli.main(_parsed(words))


@pytest.mark.parametrize(
    "words",
    [
        ["--world", "4"],
        ["--links", "free"],
        ["--links", "free", "--world", "6", "--nodes", "4"],
        ["--links", "free", "--world", "4", "--rank", "4"],
        ["--links", "free", "--world", "4", "--rank", "none"],
        ["--links", "free", "--sweep", "stage=1..2"],
        ["--links", "free", "--sweep", "world=8..4"],
        ["--links", "free", "--world", "4", "--compare", "stage"],
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_runs(words, script):
    with pytest.raises(ConfigError) as error:
        _run([*words, str(script)])
    assert error.value.code == "rehearsal-arguments"


def test_several_real_processes_are_refused(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CommError) as error:
        _run(["--links", "free", "--world", "4", str(script)])
    assert error.value.code == "rehearsal-ranks"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise RuntimeError('broken')", "broken"),
        ("pass", "0 steps"),
        (
            "import torch.distributed as d\nd.init_process_group()\nd.distributed_c10d._get_default_store().get('k')",
            "another rank",
        ),
    ],
)
def test_a_script_that_fails_or_makes_no_step_is_named(tmp_path, body, problem):
    file = tmp_path / "bad.py"
    file.write_text(body)
    with pytest.raises(CommError, match=problem) as error:
        rehearse(file, world_size=4, links="free")
    assert error.value.code == "rehearsal-script"


def test_a_result_needs_a_measured_step():
    assert (
        result_from(
            {
                "order": {"warm_up": 2},
                "steps": [dict.fromkeys(("update_s", "forward_s", "backward_s", "end_s"), 0.0)] * 2,
            }
        )
        is None
    )


def test_a_rank_finds_what_one_that_was_rehearsed_before_sent(staged, tmp_path):
    body = f"""
        from pathlib import Path
        from ds_comm.rehearsal.rehearsal_group import MissingRankError
        stop_rehearsal()
        start_rehearsal(RehearsalOptions(fabric_from("free"), 2, RANK, Path({str(tmp_path)!r})))
        dist.init_process_group()
        objects = [("shape", 3, 4)] if RANK == 0 else [None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == [("shape", 3, 4)]
        if RANK == 0:
            dist.send(torch.tensor([3, 4]), 1)
            dist.send(torch.ones(3, 4), 1)
            try:
                dist.recv(torch.empty(1, dtype=torch.int64), 1)
                raise AssertionError("rank 1 was not rehearsed")
            except MissingRankError as error:
                assert error.rank == 1
        else:
            sizes = torch.empty(2, dtype=torch.int64)
            dist.recv(sizes, 0)
            assert sizes.tolist() == [3, 4]
            values = torch.full(tuple(sizes), float("nan"))
            dist.recv(values, 0)
            assert values.isfinite().all()
        stop_rehearsal()
    """
    for rank in (0, 1):
        staged(f"RANK = {rank}\n" + textwrap.dedent(body))


@pytest.mark.slow
def test_ranks_that_are_needed_are_rehearsed_before(tmp_path):
    script = tmp_path / "chain.py"
    script.write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group()
            rank, size = dist.get_rank(), dist.get_world_size()
            width = torch.tensor([4 + rank])
            if rank:
                dist.recv(width, rank - 1)
            if rank + 1 < size:
                dist.send(width + 1, rank + 1)
            assert width.item() == 4 + rank, width
            model = torch.nn.Linear(width.item(), 1)
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(4):
                model(torch.ones(1, width.item())).sum().backward()
                optimizer.step()
        """)
    )
    assert rehearse(script, world_size=3, links="free", rank=2, steps=1, warm_up=1).rank == 2

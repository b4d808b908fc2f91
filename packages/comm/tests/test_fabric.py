"""Links as data: times follow bytes, nodes and sizes as the algorithms say; whatever names links is read or refused."""

from __future__ import annotations

import json

import pytest

from ds_comm.rehearsal.fabric import Fabric, GroupSpan, Link, as_json, fabric_from, interpolate, preset_names
from ds_config.errors import ConfigError

FABRIC = Fabric("test", 8, Link(100.0, 2.0), Link(80.0, 5.0))


def test_within_a_node_a_gather_takes_its_bytes_over_the_link():
    nbytes = 800_000_000
    expected = nbytes * 7 / 8 / 100e9
    assert FABRIC.seconds("all_gather", nbytes, range(8)) == pytest.approx(expected, rel=0.01)
    assert FABRIC.seconds("all_reduce", nbytes, range(8)) == pytest.approx(2 * expected, rel=0.01)
    assert FABRIC.algorithm("all_gather", nbytes, range(8)) == "ring"


def test_a_small_message_takes_the_way_of_fewest_hops():
    world = range(512)
    assert FABRIC.algorithm("all_reduce", 1024, world) == "tree"
    assert FABRIC.seconds("all_reduce", 1024, world) < 2 * (63 * 5 + 7 * 2) * 1e-6 / 4


def test_ranks_of_a_node_share_what_leads_out_of_it():
    nbytes = 640_000_000
    across = [8 * node for node in range(8)]  # one rank of each node, as a data group beside tensor parallelism
    alone = FABRIC.seconds("all_gather", nbytes, across)
    assert alone == pytest.approx(nbytes * 7 / 8 / (80e9 / 8), rel=0.01)
    whole = FABRIC.seconds("all_gather", nbytes, range(64))  # the node gets every byte once for all its ranks
    assert whole == pytest.approx(nbytes * 7 / 8 / 80e9, rel=0.01)


def test_all_to_all_takes_the_slower_of_inside_and_outside():
    nbytes = 64_000_000
    each = nbytes / 16
    assert FABRIC.seconds("all_to_all", nbytes, range(16)) == pytest.approx(each * 8 * 8 / 80e9 + 5e-6)
    assert FABRIC.seconds("all_to_all", nbytes, range(8)) == pytest.approx(nbytes / 8 * 7 / 100e9 + 2e-6)


def test_a_message_takes_the_link_between_its_ends():
    assert FABRIC.message_seconds(1_000_000, 0, 7) == pytest.approx(1e-5 + 2e-6)
    assert FABRIC.message_seconds(1_000_000, 7, 8) == pytest.approx(1e-4 + 5e-6)


def test_a_group_of_one_takes_no_time():
    assert FABRIC.seconds("all_reduce", 10**9, [3]) == 0.0
    assert FABRIC.algorithm("all_reduce", 10**9, [3]) == "alone"


def test_more_bytes_more_ranks_and_more_nodes_never_take_less():
    for name in preset_names():
        fabric = fabric_from(name)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            by_size = [fabric.seconds(op, 1 << at, range(64)) for at in range(0, 34, 3)]
            assert by_size == sorted(by_size), (name, op)
        by_world = [fabric.seconds("all_gather", 1 << 28, range(1 << at)) for at in range(11)]
        assert by_world == sorted(by_world), name


def test_ranks_of_the_world_are_placed_node_by_node():
    assert FABRIC.span([0, 1, 8, 9, 17]) == GroupSpan(5, 3, 2)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (100, 1.0), (150, 1.5), (200, 2.0), (400, 8.0), (500, 11.0)])
def test_between_measured_sizes_is_a_line(nbytes, seconds):
    assert interpolate(((100, 1.0), (200, 2.0), (400, 8.0)), nbytes) == pytest.approx(seconds)


def test_measured_times_count_instead_of_links(tmp_path):
    rows = [
        {"case": {"op": op, "backend": "gloo", "dtype": "float32", "nbytes": size}, "ranks": 2, "median_s": seconds}
        for op in ("all_gather", "all_reduce")
        for size, seconds in ((1000, 1e-4), (1_000_000, 1e-3))
    ]
    case = {"op": "torch.all_reduce", "backend": "gloo", "dtype": "float32", "nbytes": 1000}
    rows.append({"case": case, "ranks": 2, "median_s": 5e-4})
    file = tmp_path / "links.json"
    file.write_text(json.dumps(rows))
    fabric = fabric_from(str(file))
    assert fabric.node_size == 2
    assert fabric.seconds("all_gather", 1_000_000, range(2)) == pytest.approx(1e-3)
    assert fabric.seconds("all_gather", 1_000_000, range(4)) == pytest.approx(1e-3 * 1.5, rel=0.05)
    assert fabric.message_seconds(0, 0, 1) == pytest.approx(1e-4)
    assert fabric.seconds("all_reduce", 1000, range(2)) == pytest.approx(1e-4)
    assert fabric.seconds("all_reduce", 1000, range(2), by_torch=True) == pytest.approx(5e-4)
    assert fabric.seconds("all_gather", 1000, range(2), by_torch=True) == pytest.approx(1e-4)


def test_measured_flows_and_cores_are_told_apart_from_latency(tmp_path):
    rows = [
        {
            "case": {"op": op, "backend": "gloo", "dtype": "float32", "nbytes": size},
            "ranks": 2, "median_s": seconds, "flow_s": flow, "busy_s": flow / 2,
        }
        for op, slower in (("all_gather", 1), ("torch.all_gather", 2))
        for size, seconds, flow in ((1000, 1e-4 * slower, 2e-5 * slower), (1_000_000, 1e-3 * slower, 1.5e-3 * slower))
    ]  # fmt: skip
    file = tmp_path / "links.json"
    file.write_text(json.dumps(rows))
    fabric = fabric_from(str(file))
    small, large = (fabric.passage("all_gather", size, range(2)) for size in (1000, 1_000_000))
    assert (small.seconds, small.link_s, small.busy_s) == pytest.approx((1e-4, 2e-5, 1e-5))
    assert (large.seconds, large.link_s, large.busy_s) == pytest.approx(
        (1e-3, 1e-3, 7.5e-4)
    )  # no longer than its result takes
    by_torch = fabric.passage("all_gather", 1000, range(2), by_torch=True)
    assert (by_torch.seconds, by_torch.link_s, by_torch.busy_s) == pytest.approx((2e-4, 4e-5, 2e-5))
    linked = FABRIC.passage("all_gather", 1000, range(64))
    assert linked.link_s == linked.seconds == FABRIC.seconds("all_gather", 1000, range(64))
    assert linked.busy_s == 0.0
    assert FABRIC.passage("all_gather", 1000, [3]).seconds == 0.0


def test_a_fabric_is_written_and_read(tmp_path):
    file = tmp_path / "own.json"
    data = as_json(FABRIC)
    file.write_text(json.dumps({name: data[name] for name in ("name", "node_size", "inside", "between")}))
    assert fabric_from(str(file)) == FABRIC
    assert fabric_from("inside=100,2;between=80,5").seconds("all_gather", 1 << 30, range(64)) == FABRIC.seconds(
        "all_gather", 1 << 30, range(64)
    )


def test_other_nodes_have_their_share_of_the_adapters():
    fabric = fabric_from("h100-ib400", node_size=4)
    assert fabric.node_size == 4
    assert fabric.between.gbytes_per_s * 2 == pytest.approx(fabric_from("h100-ib400").between.gbytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "h100", "inside=1", "inside=a,b", "around=1,2", "inside=0,1", "inside=1,-1", "inside=nan,1"]
)
def test_what_names_no_links_is_refused(text):
    with pytest.raises(ConfigError) as error:
        fabric_from(text)
    assert error.value.code == "rehearsal-links"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[1]", '{"inside": 1}', '[{"case": {}}]', '{"inside": {"gbytes_per_s": "x"}}']
)
def test_files_that_are_no_links_are_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        fabric_from(str(file))
    assert error.value.code == "rehearsal-links"

"""Hostfiles, filters and Slurm's node lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_launcher.inventory import (
    Host,
    decode,
    encode,
    expand_nodelist,
    from_slurm,
    limit,
    parse_filter,
    parse_hostfile,
    read_hostfile,
    select,
)

TWO = (Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2, 3)))

inventories = st.lists(
    st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 8)),
    min_size=1,
    max_size=6,
    unique_by=lambda pair: pair[0],
).map(lambda pairs: tuple(Host(name, tuple(range(count))) for name, count in pairs))


def test_hostfile_with_comments_blank_lines_and_spaces() -> None:
    text = "# cluster\n\n worker-0 slots=4  # fast\nworker-1\tslots = 4\n"
    assert parse_hostfile(text) == TWO


def test_every_bad_line_is_told_at_once() -> None:
    text = "a slots=2\na slots=4\nb slots\nc slots=0\nd slots=two\n"
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "cluster.txt")
    message = caught.value.message
    assert caught.value.code == "launch-hostfile"
    assert "cluster.txt:2: host 'a' is given a second time" in message
    assert "cluster.txt:3: found 'b slots'" in message
    assert "cluster.txt:4: host 'c' has no slots" in message
    assert "cluster.txt:5: found 'd slots=two'" in message


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        parse_hostfile(text)


def test_a_missing_hostfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read"):
        read_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a", {"a": ()}),
        ("a:0", {"a": (0,)}),
        ("a@b:2,0", {"a": (), "b": (0, 2)}),
        ("a:1@b@a:0,1", {"a": (0, 1), "b": ()}),
        ("a:1@a", {"a": ()}),
        ("worker-0:0,1@worker-1:3", {"worker-0": (0, 1), "worker-1": (3,)}),
    ],
)
def test_filter_grammar(text: str, parsed: dict[str, tuple[int, ...]]) -> None:
    assert parse_filter(text) == parsed


@pytest.mark.parametrize("text", ["a@", "@a", "a:", "a:x", "a:0,", ":1"])
def test_filters_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_filter(text)
    assert caught.value.code == "launch-filter"


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("worker-1", "", (TWO[1],)),
        ("worker-1:2,0@worker-0:3", "", (Host("worker-0", (3,)), Host("worker-1", (0, 2)))),
        ("", "worker-0", (TWO[1],)),
        ("", "worker-1:0", (TWO[0], Host("worker-1", (1, 2, 3)))),
        ("", "worker-0:0,1,2,3", (TWO[1],)),
        ("", "", TWO),
    ],
)
def test_select(include: str, exclude: str, left: tuple[Host, ...]) -> None:
    assert select(TWO, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("worker-0", "worker-1", "both given"),
        ("worker-2", "", "not in the inventory; did you mean 'worker-"),
        ("worker-0:4,5", "", "has no slot 4, 5"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_filters_that_do_not_fit(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        select(TWO, include, exclude)


@given(inventories, st.data())
def test_include_and_exclude_of_the_same_filter_share_out_the_inventory(
    inventory: tuple[Host, ...], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(inventory), min_size=1, unique=True))
    parts = []
    for host in chosen:
        slots = data.draw(st.lists(st.sampled_from(host.slots), unique=True))
        parts.append(host.name + (":" + ",".join(map(str, slots)) if slots else ""))
    text = "@".join(parts)
    everything = {(host.name, slot) for host in inventory for slot in host.slots}
    kept = {(host.name, slot) for host in select(inventory, include=text) for slot in host.slots}
    try:
        rest = {(host.name, slot) for host in select(inventory, exclude=text) for slot in host.slots}
    except ConfigError:
        rest = set()
    assert kept | rest == everything
    assert not kept & rest


@given(inventories)
def test_an_inventory_survives_a_command_line(inventory: tuple[Host, ...]) -> None:
    text = encode(inventory)
    assert decode(text) == inventory
    assert not set(text) & set(" '\"$&|;<>%")


@pytest.mark.parametrize("text", ["not base64!", "e30=", "W1tdXQ=="])
def test_a_broken_world_info_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        select(decode(text), "a")


def test_limits_as_the_reference_has_them() -> None:
    assert limit(TWO, 1) == (TWO[0],)
    assert limit(TWO, -1, 2) == (Host("worker-0", (0, 1)), Host("worker-1", (0, 1)))
    assert limit((Host("a", (3,)),), -1, 2) == (Host("a", (0, 1)),)  # ids 0..N-1, whatever the slots were
    for hosts, slots in ((3, -1), (0, -1), (-1, 0), (-2, -1)):
        with pytest.raises(ConfigError, match="were asked for"):
            limit(TWO, hosts, slots)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("a,b-c,d[3]", ["a", "b-c", "d3"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
    ],
)
def test_nodelists(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


def test_slurm_hosts_come_from_the_allocation_only() -> None:
    assert from_slurm({}, 4) is None
    assert from_slurm({"SLURM_JOB_NODELIST": "n[1-2]"}, 2) == (Host("n1", (0, 1)), Host("n2", (0, 1)))

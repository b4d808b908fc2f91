"""Nothing grows with the world but by its logarithm: routes, plans by several planners, indexes with leaves."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt import save_planner
from ds_ckpt.checkpoint_index import CheckpointIndex, decode_index, encode_index
from ds_ckpt.checkpoint_list import read_for, read_top
from ds_ckpt.coordinator import arrived, hops, moving, pack, unpack
from ds_ckpt.format import encode
from ds_ckpt.manifest_merge import join
from ds_ckpt.records import Manifest
from ds_ckpt.save_plan import plan_save
from ds_ckpt.zone_maps import MAX_ZONES, bounds_of, meet, zones_of
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError


def routed(messages, size):
    """What `Coordinator.route` does on every rank, in one process: by rank, what came by sender; and how many swaps each made."""
    held = [[(to, rank, data) for to, data in messages[rank].items()] for rank in range(size)]
    swaps = 0
    for step in hops(size):
        split = [moving(held[rank], rank, size, step) for rank in range(size)]
        held = [split[r][1] + unpack(pack(split[(r - step) % size][0])) for r in range(size)]
        swaps += 1
    return [arrived(held[rank], rank) for rank in range(size)], swaps


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_route_delivers_every_message_in_log_swaps(size, rng):
    messages = [
        {to: rng.randbytes(rng.randrange(9)) for to in rng.sample(range(size), rng.randint(0, size))}
        for _ in range(size)
    ]
    came, swaps = routed(messages, size)
    assert swaps == (size - 1).bit_length()
    for to in range(size):
        assert came[to] == {source: messages[source][to] for source in range(size) if to in messages[source]}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_spread_route_and_settle(model, size):
    def body(ranks):
        assert ranks.spread(ranks.rank, max) == size - 1
        assert ranks.spread([ranks.rank], lambda a, b: sorted({*a, *b})) == list(range(size))
        assert ranks.route({0: bytes([ranks.rank])}) == (
            {r: bytes([r]) for r in range(size)} if ranks.rank == 0 else {}
        )
        assert ranks.first(lambda: {"x": 1}) == {"x": 1}
        with pytest.raises(CheckpointError, match=r"^no 1" if ranks.rank == 1 % size else rf"^rank {1 % size}: no 1"):
            ranks.settle(lambda: _fail(1) if ranks.rank == 1 % size else None)
        return True

    assert model.together(size, body) == [True] * size


def _fail(number):
    raise CheckpointError(f"no {number}", code="ckpt-failed", fix="")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1), (3, 1), (2, 2), (5, 1), (2, 3)]), st.sampled_from(["flat", "replica", "mixed"]), st.data()
)
def test_several_planners_give_every_element_one_writer(model, mesh, style, data):
    world = mesh[0] * mesh[1]
    shards = [model.layout(rank, *mesh, style) for rank in range(world)]
    count = data.draw(st.integers(1, world))
    asked, _ = routed([save_planner.described(own, count, world) for own in shards], world)
    answers, tables = zip(*(save_planner.planned(came, rank, world) for rank, came in enumerate(asked)), strict=True)
    back, _ = routed(answers, world)
    items = [save_planner.entries_of(back[rank], shards[rank], rank) for rank in range(world)]
    assert sorted(itertools.chain(*tables)) == sorted(model.SHAPES)  # each tensor has one planner
    assert len({i.key for own in items for i in own}) == sum(map(len, items))
    for name, (shape, _) in model.SHAPES.items():
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank, own in enumerate(items):
            for item in (i for i in own if i.name == name):
                region = seen[tuple(slice(o, o + n) for o, n in zip(item.box.offset, item.box.shape, strict=True))]
                flat = region.reshape(-1).clone()
                flat[item.at : item.at + item.piece.numel] += 1
                region += flat.reshape(region.shape) - region
                shard = shards[rank][item.piece.shard]
                assert (shard.box, shard.interval.start + item.piece.start) == (item.box, item.at)
        assert torch.equal(seen, torch.ones(shape, dtype=torch.int64)), name
    if count == 1:
        assert tuple(items) == plan_save(shards).items


boxes = st.lists(st.integers(1, 9), min_size=0, max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)), st.tuples(*[st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape])
    )
)


@st.composite
def shards(draw):
    shape, sides = draw(boxes)
    box = Box(tuple(o for o, _ in sides), tuple(min(n, total - o) for (o, n), total in zip(sides, shape, strict=True)))
    start = draw(st.integers(0, box.numel - 1))
    return TensorShard(
        f"t{draw(st.integers(0, 3))}.{len(shape)}",
        shape,
        "float32",
        box,
        Interval(start, draw(st.integers(start + 1, box.numel))),
    )


def _elements(shard):
    index = torch.arange(max(1, torch.Size(shard.shape).numel())).reshape(shard.shape)
    part = index[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))]
    return set(part.reshape(-1)[shard.interval.start : shard.interval.stop].tolist())


@settings(max_examples=100, deadline=None)
@given(st.lists(shards(), min_size=1, max_size=30), shards())
def test_zones_never_miss_a_piece(pieces, wanted):
    pieces = [p for p in pieces if p.shape == wanted.shape or p.name != wanted.name]
    bounds = [(p.name, p.shape, bounds_of(p.shape, p.box, p.interval.start, p.interval.stop)) for p in pieces]
    found = zones_of(bounds)
    assert len(found) <= max(MAX_ZONES, len({len(b) for _, _, b in bounds}))
    want = zones_of(
        [(wanted.name, wanted.shape, bounds_of(wanted.shape, wanted.box, wanted.interval.start, wanted.interval.stop))]
    )
    if any(p.name == wanted.name and _elements(p) & _elements(wanted) for p in pieces):
        assert any(meet(zone, other) for zone in found for other in want)


@pytest.fixture
def many_planners(monkeypatch):
    monkeypatch.setattr(save_planner, "SHARDS_ALONE", 0)
    monkeypatch.setattr(save_planner, "SHARDS_PER_PLANNER", 1)


LAYOUTS = [(1, 1, "flat"), (3, 1, "flat"), (2, 2, "mixed"), (4, 1, "replica")]


@pytest.mark.usefixtures("many_planners")
def test_leaves_are_written_and_read_in_every_layout(tmp_path, model):
    for i, (data, tensor, style) in enumerate(LAYOUTS):

        def save(ranks, i=i, data=data, tensor=tensor, style=style):
            local = [model.local(s, fill=True) for s in model.layout(ranks.rank, data, tensor, style)]
            return ds_ckpt.save(
                tmp_path / f"l{i}", local, {"i": i}, group=ranks, aliases={"tied": "param/prime"}
            ).nbytes

        assert model.together(data * tensor, save) == [model.nbytes] * data * tensor
        top = read_top(ds_ckpt.local_storage.locate(tmp_path / f"l{i}"))
        assert isinstance(top, CheckpointIndex if data * tensor > 1 else Manifest)
        ds_ckpt.verify(tmp_path / f"l{i}")
        for other_data, other_tensor, other_style in LAYOUTS:

            def load(ranks, i=i, d=other_data, t=other_tensor, s=other_style):
                local = [model.local(shard, fill=False) for shard in model.layout(ranks.rank, d, t, s)]
                assert ds_ckpt.load(tmp_path / f"l{i}", local, group=ranks) == {"i": i}
                return all(torch.equal(item.data, model.expected(item.shard)) for item in local)

            assert all(model.together(other_data * other_tensor, load))
    assert ds_ckpt.list_tags(tmp_path) == ["l0", "l1", "l2", "l3"]
    assert not ds_ckpt.diff(tmp_path / "l1", tmp_path / "l3").values
    assert ds_ckpt.prune(tmp_path, 1) == ["l0", "l1", "l2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l3"]


@pytest.mark.usefixtures("many_planners")
def test_a_rank_reads_the_leaves_it_needs(tmp_path, model):
    world = 6

    def flat(rank):
        return [
            TensorShard(f"t{i}", (60,), "float32", Box.whole((60,)), Interval(rank * 10, rank * 10 + 10))
            for i in range(9)
        ]

    def save(ranks):
        local = [model.Shard(s, torch.full((10,), float(ranks.rank))) for s in flat(ranks.rank)]
        ds_ckpt.save(tmp_path / "a", local, {}, group=ranks)

    model.together(world, save)
    manifest = read_for(ds_ckpt.local_storage.locate(tmp_path / "a"), flat(2))
    assert [f.name for f in manifest.files] == ["data-00002.safetensors"]
    assert len(ds_ckpt.inspect(tmp_path / "a").files) == world
    (tmp_path / "a" / "leaf-00005.json").write_text("{}")
    assert ds_ckpt.find_latest(tmp_path) is None
    mine = [model.Shard(s, torch.zeros(10)) for s in flat(2)]
    ds_ckpt.load(tmp_path / "a", mine)  # whose leaf is sound
    assert all(item.data.tolist() == [2.0] * 10 for item in mine)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.load(tmp_path / "a", [model.Shard(s, torch.zeros(10)) for s in flat(5)])
    assert caught.value.code == "ckpt-manifest-damaged"


def _index(tmp_path, model):
    def save(ranks):
        ds_ckpt.save(
            tmp_path / "a",
            [model.local(s, fill=True) for s in model.layout(ranks.rank, 2, 2, "mixed")],
            {"x": [1]},
            group=ranks,
        )

    model.together(4, save)
    return (tmp_path / "a" / "manifest.json").read_bytes()


@pytest.mark.usefixtures("many_planners")
def test_mutated_indexes_and_leaves_are_refused_with_a_code_or_load(tmp_path, model):
    good, rng, codes = _index(tmp_path, model), random.Random(0), {}
    assert encode_index(decode_index(good)) == good
    paths = sorted((tmp_path / "a").glob("*.json"))
    contents = {path: path.read_bytes() for path in paths}
    for _ in range(200):
        path = rng.choice(paths)
        body = bytearray(contents[path])
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(body))
            body[at : at + rng.choice([0, 1, 1, 4])] = rng.choice(
                [b"", b"0", b"9", b"[", b'"', b"-1", b"null", b"\xff"]
            )
        path.write_bytes(_resealed(body, path, contents))
        code = _try(tmp_path / "a", model)
        codes[code] = codes.get(code, 0) + 1
        for each, content in contents.items():
            each.write_bytes(content)
    assert set(codes) <= {
        "ok", "ckpt-manifest-invalid", "ckpt-manifest-damaged", "ckpt-damaged", "ckpt-mismatch", "ckpt-not-found", "ckpt-version",
        "ckpt-block-damaged", "ckpt-file-truncated",
    }, codes  # fmt: skip
    assert codes["ckpt-manifest-invalid"] > 60


def _resealed(body, path, contents):
    """The mutation with checksums that fit, so that it gets past them; of a leaf, in the index, too."""
    from ds_ckpt.crc import crc32

    if path.name != "manifest.json":
        manifest = path.parent / "manifest.json"
        head, _, rest = contents[manifest].partition(b"\n")
        top = json.loads(head + rest)
        row = next(leaf for leaf in top["leaves"] if leaf[0] == path.name)
        row[1:3] = [len(body), f"{crc32(body):08x}"]
        manifest.write_bytes(_sealed(top))
        return bytes(body)
    head, _, rest = bytes(body).partition(b"\n")
    return f'{{"format":"ds-ckpt","version":2,"crc32":"{crc32(rest):08x}",\n'.encode() + rest


def _sealed(top):
    from ds_ckpt.format import seal

    return seal(2, {k: v for k, v in top.items() if k not in ("format", "version", "crc32")})


def _try(path, model):
    try:
        local = [model.local(shard, fill=False) for shard in model.layout(0, 1, 1, "flat")]
        ds_ckpt.load(path, local)
        ds_ckpt.verify(path)
    except CheckpointError as error:
        return error.code
    assert all(torch.equal(item.data, model.expected(item.shard)) for item in local)
    return "ok"


def test_what_nobody_could_read_is_not_written(tmp_path, monkeypatch, model):
    monkeypatch.setattr(ds_ckpt.format, "MAX_MANIFEST_BYTES", 2000)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({f"t{i}": torch.zeros(3) for i in range(40)}), {})
    assert caught.value.code == "ckpt-manifest-size"
    assert list(tmp_path.iterdir()) == []
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"t": torch.zeros(3)}), {})
    assert ds_ckpt.find_latest(tmp_path) == str(tmp_path / "a")


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(1, "", "", 16, (), {"t": ds_ckpt.records.TensorRecord("float32", (1,) * 65, ())}),
        Manifest(1, "", "", 16, (), {"t": ds_ckpt.records.TensorRecord("float32", (2**40, 2**30), ())}),
    ],
)
def test_nor_are_shapes_beyond_the_format(manifest):
    with pytest.raises(CheckpointError) as caught:
        encode(manifest)
    assert caught.value.code == "ckpt-manifest-size"


def test_leaves_that_contradict_each_other_are_refused():
    kinds = {"t": ("float32", (4,))}
    index = CheckpointIndex(1, "", "", 16, kinds, (), {}, {})
    part = ds_ckpt.records.PartRecord(Box.whole((4,)), (ds_ckpt.records.PieceRecord(0, 0, 3, ("0" * 8,), 0),))
    leaf = ds_ckpt.checkpoint_index.Leaf(
        (ds_ckpt.records.FileRecord("d", 12, 0, "0" * 8),),
        {"t": ds_ckpt.records.TensorRecord("float32", (4,), (part,))},
    )
    with pytest.raises(CheckpointError, match="its pieces 3"):
        join(index, [leaf], whole=True)
    with pytest.raises(CheckpointError, match="overlap"):
        join(index, [leaf, leaf], whole=False)

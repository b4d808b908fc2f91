"""Plans are arithmetic: every element has one writer, every wanted byte one source, work is shared evenly."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.format import disjoint
from ds_ckpt.save_plan import _aligned, plan_load, plan_save
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError

MESHES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (2, 3)]


@st.composite
def cuts(draw, total, parts):
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [Interval(a, b) for a, b in itertools.pairwise([0, *inner, total])]


@st.composite
def requests(draw, shape, name="t", dtype="float32"):
    """Shards of one tensor over a mesh: a grid along one dim, and flat cuts or replicas inside each box."""
    data, tensor = draw(st.sampled_from(MESHES))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    out = [[] for _ in range(data * tensor)]
    if dim is None:
        grid = [Box.whole(shape)] * tensor
    else:
        grid = [
            Box(
                tuple(s.start if d == dim else 0 for d in range(len(shape))),
                tuple(s.numel if d == dim else n for d, n in enumerate(shape)),
            )
            for s in draw(cuts(shape[dim], tensor))
        ]
    for t, box in enumerate(grid):
        replica = draw(st.booleans())
        parts = [Interval(0, box.numel)] * data if replica else draw(cuts(box.numel, data))
        for d, part in enumerate(parts):
            out[d * tensor + t].append(TensorShard(name, shape, dtype, box, part))
    return out


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.data(), shapes, st.integers(1, 64))
def test_a_save_plan_gives_every_element_one_writer(data, shape, split):
    shards = data.draw(requests(shape))
    plan = plan_save(shards, split)
    seen = torch.zeros(shape, dtype=torch.int64)
    for part in plan.tensors["t"].parts:
        region = seen[tuple(slice(o, o + n) for o, n in zip(part.box.offset, part.box.shape, strict=True))]
        flat, at = region.reshape(-1).clone(), 0
        for piece in part.pieces:
            source = shards[piece.rank][piece.shard]
            assert piece.numel > 0
            assert piece.start + piece.numel <= source.numel
            if source.box == part.box:
                assert source.interval.start + piece.start == at
            flat[at : at + piece.numel] += 1
            at += piece.numel
        assert at == part.box.numel
        region += flat.reshape(region.shape)
    assert torch.equal(seen, torch.ones(shape, dtype=torch.int64))
    assert sum(plan.nbytes) == math.prod(shape) * 4
    keys = [item.key for items in plan.items for item in items]
    assert len(keys) == len(set(keys))


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes, st.sampled_from(["float32", "bfloat16", "int8", "float64"]))
def test_saved_in_any_layout_loads_in_any_other(model, data, shape, dtype):
    """W threads save layout A, W' threads load layout B: the same elements, each byte read once."""
    value = torch.randint(-100, 100, shape).to(getattr(torch, dtype))
    storage = ds_ckpt.MemoryStorage()
    saving, loading = data.draw(requests(shape, dtype=dtype)), data.draw(requests(shape, dtype=dtype))

    def fill(shard, empty):
        part = value[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))]
        flat = part.reshape(-1)[shard.interval.start : shard.interval.stop].clone()
        return model.Shard(shard, torch.zeros_like(flat) if empty else flat), flat

    drafts = {}

    class Shared(ds_ckpt.MemoryStorage):
        def draft(self, tag, token):  # all threads write into one draft
            return drafts.setdefault((tag, token), super().draft(tag, token))

    storage = Shared()
    at = ds_ckpt.CheckpointRef(storage, "a")

    def save(ranks):
        ds_ckpt.save(at, [fill(s, False)[0] for s in saving[ranks.rank]], {}, group=ranks)

    def load(ranks):
        pairs = [fill(s, True) for s in loading[ranks.rank]]
        ds_ckpt.load(at, [p[0] for p in pairs], group=ranks)
        assert all(torch.equal(got.data, want) for got, want in pairs)

    model.together(len(saving), save)
    model.together(len(loading), load)
    manifest = ds_ckpt.inspect(at)
    assert ds_ckpt.verify(at).nbytes == value.nbytes
    for shards in loading:
        needed = sum(b.needed for b in plan_load(shards, manifest))
        assert needed == sum(s.numel * ITEMSIZE[s.dtype] for s in shards)


def test_boxes_that_overlap_in_part_are_flattened():
    shape = (4, 6)
    a = TensorShard("t", shape, "float32", Box((0, 0), (3, 6)), Interval(0, 18))
    b = TensorShard("t", shape, "float32", Box((1, 0), (3, 6)), Interval(0, 18))
    c = TensorShard("t", shape, "float32", Box((0, 2), (4, 2)), Interval(0, 8))
    plan = plan_save([[a], [b], [c]])
    (part,) = plan.tensors["t"].parts
    assert part.box == Box.whole(shape)
    assert sum(p.numel for p in part.pieces) == 24


def test_replicas_share_the_writing_evenly():
    shards = [[TensorShard.whole(f"t{i}", (1000 + 37 * i,), "float32") for i in range(40)] for _ in range(8)]
    nbytes = plan_save(shards, split_bytes=2**20).nbytes
    assert max(nbytes) <= 1.1 * sum(nbytes) / 8
    big = [[TensorShard.whole("t", (1_000_003,), "bfloat16")] for _ in range(8)]
    nbytes = plan_save(big, split_bytes=2**14).nbytes
    assert max(nbytes) - min(nbytes) <= 2**14


def test_work_that_only_one_rank_can_do_counts_for_the_balance():
    own = TensorShard.whole("own", (1000,), "float32")
    shared = TensorShard.whole("shared", (1000,), "float32")
    plan = plan_save([[own, shared], [shared]])
    assert plan.nbytes == (4000, 4000)


def test_a_plan_is_the_same_whoever_makes_it():
    shards = [[TensorShard.whole(f"t{i}", (i + 1,), "float32") for i in order] for order in (range(9), range(9))]
    assert plan_save(shards) == plan_save([list(s) for s in shards])


@pytest.mark.parametrize(
    ("shards", "code"),
    [
        ([TensorShard.flat("t", (10,), "float32", Interval(0, 9))], "ckpt-incomplete-tensor"),
        ([TensorShard.flat("t", (10,), "float32", Interval(1, 10))], "ckpt-incomplete-tensor"),
        ([TensorShard("t", (2, 5), "float32", Box((0, 0), (1, 5)), Interval(0, 5))], "ckpt-incomplete-tensor"),
        ([TensorShard.flat("t", (10,), "float32", Interval(0, 0))], "ckpt-incomplete-tensor"),
        ([TensorShard.whole("t", (10,), "float4_e2m1fn_x2")], "ckpt-dtype"),
    ],
)
def test_what_cannot_be_saved_is_refused(shards, code):
    with pytest.raises(CheckpointError) as caught:
        plan_save([shards])
    assert caught.value.code == code


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 4)] * 2), max_size=7))
def test_disjoint_agrees_with_comparing_all_pairs(corners):
    boxes = [Box((a, b), (h, w)) for a, b, h, w in corners]
    assert disjoint(boxes) == all((a & b) is None for a, b in itertools.combinations(boxes, 2))


def test_disjoint_takes_a_pinwheel_that_no_cut_separates():
    boxes = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert disjoint(boxes)
    assert not disjoint([*boxes, Box((1, 1), (1, 1))])
    assert not disjoint([Box((), ()), Box((), ())])


@pytest.mark.parametrize(
    ("part", "runs"),
    [(Box((1, 0, 0), (3, 3, 5)), 1), (Box((0, 1, 0), (4, 2, 5)), 4), (Box((1, 1, 1), (3, 2, 3)), 6)],
)
def test_what_lies_together_in_both_is_one_run(part, runs):
    shard = TensorShard.whole("t", (4, 3, 5), "float32")
    found = list(_aligned(shard, part))
    assert len(found) == runs
    elements = torch.arange(60)
    got = torch.full((part.numel,), -1)
    for ours, theirs, length in found:
        got[theirs : theirs + length] = elements[ours : ours + length]
    (x, y, z), (a, b, c) = part.offset, part.shape
    assert torch.equal(got, elements.view(4, 3, 5)[x : x + a, y : y + b, z : z + c].flatten())

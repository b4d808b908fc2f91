"""One process: every dtype and shape comes back, names and types are checked, errors say what to do."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt.dtypes import CODE
from ds_ckpt.local import new_token
from ds_ckpt.shard_tensors import byte_view, torch_dtype
from ds_config.errors import CheckpointError

SHAPES = [(), (0,), (1,), (17, 31), (3, 0, 5), (2, 3, 5, 7), (97,)]


def _random(shape, dtype):
    nbytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def _same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bytes(byte_view(a)) == bytes(byte_view(b))


@pytest.mark.parametrize("dtype", sorted(CODE))
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype):
    state = {f"t{i}": _random(shape, torch_dtype(dtype)) for i, shape in enumerate(SHAPES)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {})
    back = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(back))
    assert all(_same(state[name], back[name]) for name in state)
    assert ds_ckpt.verify(tmp_path / "a").nbytes == sum(t.nbytes for t in state.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text().filter(lambda k: k != "$float"), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text().filter(lambda k: k != "$float"), json_values, max_size=4))
def test_meta_comes_back_equal(meta):
    at = ds_ckpt.CheckpointRef(ds_ckpt.MemoryStorage(), "a")
    ds_ckpt.save(at, [], meta)
    assert ds_ckpt.load(at, []) == meta


def test_meta_keeps_what_json_has_no_word_for():
    at = ds_ckpt.CheckpointRef(ds_ckpt.MemoryStorage(), "a")
    ds_ckpt.save(at, [], {"best": math.inf, "worst": -math.inf, "loss": math.nan, "betas": (0.9, 0.999)})
    meta = ds_ckpt.load(at, [])
    assert (meta["best"], meta["worst"], meta["betas"]) == (math.inf, -math.inf, [0.9, 0.999])
    assert math.isnan(meta["loss"])


@pytest.mark.parametrize(
    "value", [{1: 2}, object(), {"a": [torch.ones(1)]}, 2**64, {"$float": "inf"}, b"bytes", {"x": {1, 2}}]
)
def test_meta_that_json_cannot_hold_is_refused_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"meta\.key") as caught:
        ds_ckpt.save(ds_ckpt.CheckpointRef(ds_ckpt.MemoryStorage(), "a"), [], {"key": value})
    assert caught.value.code == "ckpt-meta-type"


def _saved(tmp_path, **tensors):
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(tensors), {"step": 3})
    return tmp_path / "a"


def test_mismatches_are_listed_together_with_the_nearest_names(tmp_path):
    path = _saved(tmp_path, weight=torch.ones(2, 3), bias=torch.ones(3), extra=torch.ones(1))
    asked = {"wieght": torch.ones(2, 3), "bias": torch.ones(4), "extra": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.load(path, ds_ckpt.full_shards(asked))
    text = str(caught.value)
    assert caught.value.code == "ckpt-mismatch"
    assert "missing 'wieght' (nearest: 'weight')" in text
    assert "unexpected 'weight'" in text
    assert "'bias' is stored as float32[3], asked for as float32[4]" in text
    assert "'extra' is stored as float32[1], asked for as int64[1]" in text


def test_options_say_what_may_be_partial(tmp_path):
    path = _saved(tmp_path, **{"param/w": torch.full((3,), 1.5), "optim/w/exp_avg": torch.ones(3)})
    target = {"param/w": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="unexpected 'optim/w/exp_avg'"):
        ds_ckpt.load(path, ds_ckpt.full_shards(target), options=ds_ckpt.LoadOptions(cast=True))
    with pytest.raises(CheckpointError, match="asked for as bfloat16"):
        ds_ckpt.load(path, ds_ckpt.full_shards(target), options=ds_ckpt.LoadOptions(prefixes=("param/",)))
    meta = ds_ckpt.load(path, ds_ckpt.full_shards(target), options=ds_ckpt.LoadOptions(prefixes=("param/",), cast=True))
    assert meta == {"step": 3}
    assert target["param/w"].tolist() == [1.5, 1.5, 1.5]
    other = {"optim/w/exp_avg": torch.zeros(3)}
    ds_ckpt.load(path, ds_ckpt.full_shards(other), options=ds_ckpt.LoadOptions(strict=False))
    assert other["optim/w/exp_avg"].tolist() == [1, 1, 1]


def test_a_tensor_without_elements_may_be_missing_or_unexpected(tmp_path):
    path = _saved(tmp_path, w=torch.ones(2), none=torch.zeros(0, 3))
    back = {"w": torch.zeros(2), "other": torch.zeros(4, 0)}
    ds_ckpt.load(path, ds_ckpt.full_shards(back))
    assert back["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"'none' is stored as float32\[0, 3\], asked for as float32\[3, 0\]"):
        ds_ckpt.load(path, ds_ckpt.full_shards({"w": torch.zeros(2), "none": torch.zeros(3, 0)}))


def test_a_tied_tensor_is_stored_once_and_loads_under_both_names(tmp_path):
    embedding = torch.randn(5, 4)
    saved = ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"embed": embedding}), {}, aliases={"lm_head": "embed"})
    assert saved.nbytes == embedding.nbytes
    back = {"lm_head": torch.zeros(5, 4)}
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(back))  # strict: the alias counts as having asked for the tensor
    assert torch.equal(back["lm_head"], embedding)
    both = {"lm_head": torch.zeros(5, 4), "embed": torch.zeros(5, 4)}
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(both))
    assert torch.equal(both["lm_head"], both["embed"])


@pytest.mark.parametrize("aliases", [{"a": "b"}, {"w": "w"}, {"x#1": "w"}])
def test_an_alias_must_be_a_new_name_of_a_stored_tensor(tmp_path, aliases):
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": torch.ones(1)}), {}, aliases=aliases)
    assert caught.value.code == "ckpt-alias"
    assert ds_ckpt.list_tags(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a#b", "__metadata__", "a\nb", "x" * 5000])
def test_names_the_format_cannot_hold_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({name: torch.ones(1)}), {})
    assert caught.value.code == "ckpt-name"


@pytest.mark.parametrize("tag", [".hidden", "x" * 300, "a\tb"])
def test_tags_that_cannot_be_directories_are_refused(tmp_path, tag):
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.save(tmp_path / tag, [], {})
    assert caught.value.code == "ckpt-tag"


def test_loading_nothing_is_an_error_that_names_the_neighbours(tmp_path):
    _saved(tmp_path, w=torch.ones(1))
    with pytest.raises(CheckpointError, match="checkpoints beside it: a") as caught:
        ds_ckpt.load(tmp_path / "b", [])
    assert caught.value.code == "ckpt-not-found"
    assert ds_ckpt.find_latest(tmp_path / "empty") is None


def test_the_newest_is_the_last_saved_and_overwriting_counts(tmp_path):
    for tag in ("one", "two", "three"):
        ds_ckpt.save(tmp_path / tag, ds_ckpt.full_shards({"w": torch.ones(1)}), {"tag": tag})
    assert ds_ckpt.list_tags(tmp_path) == ["one", "two", "three"]
    ds_ckpt.save(tmp_path / "one", ds_ckpt.full_shards({"w": torch.zeros(1)}), {"tag": "one again"})
    assert ds_ckpt.list_tags(tmp_path) == ["two", "three", "one"]
    latest = ds_ckpt.find_latest(tmp_path)
    assert ds_ckpt.load(latest, [], options=ds_ckpt.LoadOptions(strict=False)) == {"tag": "one again"}
    ds_ckpt.remove(latest)
    assert ds_ckpt.list_tags(tmp_path) == ["two", "three"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["three", "two"]


@pytest.mark.parametrize("links", [True, False])
def test_what_a_program_puts_beside_a_checkpoint_stays_there(tmp_path, monkeypatch, links):
    if not links:  # as on file systems that have none
        monkeypatch.setattr(os, "link", lambda *a, **k: (_ for _ in ()).throw(OSError("no links")))
    tag = tmp_path / "a"
    (tag / "zero").mkdir(parents=True)
    (tag / "thesis.tex").write_text("x")
    for name in ("mp_rank_00_model_states.pt", "checksums.json", "zero/step.pt"):  # DeepSpeed's of this tag
        (tag / name).write_text("old")
    ds_ckpt.save(tag, ds_ckpt.full_shards({"w": torch.ones(1)}), {"n": 1})
    (tag / "tokenizer").mkdir()
    (tag / "tokenizer" / "vocab").write_text("y")
    (tag / "link").symlink_to("thesis.tex")
    ds_ckpt.save(tag, ds_ckpt.full_shards({"w": torch.ones(1)}), {"n": 2})
    names = {"data-00000.safetensors", "manifest.json", "thesis.tex", "tokenizer", "link"}
    assert set(os.listdir(tag)) == names
    assert (tag / "link").is_symlink()
    assert [(tag / name).read_text() for name in ("thesis.tex", "tokenizer/vocab")] == ["x", "y"]
    assert ds_ckpt.load(tag, [], options=ds_ckpt.LoadOptions(strict=False)) == {"n": 2}
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_stepped_aside_for_a_save_which_died_returns(tmp_path):
    (tmp_path / ".old-a").mkdir()
    (tmp_path / ".old-a" / "thesis.tex").write_text("x")
    (tmp_path / f".tmp-a-{new_token()}").mkdir()
    ds_ckpt.save(tmp_path / "b", [], {})
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    (tmp_path / ".old-c").mkdir()
    (tmp_path / ".old-c" / "thesis.tex").write_text("of somebody who begins names so, too")
    ds_ckpt.save(tmp_path / "b", [], {})
    assert sorted(os.listdir(tmp_path)) == [".old-c", "a", "b"]


def test_views_and_columns_are_saved_as_what_they_show(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    with pytest.raises(CheckpointError, match="not contiguous"):
        ds_ckpt.full_shards({"w": base.t()})
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": base[1:3]}), {})
    assert ds_ckpt.inspect(tmp_path / "a").nbytes == 2 * 6 * 4
    back = torch.zeros(2, 6)
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards({"w": back}))
    assert torch.equal(back, base[1:3])


def test_one_element_of_a_strided_tensor(tmp_path):
    column = torch.arange(6.0).reshape(3, 2)[:, 1][1:2]
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": column}), {})
    column.zero_()
    ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards({"w": column}))
    assert column.tolist() == [3]


def test_diff_sees_names_shapes_values_and_meta(tmp_path):
    state = {"same": torch.randn(5), "value": torch.ones(300), "shape": torch.ones(2), "gone": torch.ones(1)}
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(state), {"step": 1, "seed": 0})
    state.pop("gone")
    state |= {"value": torch.cat([torch.ones(299), torch.zeros(1)]), "shape": torch.ones(3), "new": torch.ones(1)}
    ds_ckpt.save(tmp_path / "b", ds_ckpt.full_shards(state), {"step": 2, "seed": 0})
    found = ds_ckpt.diff(tmp_path / "a", tmp_path / "b")
    assert found == ds_ckpt.Diff(("gone",), ("new",), ("shape",), ("value",), ("step",))
    assert not ds_ckpt.diff(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor"])
def test_a_plain_optimizer_comes_back(tmp_path, kind):
    def start(rate):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=rate, **options)

    def step(model, optimizer, value):
        model(torch.full((2, 4), value)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state(model, optimizer):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = start(0.1)
    step(model, optimizer, 1.0)
    saved = state(model, optimizer)
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards(saved), {"state": ds_ckpt.full_meta(saved)})
    step(model, optimizer, 2.0)
    other, again = start(0.5)
    step(other, again, 3.0)  # an optimizer has its tensors after the first step
    into = state(other, again)
    meta = ds_ckpt.load(tmp_path / "a", ds_ckpt.full_shards(into))
    again.load_state_dict(ds_ckpt.fill_state(meta["state"], into)["optimizer"])
    step(other, again, 2.0)
    assert again.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError) as caught:
        ds_ckpt.fill_state(meta["state"], {"model": {}})
    assert caught.value.code == "ckpt-mismatch"


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match=r"a\.b"):
        ds_ckpt.full_shards({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


@pytest.mark.parametrize("shards", [{"w": torch.ones(2)}, [torch.ones(2)], ["w"]])
def test_a_state_dict_in_place_of_shards_is_refused_by_what_it_is(tmp_path, shards):
    for call in (lambda: ds_ckpt.save(tmp_path / "a", shards, {}), lambda: ds_ckpt.load(tmp_path / "a", shards)):
        with pytest.raises(CheckpointError, match="full_shards") as caught:
            call()
        assert caught.value.code == "ckpt-shard"
    assert list(tmp_path.iterdir()) == []

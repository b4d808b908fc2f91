"""DeepSpeed's regular layout: where elements lie, and that what is written reads back the same, however it is cut."""

import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_ckpt
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.convert.fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_ckpt.convert.pickled import load_pt
from ds_ckpt.convert.regular import Regular, plan_flats, write_regular
from ds_ckpt.convert.tensor_source import from_dict, open_checkpoint, write_checkpoint
from ds_config.errors import CheckpointError, UnsupportedError

EXPERTS = "{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"


def _expert_names(layers, numbers, leaves):
    return [EXPERTS.format(layer, n, leaf) for layer in layers for n in numbers for leaf in leaves]


@given(
    sizes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    ranks=st.integers(1, 5),
    stage=st.sampled_from([1, 3]),
    sub_group=st.integers(1, 60),
    dealt=st.booleans(),
    aligned=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_element_lies_once_in_the_flats_of_some_rank(sizes, ranks, stage, sub_group, dealt, aligned):
    groups = [{f"p{g}.{i}": n for i, n in enumerate(group)} for g, group in enumerate(sizes)]
    layout = Regular(stage, ranks, sub_group_size=sub_group, round_robin=dealt, aligned=aligned)
    each = [plan_flats(groups, layout, rank) for rank in range(ranks)]
    assert len({tuple((f.group, f.numel) for f in flats) for flats in each}) == 1  # the same on every rank
    seen = {name: [] for group in groups for name in group}
    for flats in each:
        for flat in flats:
            assert flat.padding >= 0
            assert sum(p.stop - p.start + p.pad for p in flat.pieces) + flat.padding == flat.numel
            for p in flat.pieces:
                assert p.name in groups[flat.group]
                seen[p.name].append((p.start, p.stop))
    for group in groups:
        for name, numel in group.items():
            parts = sorted(part for part in seen[name] if part[0] < part[1])
            assert [i for low, high in parts for i in range(low, high)] == list(range(numel))


def test_parts_of_a_group_start_where_deepspeed_starts_them():
    groups = [{"a": 7, "b": 4}]
    first, second = (plan_flats(groups, Regular(2, 2), rank)[0] for rank in (0, 1))
    assert (first.numel, first.padding, second.numel, second.padding) == (6, 0, 6, 1)
    assert [(p.name, p.start, p.stop) for p in second.pieces] == [("a", 6, 7), ("b", 0, 4)]
    first, second = (plan_flats(groups, Regular(2, 2, "bfloat16", aligned=True), rank)[0] for rank in (0, 1))
    assert (first.numel, first.padding, second.numel, second.padding) == (6, 0, 6, 0)
    assert [(p.name, p.start, p.stop, p.pad) for p in second.pieces] == [("a", 6, 7, 1), ("b", 0, 4, 0)]
    groups = [dict.fromkeys("abcde", 2)]
    dealt = [plan_flats(groups, Regular(1, 2, round_robin=True), rank)[0].pieces for rank in (0, 1)]
    assert [[p.name for p in pieces] for pieces in dealt] == [["a", "c", "e"], ["b", "d"]]
    groups = [{"a": 7, "b": 4}]
    (flat,) = plan_flats(groups, Regular(3, 2), 1)
    assert [(p.name, p.start, p.stop, p.pad) for p in flat.pieces] == [("a", 4, 7, 1), ("b", 2, 4, 0)]


def _state(shapes, *, frozen=(), buffers=(), step=3.0, groups=None, config=None, scale=None):
    """A training state as a source. `groups`: names of each; all trained parameters in one where it is None."""
    g = torch.Generator().manual_seed(5)
    tensors, trained = {}, [n for n in shapes if n not in frozen]
    for name, shape in shapes.items():
        tensors[f"param/{name}"] = torch.randn(shape, generator=g)
        if name in trained:
            tensors[f"optim/{name}/exp_avg"] = torch.randn(shape, generator=g)
            tensors[f"optim/{name}/exp_avg_sq"] = torch.rand(shape, generator=g)
    tensors |= {f"buffer/{n}": torch.tensor([1.0, 2.0]) for n in buffers}
    groups = groups or [trained]
    meta = {
        "optimizer": {
            "format": 1,
            "groups": [{"lr": 0.1 * (i + 1), "betas": [0.9, 0.99]} for i in range(len(groups))],
            "scalars": {"step": dict.fromkeys(trained, step)},
            "loss_scale": scale,
            "names": [list(names) for names in groups],
        },
        "counters": {"steps": 3, "samples": 24, "micro_steps": 0, "skipped": 1},
        "client": {"note": "x"},
        "config": config or {},
    }
    source = from_dict(tensors, meta)
    return type(source)(source.entries, {"param/tied": f"param/{trained[0]}"}, meta)


def _same(back, source, *, dtype="float32", frozen=()):
    assert set(back.entries) == set(source.entries)
    for name, entry in source.entries.items():
        assert torch.equal(back.entries[name].read().float(), entry.read()), name
    assert back.meta["optimizer"] == source.meta["optimizer"]
    assert back.meta["counters"] == source.meta["counters"]
    assert back.meta["client"] == {"note": "x"}
    assert back.meta["left_out"] == []


SHAPES = {"a": (17, 3), "b": (5,), "ice": (4, 2), "c": (2, 2, 7), "scalar": ()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_there_and_back(tmp_path, stage, ranks):
    source = _state(SHAPES, frozen=("ice",), buffers=("count",), groups=[("c", "a"), ("scalar", "b")])
    layout = Regular(stage, ranks, sub_group_size=10)
    path = write_regular(source, tmp_path, "global_step3", layout, allow_pickle=True)
    names = sorted(p.name for p in path.iterdir())
    models = ["mp_rank_00_model_states.pt"]
    models = models if stage < 3 else [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(ranks)]
    assert names == sorted([*models, *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks))])
    back = open_deepspeed(tmp_path, allow_pickle=True)
    _same(back, source)
    assert back.aliases == {"param/tied": "param/a" if "a" in source.aliases["param/tied"] else "param/c"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step3", "latest"]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, allow_pickle=True)
    assert torch.equal(found["a"], source.entries["param/a"].read())
    # And through a checkpoint of ours, cut otherwise.
    write_checkpoint(back, tmp_path / "ours" / "s")
    other = Regular(1 + stage % 3, 4 - ranks)
    write_regular(open_checkpoint(tmp_path / "ours" / "s"), tmp_path / "again", "t", other, allow_pickle=True)
    _same(open_deepspeed(tmp_path / "again", allow_pickle=True), source)


KEYS = [{"round_robin_gradients": True}, {"parameter_alignment": True}]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("zero", [*KEYS, KEYS[0] | KEYS[1]])
def test_the_configuration_says_how_parameters_lie_in_a_group(tmp_path, stage, ranks, zero):
    shapes = {n: (3 + i,) for i, n in enumerate("abcdef")}
    source = _state(shapes, groups=[("f", "b", "a", "d", "c"), ("e",)], config={"zero_optimization": zero})
    path = write_regular(source, tmp_path, "t", Regular(stage, ranks), allow_pickle=True)
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
    orders = {2: "facbd", 3: "fdbca"} if "round_robin_gradients" in zero else dict.fromkeys((2, 3), "fbadc")
    assert "".join(model["param_shapes"][0]) == orders[ranks]
    sizes = [shapes[n][0] for n in orders[ranks]]
    paddings = [-size % 4 for size in sizes[:-1]] + [0] if "parameter_alignment" in zero else [0] * 5
    parts = [
        load_pt(path / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt")["optimizer_state_dict"] for r in range(ranks)
    ]
    assert all(part["param_alignment_paddings"] == [paddings, [0]] for part in parts)
    flat = torch.cat([part["single_partition_of_fp32_groups"][0] for part in parts])
    lengths = [n for size, padding in zip(sizes, paddings, strict=True) for n in (size, padding)]
    for name, values in zip(orders[ranks], flat.split(lengths)[::2], strict=True):
        assert torch.equal(values, source.entries[f"param/{name}"].read())
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)


def test_the_configuration_says_how_large_sub_groups_are(tmp_path):
    source = _state(dict.fromkeys("abc", (4,)), config={"zero_optimization": {"sub_group_size": 4}})
    path = write_regular(source, tmp_path, "t", Regular(3, 2), allow_pickle=True)
    part = load_pt(path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert [len(flat) for flat in part["fp32_flat_groups"]] == [4, 2]
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("young", ["a", "b"])
def test_groups_that_stepped_less_or_never(tmp_path, stage, young):
    """Of a model that was thawed group by group."""
    source = _state(dict.fromkeys("abc", (4, 3)), groups=[("a",), ("b",), ("c",)])
    steps = source.meta["optimizer"]["scalars"]["step"]
    steps[young] = 1.0
    del steps["c"]
    entries = {name: entry for name, entry in source.entries.items() if not name.startswith("optim/c/")}
    source = type(source)(entries, source.aliases, source.meta | {"frozen": []})
    write_regular(source, tmp_path, "t", Regular(stage, 2), allow_pickle=True)
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_keep_their_master_copies(tmp_path, dtype):
    scale = {"scale": 512.0, "tolerance": 1, "step": 9, "last_overflow": 4}
    config = {"fp16": {"enabled": True, "loss_scale_window": 50}}
    source = _state(SHAPES, config=config, scale=scale if dtype == "float16" else None)
    path = write_regular(source, tmp_path, "t", Regular(2, 2, dtype), allow_pickle=True)
    prefix = "bf16_" if dtype == "bfloat16" else ""
    assert (path / f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt").is_file()
    module = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert {value.dtype for value in module.values()} == {getattr(torch, dtype)}
    assert module["tied"].data_ptr() == module["a"].data_ptr()
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)


def test_values_that_json_does_not_have_are_there_again(tmp_path):
    """As transformers writes `steps_per_print` into every configuration."""
    source = _state(SHAPES, frozen=("ice",), config={"steps_per_print": float("inf")})
    source.meta["optimizer"]["groups"][0]["lr"] = float("nan")
    write_regular(source, tmp_path, "t", Regular(2, 2), allow_pickle=True)
    write_checkpoint(open_deepspeed(tmp_path, allow_pickle=True), tmp_path / "ours")
    meta = open_checkpoint(tmp_path / "ours").meta
    assert meta["config"]["steps_per_print"] == float("inf")
    assert math.isnan(meta["optimizer"]["groups"][0]["lr"])


@pytest.mark.parametrize("layout", [Regular(2, 2), Regular(1, 1, pipeline=(0, 1)), None])
def test_what_modules_keep_beside_tensors(tmp_path, layout):
    source = _state({"0.weight": (3,), "1.weight": (4,)})
    extra = {"1": {"of": 3}} if layout and layout.pipeline else {"": [1], "1": {"of": 3}}
    source = type(source)(source.entries, {}, {**source.meta, "extra": extra})
    if layout is None:
        write_universal(source, tmp_path, "t", allow_pickle=True)
    else:
        write_regular(source, tmp_path, "t", layout, allow_pickle=True)
    assert open_deepspeed(tmp_path / "t", allow_pickle=True).meta["extra"] == extra


def test_a_padded_vocabulary_goes_on_and_is_cut_in_the_universal_layout(tmp_path):
    """As Megatron-DeepSpeed pads it for its ranks: a run that goes on on as many has these rows."""
    info = {"vocabulary_parameter_patterns": ["words"], "original_vocab_size": 3, "universal_checkpoint_version": 0.2}
    (tmp_path / "t").mkdir()
    for rank in (0, 1):
        state = {
            "module": {"words": torch.arange(4.0).view(2, 2) + 4 * rank}, "universal_checkpoint_info": info,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }  # fmt: skip
        torch.save(state, tmp_path / "t" / f"mp_rank_{rank:02d}_model_states.pt")
    source = open_deepspeed(tmp_path / "t", allow_pickle=True)
    assert source.entries["param/words"].read().equal(torch.arange(8.0).view(4, 2))
    write_universal(source, tmp_path / "u", "t", allow_pickle=True)
    back = open_deepspeed(tmp_path / "u", allow_pickle=True)
    assert back.entries["param/words"].read().equal(torch.arange(6.0).view(3, 2))
    assert back.entries["optim/words/exp_avg"].shape == (3, 2)
    back = open_deepspeed(tmp_path / "u", allow_pickle=True, rows={"words": 5})
    assert back.entries["param/words"].read().equal(torch.cat([torch.arange(6.0), torch.zeros(4)]).view(5, 2))
    assert back.entries["optim/words/exp_avg"].shape == (5, 2)


def test_state_dicts_by_part_are_read(tmp_path):
    """Of Megatron-DeepSpeed's models at stage 0: nothing else has the weights."""
    (tmp_path / "t").mkdir()
    model = {"lm": {"head": {"weight": torch.ones(3)}, "layers.0.bias": torch.ones(2)}}
    states = {"module": model, "buffer_names": [], "optimizer": None, "param_shapes": None, "ds_version": "0"}
    torch.save(states, tmp_path / "t" / "mp_rank_00_model_states.pt")
    assert set(open_deepspeed(tmp_path / "t", allow_pickle=True).entries) == {
        "param/lm.head.weight",
        "param/lm.layers.0.bias",
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_pipeline_stages(tmp_path, ranks):
    shapes = {"0.weight": (7, 3), "0.bias": (3,), "2.weight": (3, 3), "10.weight": (5,), "10.ice": (2,)}
    source = _state(shapes, frozen=("10.ice",), buffers=("2.count",))
    source = type(source)(source.entries, {}, source.meta)
    layout = Regular(1, ranks, pipeline=(0, 2), layers=12)
    path = write_regular(source, tmp_path, "t", layout, allow_pickle=True)
    names = {p.name for p in path.iterdir()}
    assert names >= {f"layer_{n}-model_states.pt" for n in ("00", "01", "02", "10", "11")}
    assert torch.load(path / "layer_11-model_states.pt", weights_only=True) == {}
    assert names >= {f"zero_pp_rank_{ranks - 1}_mp_rank_0{s}_optim_states.pt" for s in (0, 1)}
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)
    tied = _state({"tied_modules.embed.weight": (3,), "1.weight": (2,)})
    with pytest.raises(UnsupportedError, match=r"tied_modules\.embed\.weight"):
        write_regular(tied, tmp_path, "u", layout, allow_pickle=True)


def test_tied_layers_of_a_pipeline_are_with_all_that_share_them(tmp_path):
    """Layers 0 and 3 share one key, 1 and 2 another; stages [0, 2) and [2, 4) come to the keys in different order."""
    a, b = "tied_modules.a.weight", "tied_modules.b.weight"
    source = _state({a: (3,), b: (4,), "1.bias": (2,), "3.bias": (2,)}, groups=[(a, b, "1.bias", "3.bias")])
    source = type(source)(source.entries, {}, source.meta)
    layout = Regular(1, 2, pipeline=(0, 2), tied=(("a", (0, 3)), ("b", (1, 2))))
    path = write_regular(source, tmp_path, "t", layout, allow_pickle=True)
    shapes = [torch.load(path / f"mp_rank_0{s}_model_states.pt", weights_only=True)["param_shapes"][0] for s in (0, 1)]
    assert [list(own) for own in shapes] == [[a, b, "1.bias"], [b, a, "3.bias"]]
    layers = [torch.load(path / f"layer_0{n}-model_states.pt", weights_only=True) for n in range(4)]
    assert [sorted(own) for own in layers] == [["weight"], ["bias", "weight"], ["weight"], ["bias", "weight"]]
    assert torch.equal(layers[0]["weight"], layers[3]["weight"])
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert set(back.entries) == set(source.entries)
    assert all(torch.equal(back.entries[key].read(), entry.read()) for key, entry in source.entries.items())


def test_untied_parts_of_tied_layers_are_each_stages_own(tmp_path):
    """DeepSpeed calls the copies on all stages alike; here that of layer 3 is called so. Functions have no files."""
    word, place, copy = "tied_modules.e.word", "tied_modules.e.place", "3.place"
    shapes = {word: (3,), place: (2,), "1.bias": (2,), copy: (2,), "2.bias": (4,)}
    source = _state(shapes, groups=[(word, place, "1.bias", "2.bias", copy)])
    source = type(source)(source.entries, {}, source.meta)
    layout = Regular(1, 1, pipeline=(0, 2), layers=4, tied=(("e", (0, 3)),), functions=(3,))
    path = write_regular(source, tmp_path, "t", layout, allow_pickle=True)
    states = [torch.load(path / f"mp_rank_0{s}_model_states.pt", weights_only=True) for s in (0, 1)]
    assert [list(state["param_shapes"][0]) for state in states] == [[word, place, "1.bias"], [word, place, "2.bias"]]
    assert sorted(p.name for p in path.glob("layer_*")) == [f"layer_0{n}-model_states.pt" for n in range(3)]
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert back.entries.keys() == {key for key in source.entries if copy not in key}
    assert all(torch.equal(entry.read(), source.entries[key].read()) for key, entry in back.entries.items())
    (left_out,) = back.meta["left_out"]
    assert left_out.startswith(place)


def test_a_state_dict_of_dicts_is_written_as_one(tmp_path):
    source = _state({"lm.enc.0.w": (3,), "lm.enc.0.b": (2,), "lm.words": (4,), "head": (2,)})
    layout = Regular(1, 2, nested=("lm", "lm.enc", "lm.none"))
    path = write_regular(source, tmp_path, "t", layout, allow_pickle=True)
    module = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert module.keys() == {"lm", "head", "tied"}
    assert module["lm"].keys() == {"enc", "words", "none"}
    assert module["lm"]["enc"].keys() == {"0.w", "0.b"}
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)


def test_layer_files_that_are_numbered_by_a_tensor_axis_of_one_are_read(tmp_path):
    source = _state({"0.weight": (3,), "1.weight": (4,)})
    source = type(source)(source.entries, {}, source.meta)
    path = write_regular(source, tmp_path, "t", Regular(1, 1, pipeline=(0, 1), place="model_00"), allow_pickle=True)
    assert sorted(p.name for p in path.glob("layer*")) == [f"layer_0{n}-model_00-model_states.pt" for n in (0, 1)]
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)
    torch.save({}, path / "layer_00-model_01-model_states.pt")
    with pytest.raises(UnsupportedError, match="2 tensor-parallel ranks and no universal_checkpoint_info"):
        open_deepspeed(tmp_path, allow_pickle=True)


def test_tied_layers_of_a_pipeline_are_read(tmp_path):
    """Both stages have the tied layer, under its own name with the optimizer and as a numbered layer with the model."""
    source = _state({"0.weight": (3,), "1.weight": (4,)}, groups=[("0.weight", "1.weight")])
    source = type(source)(source.entries, {}, source.meta)
    path = write_regular(source, tmp_path, "t", Regular(1, 1, pipeline=(0, 1)), allow_pickle=True)
    shape = {"tied_modules.embed.weight": torch.Size([3])}
    for stage in (0, 1):
        model = torch.load(path / f"mp_rank_0{stage}_model_states.pt", weights_only=True)
        torch.save({**model, "param_shapes": [shape]}, path / f"mp_rank_0{stage}_model_states.pt")
        torch.save({"weight": torch.ones(3)}, path / f"layer_0{stage}-model_states.pt")
    stage_0 = (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
    (path / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(stage_0)
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert {n for n in back.entries if n.startswith("param/")} == {"param/tied_modules.embed.weight"}
    assert torch.equal(back.entries["param/tied_modules.embed.weight"].read(), source.entries["param/0.weight"].read())


@pytest.mark.parametrize(("stage", "ranks", "experts"), [(1, 2, 1), (1, 2, 2), (2, 4, 2), (2, 4, 4)])
def test_experts_over_ranks(tmp_path, stage, ranks, experts):
    names = _expert_names(["moe.0", "moe.1"], range(4), ["w", "b"])
    shapes = {"gate": (4, 3), **{n: (3, 5) if n.endswith("w") else (5,) for n in names}}
    # In the order in which DeepSpeed has them: those of the first rank, then those of the second, ...
    each = 4 // experts
    order = [
        n
        for owner in range(experts)
        for n in names
        if owner * each <= int(n.split("deepspeed_experts.")[1].split(".")[0]) < (owner + 1) * each
    ]
    source = _state(shapes, groups=[("gate",), order])
    source.meta["optimizer"]["groups"][1] |= {"moe": True, "name": f"ep_size_{experts}"}
    path = write_regular(source, tmp_path, "t", Regular(stage, ranks, experts=experts), allow_pickle=True)
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
    assert model["num_experts"] == [4, 4]
    assert len(model["param_shapes"][1]) == 4 * each
    assert set(model["module"]) == {"gate", "tied"}
    expert = torch.load(path / "layer_1_expert_3_mp_rank_00_model_states.pt", weights_only=True)
    assert set(expert) == {EXPERTS.format("moe.1", 3, leaf) for leaf in "wb"}
    _same(open_deepspeed(tmp_path, allow_pickle=True), source)
    with pytest.raises(CheckpointError, match="do not divide over 3 ranks"):
        write_regular(source, tmp_path, "u", Regular(1, 3, experts=3), allow_pickle=True)
    mixed = _state(shapes, groups=[("gate", *order)])
    with pytest.raises(CheckpointError, match="mixes experts"):
        write_regular(mixed, tmp_path / "m", "u", Regular(1, 2, experts=2), allow_pickle=True)


def test_the_files_name_deepspeeds_classes_and_nothing_else(tmp_path):
    import pickletools
    import zipfile

    scale = {"scale": 512.0, "tolerance": 1, "step": 9, "last_overflow": 4}
    source = _state(SHAPES, scale=scale, config={"fp16": {"hysteresis": 3}})
    path = write_regular(source, tmp_path, "t", Regular(2, 1, "float16"), allow_pickle=True)
    found = {}
    for file in path.iterdir():
        with zipfile.ZipFile(file) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            for code, argument, _ in pickletools.genops(archive.read(name)):
                if code.name == "GLOBAL":
                    found.setdefault(argument.split(" ")[0].partition(".")[0], set()).add(argument)
    assert set(found) == {"torch", "collections", "deepspeed"}
    assert found["deepspeed"] == {
        "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
        "deepspeed.utils.tensor_fragment fragment_address",
    }
    with pytest.raises((pickle.UnpicklingError, ModuleNotFoundError)):
        torch.load(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=True)


def test_what_does_not_fit_is_refused(tmp_path):
    source = _state(SHAPES)

    def refused(changed, layout=Regular(2, 2), error=CheckpointError, tag="x"):  # noqa: B008  frozen
        with pytest.raises(error) as caught:
            write_regular(changed, tmp_path, tag, layout, allow_pickle=True)
        assert not (tmp_path / tag).exists()
        for left in tmp_path.iterdir():
            assert left.name == "there" or left.name == "latest", left
        return caught.value

    def changed(**entries):
        return type(source)({**source.entries, **entries}, source.aliases, source.meta)

    with pytest.raises(UnsupportedError, match="pickle"):
        write_regular(source, tmp_path, "x", Regular(1, 1))
    write_regular(source, tmp_path, "there", Regular(1, 1), allow_pickle=True)
    with pytest.raises(CheckpointError, match="exists"):
        write_regular(source, tmp_path, "there", Regular(1, 1), allow_pickle=True)
    no_names = type(source)(source.entries, {}, {**source.meta, "optimizer": {"groups": [{}]}})
    assert "names of the parameters of 0" in str(refused(no_names))
    assert "do not name every" in str(refused(source, Regular(1, 1, groups=(("a", "b"),))))
    assert "named twice" in str(refused(source, Regular(1, 1, groups=((*SHAPES, "a"),))))
    odd = changed(**{"optim/a/exp_avg": source.entries["optim/b/exp_avg"]})
    assert "of shape [5]" in str(refused(odd, error=UnsupportedError))
    lacking = dict(source.entries)
    del lacking["optim/a/exp_avg"]
    assert "is absent" in str(refused(type(source)(lacking, {}, source.meta), error=UnsupportedError))
    source.meta["optimizer"]["scalars"]["step"]["a"] = 9.0
    assert "differ in 'step'" in str(refused(source, error=UnsupportedError))
    for bad in ({"stage": 4}, {"stage": 3, "experts": 2}, {"stage": 2, "pipeline": (0, 1)}, {"experts": 3}):
        with pytest.raises(UnsupportedError, match="has no"):
            Regular(**{"stage": 1, "ranks": 2, **bad})


def test_frozen_and_empty_parameters_are_in_no_group(tmp_path):
    """ds_zero names them with the others; DeepSpeed's flat tensors do not have them."""
    shapes = {"a": (4, 3), "ice": (2,), "none": (0, 3)}
    source = _state(shapes, frozen=("ice",), groups=[("a", "ice", "none")])
    path = write_regular(source, tmp_path, "t", Regular(2, 2), allow_pickle=True)
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)
    assert [list(group) for group in model["param_shapes"]] == [["a"]]
    assert list(model["frozen_param_shapes"]) == ["ice", "none"]
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert {n for n in back.entries if n.startswith("param/")} == {f"param/{n}" for n in shapes}
    assert back.meta["optimizer"]["names"] == [["a"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_without_a_gradient_so_far_have_a_state_of_zeros(tmp_path, stage):
    """DeepSpeed's optimizer has one, and refuses files without. What is frozen is in no group."""
    shapes = {"a": (4, 3), "spare": (5,), "ice": (2,)}
    source = _state(shapes, frozen=("spare", "ice"), groups=[("spare", "a", "ice")])
    source.meta["frozen"] = ["ice"]
    for out in ("regular", "universal"):
        if out == "regular":
            write_regular(source, tmp_path / out, "t", Regular(stage, 2), allow_pickle=True)
        else:
            write_universal(source, tmp_path / out, "t", allow_pickle=True)
        back = open_deepspeed(tmp_path / out, allow_pickle=True)
        for name, value in [
            ("param/spare", source.entries["param/spare"].read()),
            ("optim/spare/exp_avg", torch.zeros(5)),
        ]:
            assert torch.equal(back.entries[name].read(), value)
        assert torch.equal(back.entries["optim/a/exp_avg"].read(), source.entries["optim/a/exp_avg"].read())
        assert "optim/ice/exp_avg" not in back.entries


def test_universal_files_of_deepspeed_repeat_buffers_and_tied_names(tmp_path):
    scale = {"scale": 1024.0, "tolerance": 2, "step": 3, "last_overflow": 1}
    source = _state(SHAPES, buffers=("count",), config={"gradient_clipping": 0.5}, scale=scale)
    zero = write_universal(source, tmp_path, "t", allow_pickle=True) / "zero"
    for name, value in [("count", torch.tensor([1.0, 2.0])), ("tied", source.entries["param/a"].read())]:
        (zero / name).mkdir()
        torch.save({"param": value}, zero / name / "fp32.pt")
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert set(back.entries) == set(source.entries)
    assert back.aliases == {"param/tied": "param/a"}
    assert load_pt(zero / "optimizer_state.pt")["clip_grad"] == 0.5
    assert back.meta["optimizer"]["loss_scale"] == scale


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_tied_parameters_that_were_left_out_are_no_names_either(tmp_path, stage):
    """As transformers' Trainer saves a model of PEFT whose head is tied."""
    source = _state({"a": (4, 3), "ice": (2,)}, frozen=("ice",))
    source = replace(source, aliases={"param/head": "param/ice"})
    folder = write_regular(source, tmp_path, "t", Regular(stage, 1), allow_pickle=True)
    (file,) = folder.glob("*model_states.pt")
    state = load_pt(file)
    state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    state["module"] = {name: value for name, value in state["module"].items() if name not in ("ice", "head")}
    torch.save(state, tmp_path / "new")  # not over the file that the tensors are mapped from
    (tmp_path / "new").replace(file)
    back = open_deepspeed(tmp_path, allow_pickle=True)
    assert (back.aliases, [n for n in back.entries if n.startswith("param/")]) == ({}, ["param/a"])
    write_checkpoint(back, tmp_path / "ours")


def test_the_order_of_a_group_is_kept(tmp_path):
    """Every permutation of a group's names is written and read back in that order."""
    for number, order in enumerate(itertools.permutations(("a", "b", "c"))):
        source = _state({n: SHAPES[n] for n in ("a", "b", "c")}, groups=[order])
        write_regular(source, tmp_path / str(number), "t", Regular(1, 2), allow_pickle=True)
        _same(open_deepspeed(tmp_path / str(number), allow_pickle=True), source)
    assert ds_ckpt.list_tags(tmp_path) == []

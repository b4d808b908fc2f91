"""Other formats, both ways; what is read from pickles runs nothing."""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ds_ckpt
from ds_ckpt.adapter import load_adapter, save_adapter
from ds_ckpt.convert.dcp import open_dcp, write_dcp
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.convert.fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    weights,
)
from ds_ckpt.convert.huggingface import open_hf, write_hf
from ds_ckpt.convert.part_joins import PartJoins
from ds_ckpt.convert.tensor_source import cast, from_dict, open_checkpoint, write_checkpoint
from ds_config.errors import CheckpointError, UnsupportedError

STATE = {
    "param/embed.weight": torch.randn(31, 8, dtype=torch.bfloat16),
    "param/layer.weight": torch.randn(17, 31),
    "param/frozen.weight": torch.randn(3),
    "buffer/count": torch.tensor(5),
    "optim/layer.weight/exp_avg": torch.randn(17, 31),
    "optim/layer.weight/exp_avg_sq": torch.rand(17, 31),
    "optim/embed.weight/exp_avg": torch.randn(31, 8),
    "optim/embed.weight/exp_avg_sq": torch.rand(31, 8),
}
META = {
    "optimizer": {
        "format": 1,
        "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}],
        "scalars": {"step": {"layer.weight": 7.0, "embed.weight": 7.0}},
        "loss_scale": None,
    },
    "counters": {"steps": 7, "samples": 70, "micro_steps": 0, "skipped": 0},
    "client": {"note": "x"},
}


@pytest.fixture
def path(tmp_path):
    ds_ckpt.save(
        tmp_path / "runs" / "step-7",
        ds_ckpt.full_shards(STATE),
        META,
        aliases={"param/head.weight": "param/embed.weight"},
    )
    return tmp_path / "runs" / "step-7"


def _equal(source, expected):
    assert set(source.entries) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.entries[name].read(), tensor), name
        assert (source.entries[name].shape, source.entries[name].dtype) == (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )


MODEL = {name.partition("/")[2]: t for name, t in STATE.items() if not name.startswith("optim/")}


def test_a_checkpoint_is_a_source_and_a_source_becomes_a_checkpoint(path, tmp_path):
    source = open_checkpoint(path)
    _equal(source, STATE)
    write_checkpoint(source, tmp_path / "copy")
    assert not ds_ckpt.diff(path, tmp_path / "copy")


@pytest.mark.parametrize("limit", [10**9, 510, 1])
def test_to_hugging_face_and_back(path, tmp_path, limit):
    done = write_hf(weights(open_checkpoint(path)), tmp_path / "hf", max_shard_bytes=limit)
    assert len(done.files) == {10**9: 1, 510: 3, 1: 4}[limit]
    loaded = {}
    for file in done.files:
        loaded |= load_file(tmp_path / "hf" / file)
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    assert all(torch.equal(loaded[name], tensor) for name, tensor in MODEL.items())
    assert set(loaded) == set(MODEL)  # tied names are written once
    if limit != 10**9:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in MODEL.values())
        assert set(index["weight_map"]) == set(MODEL)
    _equal(open_hf(tmp_path / "hf"), MODEL)
    with pytest.raises(CheckpointError) as caught:
        write_hf(weights(open_checkpoint(path)), tmp_path / "hf")
    assert caught.value.code == "ckpt-target-exists"


@pytest.mark.parametrize("limit", [10**9, 510])
def test_to_files_of_torch_with_every_name_and_over_former_ones(path, tmp_path, limit):
    source, out = weights(open_checkpoint(path)), tmp_path / "bin"
    done = write_hf(source, out, max_shard_bytes=limit, pickled=True)
    loaded = {}
    for file in done.files:
        loaded |= torch.load(out / file, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in MODEL.items())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    index = out / "pytorch_model.bin.index.json"
    assert index.is_file() == (limit == 510)
    if index.is_file():
        assert set(json.loads(index.read_text())["weight_map"]) == {*MODEL, "head.weight"} == set(loaded)
    (out / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="already holds bin files"):
        write_hf(source, out, pickled=True)
    write_hf(source, out, max_shard_bytes=700, pickled=True, overwrite=True)
    assert len(list(out.glob("pytorch_model-*.bin"))) == 2
    write_hf(source, out, pickled=True, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["adapter_model.bin", "pytorch_model.bin"]


def test_transformers_loads_an_export_strictly(tmp_path):
    """Several files, a tied head that is written once, and another dtype than the checkpoint's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    state = {f"param/{name}": param.detach() for name, param in model.named_parameters()}
    ds_ckpt.save(
        tmp_path / "llama",
        ds_ckpt.full_shards(state),
        META,
        aliases={"param/lm_head.weight": "param/model.embed_tokens.weight"},
    )
    done = write_hf(
        cast(weights(open_checkpoint(tmp_path / "llama")), "bfloat16"), tmp_path / "hf", max_shard_bytes=4096
    )
    assert len(done.files) > 1
    config.save_pretrained(tmp_path / "hf")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(found for key, found in told.items() if "keys" in key), told
    expected = {name: param.detach().bfloat16() for name, param in model.named_parameters()}
    assert {name for name, _ in loaded.named_parameters()} == set(expected)
    assert all(torch.equal(param, expected[name]) for name, param in loaded.named_parameters())


def test_an_export_can_change_the_dtype_and_leave_out_frozen_parameters(path, tmp_path):
    model = weights(open_checkpoint(path), exclude_frozen_parameters=True)
    write_hf(cast(model, "float16"), tmp_path / "hf")
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: t.dtype for name, t in loaded.items()} == {
        "embed.weight": torch.float16,
        "layer.weight": torch.float16,
        "count": torch.int64,
    }
    assert torch.equal(loaded["layer.weight"], STATE["param/layer.weight"].half())


def test_a_hostile_index_is_refused(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("../secret.safetensors", "/etc/passwd", 5):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError):
            open_hf(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match="missing"):
        open_hf(folder)


def test_to_dcp_and_back(path, tmp_path):
    write_dcp(open_checkpoint(path), tmp_path / "dcp")
    target = {"layer.weight": torch.zeros(17, 31), "optim.state.layer.weight.exp_avg": torch.zeros(17, 31)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["layer.weight"], STATE["param/layer.weight"])
    assert torch.equal(target["optim.state.layer.weight.exp_avg"], STATE["optim/layer.weight/exp_avg"])
    with pytest.raises(UnsupportedError) as caught:
        open_dcp(tmp_path / "dcp")
    assert caught.value.code == "ckpt-pickle"
    back = open_dcp(tmp_path / "dcp", allow_pickle=True)
    renamed = {name.replace("buffer/", "param/"): tensor for name, tensor in STATE.items()}
    _equal(back, {**renamed, "param/head.weight": STATE["param/embed.weight"]})


def test_dcp_entries_that_are_pickles_are_named_and_not_read(tmp_path):
    dcp.save(
        {"model": {"w": torch.ones(3)}, "epoch": SimpleNamespace(n=1)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    source = open_dcp(tmp_path / "dcp", allow_pickle=True)
    _equal(source, {"param/w": torch.ones(3)})
    assert source.meta["left_out"] == ["epoch"]


def test_a_dcp_directory_cannot_name_files_elsewhere(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    (data,) = [p.name for p in (tmp_path / "dcp").glob("*.distcp")]
    assert file.read_bytes().count(data.encode()) == 1
    file.write_bytes(file.read_bytes().replace(data.encode(), ("../" + "x" * len(data))[: len(data)].encode()))
    with pytest.raises(CheckpointError, match="outside"):
        open_dcp(tmp_path / "dcp", allow_pickle=True)


class Evil:
    def __reduce__(self):
        return (sys.modules["os"].system, ("touch /tmp/ds-ckpt-was-here",))


def test_code_in_pickles_does_not_run(tmp_path, path, monkeypatch):
    ran = []
    monkeypatch.setattr("os.system", ran.append)
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(CheckpointError, match="it wants"):
        open_dcp(folder, allow_pickle=True)
    (folder / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match="no metadata"):
        open_dcp(folder, allow_pickle=True)
    (folder / ".metadata").write_bytes(b"\x80")
    with pytest.raises(CheckpointError):
        open_dcp(folder, allow_pickle=True)
    made = write_universal(open_checkpoint(path), tmp_path / "u", "t", allow_pickle=True)
    torch.save({"param": Evil()}, made / "zero" / "layer.weight" / "fp32.pt")
    with pytest.raises(CheckpointError) as caught:
        open_deepspeed(tmp_path / "u", allow_pickle=True)
    assert caught.value.code == "ckpt-foreign"
    assert not ran


def test_no_export_writes_through_a_link(path, tmp_path):
    """In a folder of others a name may be a link to somebody else's file."""
    theirs, out = tmp_path / "theirs", tmp_path / "hf"
    theirs.write_text("thesis")
    out.mkdir()
    (out / "model.safetensors.index.json").symlink_to(theirs)
    write_hf(weights(open_checkpoint(path)), out, max_shard_bytes=100)
    assert not (out / "model.safetensors.index.json").is_symlink()
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "latest_universal").symlink_to(theirs)
    (tmp_path / "u" / "t").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError) as caught:
        write_universal(open_checkpoint(path), tmp_path / "u", "t", allow_pickle=True)
    assert caught.value.code == "ckpt-target-exists"
    write_universal(open_checkpoint(path), tmp_path / "u", "s", allow_pickle=True)
    assert (tmp_path / "u" / "latest_universal").read_text() == "s"
    assert theirs.read_text() == "thesis"
    assert not (tmp_path / "nowhere").exists()


def test_to_deepspeeds_universal_layout_and_back(path, tmp_path):
    with pytest.raises(UnsupportedError):
        write_universal(open_checkpoint(path), tmp_path / "u", "t")
    write_universal(open_checkpoint(path), tmp_path / "u", "t", allow_pickle=True)
    assert (tmp_path / "u" / "latest_universal").read_text() == "t"
    back = open_deepspeed(tmp_path / "u", allow_pickle=True)
    expected = {n: t.float() if n.startswith("param/") and "frozen" not in n else t for n, t in STATE.items()}
    _equal(back, expected)
    assert back.meta["optimizer"] == META["optimizer"]
    assert back.meta["counters"] == META["counters"]
    assert back.meta["client"]["note"] == "x"
    assert back.aliases == {"param/head.weight": "param/embed.weight"}
    with pytest.raises(CheckpointError) as caught:
        write_universal(open_checkpoint(path), tmp_path / "u", "t", allow_pickle=True)
    assert caught.value.code == "ckpt-target-exists"


def _regular(folder, stage, world, shapes, states, mp=0, alike=None):
    """Files as DeepSpeed lays them out: `shapes` name -> shape, in one optimizer group, of one model-parallel rank."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {name: torch.randn(shape) for name, shape in shapes.items()}
    if alike is not None:
        full[alike], moments[alike] = torch.ones(shapes[alike]), torch.zeros(shapes[alike])

    def flat(values, rank):
        if stage < 3:
            whole = torch.cat([v.reshape(-1) for v in values.values()])
            each = -(-whole.numel() // world)
            return [whole[rank * each : (rank + 1) * each].clone()]
        out = []
        for value in values.values():
            each = -(-value.numel() // world)
            out.append(
                torch.nn.functional.pad(value.reshape(-1), (0, each * world - value.numel()))[rank * each :][:each]
            )
        return [torch.cat(out[:1]), torch.cat(out[1:])]

    for rank in range(world):
        groups = flat(full, rank)
        per = [{"step": torch.tensor(4.0), "exp_avg": m} for m in flat(moments, rank)]
        inner = {"state": dict(enumerate(per)), "param_groups": [{"lr": 0.1, "params": [0]}]}
        if stage < 3:
            body = {"single_partition_of_fp32_groups": groups, "base_optimizer_state": inner, "clip_grad": 0.25}
        else:
            body = {"fp32_flat_groups": groups, "optimizer_state_dict": inner}
        body |= {"zero_stage": stage, "partition_count": world if stage == 3 else [world]}
        torch.save({"optimizer_state_dict": body}, folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
        name = f"mp_rank_{mp:02d}" if stage < 3 else f"zero_pp_rank_{rank}_mp_rank_{mp:02d}"
        model = {
            "module": {},
            "param_shapes": [{n: torch.Size(s) for n, s in shapes.items()}],
            "global_steps": 4,
            **states,
        }
        torch.save(model, folder / f"{name}_model_states.pt")
    return full, moments


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_regular_layouts_of_any_world_size(tmp_path, stage, world):
    shapes = {"a": (17, 3), "b": (5,), "c": (2, 2, 7)}
    full, moments = _regular(tmp_path / "global_step4", stage, world, shapes, {"shared_params": {"tied": "a"}})
    (tmp_path / "latest").write_text("global_step4")
    source = open_deepspeed(tmp_path, allow_pickle=True)
    _equal(
        source, {**{f"param/{n}": t for n, t in full.items()}, **{f"optim/{n}/exp_avg": t for n, t in moments.items()}}
    )
    assert source.aliases == {"param/tied": "param/a"}
    assert source.meta["optimizer"]["scalars"] == {"step": {"a": 4.0, "b": 4.0, "c": 4.0}}
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, allow_pickle=True)
    assert found["tied"] is found["a"]
    assert torch.equal(found["c"], full["c"])
    (tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    if world > 1:
        with pytest.raises(CheckpointError, match=f"written by {world} ranks, {world - 1} optimizer files"):
            open_deepspeed(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("form", ["torch", "masters", "flat"])
def test_without_zero_the_optimizer_is_read_by_places_in_its_groups(tmp_path, form):
    groups = [["a", "c"], ["b"]]
    full = {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.randn(2, 7)}
    moments = {name: torch.randn_like(value) for name, value in full.items()}
    module = {name: value if form == "torch" else value.bfloat16() for name, value in full.items()}

    def laid(values):
        return [torch.cat([values[n].flatten() for n in names]) for names in groups]

    if form == "flat":
        places, state = [[0], [1]], [{"step": 4, "exp_avg": flat} for flat in laid(moments)]
    else:
        places, state = [[0, 1], [2]], [{"step": torch.tensor(4.0), "exp_avg": moments[n]} for n in ("a", "c", "b")]
    inner = {"state": dict(enumerate(state)), "param_groups": [{"lr": 0.1, "params": params} for params in places]}
    saved = {"optimizer_state_dict": inner, "dynamic_loss_scale": True, "cur_scale": 64.0, "cur_iter": 4}
    saved |= (
        {"fp32_groups_flat": laid(full)} if form == "flat" else {"fp32_groups": [[full[n] for n in g] for g in groups]}
    )
    states = {"module": {**module, "tied": module["a"]}, "optimizer": inner if form == "torch" else saved}
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    source = open_deepspeed(tmp_path, allow_pickle=True, groups=groups)
    _equal(
        source, {**{f"param/{n}": t for n, t in full.items()}, **{f"optim/{n}/exp_avg": t for n, t in moments.items()}}
    )
    assert source.aliases == {"param/tied": "param/a"}
    optimizer = source.meta["optimizer"]
    assert (optimizer["names"], len(optimizer["groups"])) == (groups, 2)
    assert optimizer["scalars"] == {"step": {"a": 4.0, "b": 4.0, "c": 4.0}}
    assert (optimizer["loss_scale"] or {"scale": None})["scale"] == (None if form == "torch" else 64.0)
    for names in (None, [["a", "b"], ["c"]], [["a"], ["b"]] if form != "flat" else [["a", "c"], ["x"]]):
        source = open_deepspeed(tmp_path, allow_pickle=True, groups=names)
        assert source.meta["left_out"] == ["optimizer (no ZeRO: its states carry no parameter names)"]
        assert source.meta["optimizer"] is None
        assert set(source.entries) == {"param/a", "param/b", "param/c"}


def test_layouts_that_do_not_say_how_to_join_are_refused(tmp_path):
    tp = {"checkpoint_parallel_dimensions": {"tp_degree": 2, "pp_degree": 1}}
    _regular(tmp_path / "tp", 2, 1, {"a": (3,)}, tp)
    with pytest.raises(CheckpointError, match="of 2 tensor-parallel ranks, and has files of 1 model-parallel ranks"):
        open_deepspeed(tmp_path / "tp", allow_pickle=True)
    _regular(tmp_path / "tp2", 2, 1, {"a": (3,)}, tp)
    _regular(tmp_path / "tp2", 2, 1, {"a": (3,)}, tp, mp=1)
    with pytest.raises(UnsupportedError, match="2 tensor-parallel ranks and no universal_checkpoint_info"):
        open_deepspeed(tmp_path / "tp2", allow_pickle=True)
    _regular(tmp_path / "moe", 2, 1, {"a": (3,)}, {"ds_autoep_layers": [{"moe_layer_id": 0}]})
    with pytest.raises(UnsupportedError, match="experts of AutoEP"):
        open_deepspeed(tmp_path / "moe", allow_pickle=True)
    _regular(tmp_path / "cut", 1, 1, {"a": (3,)}, {})
    torch.save({}, tmp_path / "cut" / "layer_00-model_01-model_states.pt")
    with pytest.raises(CheckpointError, match="of 2 tensor-parallel ranks"):
        open_deepspeed(tmp_path / "cut", allow_pickle=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_tensor_parallel_ranks_join_as_their_files_say(tmp_path, stage):
    """Two stages of a pipeline, each of two tensor-parallel ranks; model-parallel ranks are numbered stage by stage."""
    info = {
        "universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": [r".*norm$"],
        "parameter_with_row_parallelism_patterns": [r".*down$"],
        "parameter_with_sub_params": [{"patterns": [r".*qkv$"], "shape": [(4, 2, 2), -1], "partition_dim": 0}],
        "sub_param_shard_widths": {r".*qkv$": [[3, 1], [1, 1], [2, 0]]},
    }
    kept = {}
    for mp in range(4):
        at, rank = f"{mp // 2}.", mp % 2
        shapes = {f"{at}norm": (5,), f"{at}up": (2, 5), f"{at}down": (5, 2), f"{at}qkv": ((6, 3), (2, 3))[rank]}
        states = {"universal_checkpoint_info": info, "buffer_names": ["mask"]}
        states["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 2}
        kept[mp] = _regular(tmp_path / "s", stage, 2, shapes, states, mp=mp, alike=f"{at}norm")
    source = open_deepspeed(tmp_path / "s", allow_pickle=True)
    for kind, index in (("param/{}", 0), ("optim/{}/exp_avg", 1)):
        for at in ("0.", "1."):
            first, second = (kept[int(at[0]) * 2 + rank][index] for rank in range(2))
            whole = {f"{at}norm": first[f"{at}norm"]}
            whole[f"{at}up"] = torch.cat([first[f"{at}up"], second[f"{at}up"]])
            whole[f"{at}down"] = torch.cat([first[f"{at}down"], second[f"{at}down"]], 1)
            (q, k, v), (q2, k2, v2) = first[f"{at}qkv"].split([3, 1, 2]), second[f"{at}qkv"].split([1, 1, 0])
            whole[f"{at}qkv"] = torch.cat([q, q2, k, k2, v, v2])
            for name, tensor in whole.items():
                entry = source.entries[kind.format(name)]
                assert (entry.shape, torch.equal(entry.read(), tensor)) == (tuple(tensor.shape), True)
    assert source.meta["optimizer"]["names"] == [[f"{i}.{n}" for i in "01" for n in ("norm", "up", "down", "qkv")]]
    write_universal(source, tmp_path / "u", "t", allow_pickle=True)
    clip = torch.load(tmp_path / "u" / "t" / "zero" / "optimizer_state.pt", weights_only=True)["clip_grad"]
    assert clip == (
        0.25 if stage == 1 else 1.0
    )  # files of stage 3 do not say it: what DeepSpeed clips to unless told otherwise
    _equal(open_deepspeed(tmp_path / "u", allow_pickle=True), {n: e.read() for n, e in source.entries.items()})
    several = b"cdeepspeed.checkpoint.universal_checkpoint\nSubparamShape\n"
    for name, words in {"0.norm": [], "0.up": [b"cat_dim"], "1.qkv": [b"sub_param_shape", several]}.items():
        file = (tmp_path / "u" / "t" / "zero" / name / "exp_avg.pt").read_bytes()
        assert [word in file for word in (b"cat_dim", b"sub_param_shape", several)] == [
            w in words for w in (b"cat_dim", b"sub_param_shape", several)
        ]
    assert torch.load(tmp_path / "u" / "t" / "zero" / "1.down" / "fp32.pt")["cat_dim"] == 1
    told = {**info, "tp_replicated_parameter_patterns": []}
    other = open_deepspeed(tmp_path / "s", allow_pickle=True, parallel_info=told)
    assert other.entries["param/0.norm"].shape == (10,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_of_stage_3_that_say_no_more_than_needed(tmp_path, ranks):
    """Shapes are lists, states a list by group, and neither groups nor counts say which parameters and ranks there are."""
    whole = torch.arange(20.0).view(5, 4)
    info = {"universal_checkpoint_version": 0.4, "parameter_with_row_parallelism_patterns": ["no"]}
    for rank, part in enumerate(whole.split([3, 2] if ranks == 2 else [5])):
        for data, flat in enumerate(part.flatten().chunk(2)):
            stem = f"{tmp_path}/zero_pp_rank_{data}_mp_rank_{rank:02d}"
            said = {"param_shapes": [{"w": list(part.shape)}], "universal_checkpoint_info": info}
            torch.save(said, f"{stem}_model_states.pt")
            inner = {"state": [{"exp_avg": flat * 10}], "param_groups": [{}]}
            outer = {"optimizer_state_dict": inner, "fp32_flat_groups": [flat.clone()], "zero_stage": 3}
            torch.save({"optimizer_state_dict": outer}, f"{stem}_optim_states.pt")
    source = open_deepspeed(tmp_path, allow_pickle=True)
    _equal(source, {"param/w": whole, "optim/w/exp_avg": whole * 10})
    assert source.meta["source"].get("unused_patterns") == (["no"] if ranks == 2 else None)
    write_universal(source, tmp_path / "u", "t", allow_pickle=True, flat=ranks == 1)
    written = torch.load(tmp_path / "u" / "t" / "zero" / "w" / "exp_avg.pt")
    assert (written if ranks == 1 else written["param"]).equal(whole.flatten() * 10 if ranks == 1 else whole * 10)
    _equal(open_deepspeed(tmp_path / "u", allow_pickle=True), {"param/w": whole, "optim/w/exp_avg": whole * 10})


def test_joins_of_parts():
    a, b = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    blocks = {"logical_shape": [2, 8], "ranks": {}}
    for rank in (0, 1):  # columns in turn
        piece = {"shape": [2, 4], "source": [rank, [8, 2]], "dest": [0, [4, 1]], "locations": [rank]}
        blocks["ranks"][rank] = {"shard_shape": [4, 2], "pieces": [piece]}
    info = {
        "affine_map": {"version": 1, "params": {"turns": blocks}},
        "parameter_to_average_patterns": ["mean"],
        "parameter_with_2_sub_params_cat_dim_0": ["glu"],
        "parameter_with_sub_params": [{"patterns": ["three"], "shape": (2, -1), "partition_dim": 0}],
        "vocabulary_parameter_patterns": ["words"],
        "original_vocab_size": 7,
    }
    joins = PartJoins(info, 2)
    assert joins.join("mean", [a, b]).equal((a + b) / 2)
    for name in ("glu", "three"):
        assert joins.join(name, [a, b]).equal(torch.cat([a[:2], b[:2], a[2:], b[2:]]))
    assert joins.join("words", [a, b]).equal(torch.cat([a, b])[:7])
    turns = torch.stack([a.view(2, 4), b.view(2, 4)], 2).view(2, 8)
    assert joins.join("turns", [a, b]).equal(turns)
    assert joins.shape("turns", [(4, 2), (4, 2)]) == (2, 8)
    assert joins.cut_of("three", (8, 2))["sub_param_shape"]["shape"] == [(4, 4), -1]  # a count is no size
    assert joins.unused(["mean", "glu", "words"]) == {"three"}
    with pytest.raises(CheckpointError, match="records no sub_param_shard_widths for three"):
        PartJoins({**info, "universal_checkpoint_version": 0.4}, 2).join("three", [a, b])
    blocks["ranks"][0]["pieces"][0]["scale"] = 0.5
    assert joins.join("turns", [a / 2, b]).equal(turns)
    with pytest.raises(UnsupportedError, match=r"multiplied by 0\.5"):
        joins.join("turns", [a, b], state=True)
    with pytest.raises(CheckpointError, match="leaves 8 elements out"):
        PartJoins({"affine_map": {"params": {"t": {**blocks, "ranks": {1: blocks["ranks"][1]}}}}}, 2).join("t", [a, b])
    with pytest.raises(CheckpointError, match="every rank should have the same"):
        PartJoins({"tp_replicated_parameter_patterns": ["a"]}, 2).join("a", [a, b])
    uneven = {"patterns": ["a"], "shape": [(5, 3), 2], "partition_dim": 0}
    with pytest.raises(CheckpointError, match="do not divide"):
        PartJoins({"parameter_with_sub_params": [uneven]}, 2).join("a", [a, b])
    for hostile in ({"autotp_unsupported_parameter_patterns": {"a": "why"}}, {"affine_map": {"version": 2}}):
        with pytest.raises(UnsupportedError, match="not known"):
            PartJoins(hostile, 2)
    far = {"logical_shape": [2], "ranks": {0: {"pieces": [{"shape": [2], "source": [2**40, [1]], "dest": [0, [1]]}]}}}
    with pytest.raises(CheckpointError):
        PartJoins({"affine_map": {"params": {"a": far}}}, 2).join("a", [a, b])


def test_a_universal_vector_is_whole_where_the_model_file_has_shapes_of_parts(tmp_path):
    """Of a model of tensor-parallel ranks: the first rank's file says `param_shapes`."""
    folder = tmp_path / "u" / "zero" / "bias"
    folder.mkdir(parents=True)
    for name in ("fp32", "exp_avg"):
        torch.save({"param": torch.arange(6.0), "cat_dim": 0}, folder / f"{name}.pt")
    torch.save({"param_groups": [{"lr": 0.1}], "optimizer_state_dict": {}}, folder.parent / "optimizer_state.pt")
    model = {"module": {}, "param_shapes": [{"bias": torch.Size([3])}], "global_steps": 1}
    torch.save(model, tmp_path / "u" / "mp_rank_00_model_states.pt")
    source = open_deepspeed(tmp_path / "u", allow_pickle=True)
    assert source.entries["param/bias"].read().equal(torch.arange(6.0))


def test_full_fp32_weights_of_our_checkpoints(path, tmp_path):
    root = path.parent
    found = get_fp32_state_dict_from_zero_checkpoint(root)
    assert set(found) == {*MODEL, "head.weight"}
    assert found["head.weight"] is found["embed.weight"]
    assert found["embed.weight"].dtype == torch.float32
    assert torch.equal(found["embed.weight"], STATE["param/embed.weight"].float())
    lazy = get_fp32_state_dict_from_zero_checkpoint(root, "step-7", lazy_mode=True)
    assert lazy["embed.weight"].shape == (31, 8)
    assert torch.equal(lazy["head.weight"].contiguous(), found["head.weight"])
    assert "frozen.weight" not in get_fp32_state_dict_from_zero_checkpoint(root, exclude_frozen_parameters=True)
    done = convert_zero_checkpoint_to_fp32_state_dict(root, tmp_path / "out")
    assert load_file(tmp_path / "out" / done.files[0])["embed.weight"].dtype == torch.float32
    with pytest.raises(CheckpointError) as caught:
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")
    assert caught.value.code == "ckpt-not-found"


def test_weights_go_into_a_module(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    saved, fresh = Tied(), Tied()
    state = {f"param/{n}": p.detach() for n, p in saved.named_parameters()}
    ds_ckpt.save(tmp_path / "t", ds_ckpt.full_shards(state), {}, aliases={"param/b.weight": "param/a.weight"})
    load_state_dict_from_zero_checkpoint(fresh, tmp_path, "t")
    assert torch.equal(fresh.a.weight, saved.a.weight)
    assert fresh.b.weight is fresh.a.weight


def test_tensors_in_memory_that_are_the_same_object_are_stored_once(tmp_path):
    w = torch.randn(3)
    write_checkpoint(from_dict({"param/a": w, "param/b": w}), tmp_path / "t")
    assert ds_ckpt.inspect(tmp_path / "t").aliases == {"param/b": "param/a"}


def test_an_adapter_belongs_to_its_base(tmp_path):
    base = {"w": torch.randn(4, 4), "b": torch.randn(4)}
    adapter = {"w.lora_a": torch.randn(2, 4), "w.lora_b": torch.randn(4, 2)}
    saved = save_adapter(tmp_path / "lora", adapter, base, {"rank": 2})
    assert saved.nbytes == sum(t.nbytes for t in adapter.values())
    back = {name: torch.zeros_like(t) for name, t in adapter.items()}
    assert load_adapter(tmp_path / "lora", back, dict(reversed(base.items()))) == {"rank": 2}
    assert all(torch.equal(back[n], adapter[n]) for n in adapter)
    base["b"][0] += 1
    with pytest.raises(CheckpointError) as caught:
        load_adapter(tmp_path / "lora", back, base)
    assert caught.value.code == "ckpt-base-differs"

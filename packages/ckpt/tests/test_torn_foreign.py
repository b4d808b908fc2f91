"""Folders of other programs that were cut, changed or put together wrongly: an error that names the folder, nothing else; names of DCP."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ds_ckpt
from ds_ckpt.cli import register
from ds_ckpt.convert.dcp import open_dcp, write_dcp
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.convert.huggingface import open_hf, write_hf
from ds_ckpt.convert.regular import Regular, write_regular
from ds_ckpt.convert.tensor_source import cast, from_dict, open_checkpoint
from ds_config.errors import CheckpointError

STATE = {
    "param/a.weight": torch.randn(7, 3),
    "param/b.weight": torch.randn(5),
    **{
        f"optim/{n}/{s}": torch.ones(f)
        for n, f in (("a.weight", (7, 3)), ("b.weight", 5))
        for s in ("exp_avg", "exp_avg_sq")
    },
}
META = {
    "optimizer": {
        "format": 1,
        "groups": [{"lr": 0.1}],
        "scalars": {"step": {"a.weight": 7.0, "b.weight": 7.0}},
        "loss_scale": None,
    },
    "counters": {"steps": 7, "samples": 70, "micro_steps": 7, "skipped": 0},
}
GROUPS = (("a.weight", "b.weight"),)


def _read_all(form, folder):
    opened = {"hf": open_hf, "dcp": lambda path: open_dcp(path, allow_pickle=True)}
    source = opened.get(form, lambda path: open_deepspeed(path, allow_pickle=True))(folder)
    return [entry.read() for entry in source.entries.values()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each form."""
    root = tmp_path_factory.mktemp("forms")
    ds_ckpt.save(root / "ours", ds_ckpt.full_shards(STATE), META)
    source = open_checkpoint(root / "ours")
    write_hf(source, root / "hf", max_shard_bytes=60)
    write_dcp(source, root / "dcp")
    write_universal(source, root / "universal", "t", allow_pickle=True)
    write_regular(source, root / "regular", "t", Regular(2, 2, "bfloat16", GROUPS), allow_pickle=True)
    return root


TEARS = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "gone": lambda file: file.unlink(),
    "directory": lambda file: (file.unlink(), file.mkdir()),
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "link to itself": lambda file: (file.unlink(), file.symlink_to(file.name)),
    "another's": lambda file: torch.save({"x": 1}, file),
}
FILES = {
    "hf": "model-00002-of-*.safetensors",
    "dcp": "*.distcp",
    "universal": "t/zero/a.weight/fp32.pt",
    "regular": "t/*_1_mp_rank_00_optim_states.pt",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tear", TEARS)
@pytest.mark.parametrize("form", FILES)
def test_a_torn_file_is_a_typed_error(folders, tmp_path, form, tear):
    """They were errors of safetensors, of pickles and of torch; a pipe hung, and a parameter without its file was left out."""
    folder = shutil.copytree(folders / form, tmp_path / form)
    (file,) = folder.glob(FILES[form])
    TEARS[tear](file)
    with pytest.raises(CheckpointError):
        _read_all(form, folder)


def test_an_index_and_its_files_belong_together(folders, tmp_path):
    folder = shutil.copytree(folders / "hf", tmp_path / "hf")
    save_file({"other": torch.ones(3)}, next(folder.glob("model-00002-of-*.safetensors")))
    with pytest.raises(CheckpointError, match="names tensors that its files do not have"):
        open_hf(folder)


@pytest.mark.parametrize("trained", [True, False])
def test_names_that_begin_with_model_stay(tmp_path, trained):
    """`model.` is torch's own prefix where every name has it; transformers' names have it, too."""
    state = {"param/model.embed": torch.ones(3), **({} if trained else {"param/head": torch.ones(2)})}
    if trained:
        state["optim/model.embed/exp_avg"] = torch.zeros(3)
    write_dcp(from_dict(state), tmp_path / "dcp")
    assert open_dcp(tmp_path / "dcp", allow_pickle=True).entries.keys() == state.keys()
    both = {"model": {"w": torch.ones(3)}, "optim": {"state": {"w": {"exp_avg": torch.ones(3)}}}}
    dcp.save(both, checkpoint_id=tmp_path / "both", no_dist=True)
    assert open_dcp(tmp_path / "both", allow_pickle=True).entries.keys() == {"param/w", "optim/w/exp_avg"}


@pytest.mark.parametrize(
    "names", [("optim/a/b.c",), ("param/x", "buffer/x"), ("param/optim.state.x.y", "param/x"), ("optim/exp_avg",)]
)
def test_names_that_dcp_cannot_tell_apart_are_refused(tmp_path, names):
    with pytest.raises(CheckpointError, match=names[0]):
        write_dcp(from_dict({name: torch.ones(2) for name in names}), tmp_path / "dcp")


def test_what_dcp_has_no_place_for_is_named(tmp_path, capsys):
    import argparse

    from ds_ckpt.cli import main

    ds_ckpt.save(tmp_path / "ours", ds_ckpt.full_shards({"param/a": torch.ones(2), "rng/0/cpu": torch.ones(3)}), {})
    parser = argparse.ArgumentParser()
    register(parser)
    words = ["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--from", "ds", "--to", "dcp"]
    assert main(parser.parse_args(words)) == 0
    assert "left out: rng/0/cpu" in capsys.readouterr().err


def test_weights_are_not_cut_to_integers():
    with pytest.raises(CheckpointError, match="would lose their fractions"):
        cast(from_dict({"a": torch.ones(2)}), "int64")

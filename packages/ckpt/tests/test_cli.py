"""`ds ckpt` from a parser to its output and exit status."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file

import ds_ckpt
from ds_ckpt import cli


def run(*words):
    parser = argparse.ArgumentParser()
    cli.register(parser)
    return cli.main(parser.parse_args([str(w) for w in words]))


@pytest.fixture
def root(tmp_path):
    state = {
        "param/w": torch.arange(6.0).reshape(2, 3),
        "buffer/n": torch.tensor(1),
        "optim/w/exp_avg": torch.ones(2, 3),
    }
    for step in (1, 2):
        state["param/w"] += 1
        ds_ckpt.save(tmp_path / f"s{step}", ds_ckpt.full_shards(state), {"step": step}, aliases={"param/v": "param/w"})
    return tmp_path


def test_inspect(root, capsys):
    assert run("inspect", root) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["s1", "s2"]
    assert run("inspect", root, "--json") == 0
    assert [row["tag"] for row in json.loads(capsys.readouterr().out)] == ["s1", "s2"]
    assert run("inspect", root / "s2", "--tensors") == 0
    out = capsys.readouterr().out
    assert "3 tensors" in out
    assert "param/w  float32[2, 3]  1 pieces" in out
    assert "param/v = param/w" in out
    assert run("inspect", root / "s2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["meta"] == {"step": 2}
    assert run("inspect", root / "nothing") == 2
    assert "ckpt-not-found" in capsys.readouterr().err


def test_verify(root, capsys):
    assert run("verify", root / "s1") == 0
    assert "sound: 1 files, 3 blocks, 56 bytes" in capsys.readouterr().out
    path = root / "s1" / "data-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run("verify", root / "s1") == 1
    assert "is damaged" in capsys.readouterr().err


def test_diff(root, capsys):
    assert run("diff", root / "s1", root / "s2") == 1
    assert capsys.readouterr().out.splitlines() == [
        "other values: param/v",
        "other values: param/w",
        "other meta: step",
    ]
    assert run("diff", root / "s1", root / "s1") == 0
    assert capsys.readouterr().out == "equal\n"


def test_as_json(root, tmp_path, capsys):
    def told(*words, status=0):
        assert run(*words, "--json") == status
        return json.loads(capsys.readouterr().out)

    tensors = told("inspect", root / "s1", "--tensors")
    assert tensors["all_tensors"]["param/w"] == {"dtype": "float32", "shape": [2, 3], "pieces": 1}
    assert tensors["all_aliases"] == {"param/v": "param/w"}
    assert told("verify", root / "s1") == {"num_files": 1, "num_blocks": 3, "nbytes": 56}
    other = told("diff", root / "s1", root / "s2", status=1)
    assert (other["equal"], other["values"], other["meta"]) == (False, ["param/v", "param/w"], ["step"])
    assert told("diff", root / "s1", root / "s1")["equal"] is True
    assert told("export", root, tmp_path / "hf")["files"] == ["model.safetensors"]
    written = told("convert", root / "s1", tmp_path / "out", "--from", "ds", "--to", "hf")
    assert written == {"written": ["model.safetensors"], "left_out": []}


def test_export_takes_the_newest_and_converts(root, tmp_path, capsys):
    assert run("export", root, tmp_path / "hf", "--dtype", "bfloat16", "--max-shard-size", "1KB") == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["w"].dtype == torch.bfloat16
    assert found["w"].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert "1 files" in capsys.readouterr().out
    assert run("export", root, tmp_path / "more", "--max-shard-size", "many") == 2


@pytest.mark.parametrize("form", ["hf", "dcp", "ds"])
def test_convert_there_and_back(root, tmp_path, form, capsys):
    assert run("convert", root / "s1", tmp_path / "out", "--from", "ds", "--to", form) == 0
    words = ["convert", tmp_path / "out", tmp_path / "back", "--from", form, "--to", "ds"]
    if form == "dcp":
        assert run(*words) == 2
        assert "ckpt-pickle" in capsys.readouterr().err
    assert run(*words, "--allow-pickle") == 0
    assert "param/w" not in ds_ckpt.diff(root / "s1", tmp_path / "back").values
    assert "param/w" in ds_ckpt.inspect(tmp_path / "back").tensors


def test_convert_to_deepspeed_and_back(root, tmp_path, capsys):
    """Universal without a stage, as ZeRO writes it with one."""
    state = {"param/w": torch.randn(5, 3), "optim/w/exp_avg": torch.ones(5, 3)}
    names = {"groups": [{"lr": 0.1}], "names": [["w"]], "scalars": {"step": {"w": 2.0}}}
    ds_ckpt.save(tmp_path / "run", ds_ckpt.full_shards(state), {"optimizer": names})
    for number, extra in enumerate(([], ["--stage", 2, "--ranks", 2, "--module-dtype", "bfloat16"], ["--stage", 3])):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        words = ["convert", tmp_path / "run", out, "--from", "ds", "--to", "deepspeed", *extra]
        assert run(*words) == 2
        assert "ckpt-pickle" in capsys.readouterr().err
        assert run(*words, "--allow-pickle") == 0
        assert (out / "converted" / "zero").is_dir() == (not extra)
        assert run("convert", out, back, "--from", "deepspeed", "--to", "ds", "--allow-pickle") == 0
        found = ds_ckpt.diff(tmp_path / "run", back)
        assert not (found.only_first)
        assert not (found.only_second)
        assert not (found.kind)
        assert not (found.values)


@pytest.mark.parametrize("action", ["inspect", "verify", "diff", "export", "convert"])
def test_every_command_takes_the_folder_of_checkpoints(root, tmp_path, action, capsys):
    words = {
        "inspect": [str(root)],
        "verify": [str(root)],
        "diff": [str(root), str(root)],
        "export": [str(root), str(tmp_path / "out")],
        "convert": ["--from", "ds", "--to", "hf", str(root), str(tmp_path / "out")],
    }[action]
    assert run(action, *words) == 0
    capsys.readouterr()
    if action != "inspect":
        assert run(action, *(str(tmp_path / "nowhere") if word == str(root) else word for word in words)) != 0
        assert "there is no directory" in capsys.readouterr().err

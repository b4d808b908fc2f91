"""Checkpoint folders that others write to, too: what is outside or not ours stays; a broken `latest` costs one checkpoint, not the run."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ckpt
import ds_comm
import ds_engine
from ds_ckpt.checkpoint_list import hold_newest
from ds_ckpt.convert.deepspeed_folders import CHECKSUMS
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.coordinator import TRANSFER_S
from ds_config.errors import CheckpointError
from ds_engine.deepspeed_checkpoints import latest_tag
from ds_testing import world

LAYOUT = {"checkpoint": {"layout": "deepspeed"}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def start(stage=1, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return ds_engine.initialize(model=Model(), config=config)[0]


def steps(engine, count=2):
    for number in range(count):
        engine.backward(engine(torch.full((2, 6), float(number + 1))))
        engine.step()


def shared(tmp_path):
    """One folder for all ranks."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_saving_over_what_is_no_checkpoint(tmp_path, stage):
    folder = shared(tmp_path)
    engine = start(stage, **LAYOUT)
    steps(engine)
    if dist.get_rank() == 0:
        (folder / "data").write_text("years of work")
        (folder / "t").mkdir()
        (folder / "t" / "args.json").write_text("{}")
        (folder / "t" / "trainer_states.pt").write_text("a file of the program's")
        (folder / "t.translated").mkdir()
        (folder / "t.translated" / "thesis.txt").write_text("years of work")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(str(folder), "data")
    assert caught.value.code == "ckpt-target-exists"
    for tag in ("t", "t"):  # a checkpoint is replaced
        path = engine.save_checkpoint(str(folder), tag)
    assert sorted(os.listdir(path))[:2] == ["args.json", "checksums.json"]
    assert engine.load_checkpoint(str(folder))[0] == str(folder / "t")
    dist.barrier()
    assert (folder / "t" / "trainer_states.pt").is_file()
    assert (folder / "data").read_text() == "years of work"
    assert (folder / "t.translated" / "thesis.txt").exists()
    assert sorted(os.listdir(folder)) == ["data", "latest", "t", "t.translated"]
    engine.close()


@pytest.mark.parametrize("name", ["../outside/s1", "{folder}/../outside/s1", "link"])
@world(2)
def test_latest_does_not_lead_out_of_its_folder(tmp_path, name):
    top = shared(tmp_path)
    folder, outside = top / "here", top / "outside"
    engine = start(**LAYOUT)
    steps(engine)
    engine.save_checkpoint(str(outside), "s1")
    engine.save_checkpoint(str(folder), "ours")
    before = contents(outside)
    if dist.get_rank() == 0:
        (outside / "s1.translated").mkdir()
        (outside / "s1.translated" / "thesis.txt").write_text("years of work")
        (folder / "link").symlink_to(outside / "s1")
        (folder / "latest").write_text(name.format(folder=folder))
    dist.barrier()
    assert engine.load_checkpoint(str(folder))[0] == str(folder / "ours")  # the newest that is sound and here
    assert contents(outside) == {**before, "s1.translated/thesis.txt": b"years of work"}
    for tag in ("../outside/s1", "link"):
        for call in (engine.load_checkpoint, engine.save_checkpoint):
            with pytest.raises(CheckpointError) as caught:
                call(str(folder), tag)
            assert caught.value.code == "ckpt-outside"
    engine.close()


@pytest.mark.parametrize("content", [b"", b"gone", b"\xff\xfe", b"x" * 5000, b"\0", b"pipe", b"t2"])
@world(2)
def test_a_broken_latest_falls_back_to_the_newest_sound_checkpoint(tmp_path, content):
    folder = shared(tmp_path)
    engine = start(**LAYOUT)
    steps(engine)
    engine.save_checkpoint(str(folder), "t1")
    expected = engine.full_state_dict()
    steps(engine)
    engine.save_checkpoint(str(folder), "t2")
    if dist.get_rank() == 0:
        file = next((folder / "t2").glob("*optim_states.pt"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1  # one bit
        file.write_bytes(data)
        (folder / "latest").unlink()
        if content == b"pipe":
            os.mkfifo(folder / "latest")
        else:
            (folder / "latest").write_bytes(content)
    dist.barrier()
    assert engine.load_checkpoint(str(folder))[0] == str(folder / "t1")
    assert all(torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items())
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(folder), "t2")
    assert caught.value.code == "ckpt-damaged"
    engine.close()


@world(2)
def test_without_anything_sound_a_broken_latest_is_an_error(tmp_path):
    folder = shared(tmp_path)
    engine = start(**LAYOUT)
    steps(engine)
    if dist.get_rank() == 0:
        (folder / "latest").write_text("gone")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(folder))
    assert caught.value.code == "ckpt-latest"
    engine.close()


@world(2)
def test_a_load_while_another_job_saves_and_keeps_one(tmp_path, monkeypatch):
    folder = shared(tmp_path)
    engine = start()
    steps(engine)
    engine.save_checkpoint(str(folder), "t1")
    dist.barrier()

    def newest(storage, _real=ds_ckpt.checkpoint_list.newest_tag, looks=[]):  # noqa: B006 - remembers between calls
        tag = _real(storage)
        looks.append(tag)
        if (
            len(looks) == 1 and (folder / "t1").is_dir()
        ):  # between the choice and the hold: the other job's next checkpoint, and its retention
            (folder / "t1").rename(folder / "t2")
        return tag

    monkeypatch.setattr("ds_ckpt.checkpoint_list.newest_tag", newest)
    assert engine.load_checkpoint(str(folder))[0] == str(folder / "t2")
    dist.barrier()
    tag, release = hold_newest(folder, 60.0)
    assert tag == "t2"
    release()
    engine.close()


@world(2)
def test_ranks_wait_for_the_one_that_reads_a_folder(tmp_path, monkeypatch):
    """A translation takes longer than the watchdog's deadline."""
    waits = []
    monkeypatch.setattr("ds_ckpt.coordinator.extend_timeout", lambda seconds: waits.append(seconds) or nullcontext())
    assert latest_tag(str(tmp_path), ds_comm.world_group()) is None
    assert waits == [TRANSFER_S]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_models_own_state_dict_of_dicts_is_nested_in_the_files(tmp_path, stage):
    """As Megatron's, whose `load_state_dict` takes no other; one of plain names is left as it is."""
    engine = start(stage, **LAYOUT)
    engine.module.state_dict = lambda: {"a": engine.module.a.state_dict(), "b": engine.module.b.state_dict()}
    steps(engine)
    engine.save_checkpoint(tmp_path, tag="t")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    module = torch.load(tmp_path / "t" / name, weights_only=True)["module"]
    assert {part: list(inner) for part, inner in module.items()} == {p: ["bias", "weight"] for p in "ab"}
    del engine.module.state_dict
    expected = [engine(torch.ones(2, 6)).item(), steps(engine), engine(torch.ones(2, 6)).item()]
    engine.load_checkpoint(tmp_path, tag="t")
    assert [engine(torch.ones(2, 6)).item(), steps(engine), engine(torch.ones(2, 6)).item()] == expected
    engine.close()


def test_a_vocabulary_of_a_universal_checkpoint_gets_the_rows_that_the_run_has(tmp_path):
    """DeepSpeed's converter leaves out what Megatron padded it by."""
    engine = start(**LAYOUT)
    steps(engine)
    engine.save_checkpoint(tmp_path, tag="t")
    source = open_deepspeed(tmp_path / "t", allow_pickle=True)
    said = {"cuts": {"a.weight": {"cat_dim": 0, "vocab_tensor": True}}, "vocabulary": 7}
    write_universal(replace(source, meta=source.meta | said), tmp_path / "u", "t", allow_pickle=True)
    expected = engine.full_state_dict()
    engine.close()
    engine = start(checkpoint={"load_universal": True})
    engine.load_checkpoint(tmp_path / "u", tag="t")
    found = engine.full_state_dict()
    assert torch.equal(found["a.weight"][:7], expected["a.weight"][:7])
    assert not found["a.weight"][7].any()
    assert torch.equal(found["b.weight"], expected["b.weight"])
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_weights_whose_optimizer_was_removed_are_no_resume(tmp_path, stage):
    """The optimizer began anew at stage 1, with no word; at stage 3, whose weights are in these files, it was a ValueError of zip."""
    folder = shared(tmp_path)
    engine = start(stage, **LAYOUT)
    steps(engine)
    engine.save_checkpoint(str(folder), "t")
    if dist.get_rank() == 0:
        for file in (folder / "t").glob("*_optim_states.pt"):
            file.unlink()
        (folder / "t" / CHECKSUMS).unlink()  # which DeepSpeed does not write
    dist.barrier()
    other = start(stage, **LAYOUT)
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(str(folder), "t")
    assert caught.value.code == "optimizer-class"
    assert f"{folder}/t has no optimizer state" in caught.value.message
    kept = [p.clone() for p in engine.module.parameters()]
    if stage == 1:
        other.load_checkpoint(str(folder), "t", load_module_only=True)
        assert all(torch.equal(a, b) for a, b in zip(kept, other.module.parameters(), strict=True))
    else:
        with pytest.raises(CheckpointError, match="not one of its parameters") as caught:
            other.load_checkpoint(str(folder), "t", load_module_only=True)
        assert caught.value.code == "ckpt-mismatch"

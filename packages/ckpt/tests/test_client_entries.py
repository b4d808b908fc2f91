"""Client states in DeepSpeed's folders keep their types, in what DeepSpeed wrote and in what is written for it."""

import argparse
import dataclasses
import enum
import sys
from collections import Counter, OrderedDict
from datetime import date

import numpy as np
import pytest
import torch

from ds_ckpt.client_state import decode, encode
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.convert.pickled import load_pt
from ds_ckpt.convert.regular import write_regular
from ds_ckpt.convert.regular_plan import Regular
from ds_ckpt.convert.tensor_source import from_dict, open_checkpoint, write_checkpoint

PLAIN = {
    "shape": (3, (4, [5, None])), "nothing": None, "best": float("inf"), "large": 2**70, "kinds": {1, "a"}, "by_number": {1: (2,)},
    "ordered": OrderedDict(b=1, a=2), "counted": Counter("aab"), "z": 1 + 2j, "raw": b"\x00\xff", "changed": bytearray(b"x"),
    "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
}  # fmt: skip


PARTS = (("param", ""), ("optim", "/exp_avg"), ("optim", "/exp_avg_sq"))


@dataclasses.dataclass
class Progress:
    epoch: int
    day: date


def _client(source):
    return decode(source.meta["client"])


def _same(left, right):
    assert list(left) == list(right)
    for key, value in left.items():
        assert type(value) is type(right[key]), key
        assert value == right[key], key
    assert type(left["shape"][1]) is tuple
    assert list(left["ordered"]) == ["b", "a"]


def test_what_deepspeed_wrote_keeps_its_types(tmp_path):
    state = {"module": {"w": torch.ones(2)}, "global_steps": 3, **PLAIN, "step": torch.tensor(4)}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    source = open_deepspeed(tmp_path, allow_pickle=True)
    assert source.meta["left_out"] == []
    assert source.meta["format"] == 2
    client = _client(source)
    assert torch.equal(client.pop("step"), torch.tensor(4))
    _same(client, PLAIN)
    write_checkpoint(source, tmp_path / "ours")
    _same({k: v for k, v in _client(open_checkpoint(tmp_path / "ours")).items() if k != "step"}, PLAIN)


class Kind(enum.Enum):
    ENCODER = 1


class Gone:
    """A class that nobody has when the file is read."""


def test_objects_of_a_program_are_data_or_left_out(tmp_path, monkeypatch):
    """As Megatron-DeepSpeed saves its arguments and random states, which need its code for a plain unpickler."""
    monkeypatch.setattr(Gone, "__module__", __name__)
    args = argparse.Namespace(layers=2, kind=Kind.ENCODER, gone=Gone(), inner={"also": [Gone()], "kept": 1})
    state = {
        "module": {"w": torch.ones(2)}, "args": args, "numbers": np.arange(6, dtype=np.uint32).reshape(2, 3, order="F"),
        "loss": np.float64(0.5), "lr_scheduler": {"rate": np.float32(0.25)}, "gone": Gone(),
    }  # fmt: skip
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    source = open_deepspeed(tmp_path, allow_pickle=True)
    client = _client(source)
    assert vars(client["args"]) == {"layers": 2, "kind": Kind.ENCODER, "inner": {"kept": 1}}
    assert np.array_equal(client["numbers"], state["numbers"])
    assert client["numbers"].dtype == np.uint32
    assert client["loss"] == 0.5
    assert source.meta["scheduler"] == {"rate": 0.25}
    assert [line.partition(":")[0] for line in source.meta["left_out"]] == [
        "client.args.gone", "client.args.inner.also", "client.gone"
    ]  # fmt: skip


def test_plain_states_need_no_newer_reader(tmp_path):
    torch.save({"module": {}, "epoch": 3, "names": ["a"]}, tmp_path / "mp_rank_00_model_states.pt")
    meta = open_deepspeed(tmp_path, allow_pickle=True).meta
    assert (meta["format"], meta["client"]) == (1, {"epoch": 3, "names": ["a"]})


@pytest.mark.parametrize("layout", ["universal", "regular"])
def test_what_is_written_for_deepspeed_are_values(tmp_path, layout):
    random, args = np.random.default_rng(1).permutation(4), argparse.Namespace(layers=2, kind=Kind.ENCODER)
    more = {"rng": ("MT19937", random, np.float64(0.5)), "args": args}
    gone = {"~": "enum", "class": "not_here:Kind", "value": "A"}  # where the program that has the class does not run
    meta = {"client": encode({**PLAIN, **more, "weights": torch.arange(3), "progress": Progress(2, date(2026, 1, 5))})}
    meta["client"]["gone"] = gone
    meta["optimizer"] = {"groups": [{"lr": 0.1}], "scalars": {"step": {"w": 1.0}}, "names": [["w"]]}
    source = from_dict({f"{kind}/w{state}": torch.ones(2) for kind, state in PARTS}, meta)
    if layout == "universal":
        write_universal(source, tmp_path, "t", allow_pickle=True)
    else:
        write_regular(source, tmp_path, "t", Regular(2, 1), allow_pickle=True)
    file = min((tmp_path / "t").glob("*model_states.pt"))
    written = load_pt(file)
    _same({key: written[key] for key in PLAIN}, PLAIN)
    assert torch.equal(written["weights"], torch.arange(3))
    plain = torch.load(file, weights_only=False)  # as DeepSpeed's programs do
    assert plain["rng"][::2] == ("MT19937", 0.5)
    assert np.array_equal(plain["rng"][1], random)
    assert (plain["args"], plain["gone"]) == (args, gone)
    source = open_deepspeed(tmp_path, allow_pickle=True)
    assert source.meta["client"].pop("gone") == gone
    back = _client(source)
    assert back.pop("progress") == Progress(2, date(2026, 1, 5))  # which no pickle may name: it lies there as JSON
    assert torch.equal(back.pop("weights"), torch.arange(3))
    assert np.array_equal(back.pop("rng")[1], random)
    assert back.pop("args") == args
    _same(back, PLAIN)

"""Writers of files, checkpoints of Megatron, and attention over alignments, as scripts for DeepSpeed use them."""

from __future__ import annotations

import pytest
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.state_dict_factory import MegatronSDLoader, SDLoaderFactory

from ds_config.errors import UnsupportedError

# ---- files


def _fast(path, nbytes=16384, **options):
    handle = AsyncIOBuilder().load().aio_handle(block_size=4096, queue_depth=4)
    return FastFileWriter(
        str(path),
        FastFileWriterConfig(
            handle, handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)), **options
        ),
    )


STATE = {"a": torch.arange(30_000.0), "b": [torch.ones(3, dtype=torch.int8), "text"]}


@pytest.mark.parametrize("zipfile", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_torch_saves_through_pinned_memory(tmp_path, zipfile, double):
    path = tmp_path / "fast.pt"
    path.write_bytes(b"x" * 500_000)  # longer than what is written
    writer = _fast(path, double_buffer=double)
    torch.save(STATE, writer, _use_new_zipfile_serialization=zipfile)
    writer.close()
    writer.close()
    back = torch.load(path)
    assert torch.equal(back["a"], STATE["a"])
    assert back["b"][1] == "text"
    assert writer._stats["bytes"] == writer._stats["aio_bytes"] == path.stat().st_size
    assert writer.file_path() == str(path)
    with pytest.raises(ValueError, match=r"after close\(\)"):
        writer.write(b"x")


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 8193, 16384, 50_001])
def test_every_length_arrives(tmp_path, size):
    data = bytes(i % 251 for i in range(size))
    writer = _fast(tmp_path / "f")
    for start in range(0, size, 3000):
        assert writer.write(data[start : start + 3000]) == len(data[start : start + 3000])
    writer.close()
    assert (tmp_path / "f").read_bytes() == data


def test_other_writers_count(tmp_path, capsys):
    plain, none = PyFileWriter(str(tmp_path / "p.pt")), MockFileWriter(str(tmp_path / "m.pt"))
    for writer in (plain, none):
        torch.save(STATE, writer)
        writer.flush()
        writer.close()
        writer._dump_state()
    assert torch.equal(torch.load(tmp_path / "p.pt")["a"], STATE["a"])
    assert (tmp_path / "m.pt").stat().st_size == 0
    assert none._stats["bytes"] == plain._stats["bytes"] == (tmp_path / "p.pt").stat().st_size
    assert (none._stats["close"], none._stats["flush"], none.fileno()) == (1, plain._stats["flush"], -1)
    assert "write_GB/s" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [True, False])
def test_writers_share_a_list_of_storages(tmp_path, sizes):
    tensors = [torch.arange(5), torch.arange(7.0, dtype=torch.float64), torch.arange(9, dtype=torch.uint8)]
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    parts = []
    for rank in range(3):
        writer = _fast(tmp_path / f"{rank}", num_parallel_writers=3, writer_rank=rank)
        count = writer.save_torch_storage_object_list(storages, sizes)
        writer.close()
        parts.append((tmp_path / f"{rank}").read_bytes())
        assert count == len(parts[-1])
    want = b"".join((len(t).to_bytes(8, "little") if sizes else b"") + t.numpy().tobytes() for t in tensors)
    assert b"".join(parts) == want
    mock = MockFileWriter(str(tmp_path / "m"))
    assert mock.save_torch_storage_object_list(storages, sizes) == len(want)


def test_wrong_writers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="multiple of 8192"):
        _fast(tmp_path / "f", 12288)
    with pytest.raises(ValueError, match="writer_rank 2 of 2"):
        _fast(tmp_path / "f", num_parallel_writers=2, writer_rank=2)


# ---- Megatron's checkpoints


LAYER = "transformer.layers.0."
WHOLE = {
    f"{LAYER}attention.query_key_value.weight": torch.arange(48.0).view(12, 4),
    f"{LAYER}attention.query_key_value.bias": torch.arange(12.0),
    f"{LAYER}attention.dense.weight": torch.arange(16.0).view(4, 4),
    f"{LAYER}mlp.dense_h_to_4h.weight": torch.arange(32.0).view(8, 4),
    f"{LAYER}mlp.dense_h_to_4h.bias": torch.arange(8.0),
    f"{LAYER}mlp.dense_4h_to_h.weight": torch.arange(32.0).view(4, 8),
    "word_embeddings.weight": torch.arange(24.0).view(6, 4),
    "final_layernorm.weight": torch.arange(4.0),
}


def _load(files, ranks, rank, **options):
    loader = SDLoaderFactory.get_sd_loader_json({"type": "Megatron", "checkpoints": files, "version": None}, None)
    return loader.load(ranks, rank, **options)


@pytest.mark.parametrize("version", [0, 2.0])
def test_megatrons_ranks_are_cut_and_joined(tmp_path, version):
    whole = {"module": WHOLE, "checkpoint_version": version, "iteration": 3}
    torch.save(whole, tmp_path / "whole.pt")
    files = []
    for rank in range(2):
        path, state, (scales, count) = _load([str(tmp_path / "whole.pt")], 2, rank)
        assert (path, scales, count, state["iteration"]) == (str(tmp_path / "whole.pt"), None, 1, 3)
        files.append(str(tmp_path / f"{rank}.pt"))
        torch.save({**state, "mp_world_size": 2}, files[-1])
    cut = torch.load(files[0])["module"]
    fused = WHOLE[f"{LAYER}attention.query_key_value.weight"]
    rows = [0, 1, 4, 5, 8, 9] if version == 0 else [0, 1, 2, 3, 4, 5]
    assert torch.equal(cut[f"{LAYER}attention.query_key_value.weight"], fused[rows])
    assert torch.equal(cut[f"{LAYER}mlp.dense_4h_to_h.weight"], WHOLE[f"{LAYER}mlp.dense_4h_to_h.weight"][:, :4])
    _, joined, (_, count) = _load(files, 1, 0)
    assert count == 2
    assert list(joined["module"]) == list(WHOLE)
    for name, tensor in WHOLE.items():
        assert torch.equal(joined["module"][name], tensor), name
    same = _load(files, 2, 1)[1]["module"]
    assert torch.equal(same["word_embeddings.weight"], WHOLE["word_embeddings.weight"][3:])
    assert _load(files, 4, 3, module_key="module", is_pipe_parallel=True)[0] == files[0]


def test_wrong_checkpoints_of_megatron_are_refused(tmp_path, monkeypatch):
    torch.save({"module": {"word_embeddings.weight": torch.ones(4, 2)}, "mp_world_size": 2}, tmp_path / "e.pt")
    files = [str(tmp_path / "e.pt")] * 2
    with pytest.raises(AssertionError, match=r"attention\.dense\.weight is not found in the checkpoint"):
        _load(files, 1, 0)
    monkeypatch.setattr(MegatronSDLoader, "sanity_check", lambda self, ckpt_file_name: None)
    assert _load(files, 1, 0)[1]["module"]["word_embeddings.weight"].shape == (8, 2)
    with pytest.raises(AssertionError, match="2 does not divide 3"):
        _load(files, 3, 0)
    with pytest.raises(AssertionError, match="1 files of a checkpoint of 2 ranks"):
        _load(files[:1], 1, 0)
    with pytest.raises(UnsupportedError, match="quantize"):
        _load(files, 2, 0, quantize=True)
    with pytest.raises(AssertionError, match="bert checkpoint type"):
        SDLoaderFactory.get_sd_loader(files, None, "bert")
    assert SDLoaderFactory.get_sd_loader_json({"type": "BLOOM", "checkpoints": [], "version": 1})["version"] == 1


# ---- attention over alignments


def test_alignments():
    q, k, v = (torch.randn(2, 3, 20, 2, 4, requires_grad=True) for _ in range(3))
    mask = torch.zeros(2, 3, 1, 1, 20).masked_fill_(torch.rand(2, 3, 1, 1, 20) < 0.3, -1e9)
    pair = torch.randn(2, 1, 2, 20, 20, requires_grad=True)
    out = DS4Sci_EvoformerAttention(q, k, v, [mask, pair])
    scores = torch.einsum("brqhd,brkhd->brhqk", q, k) / 2 + mask + pair
    want = torch.einsum("brhqk,brkhd->brqhd", scores.softmax(-1), v)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), pair)[0],
        torch.autograd.grad(want.square().sum(), pair)[0],
        rtol=1e-3,
        atol=1e-4,
    )
    torch.testing.assert_close(
        DS4Sci_EvoformerAttention(q[0], k[0], v[0], []), DS4Sci_EvoformerAttention(q, k, v, [])[0]
    )
    with pytest.raises(AssertionError, match="bias2 shape is incorrect"):
        DS4Sci_EvoformerAttention(q, k, v, [mask, mask])
    with pytest.raises(AssertionError, match="3 biases"):
        DS4Sci_EvoformerAttention(q, k, v, [mask, pair, pair])

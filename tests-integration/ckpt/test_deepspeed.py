"""Against the real thing: what DeepSpeed writes resumes here, what we export resumes there. Needs its environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt.convert.deepspeed_layout import open_deepspeed, write_universal
from ds_ckpt.convert.pickled import load_pt
from ds_ckpt.convert.regular import Regular, write_regular
from ds_ckpt.convert.tensor_source import open_checkpoint, write_checkpoint

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PEER = HERE.parents[1] / ".nox" / "peer-deepspeed" / "bin" / "python"


def _run(action, folder, *rest, script="deepspeed_run.py"):
    if not PEER.exists():
        pytest.skip("DeepSpeed's environment is missing; make it with: python tools/bench/peers.py deepspeed")
    port = 29_000 + os.getpid() % 900
    command = [str(PEER), "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += [str(HERE / script), action, str(folder), *map(str, rest)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(
    scope="module", params=[(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")], ids=str
)
def written(request, tmp_path_factory):
    stage, dtype = request.param
    folder = tmp_path_factory.mktemp(f"stage{stage}-{dtype}")
    _run("write", folder, stage, dtype)
    return folder, stage, dtype


class Net(torch.nn.Module):
    """The same model as in deepspeed_run.py."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(17, 31)
        self.frozen = torch.nn.Linear(31, 31)
        self.second = torch.nn.Linear(31, 17, bias=False)
        self.register_buffer("scale", torch.zeros(3))

    def forward(self, x):
        return self.second(torch.tanh(self.frozen(torch.tanh(self.first(x))))) * self.scale[1]


@pytest.mark.timeout(400)
def test_what_deepspeed_wrote_is_read_to_the_bit(written):
    folder, stage, dtype = written
    source = open_deepspeed(folder, allow_pickle=True)
    truth = torch.load(folder / "truth.pt", weights_only=True)
    for name, value in truth.items():
        assert torch.equal(source.entries[name].read(), value), name
    assert source.entries["param/frozen.weight"].dtype == dtype
    assert source.entries["buffer/scale"].read().float().tolist() == [0.5, 2.0, 1.0]
    assert source.meta["counters"]["steps"] == 3
    assert source.meta["client"]["note"] == "hello"
    assert set(source.meta["optimizer"]["scalars"]["step"].values()) == {3.0}
    assert [g["weight_decay"] for g in source.meta["optimizer"]["groups"]] == ([0.1, 0.0] if stage < 3 else [0.1])


@pytest.mark.timeout(400)
def test_it_resumes_in_one_process_with_the_same_next_losses(written, tmp_path):
    folder, _, dtype = written
    if dtype != "float32":
        pytest.skip("losses are compared in float32; the other types are compared tensor by tensor")
    write_checkpoint(open_deepspeed(folder, allow_pickle=True), tmp_path / "ours")
    source = open_checkpoint(tmp_path / "ours")
    net = Net()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            kind = "buffer" if name == "scale" else "param"
            tensor.copy_(source.entries[f"{kind}/{name}"].read())
    names = [n for n, _ in net.named_parameters() if not n.startswith("frozen")]
    groups = [{**group, "params": []} for group in source.meta["optimizer"]["groups"]]
    for name, param in net.named_parameters():
        if name in names:
            groups[param.dim() <= 1 and len(groups) > 1]["params"].append(param)
        else:
            param.requires_grad_(False)
    known = ("params", "lr", "betas", "eps", "weight_decay")
    optimizer = torch.optim.AdamW([{k: v for k, v in g.items() if k in known} for g in groups])
    for name, param in net.named_parameters():
        if name in names:
            step = torch.tensor(source.meta["optimizer"]["scalars"]["step"][name])
            states = {key: source.entries[f"optim/{name}/{key}"].read() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": step, **states}
    data = [torch.Generator().manual_seed(7 + rank) for rank in range(2)]
    for _ in range(3):
        for generator in data:
            torch.randn(4, 17, generator=generator)
    losses = []
    for _ in range(2):
        batches = [torch.randn(4, 17, generator=generator) for generator in data]
        each = [(net(x) - x).pow(2).mean() for x in batches]
        losses.append([loss.item() for loss in each])
        optimizer.zero_grad()
        (sum(each) / 2).backward()
        optimizer.step()
    theirs = json.loads((folder / "losses-write.json").read_text())
    assert torch.allclose(torch.tensor(losses).t(), torch.tensor(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.timeout(400)
def test_what_we_export_resumes_in_deepspeed_with_the_same_next_losses(written, tmp_path):
    folder, stage, dtype = written
    write_checkpoint(open_deepspeed(folder, allow_pickle=True), tmp_path / "ours")
    assert ds_ckpt.verify(tmp_path / "ours").num_blocks > 10
    out = tmp_path / "universal"
    out.mkdir()
    write_universal(open_checkpoint(tmp_path / "ours"), out, "step3", allow_pickle=True)
    _run("resume", out, stage, dtype)
    theirs = torch.tensor(json.loads((folder / "losses-write.json").read_text()))
    resumed = torch.tensor(json.loads((out / "losses-resume.json").read_text()))
    assert torch.allclose(resumed, theirs, rtol=1e-6, atol=1e-6)
    again = open_deepspeed(out, allow_pickle=True)
    ours = open_checkpoint(tmp_path / "ours")
    for name, entry in ours.entries.items():
        assert torch.equal(again.entries[name].read(), entry.read()), name
    assert again.meta["optimizer"]["scalars"] == ours.meta["optimizer"]["scalars"]


def _flats(folder):
    """Every flat tensor of the optimizer's files: file name -> tensors in order."""
    out = {}
    for file in sorted(folder.glob("*_optim_states.pt")):
        body = load_pt(file)["optimizer_state_dict"]
        inner = body.get("base_optimizer_state") or body["optimizer_state_dict"]
        states = [v for _, s in sorted(inner["state"].items()) for _, v in sorted(s.items())]
        found = [*(body.get("single_partition_of_fp32_groups") or body["fp32_flat_groups"]), *states]
        out[file.name] = [torch.as_tensor(tensor) for tensor in found]
    return out


@pytest.mark.timeout(400)
def test_the_regular_layout_is_written_as_deepspeed_writes_it_and_resumes_there(written, tmp_path):
    """The same files with the same flat tensors, to the bit; and the same next losses."""
    folder, stage, dtype = written
    write_checkpoint(open_deepspeed(folder, allow_pickle=True), tmp_path / "ours")
    out = tmp_path / "regular"
    path = write_regular(open_checkpoint(tmp_path / "ours"), out, "step3", Regular(stage, 2, dtype), allow_pickle=True)
    theirs, ours = folder / "step3", _flats(path)
    assert {p.name for p in path.iterdir()} == {p.name for p in theirs.iterdir() if p.suffix == ".pt"}
    for name, tensors in _flats(theirs).items():
        assert len(tensors) == len(ours[name])
        for ours_, theirs_ in zip(ours[name], tensors, strict=True):
            assert ours_.shape == theirs_.shape
            assert stage == 3 or torch.equal(ours_, theirs_), name  # at stage 3 its padding is whatever was in memory
    back, source = (open_deepspeed(root, allow_pickle=True) for root in (out, folder))
    assert back.entries.keys() == source.entries.keys()
    for name, entry in source.entries.items():
        assert torch.equal(back.entries[name].read(), entry.read()), name
    for file in sorted(theirs.glob("*_model_states.pt")):
        wrote, made = load_pt(file)["module"], load_pt(path / file.name)["module"]
        assert wrote.keys() == made.keys()
        for name, tensor in wrote.items():
            assert torch.equal(made[name], tensor), name
            assert made[name].dtype == tensor.dtype
    _run("continue", out, stage, dtype)
    expected = torch.tensor(json.loads((folder / "losses-write.json").read_text()))
    resumed = torch.tensor(json.loads((out / "losses-continue.json").read_text()))
    assert torch.equal(resumed, expected)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "layout"), [("pipeline", Regular(1, 1, pipeline=(0, 2))), ("moe", Regular(2, 2, experts=2))]
)
def test_pipeline_stages_and_experts(tmp_path, kind, layout):
    """What DeepSpeed wrote is read and written again: the same flat tensors, and the same next losses there."""
    folder, out = tmp_path / "theirs", tmp_path / "regular"
    folder.mkdir()
    _run("write", folder, kind, script="deepspeed_parts.py")
    write_checkpoint(open_deepspeed(folder, allow_pickle=True), tmp_path / "ours")
    path = write_regular(open_checkpoint(tmp_path / "ours"), out, "step3", layout, allow_pickle=True)
    theirs, ours = folder / "step3", _flats(path)
    assert {p.name for p in path.iterdir()} == {p.name for p in theirs.iterdir()}
    for name, tensors in _flats(theirs).items():
        assert len(tensors) == len(ours[name])
        assert all(torch.equal(a, b) for a, b in zip(ours[name], tensors, strict=True)), name
    for file in [*theirs.glob("layer_*")]:
        made = load_pt(path / file.name)
        assert all(torch.equal(made[n], t) for n, t in load_pt(file).items()), file.name
    _run("continue", out, kind, script="deepspeed_parts.py")
    written = json.loads((folder / "losses-write.json").read_text())
    assert json.loads((out / "losses-continue.json").read_text()) == written

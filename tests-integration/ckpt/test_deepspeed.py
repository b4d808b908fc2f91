"""Against the real thing: what DeepSpeed writes resumes here, what we export resumes there. Needs its environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import ds_ckpt
from ds_ckpt.convert.deepspeed import open_deepspeed, write_universal
from ds_ckpt.convert.tensors import open_checkpoint, write_checkpoint

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PEER = HERE.parents[1] / ".nox" / "peer-deepspeed" / "bin" / "python"


def _run(action, folder, stage, dtype):
    if not PEER.exists():
        pytest.skip("DeepSpeed's environment is missing; make it with: python tools/bench/peers.py deepspeed")
    port = 29_000 + os.getpid() % 900
    command = [str(PEER), "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += [str(HERE / "deepspeed_run.py"), action, str(folder), str(stage), dtype]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module", params=[(1, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")], ids=str)
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

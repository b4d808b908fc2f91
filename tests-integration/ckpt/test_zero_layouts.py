"""Training states of ds-zero: saved at every stage, number of ranks and layout, loaded in every other, the same run goes on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ckpt
import ds_zero
from ds_ckpt.convert.deepspeed_layout import open_deepspeed
from ds_ckpt.convert.regular import Regular, write_regular
from ds_ckpt.convert.tensor_source import open_checkpoint
from ds_testing import world

# (stage, ranks, how units are cut)
LAYOUTS = [
    *((stage, ranks, "flat") for stage in range(4) for ranks in (1, 2, 3, 4)),
    *((stage, ranks, cut) for stage in (1, 2, 3) for ranks in (2, 3) for cut in ("dim0", "whole")),
]


class Net(nn.Module):
    """Primes, a scalar-like vector, a tied weight, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 17)
        self.gain = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.down = nn.Linear(17, 7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = torch.tanh(self.up(self.embed(tokens))) * self.gain
        return self.head(self.down(x)).mean(0) + self.none.sum()


def _batch(step):
    return torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(step))


class Run:
    """A model and its sharded optimizer; every rank takes the whole batch, so that runs on any number are comparable."""

    def __init__(self, layout):
        stage, ranks, cut = layout
        assert ranks == dist.get_world_size()
        torch.manual_seed(ranks)
        self.model = Net()
        groups_ = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1]},
            {"params": [p for p in self.model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(groups_, lr=0.05, weight_decay=0.1)
        self.optimizer = ds_zero.shard(self.model, inner, stage=stage, layout=cut)

    def step(self, number):
        loss = self.model(_batch(number)).pow(2).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, path, **meta):
        ds_ckpt.save(path, self.optimizer.shards(), {"optimizer": self.optimizer.common_state_dict(), **meta})

    def load(self, path):
        self.optimizer.materialize({name: t.shape for name, t in ds_ckpt.inspect(path).tensors.items()})
        meta = ds_ckpt.load(path, self.optimizer.shards())
        self.optimizer.load_state_dict(meta["optimizer"])
        self.optimizer.refresh()

    def same(self, truth):
        """Whether every element this rank holds is that of the whole tensors `truth`."""
        for local in self.optimizer.shards():
            s = local.shard
            part = truth[s.name][tuple(slice(o, o + n) for o, n in zip(s.box.offset, s.box.shape, strict=True))]
            assert torch.equal(local.data.reshape(-1), part.reshape(-1)[s.interval.start : s.interval.stop]), s


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the tests below leave for the ones after them; they run in the order of this file."""
    return tmp_path_factory.mktemp("layouts")


def _name(layout):
    return "stage{}-ranks{}-{}".format(*layout)


def _save(folder, ranks):
    for layout in LAYOUTS:
        if layout[1] == ranks:
            run = Run(layout)
            run.load(folder / "first")
            run.save(folder / _name(layout))
            run.optimizer.close()


def _load(folder, ranks, sources_of):
    manifest = ds_ckpt.inspect(folder / "first")
    truth = {n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for n, t in manifest.tensors.items()}
    meta = ds_ckpt.load(folder / "first", ds_ckpt.full_shards(truth))
    assert any(t.numel() == 0 for t in truth.values())
    for layout in LAYOUTS:
        if layout[1] == ranks:
            run = Run(layout)
            for source in sources_of(layout):
                run.load(folder / _name(source))
                run.same(truth)
                assert [run.step(3), run.step(4)] == pytest.approx(meta["next"], rel=1e-6), (source, layout)
            run.optimizer.close()


@world(1)
def test_saved_on_one(folder):
    """Also the run that all others must go on with: three steps, saved, and the losses of the next two."""
    ahead = Run((0, 1, "flat"))
    losses = [ahead.step(number) for number in range(5)]
    run = Run((0, 1, "flat"))
    again = [run.step(number) for number in range(3)]
    assert again == losses[:3]
    run.save(folder / "first", next=losses[3:])
    _save(folder, 1)


@world(2)
def test_saved_on_two(folder):
    _save(folder, 2)


@world(3)
def test_saved_on_three(folder):
    _save(folder, 3)


@world(4)
def test_saved_on_four(folder):
    _save(folder, 4)


def _some(target):
    """A sample: every layout is read from three others, and every one is read."""
    at = LAYOUTS.index(target)
    return [LAYOUTS[(at + step) % len(LAYOUTS)] for step in (5, 11, 17)]


def _every(target):
    return LAYOUTS


SAMPLE = pytest.param(_some, id="some")
ALL = pytest.param(_every, id="every", marks=[pytest.mark.slow, pytest.mark.timeout(300)])


@pytest.mark.parametrize("sources_of", [SAMPLE, ALL])
@world(1)
def test_loaded_on_one(folder, sources_of):
    assert len(LAYOUTS) >= 24
    _load(folder, 1, sources_of)


@pytest.mark.parametrize("sources_of", [SAMPLE, ALL])
@world(2, timeout=280)
def test_loaded_on_two(folder, sources_of):
    _load(folder, 2, sources_of)


@pytest.mark.parametrize("sources_of", [SAMPLE, ALL])
@world(3, timeout=280)
def test_loaded_on_three(folder, sources_of):
    _load(folder, 3, sources_of)


@pytest.mark.parametrize("sources_of", [SAMPLE, ALL])
@world(4, timeout=280)
def test_loaded_on_four(folder, sources_of):
    _load(folder, 4, sources_of)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_ours_in_the_files_of_deepspeed(folder, tmp_path, stage):
    """The checkpoint names the parameters of each group in order, so that their flat tensors can be made from it."""
    ours = open_checkpoint(folder / "first")
    write_regular(ours, tmp_path, "t", Regular(stage, 2), allow_pickle=True)
    there = open_deepspeed(tmp_path, allow_pickle=True)
    for name, entry in ours.entries.items():
        if not name.startswith("optim/none/"):  # DeepSpeed has no states for nothing
            assert torch.equal(there.entries[name].read(), entry.read()), name
    assert there.meta["optimizer"]["names"] == [["embed.weight", "up.weight", "down.weight"], ["gain", "up.bias"]]
    assert there.aliases == ours.aliases

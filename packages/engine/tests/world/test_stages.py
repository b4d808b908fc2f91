"""A model in stages under the engine: losses, norms, parameters, evaluation and checkpoints as of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_engine
from ds_ckpt.convert.pickled import load_pt
from ds_config.errors import PlanError, UnsupportedError
from ds_engine import SumLoss
from ds_engine.pipelining import PipelineEngine
from ds_pipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec
from ds_testing import world

WIDTH, MICRO, ACCUMULATION = 8, 2, 4


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH) * 0.3)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def head(words, x):
    return F.linear(x, words.weight)


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut(stages, schedule="1f1b", **options):
    layers = [
        TiedLayerSpec("words", Words),
        *(LayerSpec(Block) for _ in range(6)),
        TiedLayerSpec("words", Words, forward_fn=head),
    ]
    options = {"seed_layers": True, "partition_method": "uniform", "loss_fn": loss_fn} | options
    return PipelineModule(layers, num_stages=stages, schedule=schedule, **options)


def batches(copy, copies, steps):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps * ACCUMULATION):
        tokens = torch.randint(11, (copies * MICRO, 6), generator=generator)
        mine = tokens[copy * MICRO : (copy + 1) * MICRO]
        yield mine[:, :-1], mine[:, 1:]


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.0}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage},
    } | more


def train(engine, data, steps=2):
    return [engine.train_batch(data) for _ in range(steps)]


def values(engine):
    """Of this rank, by the names of the unsplit model."""
    return {name: param.detach().clone() for name, param in engine.module.staged.named_logical()}


def whole_run(copies, steps=2):
    """One process, all data, in a plain loop."""
    words, blocks = None, []
    for index in range(8):
        torch.manual_seed(1234 + index)
        built = Words() if index in (0, 7) else Block()
        words = built if index == 0 else words
        blocks += [built] if 0 < index < 7 else []
    named = {"tied_modules.words.weight": words.weight}
    named |= {f"{i + 1}.{n}": p for i, block in enumerate(blocks) for n, p in block.named_parameters()}
    optimizer = torch.optim.AdamW(list(named.values()), lr=1e-2, weight_decay=0.0)
    losses, norms, streams = [], [], [batches(copy, copies, steps) for copy in range(copies)]
    for _ in range(steps):
        total = 0.0
        for _, stream in ((m, s) for m in range(ACCUMULATION) for s in streams):
            tokens, labels = next(stream)
            x = words(tokens)
            for block in blocks:
                x = block(x)
            loss = loss_fn(head(words, x), labels) / (ACCUMULATION * copies)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in named.items()}


def check(stage, schedule, stages=2, **more):
    model = cut(stages, schedule)
    model_data = model.places.data
    engine, optimizer, _, _ = ds_engine.initialize(model=model, config=config(stage, **more))
    assert isinstance(engine, PipelineEngine)
    data = batches(model_data.rank, model_data.size, 2) if engine.is_first_stage() or engine.is_last_stage() else None
    results = train(engine, data)
    losses, norms, named = whole_run(model_data.size)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6)
    assert [r.norm for r in results] == pytest.approx(norms, rel=1e-5)
    optimizer.close()
    for name, value in values(engine).items():
        assert (value - named[name]).norm() <= 1e-5 * named[name].norm(), (name, stage, schedule)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_two_stages(stage):
    for schedule in ("1f1b", "zb-h1", "zbv"):
        check(stage, schedule)
    check(stage, "1f1b", pipeline={"activation_checkpoint_interval": 2})


@pytest.mark.parametrize("stage", [1, 3])
@world(4)
def test_two_stages_and_copies(stage):
    check(stage, "1f1b")
    check(stage, "zb-h1")


@world(1)
def test_one_stage():
    check(1, "1f1b", stages=1)


@world(2)
def test_low_precision_and_loss_scaling_train():
    for precision in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        engine, _, _, _ = ds_engine.initialize(model=cut(2, "zb-h1"), config=config(2, **precision))
        same = list(batches(0, 1, 1)) * 6
        first, *_, last = train(engine, iter(same), 6)
        assert last.loss < first.loss
        assert not last.skipped
        engine.close()


@world(2)
def test_evaluation_gives_losses_and_logits():
    engine, _, _, _ = ds_engine.initialize(model=cut(2), config=config(1))
    data = list(batches(0, 1, 1))
    mean = engine.eval_batch(iter(data))
    loss, logits = engine.evaluate(iter(data), return_logits=True)
    assert float(loss) == pytest.approx(mean, rel=1e-6)
    if engine.is_last_stage():
        assert logits.shape == (ACCUMULATION * MICRO, 5, 11)
        labels = torch.cat([labels for _, labels in data])
        assert float(loss_fn(logits, labels)) == pytest.approx(mean, rel=1e-5)
    else:
        assert logits is None
    outputs, _ = engine.evaluate(iter(data), compute_loss=False, num_micro_batches=2)
    assert (outputs is None) == (not engine.is_last_stage())
    frozen = next(engine.module.children()).eval()
    losses, _ = engine.evaluate(iter(data), reduce=False)
    if engine.is_last_stage():
        assert [float(loss) for loss in losses] == [
            float(loss_fn(out, labels)) for out, labels in zip(logits.split(MICRO), (y for _, y in data), strict=True)
        ]
    else:
        assert losses is None
    assert torch.is_grad_enabled()
    assert engine.module.training
    assert not frozen.training
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataloader([{"x": x, "y": y} for x, y in data])
    assert engine.train_batch().loss == pytest.approx(mean, rel=1e-6)
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(UnsupportedError):
            call()
    engine.close()


@world(2)
def test_sum_losses_weigh_by_their_counts():
    def summed(logits, labels):
        return SumLoss(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel())

    plain, _, _, _ = ds_engine.initialize(model=cut(2), config=config(1))
    weighed, _, _, _ = ds_engine.initialize(model=cut(2, loss_fn=summed), config=config(1))
    for a, b in zip(train(plain, batches(0, 1, 2)), train(weighed, batches(0, 1, 2)), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.norm == pytest.approx(b.norm, rel=1e-5)
        assert b.tokens == MICRO * 5 * ACCUMULATION
    plain.close()
    weighed.close()


@world(2)
def test_a_checkpoint_of_two_stages_goes_on_with_one_and_back(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    engine, _, _, _ = ds_engine.initialize(model=cut(2, "zb-h1"), config=config(2))
    stream = batches(0, 1, 4)
    train(engine, stream)
    engine.save_checkpoint(folder[0])
    expected = [r.loss for r in train(engine, stream)]
    engine.close()
    # One stage on each of two ranks, which are copies now: both take the same data.
    other, _, _, _ = ds_engine.initialize(model=cut(1), config=config(3))
    other.load_checkpoint(folder[0])
    rest = list(batches(0, 1, 4))[2 * ACCUMULATION :]
    assert [r.loss for r in train(other, iter(rest))] == pytest.approx(expected, rel=1e-5)
    other.close()
    again, _, _, _ = ds_engine.initialize(model=cut(2, "zbv"), config=config(1))
    again.load_checkpoint(folder[0])
    assert [r.loss for r in train(again, iter(rest))] == pytest.approx(expected, rel=1e-5)
    again.close()


@world(2)
def test_a_checkpoint_in_deepspeeds_layer_files_goes_on_with_any_stages(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    layout = {"checkpoint": {"layout": "deepspeed"}}
    engine, _, _, _ = ds_engine.initialize(model=cut(2), config=config(2, **layout))
    stream = batches(0, 1, 4)
    train(engine, stream)
    engine.save_checkpoint(folder[0], "t", client_state={"epoch": 3})
    expected = [r.loss for r in train(engine, stream)]
    tied = dict(engine.module.named_parameters())["tied_modules.words.weight"]
    files = {path.name: path for path in (Path(folder[0]) / "t").iterdir()}
    assert [name for name in sorted(files) if name.startswith("layer")] == [
        f"layer_{number:02d}-model_states.pt" for number in range(7)
    ]  # the head is a function of the words
    file = torch.load(files["layer_00-model_states.pt"], weights_only=True)
    assert {name: value.shape for name, value in file.items()} == {"weight": tied.shape}
    for stage, blocks in enumerate((("1", "2", "3"), ("4", "5", "6"))):
        (shapes,) = torch.load(files[f"mp_rank_0{stage}_model_states.pt"], weights_only=True)["param_shapes"]
        assert {name.split(".")[0] for name in shapes} == {"tied_modules", *blocks}
        file = load_pt(files[f"zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt"])
        assert file["optimizer_state_dict"]["clip_grad"] == 0.05  # what DeepSpeed clips by after it has loaded
    engine.close()
    rest = list(batches(0, 1, 4))[2 * ACCUMULATION :]
    for stages, schedule, zero in ((1, "1f1b", 3), (2, "zbv", 1)):
        other, _, _, _ = ds_engine.initialize(model=cut(stages, schedule), config=config(zero, **layout))
        path, client = other.load_checkpoint(folder[0], "t")
        assert (path, client["epoch"]) == (f"{folder[0]}/t", 3)
        assert [r.loss for r in train(other, iter(rest))] == pytest.approx(expected, rel=1e-5)
        if schedule == "zbv":
            with pytest.raises(UnsupportedError, match=r"\[0, 1, 1, 0\]"):
                other.save_checkpoint(folder[0], "u")
        other.close()


@world(2)
def test_ranks_in_another_order_are_refused():
    model = cut(None, topology=ProcessTopology(("data", "pipe"), (2, 1)))
    engine, _, _, _ = ds_engine.initialize(model=model, config=config(1))  # one stage: the same groups
    engine.close()
    slices = {"tensor_parallel": {"autotp_size": 2, "megatron_layers": True}}
    with pytest.raises(PlanError) as caught:
        ds_engine.initialize(model=cut(1), config=config(1, **slices))  # cut for two replicas
    assert caught.value.code == "engine-stages"

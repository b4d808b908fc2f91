"""Pipelines that resume on another number of stages, with tied layers that have untied parts, and stages with nothing to train."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ds_engine
from ds_ckpt.convert.pickled import load_pt
from ds_pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_testing import world

WIDTH, MICRO, ACCUMULATION = 8, 2, 2


class Embedding(nn.Module):
    """As Megatron's GPT has it: words, which are tied to the head, and positions, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH) * 0.3)
        self.positions = nn.Parameter(torch.randn(5, WIDTH) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) + self.positions


class Residual(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Output(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 11)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class Frozen(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def head(words: Embedding, x: Tensor) -> Tensor:
    return F.linear(x, words.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied(stages: int) -> PipelineModule:
    layers = [
        TiedLayerSpec("embed", Embedding),
        *(LayerSpec(Residual) for _ in range(4)),
        TiedLayerSpec("embed", Embedding, forward_fn=head),
    ]
    return PipelineModule(layers, num_stages=stages, seed_layers=True, partition_method="uniform", loss_fn=loss_fn)


def microbatches(first: int, steps: int) -> Any:
    for number in range(first * ACCUMULATION, (first + steps) * ACCUMULATION):
        tokens = torch.randint(11, (MICRO, 6), generator=torch.Generator().manual_seed(number))
        yield tokens[:, :-1], tokens[:, 1:]


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    } | more


def start(model: PipelineModule, config: dict[str, Any]) -> Any:
    return ds_engine.initialize(model=model, config=config)[0]


def trained(engine: Any, first: int, steps: int) -> list[float]:
    stream = microbatches(first, steps)
    return [engine.train_batch(stream).loss for _ in range(steps)]


CUTS = [
    (before, after, stage, strict)
    for before in (1, 2)
    for after in (1, 2)
    for stage, strict in ((0, None), (1, "model"))
]


@pytest.mark.parametrize(("before", "after", "stage", "strict"), CUTS)
@world(2)
def test_a_tied_layer_with_untied_parts_goes_on_on_any_stages(
    before: int, after: int, stage: int, strict: Any, tmp_path: Path
) -> None:
    """One stage on two ranks is two copies, which take the same data here."""
    engine = start(tied(before), settings(stage))
    trained(engine, 0, 3)
    engine.save_checkpoint(tmp_path, tag="three")
    expected = trained(engine, 3, 3)
    engine.close()
    engine = start(tied(after), settings(stage))
    trained(engine, 7, 1)  # what it had before is forgotten
    engine.load_checkpoint(tmp_path, tag="three", strict=strict)
    assert trained(engine, 3, 3) == pytest.approx(expected, rel=1e-5)
    engine.close()


@world(2)
def test_functions_of_a_pipeline_have_no_files(tmp_path: Path) -> None:
    """As Megatron-DeepSpeed's: its tools take the first file for the embedding's, and the last for the norm's."""
    layers = [
        torch.abs,
        TiedLayerSpec("embed", Embedding),
        nn.Tanh(),
        TiedLayerSpec("embed", Embedding, forward_fn=head),
    ]
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=loss_fn)
    engine = start(model, settings(1, checkpoint={"layout": "deepspeed"}))
    trained(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="one")
    expected = trained(engine, 1, 1)
    names = sorted(path.name for path in (tmp_path / "one").glob("layer_*"))
    assert names == ["layer_01-model_states.pt", "layer_02-model_states.pt"]
    engine.load_checkpoint(tmp_path, tag="one")
    assert trained(engine, 1, 1) == expected
    engine.close()


@world(2)
def test_files_without_zero_name_tied_layers_by_their_numbers(tmp_path: Path) -> None:
    """As DeepSpeed writes them: only the first of the layers that share a key is there."""
    asked = settings(0, checkpoint={"layout": "ds"})
    engine = start(tied(2), asked)
    trained(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="one")
    expected = trained(engine, 1, 1)
    engine.close()
    if dist.get_rank() == 0:
        for path in (tmp_path / "one").glob("*_optim_states.pt"):
            path.unlink()
        for path in (tmp_path / "one").glob("mp_rank_*_model_states.pt"):
            torch.save({**load_pt(path), "param_shapes": None, "shared_params": None}, path)
        (tmp_path / "one" / "layer_05-model_states.pt").unlink(missing_ok=True)
    dist.barrier()
    engine = start(tied(2), asked)
    engine.load_checkpoint(tmp_path, tag="one", strict="model", load_optimizer_states=False)
    assert trained(engine, 1, 1) == pytest.approx(expected, rel=1e-5)
    engine.close()


@pytest.mark.parametrize("frozen", [False, True])
@world(3)
def test_stages_without_tied_or_with_frozen_layers_are_saved(frozen: bool, tmp_path: Path) -> None:
    """What only some stages have was other meta on each of them, and refused."""

    def begin(stages: int) -> Any:
        model = tied(stages)
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or not name.startswith("2."))
        return start(model, settings(1))

    engine = begin(3)
    trained(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    expected = trained(engine, 2, 2)
    engine.close()
    engine = begin(1)
    engine.load_checkpoint(tmp_path)
    assert trained(engine, 2, 2) == pytest.approx(expected, rel=1e-5)
    engine.close()


@world(2)
def test_what_another_cut_has_twice_is_named(tmp_path: Path) -> None:
    engine = start(tied(2), settings(1))
    trained(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="one")
    engine.close()
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("ds_engine").addHandler(handler := Heard())
    engine = start(tied(1), settings(1))
    engine.load_checkpoint(tmp_path, tag="one")
    engine.close()
    logging.getLogger("ds_engine").removeHandler(handler)
    if dist.get_rank() == 0:
        assert len(heard) == 1
        assert heard[0].endswith(
            "1 further copies of untied parts of tied layers, of which the first are used: param/5.positions"
        )


def plain(x: Tensor) -> Tensor:
    return torch.tanh(x)


PARTIAL = {
    "first stage frozen": lambda: [
        LayerSpec(Frozen),
        LayerSpec(Residual, True),
        LayerSpec(Residual),
        LayerSpec(Output),
    ],
    "last stage frozen": lambda: [
        LayerSpec(Embedding),
        LayerSpec(Residual),
        LayerSpec(Residual, True),
        LayerSpec(Output, True),
    ],
    "last stage without parameters": lambda: [LayerSpec(Embedding), LayerSpec(Output), plain, plain],
    "first stage an embedding": lambda: [LayerSpec(Embedding), plain, LayerSpec(Residual), LayerSpec(Output)],
}
ROWS = [(name, stage, kind) for name in PARTIAL for stage in (0, 1, 3) for kind in ("AdamW", "Muon", "SGD", "client")]
SAMPLE = [ROWS[i] for i in (0, 5, 15, 22, 29, 36)]
MARKED = [*SAMPLE, *(pytest.param(*row, marks=pytest.mark.slow) for row in ROWS if row not in SAMPLE)]


def partial(name: str, stage: int, kind: str, stages: int = 2) -> Any:
    model = PipelineModule(
        PARTIAL[name](), num_stages=stages, seed_layers=True, partition_method="uniform", loss_fn=loss_fn
    )
    config = settings(stage)
    if kind == "client":
        del config["optimizer"]
        return ds_engine.initialize(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), config=config)[0]
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-2}}
    return start(model, config)


@pytest.mark.parametrize(("name", "stage", "kind"), MARKED)
@world(2)
def test_a_stage_with_nothing_to_train_works(name: str, stage: int, kind: str, tmp_path: Path) -> None:
    alone = partial(name, 0, kind, stages=1)
    expected = trained(alone, 0, 6)
    alone.close()
    engine = partial(name, stage, kind)
    found = trained(engine, 0, 3)
    engine.save_checkpoint(tmp_path, tag="three")
    engine.close()
    engine = partial(name, stage, kind)
    engine.load_checkpoint(tmp_path, tag="three")
    assert found + trained(engine, 3, 3) == pytest.approx(expected, rel=1e-5)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_a_stage_that_trains_nothing_takes_part_in_what_offload_asks(stage: int) -> None:
    """It has no state to put anywhere, and waited for nobody when the others compared their hosts' memory."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    for layer in layers[2:]:
        layer.requires_grad_(False)
    whole = nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
    model = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    engine = start(model, settings(stage, zero_optimization=zero, optimizer=adam))
    optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for step in range(2):
        data = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(step))
        result = engine.train_batch((x, x.flip(-1)) for x in data)
        loss = sum(F.mse_loss(whole(x), x.flip(-1)) for x in data) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert float(result.loss) == pytest.approx(float(loss), rel=1e-5)
    engine.close()


_EARLY = {
    "OneBitAdam": {"freeze_step": 1},
    "OneBitLamb": {"freeze_step": 1},
    "ZeroOneAdam": {"var_freeze_step": 1, "local_step_scaler": 1},
}


@pytest.mark.parametrize("idle", [False, True])  # whether the second stage trains nothing
@pytest.mark.parametrize("name", sorted(_EARLY))
@world(2)
def test_stages_of_a_1_bit_optimizer_are_saved_with_their_errors(name: str, idle: bool, tmp_path: Path) -> None:
    """Messages of stages have other lengths; and what lies between parameters of a flat shard is in no file."""
    onebit = {"type": name, "params": {"lr": 1e-2} | _EARLY[name]}
    asked = settings(0, optimizer=onebit, gradient_clipping=0.0)

    def begin() -> Any:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
        for layer in layers[2:] if idle else ():
            layer.requires_grad_(False)
        return start(PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform"), asked)

    def losses(engine: Any, first: int, steps: int) -> list[float]:
        data = [torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(i)) for i in range(first, first + steps)]
        return [float(engine.train_batch((x, x[:, :3]) for x in few).loss) for few in data]

    engine = begin()
    losses(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    expected = losses(engine, 3, 2)
    engine.close()
    engine = begin()
    engine.load_checkpoint(tmp_path)
    assert losses(engine, 3, 2) == expected
    engine.close()

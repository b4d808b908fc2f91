"""Every optimizer type of the schema is made as its parameters say, and shards without changing its result."""

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ds_engine
import ds_ops
from ds_comm.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from ds_config.errors import ConfigError, DsError, PlanError
from ds_engine import Shapes, load_config, make_plan
from ds_engine.optimizer_table import FROM_MUP, check_optimizer, make_optimizer, make_torch_scheduler
from ds_ops.optim import orthogonalize

Make = Callable[[], nn.Module]
Settings = Callable[..., dict[str, Any]]


def made(section: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    config = load_config({"optimizer": section})
    assert config.optimizer is not None
    return make_optimizer(config.optimizer, list(model.parameters()), model)


@pytest.mark.parametrize(
    ("section", "kind", "expected"),
    [
        ({"type": "Adam"}, ds_ops.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
        ({"type": "adam", "params": {"adam_w_mode": False}}, ds_ops.optim.Adam, {"eps": 1e-8}),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, ds_ops.optim.AdamW, {"betas": (0.9, 0.999)}),
        ({"type": "AdamW", "params": {"bias_correction": False}}, ds_ops.optim.AdamW, {"bias_correction": False}),
        (
            {"type": "AdamW", "params": {"torch_adam": True}},
            torch.optim.AdamW,
            {"amsgrad": False, "weight_decay": 0.01},
        ),
        ({"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0}}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"amsgrad": True, "adam_w_mode": False}}, torch.optim.Adam, {"amsgrad": True}),
        ({"type": "Adagrad", "params": {"eps": 1e-5}}, ds_ops.optim.Adagrad, {"lr": 1e-2, "eps": 1e-5}),
        ({"type": "lion", "params": {"betas": [0.8, 0.9]}}, ds_ops.optim.Lion, {"betas": (0.8, 0.9)}),
        ({"type": "LAMB", "params": {"max_coeff": 5.0}}, ds_ops.optim.Lamb, {"max_coeff": 5.0, "min_coeff": 0.01}),
        ({"type": "Lamb", "params": {"eps_inside_sqrt": True}}, ds_ops.optim.Lamb, {"eps_inside_sqrt": True}),
        ({"type": "OneBitAdam", "params": {"lr": 0.5, "bias_correction": False}}, OnebitAdam, {"lr": 0.5}),
        ({"type": "ZeroOneAdam", "params": {"betas": [0.5, 0.9]}}, ZeroOneAdam, {"betas": (0.5, 0.9)}),
        ({"type": "onebitlamb", "params": {"max_coeff": 0.3}}, OnebitLamb, {"max_coeff": 0.3, "min_coeff": 0.01}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9}),
        ({"type": "RMSprop", "params": {"alpha": 0.5}}, torch.optim.RMSprop, {"alpha": 0.5}),
        ({"type": "Adamax", "params": {"betas": [0.5, 0.9]}}, torch.optim.Adamax, {"betas": (0.5, 0.9)}),
    ],
)
def test_types_and_parameters(
    make_model: Make, section: dict[str, Any], kind: type[torch.optim.Optimizer], expected: dict[str, Any]
) -> None:
    optimizer = made(section, make_model())
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in expected} == expected


def test_muon_takes_matrices_that_are_neither_embedding_nor_head() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "mix": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
    optimizer = made({"type": "Muon", "params": {"muon_lr": 0.5, "lr": 0.1, "weight_decay": 0.01}}, model)
    names = {id(p): name for name, p in model.named_parameters()}
    by_use = {g["use_muon"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}
    assert by_use == {True: ["mix.weight"], False: ["embed.weight", "mix.bias", "lm_head.weight", "lm_head.bias"]}
    assert {g["use_muon"]: g["lr"] for g in optimizer.param_groups} == {True: 0.5, False: 0.1}


def test_muon_steps_weights_of_three_dims_as_stacks_unless_told() -> None:
    """DeepSpeed's Muon takes a Conv1d or a positional embedding; it orthogonalizes the matrices of the last two dims."""
    model = nn.ModuleDict({"conv": nn.Conv1d(3, 5, 2), "flat": nn.Conv1d(3, 5, 2)})
    model["flat"].weight.muon_matrices = "flat"
    optimizer = made({"type": "Muon", "params": {"lr": 0.1, "momentum": 0.0}}, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    moves = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    for move in moves["conv.weight"]:  # each [3, 2] has singular values near one another
        low, high = torch.linalg.svdvals(move).aminmax()
        assert low > high / 2
    low, high = torch.linalg.svdvals(moves["flat.weight"].flatten(1)).aminmax()
    assert low > high / 2


@pytest.mark.parametrize(
    ("section", "peer"),
    [
        ({"type": "Adagrad", "params": {"lr_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True}}, torch.optim.Adagrad),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "maximize": True, "foreach": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"maximize": True, "set_grad_none": True, "weight_decay": 0.2}}, torch.optim.AdamW),
        ({"type": "Muon", "params": {"adam_w_mode": False, "weight_decay": 0.2, "torch_adam": True}}, torch.optim.Adam),
    ],
)  # fmt: skip
def test_keys_that_deepspeed_hands_on_to_torch_act(section: dict[str, Any], peer: Any) -> None:
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    names = inspect.signature(peer.__init__).parameters
    values = {key: value for key, value in section["params"].items() if key in names}
    if section["type"] == "Muon":
        values |= {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}
    optimizers = made(section, ours), peer(theirs.parameters(), **({"weight_decay": 0.0} | values))
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.bias, theirs.bias)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        widths = {"q_proj": 8, "k_proj": 4, "o_proj": 8, "kv_b_proj": 12, "query_key_value": 24}
        self.attn = nn.ModuleDict({name: nn.Linear(8, rows, bias=False) for name, rows in widths.items()})


def test_muon_takes_the_heads_of_projections_apart() -> None:
    config = SimpleNamespace(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=2, qk_nope_head_dim=1, v_head_dim=2
    )
    model = Attention(config)
    optimizer = made({"type": "Muon", "params": {"lr": 0.1, "momentum": 0.0, "per_head_muon": True}}, model)
    names = {id(p): name.split(".")[1] for name, p in model.named_parameters()}
    found = {names[id(p)]: group.get("heads") for group in optimizer.param_groups for p in group["params"]}
    assert found == {"q_proj": 4, "k_proj": 2, "o_proj": None, "kv_b_proj": 4, "query_key_value": None}
    query: Any = model.attn["q_proj"]
    heads = query.weight.detach().clone().view(4, 2, 8)
    grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    query.weight.grad = grad.clone()
    optimizer.step()
    moved = (heads - query.weight.detach().view(4, 2, 8)) / 0.1
    torch.testing.assert_close(moved, orthogonalize(grad.view(4, 2, 8), method="gram"))
    with pytest.raises(ConfigError) as caught:
        made({"type": "Muon", "params": {"per_head_muon": True}}, nn.Linear(4, 4))
    assert caught.value.code == "optimizer-heads"


def test_muon_groups_of_the_caller_are_kept(make_model: Make) -> None:
    model = make_model()
    section = load_config({"optimizer": {"type": "Muon"}}).optimizer
    groups = [{"params": list(model.parameters()), "use_muon": False, "lr": 0.7}]
    optimizer = make_optimizer(section, groups, model)  # type: ignore[arg-type]
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(False, 0.7, 4)]


@pytest.mark.parametrize("wide", [True, False])
def test_state_is_wide_unless_it_is_asked_to_be_narrow(
    make_model: Make, config: Settings, rows: Any, wide: bool
) -> None:
    adam = {"type": "AdamW", "params": {"fp32_optimizer_states": wide}}
    engine = ds_engine.initialize(model=make_model(), config=config(optimizer=adam, bf16={"enabled": True}))[0]
    batch = (rows.x[:4].bfloat16(), rows.y[:4].bfloat16())
    engine.train_batch(iter([batch] * 2))
    assert engine.optimizer is not None
    states = {s.data.dtype for s in engine.optimizer.shards() if s.shard.name.startswith("optim/")}
    assert states == {torch.float32 if wide else torch.bfloat16}
    engine.close()


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion", "Lamb", "Muon", "SGD", "RMSprop", "Adafactor"])
def test_training_with_each(make_model: Make, config: Settings, rows: Any, name: str) -> None:
    """What the engine trains equals the same optimizer alone, at a stage that cuts state."""
    params = {} if name == "Adafactor" else {"lr": 0.01}
    section = {"type": name, "params": params}
    batches = [(rows.x[i : i + 8], rows.y[i : i + 8]) for i in range(0, 40, 8)]
    model, alone = make_model(), make_model()
    asked = config(
        optimizer=section, zero_optimization={"stage": 2}, gradient_accumulation_steps=1, gradient_clipping=0
    )
    engine = ds_engine.initialize(model=model, config=asked)[0]
    expected = made(section, alone)
    for batch in batches:
        engine.train_batch(iter([batch]))
        alone(*batch).backward()
        expected.step()
        expected.zero_grad()
    engine.close()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(FROM_MUP))
def test_optimizers_of_a_package_that_is_not_there_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    section = load_config({"optimizer": {"type": name, "params": {"lr": 0.1}}}).optimizer
    assert section is not None
    with pytest.raises(DsError) as caught:
        check_optimizer(section)
    assert caught.value.code == "optimizer-unbuilt"
    assert "pip install mup" in caught.value.fix


def test_optimizers_of_mup_are_made_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": options["lr"] / p.ndim} for p in params]  # a rate that follows the shape
        return torch.optim.AdamW(groups, **options)

    mup = ModuleType("mup")
    mup.MuAdamW = narrow  # type: ignore[attr-defined]
    mup.__spec__ = ModuleSpec("mup", None)
    monkeypatch.setitem(sys.modules, "mup", mup)
    section = load_config({"optimizer": {"type": "muadamw", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}}).optimizer
    assert section is not None
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(section, list(model.parameters()), model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.1]
    assert optimizer.defaults["betas"] == (0.8, 0.9)


def test_who_reduces_gradients_alone_is_refused_where_state_is_sharded(make_model: Make, config: Settings) -> None:
    model = make_model()
    asked = {key: value for key, value in config(zero_optimization={"stage": 1}).items() if key != "optimizer"}
    for optimizer in (OnebitAdam(model.parameters()), lambda params: OnebitAdam(params)):
        with pytest.raises(DsError) as caught:
            ds_engine.initialize(model=model, config=asked, optimizer=optimizer)
        assert caught.value.code == "optimizer-owns-reduction"
    assert type(model.first.weight) is nn.Parameter
    engine = ds_engine.initialize(model=model, config=asked | {"zero_optimization": {}}, optimizer=optimizer)[0]
    assert not engine.plan.residency.shard_optim
    engine.close()


@pytest.mark.parametrize(
    ("given", "type_"),
    [
        ("Onebitadam", "OneBitAdam"),
        ("ADAMw", "AdamW"),
        ("zeroOneAdam", "ZeroOneAdam"),
        ("mUON", "Muon"),
        ("laMB", "Lamb"),
    ],
)
def test_names_of_the_schema_are_taken_in_any_case(given: str, type_: str) -> None:
    section = load_config({"optimizer": {"type": given}}).optimizer
    assert section is not None
    assert section.type == type_


@pytest.mark.parametrize(
    ("given", "kind"), [("sgd", torch.optim.SGD), ("RMSPROP", torch.optim.RMSprop), ("Radam", torch.optim.RAdam)]
)
def test_names_of_torch_are_taken_in_any_case(given: str, kind: type) -> None:
    model = nn.Linear(2, 2)
    optimizer = made({"type": given, "params": {"lr": 0.5}}, model)
    assert type(optimizer) is kind
    section = load_config({"scheduler": {"type": "steplr", "params": {"step_size": 2}}}).scheduler
    assert type(make_torch_scheduler(section, optimizer)) is torch.optim.lr_scheduler.StepLR  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["Warmuplr", "warmupLR", "WARMUPLR"])
def test_schedules_are_taken_in_any_case(given: str) -> None:
    section = load_config({"scheduler": {"type": given}}).scheduler
    assert section is not None
    assert section.type == "WarmupLR"


@pytest.mark.parametrize("asks", ["torch_adam", "amsgrad"])
@pytest.mark.parametrize("flag", ["bias_correction", "fp32_optimizer_states"])
def test_a_flag_that_torchs_adam_would_discard_is_refused(asks: str, flag: str) -> None:
    content = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {asks: True, flag: False}}}
    with pytest.raises(PlanError, match=f"has no {flag} = false") as caught:
        make_plan(load_config(content), Shapes((), ()), 1)
    assert caught.value.code == "optimizer-torch-adam"
    for params in ({asks: True, flag: True}, {flag: False}):
        make_plan(load_config(content | {"optimizer": {"type": "Adam", "params": params}}), Shapes((), ()), 1)


def test_fused_is_a_flag_of_torchs_adam() -> None:
    content = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"fused": True}}}
    with pytest.raises(PlanError, match="without torch_adam") as caught:
        make_plan(load_config(content), Shapes((), ()), 1)
    assert caught.value.code == "optimizer-torch-fused"

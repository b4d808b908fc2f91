"""Routed layers see the tokens that were drawn, and no others; gradients are those of plain indexing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_config.errors import ConfigError
from ds_data.token_dropping import (
    Router,
    RouterConfig,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
    start_routing,
    stop_routing,
)

BASE: dict[str, Any] = {
    "total_layers": 4, "layers": (1, 2), "min_value": 4, "max_value": 12, "require_steps": 10, "seq_per_step": 2,
}  # fmt: skip
SECTION: dict[str, Any] = {
    "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_mask_name": "mask",
    "model_type": "encoder", "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": {
        "min_value": 4, "max_value": 12, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 2},
    },
}  # fmt: skip


class Block(nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.mask: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, str]:
        self.mask, self.seen = mask, hidden
        return hidden + self.lin(hidden).tanh(), "extra"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            hidden, extra = block(hidden, mask=mask)
            assert extra == "extra"
        return hidden


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 40), st.integers(1, 16), st.integers(0, 80))
def test_the_schedule_is_the_papers(low: int, more: int, total: int, multiple: int, step: int) -> None:
    multiple = min(multiple, low)
    router = Router(RouterConfig(2, (0,), low, low + more, total, multiple))
    value = math.floor(step / total * more + low)
    want = min(value - value % multiple, low + more)
    # At its end from the beginning, it stays there.
    assert router.update(step) == (want if more else low)


def test_tokens_are_counted_as_deepspeed_counts_them() -> None:
    router = Router(RouterConfig(**BASE))
    want = 0
    for step in (1, 2, 2, 5, 20, 21):
        before = router.step
        kept = router.update(step, samples=3)
        want += 3 * (kept * 2 + 12 * 2) * (step != before)
        assert router.consumed == want
    assert router.num_kept == 12
    other = Router(RouterConfig(**BASE))
    other.load_state_dict(router.state_dict())
    assert (other.num_kept, other.step, other.consumed) == (12, 21, want)


@pytest.mark.parametrize("order", ["batch_seq_dim", "seq_batch_dim"])
def test_forward_and_gradients_are_those_of_indexing(order: str) -> None:
    torch.manual_seed(0)
    first = order == "batch_seq_dim"
    block, routed, router = one_layer(RouterConfig(**{**BASE, "order": order, "total_layers": 1, "layers": (0,)}))
    hidden = torch.randn(2, 7, 3, dtype=torch.float32, requires_grad=True)
    given_ = hidden if first else hidden.transpose(0, 1)
    state = torch.get_rng_state()
    out = routed(given_)[0]
    out = out if first else out.transpose(0, 1)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), [hidden, *block.parameters()])

    torch.set_rng_state(state)
    places = router.draw(2, 7, hidden.device)
    stop_routing(routed)
    assert places.shape == (2, 4)
    assert (places.diff(dim=1) > 0).all()
    rows = []
    for sample, kept in zip(hidden, places.tolist(), strict=True):
        through = block(sample)[0]
        rows.append(torch.stack([through[i] if i in kept else sample[i] for i in range(7)]))
    plain = torch.stack(rows)
    torch.testing.assert_close(out, plain)
    theirs = torch.autograd.grad((plain * weight).sum(), [hidden, *block.parameters()])
    torch.testing.assert_close(ours, theirs)


def test_every_token_is_drawn_equally_often_and_layers_draw_apart() -> None:
    router = Router(RouterConfig(**BASE))
    counts = torch.bincount(router.draw(3000, 8, torch.device("cpu")).flatten(), minlength=8)
    assert (counts - 1500).abs().max() < 150
    model = Model().train()
    start_routing(convert_to_random_ltd(model, Block), RouterConfig(**BASE))
    hidden = torch.arange(12.0)[None, :, None].expand(8, 12, 3).clone()
    model(hidden)
    one, two = (model.blocks[n].seen for n in (1, 2))
    assert one.shape == two.shape == (8, 4, 3)
    assert model.blocks[0].seen.shape == (8, 12, 3)


@pytest.mark.parametrize("shape", [(2, 7), (2, 1, 1, 7), (2, 1, 7, 7), (1, 1, 7, 7), (2, 7, 7)])
@pytest.mark.parametrize("model_type", ["encoder", "decoder"])
def test_masks(shape: tuple[int, ...], model_type: str) -> None:
    only = {"total_layers": 1, "layers": (0,)}
    block, routed, router = one_layer(RouterConfig(**{**BASE, **only, "model_type": model_type, "mask_name": "mask"}))
    mask, hidden = torch.randn(shape), torch.randn(2, 7, 3)
    state = torch.get_rng_state()
    routed(hidden, mask=mask)
    torch.set_rng_state(state)
    places = router.draw(2, 7, mask.device).tolist() if model_type == "encoder" else [list(range(4))] * 2
    rows = len(shape) > 2 and shape[-2] == 7
    want = []
    for sample, kept in zip(mask.expand(2, *shape[1:]), places, strict=True):
        cut = sample[..., kept]
        want.append(cut[..., kept, :] if rows else cut)
    expected = torch.stack(want)
    torch.testing.assert_close(block.mask.expand_as(expected), expected)


def test_all_tokens_pass_in_eval_and_when_nothing_is_left_out() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    router = start_routing(convert_to_random_ltd(model, Block), RouterConfig(**BASE))
    hidden = torch.randn(2, 12, 3)
    torch.testing.assert_close(model.eval()(hidden), plain(hidden), rtol=0, atol=0)
    assert not torch.equal(model.train()(hidden), plain(hidden))
    router.update(10)
    torch.testing.assert_close(model(hidden), plain(hidden), rtol=0, atol=0)


def test_a_checkpoint_has_the_plain_models_names() -> None:
    model = Model()
    names = list(model.state_dict())
    start_routing(convert_to_random_ltd(model, Block), RouterConfig(**BASE))
    assert list(model.state_dict()) == list(save_without_random_ltd(model)) == names
    theirs = {name.replace(".lin", ".random_ltd_layer.lin"): value for name, value in model.state_dict().items()}
    nested = remove_random_ltd_state_dict({"encoder": theirs, "step": 3})
    assert list(nested["encoder"]) == names
    Model().load_state_dict(save_without_random_ltd(model))


def test_deepspeeds_section() -> None:
    config = RouterConfig.of(SECTION)
    assert config == RouterConfig(**BASE, mask_name="mask", model_type="encoder", order="seq_batch_dim")


@pytest.mark.parametrize(
    "change",
    [
        {"random_ltd_layer_num": 3},
        {"total_layer_num": 2},
        {"surprise": 1},
        {"model_type": "both"},
        {"layer_token_lr_schedule": {"enabled": True}},
        {"random_ltd_schedule": {**SECTION["random_ltd_schedule"], "schedule_type": "fixed_root"}},
        {"random_ltd_schedule": {**SECTION["random_ltd_schedule"], "min_value": 1}},
        {"random_ltd_schedule": {"min_value": 4}},
    ],
)
def test_sections_that_say_nothing(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig.of({**SECTION, **change})
    assert error.value.code == "data-routing"


def test_a_checkpointed_layer_draws_the_same_tokens_again() -> None:
    model = Model().train()
    start_routing(convert_to_random_ltd(model, Block), RouterConfig(**BASE))
    hidden = torch.randn(2, 12, 3, requires_grad=True)

    def gradients(*, checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(5)
        out = hidden
        for block in model.blocks:
            out = checkpoint(block, out, use_reentrant=False)[0] if checkpointed else block(out)[0]
        return list(torch.autograd.grad(out.square().sum(), [hidden, *model.parameters()]))

    for ours, plain in zip(gradients(checkpointed=True), gradients(checkpointed=False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_models_that_cannot_be_converted() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="no Conv1d"):
        convert_to_random_ltd(model, nn.Conv1d)
    with pytest.raises(ConfigError, match="no Model within"):
        convert_to_random_ltd(model, Model)
    with pytest.raises(ConfigError, match="0 layers that can be routed"):
        start_routing(model, RouterConfig(**BASE))
    assert convert_to_random_ltd(model, Block) is model
    with pytest.raises(ConfigError, match="asked for"):
        start_routing(model, RouterConfig(**{**BASE, "total_layers": 9, "layers": (8,)}))
    with pytest.raises(ConfigError, match="converted already"):
        convert_to_random_ltd(model, Block)
    other = Model()
    other.blocks[2].forward = lambda hidden: (hidden, "extra")
    with pytest.raises(ConfigError, match="forward was replaced"):
        convert_to_random_ltd(other, Block)


def one_layer(config: RouterConfig) -> tuple[Block, nn.Module, Router]:
    """A block, the model around it that calls it alone, and its router."""
    block = Block()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
            return self.block(hidden, mask=mask)

    around = Around().train()
    return block, around, start_routing(convert_to_random_ltd(around, Block), config)

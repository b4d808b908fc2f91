"""Image patches, and text with images in it, over ranks: the results and gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_comm import world_group
from ds_config.errors import set_place
from ds_parallel.sequence import vision
from ds_testing import world


class SiglipAttention(nn.Module):
    """Returns its weights, too, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.inner(hidden_states * scale, hidden_states, hidden_states)


@pytest.mark.parametrize("class_token", [True, False])
@world(2)
def test_attention_over_patches_that_ranks_do_not_divide(class_token: bool) -> None:
    group, first = world_group(), int(class_token)
    torch.manual_seed(1)
    whole = torch.randn(2, first + 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(whole)
    weight[:, :first] = 0.0
    own = slice(first, first + 3) if group.rank == 0 else slice(first + 3, first + 5)
    wanted = SiglipAttention()(whole, scale=2.0)[0]
    (wanted * weight).sum().backward()
    mine = torch.cat([whole[:, :first], whole[:, own]], 1).detach().requires_grad_()
    model = nn.ModuleDict({"vision": SiglipAttention(), "text": nn.Linear(2, 2)})
    vision.CLASS_TOKENS["SiglipAttention"] = class_token
    assert vision.gather_vision_attention(model, group) == ["vision"]
    vision.CLASS_TOKENS["SiglipAttention"] = False
    found, weights = model["vision"](mine, scale=2.0)
    assert weights.shape[-1] == whole.shape[1]
    torch.testing.assert_close(found, torch.cat([wanted[:, :first], wanted[:, own]], 1))
    (found[:, first:] * weight[:, own]).sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad[:, first:], whole.grad[:, own])
    set_place("")


@world(2)
def test_a_text_with_images_is_cut_over_ranks() -> None:
    group = world_group()
    torch.manual_seed(2)
    text, image = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    ids = torch.tensor([[1, 9, 1, 1, 1]])
    mine = image[:, :3] if group.rank == 0 else image[:, 3:]
    mine = mine.clone().requires_grad_()
    part = vision.spliced(text, mine, group, lambda t, i: vision.replace_tokens(t, i, ids, 9))
    whole = torch.cat([text[:, :1], image, text[:, 2:], torch.zeros(1, 1, 4)], 1)
    torch.testing.assert_close(part, whole.chunk(2, 1)[group.rank])
    part.sum().backward()
    torch.testing.assert_close(mine.grad, torch.ones_like(mine))
    set_place("")

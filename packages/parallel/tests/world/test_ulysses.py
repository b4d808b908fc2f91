"""Sequences over ranks: attention, models, losses and batches equal those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
from ds_comm import Mesh, MeshSpec, world_group
from ds_config.errors import CommError, PlanError, UnsupportedError, set_place
from ds_parallel.heads import spread
from ds_parallel.sequence import DistributedAttention, SequenceDataLoader, sequence_part, token_weighted_loss
from ds_parallel.sequence.hf_attention import SequenceRanks, UlyssesAttention, document_mask, register_with_transformers
from ds_testing import world

Tiny = Callable[[str], tuple[nn.Module, dict[str, Tensor]]]


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
    """[b, s, h, d] with grouped heads."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (6, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("length", [8, 13, 97])
@pytest.mark.parametrize("ranks", [2, 4])
@world(4)
def test_attention(heads: tuple[int, int], length: int, ranks: int) -> None:
    mesh = Mesh.build(MeshSpec.fit(4, sequence=ranks))
    group = mesh["sequence"]
    torch.manual_seed(7)
    whole = [
        torch.randn(2, length, n, 4, dtype=torch.float64, requires_grad=True) for n in (heads[0], heads[1], heads[1])
    ]
    weight = torch.randn(2, length, heads[0], 4, dtype=torch.float64)
    lengths = [stop - start for start, stop in spread(length, ranks)]
    wanted = attention(*whole)
    (wanted * weight).sum().backward()
    mine = [t.detach().split(lengths, 1)[group.rank].clone().requires_grad_() for t in whole]
    layer = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
    found = layer(*mine, 0, lengths=lengths)
    torch.testing.assert_close(found, wanted.split(lengths, 1)[group.rank], atol=1e-9, rtol=1e-9)
    (found * weight.split(lengths, 1)[group.rank]).sum().backward()
    for part, full in zip(mine, whole, strict=True):
        torch.testing.assert_close(part.grad, full.grad.split(lengths, 1)[group.rank], atol=1e-9, rtol=1e-9)
    set_place("")


@world(2)
def test_sequence_first_with_heads_folded_in_and_rotation() -> None:
    """Megatron's layout: [s, b, h, d] in, [s, b, h * d] out; rotation of the whole sequence after the exchange."""
    group = world_group()
    torch.manual_seed(1)
    q, k, v = (torch.randn(6, 2, 4, 4) for _ in range(3))
    angle = torch.randn(6, 1, 1, 2).repeat(1, 1, 1, 2)
    turn = (angle.cos(), angle.sin())

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1).flatten(2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * turn[0] + torch.cat([-second, first], -1) * turn[1]

    layer = DistributedAttention(core, group.pg)
    found = layer(*(t.chunk(2)[group.rank] for t in (q, k, v)), 1, turn)
    torch.testing.assert_close(found, core(rotated(q), rotated(k), v).chunk(2)[group.rank], atol=1e-6, rtol=1e-6)
    with pytest.raises(PlanError, match="batch_dim_idx = 0"):
        layer(q, k, v, 0)
    with pytest.raises(UnsupportedError, match="a stream of the caller's"):
        DistributedAttention(core, group, sp_stream=object())


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@world(4)
def test_a_model_with_labels_masked_unevenly(name: str, tiny: Tiny) -> None:
    """Two packed documents, key-value heads fewer than ranks (4), a loss weighted by tokens: equal to one process."""
    ids = torch.randint(1, 67, (1, 12), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[0, :5] = -100
    positions = torch.cat([torch.arange(7), torch.arange(5)]).unsqueeze(0)
    reference, _ = tiny(name)
    seen = document_mask(positions, causal=True)
    masked = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = reference(input_ids=ids, position_ids=positions, attention_mask=masked).logits
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    wanted = functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    wanted.backward()
    for ranks in (2, 4):
        mesh = Mesh.build(MeshSpec.fit(4, sequence=ranks))
        group = mesh["sequence"]
        ulysses = UlyssesAttention.register("sdpa", group)
        try:
            model, _ = tiny(name)
            part = sequence_part({"input_ids": ids, "labels": labels, "position_ids": positions}, group.rank, ranks)
            mine = part.pop("shift_labels").flatten()
            found = model(**part).logits
            torch.testing.assert_close(found, logits.chunk(ranks, 1)[group.rank], atol=1e-5, rtol=1e-5)
            loss = functional.cross_entropy(found.flatten(0, 1), mine)
            total = token_weighted_loss(loss, (mine != -100).sum(), group)
            torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-6)
            total.backward()
            for (key, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                ds_comm.all_reduce(param.grad, group=group)
                torch.testing.assert_close(
                    param.grad / ranks, other.grad, atol=1e-5, rtol=1e-4, msg=lambda said, n=key: f"{n}: {said}"
                )
        finally:
            ulysses.remove()
    set_place("")


class Attending(nn.Module):
    """An attention module as far as attention functions look at it."""

    def __init__(self, causal: bool, window: int | None = None) -> None:
        super().__init__()
        self.is_causal, self.sliding_window, self.num_key_value_groups = causal, window, 1


def _attend(
    module: nn.Module, padding: list[int], mask_of: str, left: bool = False, **options: object
) -> tuple[Tensor, Tensor]:
    """(this rank's part of the shared attention, that of one process), of two rows whose last (`left`: first) tokens are padding."""
    group, length = world_group(), 8
    pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 4, length, 4, generator=generator) for _ in range(3))
    tokens = torch.arange(length) < length - torch.tensor(padding)[:, None]
    tokens = tokens.flip(1) if left else tokens
    positions = torch.arange(length).expand(2, -1)
    at = torch.arange(length)
    distance = at[:, None] - at
    seen = distance >= 0 if module.is_causal else torch.ones_like(distance, dtype=torch.bool)
    window = options.get("sliding_window", module.sliding_window)
    seen = seen & (distance.abs() < window) if window else seen
    seen = seen & tokens[:, None, None]
    wanted = functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
    ulysses = UlyssesAttention.register("sdpa", group)
    try:
        q, k, v, local, part, positions = (
            t.chunk(group.size, dim)[group.rank]
            for t, dim in ((q, 2), (k, 2), (v, 2), (tokens, 1), (wanted, 1), (positions, 1))
        )
        # As transformers makes it of a part.
        mask = None if bool(local.all()) else local[:, None, None].expand(2, 1, 4, 4)
        mask = mask.tril() if mask is not None and module.is_causal else mask
        if mask is not None and mask_of == "numbers":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        found, _ = ulysses(module, q, k, v, mask, position_ids=positions, dropout=0.0, scaling=None, **options)
    finally:
        ulysses.remove()
    return found * local[:, :, None, None], part * local[:, :, None, None]


@pytest.mark.parametrize("mask_of", ["truth", "numbers"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [[0, 0], [3, 0], [5, 1]], ids=str)
@world(2)
def test_padding_is_not_attended(
    padding: list[int], causal: bool, left: bool, window: int | None, mask_of: str
) -> None:
    module = Attending(causal, window)
    torch.testing.assert_close(*_attend(module, padding, mask_of, left), atol=1e-6, rtol=1e-5)


@world(2)
def test_a_layer_that_says_it_has_no_window_has_none() -> None:
    """EXAONE 4: modules know the model's window, and full layers pass None."""
    for said in ({"sliding_window": None}, {"sliding_window": 3}, {}):
        torch.testing.assert_close(*_attend(Attending(True, 3), [0, 0], "truth", **said), atol=1e-6, rtol=1e-5)


@world(2)
def test_masks_that_add_numbers_are_refused() -> None:
    pytest.importorskip("transformers")
    ulysses = UlyssesAttention.register("sdpa", world_group())
    q = torch.randn(1, 4, 4, 4)
    positions = torch.arange(4)[None] + 4 * world_group().rank
    try:
        for mask in (torch.randn(1, 4, 4, 4), torch.zeros(1, 1, 4, 8), object()):
            with pytest.raises(UnsupportedError, match="sequence-attention"):
                ulysses(Attending(False), q, q, q, mask, position_ids=positions)
    finally:
        ulysses.remove()


@world(2)
def test_registration_is_checked_and_taken_back(tiny: Tiny) -> None:
    model, batch = tiny("llama")
    before = model(**batch).loss.item()
    assert register_with_transformers(model, "sdpa", 1) is None
    with pytest.raises(PlanError, match="query heads cannot be given"):
        register_with_transformers(model.config.__class__(num_attention_heads=1, num_key_value_heads=1), "sdpa", 2)
    with pytest.raises(PlanError, match="13 tokens over 2"):
        register_with_transformers(model, "sdpa", 2, 1, seq_length=13, seq_length_is_variable=False)
    with pytest.raises(UnsupportedError, match="'eager'"):
        register_with_transformers(model, "eager", 2)
    ranks = register_with_transformers(model, "sdpa", 2, disable_in_eval=True)
    assert isinstance(ranks, SequenceRanks)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        assert (ranks.get_sequence_parallel_world_size(), ranks.get_data_parallel_world_size()) == (2, 1)
        with pytest.raises(PlanError, match="wrapped already"):
            register_with_transformers(model, "sdpa", 2)
        model.eval()
        assert model(**batch).loss.item() == pytest.approx(before)
    finally:
        wrapped.remove()
    assert model(**batch).loss.item() == pytest.approx(before)
    set_place("")


@world(2)
def test_batches_of_all_ranks_in_parts() -> None:
    group = world_group()
    ids = torch.arange(12).view(3, 1, 4) + 100 * group.rank
    loader = SequenceDataLoader([{"input_ids": one, "labels": one, "name": group.rank} for one in ids], group)
    found = list(loader)
    assert len(loader) == len(found) == 6
    assert [batch["name"] for batch in found] == [0, 1] * 3
    second = found[3]  # batch 1 of rank 1: 104 .. 107
    assert second["input_ids"].tolist() == [[[104, 105], [106, 107]][group.rank]]
    assert second["shift_labels"].tolist() == [[[105, 106], [107, -100]][group.rank]]
    assert second["position_ids"].tolist() == [[[0, 1], [2, 3]][group.rank]]
    assert "labels" not in second
    with pytest.raises(PlanError, match="have ended"):
        list(SequenceDataLoader([{"input_ids": ids[0]}] * (1 + group.rank), group))
    with pytest.raises(PlanError, match="multiple of 2"):
        sequence_part({"input_ids": torch.zeros(1, 5)}, 0, 2)


def test_masks_of_documents_and_windows() -> None:
    positions = torch.tensor([[0, 1, 2, 3]])
    assert document_mask(positions, causal=True) is None
    window = document_mask(positions, causal=True, window=2)[0, 0].int().tolist()
    assert window == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    packed = document_mask(torch.tensor([[0, 1, 0, 1]]), causal=False)[0, 0].int().tolist()
    assert packed == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("what", ["file", "batch"])
@world(2, timeout=20.0)
def test_a_loader_that_fails_on_one_rank(what: str) -> None:
    """The others waited for its batch."""
    rank = world_group().rank

    def loader() -> Iterator[dict[str, Tensor]]:
        yield {"input_ids": torch.arange(8).view(1, 8)}
        if rank == 1 and what == "file":
            raise OSError(5, "shard-7 cannot be read")
        yield [1, 2] if rank == 1 else {"input_ids": torch.arange(8).view(1, 8)}  # type: ignore[misc]

    batches = iter(SequenceDataLoader(loader(), world_group()))  # type: ignore[arg-type]
    assert [next(batches)["input_ids"].shape for _ in range(2)] == [(1, 4)] * 2
    own, match = (OSError, "shard-7") if what == "file" else (AttributeError, "items")
    with pytest.raises(own if rank == 1 else CommError, match=match):
        next(batches)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@world(2)
def test_flex_attention_sees_what_a_whole_sequence_sees(causal: bool, window: int | None) -> None:
    """Its mask says all: two rows of one document, then one of two documents, then the first again, of which a mask is known."""
    group, module = world_group(), Attending(causal, window)
    from torch.nn.attention.flex_attention import flex_attention

    def core(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **options: object
    ) -> tuple[Tensor, None]:
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2), None

    ulysses = UlyssesAttention(core, "flex_attention", group)
    one = torch.arange(8).expand(2, -1)
    two = torch.stack([torch.arange(8), torch.cat([torch.arange(5), torch.arange(3)])])
    for seed, positions in enumerate((one, two, one, one[:1, :6])):
        rows, length = positions.shape
        q, k, v = torch.randn(3, rows, 4, length, 16, generator=torch.Generator().manual_seed(seed)).unbind()
        seen = document_mask(positions, causal, window)
        wanted = functional.scaled_dot_product_attention(q, k, v, seen, is_causal=causal and seen is None).transpose(
            1, 2
        )
        mine = [t.chunk(2, 2)[group.rank] for t in (q, k, v)]
        with torch.no_grad():
            found, _ = ulysses(module, *mine, None, position_ids=positions.chunk(2, 1)[group.rank])
        torch.testing.assert_close(found, wanted.chunk(2, 1)[group.rank], atol=1e-5, rtol=1e-5)

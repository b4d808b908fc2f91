"""Compiled runs whose layers or sequences are cut over ranks: collectives stand in the graphs, and the numbers are one process's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional

import ds_engine
from ds_comm import differentiable, world_group
from ds_config.errors import PlanError, UnsupportedError
from ds_engine.compiling import _torch
from ds_engine.compiling.graph_moves import MOVES, substitute_moves
from ds_testing import world

torch.hub.tqdm.monitor_interval = 0  # else torch.fx starts a thread that outlives the test
WIDTH, HEADS, VOCAB, LENGTH = 16, 4, 32, 8


# ---- moves


def moved(name: str) -> Callable[[Tensor], Tensor]:
    group = world_group()
    return {
        "copy": lambda x: differentiable.copy(x, group) * (1 + group.rank),
        "reduce": lambda x: differentiable.reduce(x * (2 + group.rank), group),
        "gather": lambda x: differentiable.gather(x, group, -1, [3, 3]),
        "all_gather": lambda x: differentiable.all_gather(x, group, 0) * (1 + group.rank),
        "reduce_scatter": lambda x: differentiable.reduce_scatter(x, group, 0),
        "split": lambda x: differentiable.split(x, group, 0),
        "exchange": lambda x: differentiable.seq_all_to_all(
            x, group, scatter_dim=0, gather_dim=1, async_op=True
        ).wait(),
    }[name]


@world(2)
def test_moves_in_a_graph_and_their_gradients_are_those_outside() -> None:
    _torch.keep_out("ds_comm")
    substitute_moves()
    for name in ("copy", "reduce", "gather", "all_gather", "reduce_scatter", "split", "exchange"):
        function = moved(name)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        seen = []
        for call in (function, compiled):
            x = torch.arange(12.0).view(4, 3).add(world_group().rank).requires_grad_()
            out = call(x)
            (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
            seen.append((out.detach(), x.grad))
        for one, other in zip(*seen, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)


# ---- layers


class Block(nn.Module):
    """Llama's names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(WIDTH), nn.Module(), nn.Module()
        self.self_attn.head_dim, self.self_attn.num_heads, self.self_attn.num_key_value_heads = (
            WIDTH // HEADS,
            HEADS,
            HEADS,
        )
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(WIDTH, WIDTH, bias=name == "o_proj"))
        for name in ("gate_proj", "up_proj"):
            self.mlp.add_module(name, nn.Linear(WIDTH, 24))
        self.mlp.down_proj = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed, attn = self.norm(x), self.self_attn
        q, k, v = (
            layer(normed).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for layer in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp.down_proj(functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))


class Decoder(nn.Module):
    """`shift_labels` are the next tokens; positions are an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.config = SimpleNamespace(model_type="llama", to_dict=lambda: {"model_type": "llama"})
        self.embed_tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), shift_labels.flatten(), ignore_index=-100)


def batches(steps: int) -> list[dict[str, Tensor]]:
    """The same on every rank; some labels do not count, more of them in the second half."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, LENGTH - 3 :] = -100
        labels[1, 0] = -100
        positions = torch.arange(LENGTH).expand(2, LENGTH).contiguous()
        found.append({"input_ids": ids[:, :-1], "position_ids": positions, "shift_labels": labels})
    return found


def alone(model: nn.Module, data: list[dict[str, Tensor]]) -> list[float]:
    optimizer, losses = (
        torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0),
        [],
    )
    for batch in data:
        out = model(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def configured(stage: int, passes: list[str] | None = None, **degrees: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.0},
        },
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": True, "passes": passes},
        **degrees,
    }


def trained(
    model: nn.Module, config: dict[str, Any], data: list[dict[str, Tensor]], **compiled: Any
) -> tuple[list[float], Any]:
    """Losses, the session, and how many moves of each kind stand in its graphs."""
    engine, *_ = ds_engine.initialize(model=model, config=config)
    engine.compile(**{"backend": "eager", **compiled})
    losses = []
    with inductor.patch(compile_threads=1):  # more would be a pool of threads for the rest of the process
        for batch in data:
            out = engine(**batch)
            loss = out if isinstance(out, Tensor) else out.loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    session = engine.compiled.session
    moves = {"breaks": dict(session.breaks), "passes": session.passes}
    for piece in session.pieces:
        side = "backward" if piece.backward else "forward"
        gm = session.edit(piece, piece.gm.__copy__())
        for node in gm.graph.nodes:
            for name in ("summed", "exchanged"):
                if node.target is getattr(MOVES, name).default:
                    moves[f"{name} {side}"] = moves.get(f"{name} {side}", 0) + 1
    engine.close()
    return losses, moves


@pytest.mark.parametrize(
    "stage", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@world(2)
def test_layers_cut_in_graphs_have_the_numbers_of_one_process(stage: int) -> None:
    data = batches(3)
    expected = alone(Decoder(), data)
    config = configured(stage, ["autotp"], tensor_parallel={"autotp_size": 2})
    losses, moves = trained(Decoder(), config, data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert moves["breaks"] == {}
    assert "autotp" in moves["passes"]
    assert moves["summed forward"] == 5  # the embedding, attention and MLP of two blocks
    assert moves["summed backward"] == 5  # the head's input; for query, key and value one, for gate and up one


@world(2)
def test_ranks_that_cut_layers_are_given_one_batch() -> None:
    engine, *_ = ds_engine.initialize(model=Decoder(), config=configured(1, tensor_parallel={"autotp_size": 2}))
    engine.compile(backend="eager")
    (batch,) = batches(1)
    with pytest.raises(PlanError, match="different batches"):
        engine(**{**batch, "input_ids": batch["input_ids"].add(world_group().rank).remainder(VOCAB)})
    engine.close()


# ---- sequences


@pytest.mark.parametrize(
    "stage", [1, pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(2, marks=pytest.mark.slow)]
)
@world(2)
def test_sequences_cut_in_graphs_have_the_numbers_of_one_process(stage: int) -> None:
    data = batches(3)
    expected = alone(Decoder(), data)
    losses, moves = trained(Decoder(), configured(stage, ["autosp"], sequence_parallel_size=2), data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert moves["breaks"] == {}
    assert moves["exchanged forward"] == 8  # query, key, value and the result, of two attentions
    assert moves["exchanged backward"] == 8


class Counting(Decoder):
    """Counts positions itself."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        return super().forward(input_ids, torch.arange(input_ids.shape[1]).expand_as(position_ids), shift_labels)


class Breaking(Decoder):
    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(input_ids, position_ids, shift_labels)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        return self.inner(tokens[:, :-1], positions, tokens[:, 1:])


class Plain(nn.Module):
    """No attention: its parts see nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.table(input_ids).flatten(0, 1), shift_labels.flatten())


@world(2)
def test_models_whose_sequences_cannot_be_cut_are_refused_with_what_was_found() -> None:
    (batch,) = batches(1)
    tokens = {"tokens": torch.zeros(2, LENGTH + 1, dtype=torch.long)}
    cases: list[tuple[type[nn.Module], dict[str, Tensor], type[Exception], str]] = [
        (Counting, batch, UnsupportedError, "counts positions"),
        (Breaking, batch, UnsupportedError, "capture ends early"),
        (Plain, batch, UnsupportedError, "found no scaled_dot_product_attention"),
        (Tokens, tokens, PlanError, "has no sequence"),
        (Decoder, {**batch, "input_ids": batch["input_ids"][:, :7]}, PlanError, "7 tokens over 2 ranks"),
    ]
    for kind, given, error, said in cases:
        torch._dynamo.reset()
        engine, *_ = ds_engine.initialize(model=kind(), config=configured(1, ["autosp"], sequence_parallel_size=2))
        engine.compile(backend="eager")
        with pytest.raises(error, match=said):
            engine(**given)
        engine.close()


@world(2)
def test_a_schedule_that_cuts_what_the_run_does_not_is_refused() -> None:
    engine, *_ = ds_engine.initialize(model=Decoder(), config=configured(1))
    with pytest.raises(PlanError, match="nothing is cut"):
        engine.compile(backend="eager", schedule=[(0, ["reduce", "autosp"])])
    engine.close()


# ---- slow: models of others


def llama(**more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more)
    )


def texts(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(VOCAB, (2, LENGTH), generator=generator) for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


@world(2)
def test_padding_of_a_shared_sequence_is_that_of_one_process() -> None:
    """On the left of one row and on the right of the other, with labels in it: the loss is that of the whole batch on one rank."""
    data = texts(2)
    for batch in data:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :3] = batch["attention_mask"][1, -5:] = 0
    expected = [llama()(**batch).loss.item() for batch in data]
    settings = configured(1, ["autosp"], sequence_parallel_size=2)
    engine, *_ = ds_engine.initialize(model=llama(), config=settings)
    engine.compile(backend="eager")
    assert [engine(**batch).loss.item() for batch in data] == pytest.approx(expected, rel=1e-5)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["autotp", "autosp"])
@world(2, timeout=300)
def test_a_llama_cut_in_graphs_has_the_numbers_of_one_process(name: str, stage: int, backend: str) -> None:
    data = texts(5)
    expected = alone(llama(), data)
    degrees: dict[str, Any] = (
        {"tensor_parallel": {"autotp_size": 2}} if name == "autotp" else {"sequence_parallel_size": 2}
    )
    losses, moves = trained(llama(), configured(stage, [name], **degrees), data, backend=backend)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert moves["summed forward" if name == "autotp" else "exchanged forward"] > 0

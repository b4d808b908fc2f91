"""What is decided before a tensor is touched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_config.errors import PlanError
from ds_parallel.config import LayerSpecConfig
from ds_parallel.tensor import HeadCounts, HeadUnit, ShardKind, ShardPart, TensorOptions, facts_of, make_tensor_plan
from ds_parallel.tensor.dim_shards import cut_dim
from ds_parallel.tensor.layer_rules import first_match, rules_of_specs, rules_of_tp_plan


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_query_heads_stay_with_the_key_value_head_they_use(keys: int, group: int, degree: int) -> None:
    heads = HeadCounts(keys * group, keys)
    if degree > keys * group or (degree > keys and -(-degree // keys) > group):
        with pytest.raises(PlanError, match="query heads cannot be given"):
            heads.stretches(degree)
        return
    found = heads.stretches(degree)
    assert [query for query, _ in found] == sorted(query for query, _ in found)
    assert sum(stop - start for (start, stop), _ in found) == heads.query  # every query head on one rank
    for (start, stop), (first, last) in found:
        assert stop > start
        assert {head // group for head in range(start, stop)} == set(range(first, last))


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_parts_are_cut_each_for_itself(units: list[int], grain: int, degree: int) -> None:
    sizes = [unit * grain * degree for unit in units]
    cut = cut_dim(sum(sizes), 0, [ShardPart(size=size) for size in sizes], degree, grain=grain)
    seen = sorted(i for part in cut.parts for start, stop in part for i in range(start, stop))
    assert seen == list(range(sum(sizes)))
    assert sum(cut.width(rank) for rank in range(degree)) == sum(sizes)


def test_a_fused_weight_with_unequal_parts() -> None:
    """8 query heads and 2 key-value heads of 4: q 32, k 8, v 8. Four ranks: two of them share a key-value head."""
    parts = (ShardPart(HeadUnit.QUERY), ShardPart(HeadUnit.KEY_VALUE), ShardPart(HeadUnit.KEY_VALUE))
    cut = cut_dim(48, 0, parts, 4, heads=HeadCounts(8, 2))
    assert cut.parts[0] == ((0, 8), (8, 16), (16, 24), (24, 32))
    assert cut.parts[1] == ((32, 36), (32, 36), (36, 40), (36, 40))
    assert cut.stretches(3) == ((24, 32), (36, 40), (44, 48))
    assert cut.sharers(1, 2) == (2, 3)
    assert cut.sharers(0, 2) == (2,)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(PlanError, match="cannot be cut over 4 ranks"):
        cut_dim(3, 0, [ShardPart()], 4)
    with pytest.raises(PlanError, match="add up to"):
        cut_dim(10, 0, [ShardPart(size=4), ShardPart(size=4)], 2)
    with pytest.raises(PlanError, match="how many there are is not known"):
        cut_dim(8, 0, [ShardPart(HeadUnit.QUERY)], 2)
    with pytest.raises(PlanError, match="interleaved in one weight"):
        cut_dim(24, 0, [ShardPart(HeadUnit.GROUP)], 4, heads=HeadCounts(8, 2))


def spec(**values: object) -> LayerSpecConfig:
    return LayerSpecConfig.model_validate(values)


def test_a_users_patterns_are_matched_from_the_start_of_a_parameters_path() -> None:
    rules = rules_of_specs(
        [
            spec(patterns=[r".*\.o_proj\.weight$"], partition_type="row"),
            spec(patterns=[r".*\.gate_up_proj\.weight"], shape=[2, -1]),
            spec(patterns=[r".*\.qkv\.weight"], shape=[[32, 8, 8], -1]),
            spec(patterns=[r".*norm.*"], partition_type="skip", grad_allreduce=True),
            spec(patterns=[r".*"], partition_type="skip", model_types=["other"]),
        ],
        "mine",
    )
    found = {name: first_match(rules, f"model.layers.0.{name}") for name in ("o_proj", "gate_up_proj", "qkv", "q_norm")}
    assert [found[name].kind for name in found] == [ShardKind.ROW, ShardKind.COLUMN, ShardKind.COLUMN, ShardKind.SKIP]
    assert found["gate_up_proj"].parts == (ShardPart(), ShardPart())
    assert [part.size for part in found["qkv"].parts] == [32, 8, 8]
    assert found["q_norm"].sum_gradient
    assert first_match(rules, "lm_head") is None


def test_shapes_that_say_nothing_are_refused() -> None:
    for shape in ([0, -1], [-2, -1], [[3, 3], [3, 3]], [-1, [3, 3]]):
        with pytest.raises(PlanError, match="partition_config: shape"):
            rules_of_specs([spec(patterns=["x"], shape=shape)], None)


def test_a_models_own_plan() -> None:
    plan = {
        "layers.*.q": "colwise",
        "layers.*.o": "rowwise",
        "head": "colwise_gather_output",
        "layers.*.n": "replicated",
    }
    rules = rules_of_tp_plan(plan, ("", "model."))
    assert first_match(rules, "model.layers.11.q").kind is ShardKind.COLUMN
    assert first_match(rules, "layers.0.o").kind is ShardKind.ROW
    assert first_match(rules, "head").gather_output
    assert first_match(rules, "model.layers.0.x.q") is None
    with pytest.raises(PlanError, match=r"styles \['mystery'\]"):
        rules_of_tp_plan({"layers.*.q": "mystery"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))


SPECS = (spec(patterns=[r".*\.up"]), spec(patterns=[r".*\.down"], partition_type="row"))


def test_the_plan_is_a_table_of_decisions() -> None:
    plan = make_tensor_plan(facts_of(Model()), TensorOptions(2, specs=SPECS))
    assert [decision.kind for decision in plan.decisions[:3]] == [ShardKind.COLUMN, ShardKind.ROW, ShardKind.SKIP]
    text = str(plan)
    assert "layers.*.up (x3)" in text
    assert "16 -> 8" in text
    assert "no rule" in text
    assert plan.numel(0) == (3 * (8 * 8 + 8 + 8 * 8 + 8 + 8 * 8 + 8), 3 * (8 * 16 + 16 + 16 * 8 + 8 + 8 * 8 + 8))


def test_nothing_is_guessed() -> None:
    with pytest.raises(PlanError, match="no layer of a model of no known type is cut"):
        make_tensor_plan(facts_of(Model()), TensorOptions(2))
    with pytest.raises(PlanError, match=r"no rule matches 3 linear layers: layers.\*.extra"):
        make_tensor_plan(facts_of(Model()), TensorOptions(2, specs=SPECS, strict=True))
    with pytest.raises(PlanError, match="Did you mean 'llama'"):
        make_tensor_plan(facts_of(Model()), TensorOptions(2, preset="lama"))


def test_a_head_that_only_its_name_cuts_stays_whole_with_its_embedding() -> None:
    model = Model()
    model.embed_tokens, model.lm_head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
    options = TensorOptions(2, specs=SPECS, heads=("lm_head",))
    assert make_tensor_plan(facts_of(model), options).cut[-1].name == "lm_head"
    model.lm_head.weight = model.embed_tokens.weight
    plan = make_tensor_plan(facts_of(model), options)
    assert [decision.name for decision in plan.cut if "lm_head" in decision.name] == []
    assert "tied to embed_tokens, which stays whole" in str(plan)


def test_one_rank_cuts_nothing() -> None:
    plan = make_tensor_plan(facts_of(Model()), TensorOptions(1))
    assert not plan.cut


class Fused(nn.Module):
    """Queries, keys and values in one weight, as GPT-2's; the configuration says what it likes."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = 4, 4, keys
        self.c_proj = nn.Linear(16, 16)


@pytest.mark.parametrize(("name", "width"), [("attn", 48), ("crossattention", 32)])
def test_parts_that_the_heads_do_not_fill_are_refused(name: str, width: int) -> None:
    """A GPT-2 configuration that also carries `num_key_value_heads: 2`."""
    for keys in (4, 2):
        model = nn.Module()
        model.add_module(name, Fused(keys))
        model.get_submodule(name).c_attn = nn.Linear(16, width)
        if keys == 4:
            assert make_tensor_plan(facts_of(model), TensorOptions(2, preset="gpt2")).cut
            continue
        with pytest.raises(PlanError, match=r"4 query heads with 2 key-value heads of 4 are .* = (32|16)") as told:
            make_tensor_plan(facts_of(model), TensorOptions(2, preset="gpt2"))
        assert told.value.code == "tensor-parts"

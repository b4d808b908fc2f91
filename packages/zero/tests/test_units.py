"""Which parameters travel together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_zero.layout.units import STAGES, ModuleInfo, ParamInfo, UnitSizePolicy, plan_units


def param(name, numel=100, **keys):
    keys.setdefault("group", 0)
    return ParamInfo(name, (numel,), keys.pop("dtype", "float32"), name.rpartition(".")[0], **keys)


def names(units):
    return [[p.name for p in u.params] for u in units]


MODULES = [ModuleInfo(""), ModuleInfo("list", callable=False), *(ModuleInfo(f"list.{i}") for i in range(3))]
BLOCKS = [param(f"list.{i}.{n}") for i in range(3) for n in ("a", "b")]


def test_without_sharded_parameters_a_unit_is_a_run():
    units = plan_units(BLOCKS, MODULES, STAGES[2], UnitSizePolicy(max_numel=300))
    assert [len(u.params) for u in units] == [3, 3]
    assert names(plan_units(BLOCKS, MODULES, STAGES[0], UnitSizePolicy())) == [[p.name for p in BLOCKS]]


def test_with_sharded_parameters_a_unit_is_a_module():
    units = plan_units(BLOCKS, MODULES, STAGES[3], UnitSizePolicy(max_numel=200, persist_numel=0))
    assert [u.module for u in units] == ["list.0", "list.1", "list.2"]


def test_a_container_has_no_forward_so_its_parent_gathers_for_it():
    loose = [param("list.loose", 300)]
    units = plan_units(loose, MODULES[:2], STAGES[3], UnitSizePolicy(max_numel=1, persist_numel=0))
    assert [(u.module, len(u.params)) for u in units] == [("", 1)]


def test_a_leaf_is_not_split_between_modules():
    modules = [ModuleInfo(""), ModuleInfo("moe"), ModuleInfo("moe.a"), ModuleInfo("moe.b")]
    params = [param("moe.a.w"), param("moe.b.w")]
    policy = UnitSizePolicy(max_numel=200, persist_numel=0)
    split = UnitSizePolicy(max_numel=150, persist_numel=0)
    leaf = UnitSizePolicy(max_numel=150, persist_numel=0, leaves=frozenset({"moe"}))
    assert [u.module for u in plan_units(params, modules, STAGES[3], policy)] == ["moe"]
    assert [u.module for u in plan_units(params, modules, STAGES[3], split)] == ["moe.a", "moe.b"]
    assert [u.module for u in plan_units(params, modules, STAGES[3], leaf)] == ["moe"]


def test_small_parameters_stay_gathered_up_to_a_total():
    params = [param("a", 10), param("b", 500), param("c", 10), param("d", 10)]
    units = plan_units(params, [ModuleInfo("")], STAGES[3], UnitSizePolicy(persist_numel=10, persist_total=20))
    kept = [p.name for u in units if not u.strategy.shard_params for p in u.params]
    assert kept == ["a", "c"]


def test_keys_do_not_mix():
    params = [param("a"), param("b", dtype="bfloat16"), param("c", group=1), param("d", group=None), param("e")]
    units = plan_units(params, [ModuleInfo("")], STAGES[1], UnitSizePolicy())
    assert names(units) == [["a", "e"], ["b"], ["c"], ["d"]]
    assert [u.trained for u in units] == [True, True, True, False]


tree = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 500), st.sampled_from([None, 0, 1])), max_size=12
)


@given(tree, st.integers(0, 3), st.sampled_from([None, 1, 200, 10_000]), st.integers(0, 100), st.booleans())
def test_every_parameter_is_in_one_unit_below_its_limit(found, stage, limit, persist, callable_root):
    modules, params = {"": ModuleInfo("")}, []
    for i, (path, numel, group) in enumerate(found):
        for depth in range(1, len(path) + 1):
            name = ".".join(map(str, path[:depth]))
            modules.setdefault(name, ModuleInfo(name, callable=callable_root or depth % 2 == 0))
        owner = ".".join(map(str, path))
        params.append(ParamInfo(f"{owner}.p{i}", (numel,), "float32", owner, group))
    policy = UnitSizePolicy(max_numel=limit, persist_numel=persist)
    units = plan_units(params, modules.values(), STAGES[stage], policy)
    flat = [p.name for u in units for p in u.params]
    assert sorted(flat) == sorted(p.name for p in params)
    for unit in units:
        assert len({(p.dtype, p.group) for p in unit.params}) == 1
        assert limit is None or unit.numel <= limit or len([p for p in unit.params if p.numel]) == 1
        assert modules[unit.module].callable
        if stage == 3 and unit.strategy.shard_params:
            assert all(p.module == unit.module or p.module.startswith(unit.module) for p in unit.params)


def test_a_run_is_cut_where_the_part_that_is_being_filled_is_full():
    run = [param(f"list.0.{i}", n) for i, n in enumerate((100, 100, 100, 100, 100, 250, 50, 150))]
    units = plan_units(run, MODULES, STAGES[1], UnitSizePolicy(max_numel=200))
    assert [len(u.params) for u in units] == [2, 2, 1, 1, 2]

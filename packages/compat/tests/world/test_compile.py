"""`engine.compile(schedule=...)` of the facade: passes of upstream's form, with contracts in upstream's words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_config.errors import PlanError, UnsupportedError
from ds_testing import world

torch.hub.tqdm.monitor_interval = 0  # else torch.fx starts a thread that outlives the test


@world(2, backend=None)
def test_passes_of_upstreams_form_run_in_schedules_that_keep_their_contracts() -> None:
    import deepspeed
    from deepspeed.compile.passes import contract, prefetch, zero3_compile

    seen = []

    def count(gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd):
        with pytest.raises(UnsupportedError, match="no inputs are kept"):
            create_inputs_fn()
        seen.append((bwd, (graph_id, True) in graph_order, len(param_manager[graph_id]) > 0, len(gm.graph.nodes) > 0))
        return gm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": True},
    }
    deepspeed.init_distributed("gloo")  # ranks on shared memory keep one whole copy: nothing is gathered
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert str(engine.compiled) == "not compiled"
    with pytest.raises(PlanError, match="built in"):
        engine.register_compile_pass(zero3_compile.NAME, count)
    engine.register_compile_pass("count", count, contract.PassContract(requires=zero3_compile.CONTRACT.provides))
    with pytest.raises(contract.PassContractError, match="count requires z3_gather_release"):
        engine.compile(backend="eager", schedule=[(0, [count])])
    with pytest.raises(contract.PassContractError, match="prefetch requires z3_gather_release"):
        engine.compile(backend="eager", schedule=[(0, [prefetch.NAME, zero3_compile.NAME])])
    engine.compile(
        backend="eager", schedule=[(0, [zero3_compile.NAME]), (1, [zero3_compile.add_z3_gather_release, count])]
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    assert seen == [(False, True, True, True), (True, True, True, True)]
    said = str(engine.compiled).splitlines()
    assert said[0] == "step 2: reduce -> gather -> count"
    assert [line.strip() for line in said if not line.startswith("    ")][1:] == ["forward", "backward"]
    assert any(line.startswith("    gather 0.weight before ") for line in said)
    assert sum(line.startswith("    reduce ") for line in said) == len(engine.sharding.units)
    engine.destroy()
    contract.register_pass_contract("count", None)
    deepspeed.comm.destroy_process_group()

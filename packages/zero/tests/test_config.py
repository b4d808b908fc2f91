"""The sections that ds-zero owns say what becomes of every key of the schema."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ds_config import Deprecated, NoEffect, StrictModel, Unsupported, UnsupportedConfigError, load
from ds_ops.io import IOSettings
from ds_zero import NodeTopology, OffloadPolicy, ShardOptions, UnitSizePolicy, plan
from ds_zero.config import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig, ZeroConfig
from ds_zero.layout.units import ModuleInfo, ParamInfo
from ds_zero.policies.quantized_comm import EXACT, QGZ, QWZ, ErrorFeedbackOptions, QuantizedComm


class Document(StrictModel):
    zero_optimization: ZeroConfig = ZeroConfig()
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()


def zero(**section: Any) -> ZeroConfig:
    return load(Document, {"zero_optimization": section}).zero_optimization


def test_the_oldest_form_is_a_bool(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ds_zero"):
        assert load(Document, {"zero_optimization": True}).zero_optimization.stage == 1
        assert load(Document, {"zero_optimization": False}).zero_optimization.stage == 0
    assert len(caplog.records) == 2


def test_both_spellings_are_one_key() -> None:
    assert zero(stage3_param_persistence_threshold=7) == zero(param_persistence_threshold=7)
    assert zero(stage3_param_persistence_threshold=1e6).param_persistence_threshold == 1_000_000


@pytest.mark.parametrize(
    "key",
    [
        "contiguous_gradients",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "elastic_checkpoint",
    ],
)
def test_what_the_units_replace_is_accepted_with_one_line(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        zero(**{key: 5 if key[0] == "s" else False})
    assert len(caplog.records) == 1
    assert "has no effect" in caplog.records[0].getMessage()


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        zero(legacy_stage1=True)
    assert "zero_optimization" in caught.value.message


def test_switched_off_sections_are_fine() -> None:
    assert zero(offload_optimizer={"device": "none", "pin_memory": True}, cpu_offload_param=False).stage == 0
    assert zero(mics_shard_size=-1, zero_hpz_partition_size=1, zeropp_loco_param=None).stage == 0


def test_offloading_sections_are_placements() -> None:
    io = IOSettings(queue_depth=3)
    off = zero(offload_optimizer={}, offload_param={"device": "none"})
    assert (off.offload_optimizer.placement(io), off.offload_param.placement(io)) == ("device", "device")
    host = zero(cpu_offload=True, cpu_offload_param=True)
    assert (host.offload_optimizer.placement(io), host.offload_param.placement(io)) == (
        OffloadPolicy(),
        OffloadPolicy(),
    )
    part = zero(offload_optimizer={"device": "cpu", "pin_memory": False, "ratio": 0.3})
    assert part.offload_optimizer.placement(io) == OffloadPolicy(pin=False, ratio=0.3)
    early = {"device": "cpu", "cpuadam_cores_perc": 0.5}
    assert zero(offload_optimizer=early).offload_optimizer.placement(io) == OffloadPolicy()
    assert zero(offload_optimizer={**early, "super_offload": True}).offload_optimizer.placement(io) == OffloadPolicy(
        overlap_ratio=0.5
    )
    files = {"device": "nvme", "nvme_path": "/local", "buffer_count": 1}
    found = zero(
        offload_optimizer={**files, "pipeline_read": False, "pipeline_write": False},
        offload_param={**files, "max_in_cpu": 7},
    )
    slow = OffloadPolicy("file", "/local/ds-zero", buffer_count=2, read_ahead=False, write_behind=False, io=io)
    assert found.offload_optimizer.placement(io) == slow
    assert found.offload_param.placement(io) == OffloadPolicy(
        "file", "/local/ds-zero", buffer_count=2, max_in_cpu=7, io=io
    )


@pytest.mark.parametrize(
    "document",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"reduce_bucket_size": -1}},
        {"fp16": {"loss_scale": -1}},
        {"fp16": {"loss_scale_window": 0}},
        {"torch_autocast": {"enabled": True, "dtype": "int8"}},
        {"data_types": {"grad_accum_dtype": "fp8"}},
        {"bf16": {"enabled": "true"}},
    ],
)
def test_values_are_checked(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        load(Document, document)


def retired(name: str) -> object | None:
    """Why a key of the section does nothing; None if it does something."""
    found = [m for m in ZeroConfig.model_fields[name].metadata if isinstance(m, NoEffect | Deprecated | Unsupported)]
    return found[0] if found else None


def another(name: str) -> Any:
    """A value that is not the key's default."""
    default = ZeroConfig.model_fields[name].default
    special = {"zeropp_loco_param": {"err_beta": 0.5}, "zenflow": {"topk_ratio": 0.1}}
    if name in special:
        return special[name]
    return (not default) if isinstance(default, bool) else default + 1


KEYS = list(ZeroConfig.model_fields)


@pytest.mark.parametrize("name", [n for n in KEYS if isinstance(retired(n), NoEffect)])
def test_every_key_without_effect_says_what_took_its_place(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        zero(**{name: another(name)})
    assert [name in r.getMessage() and "has no effect: " in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("name", [n for n in KEYS if isinstance(retired(n), Unsupported)])
def test_every_key_that_is_not_built_is_an_error(name: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=name):
        zero(**{name: another(name)})


def units(stage: int = 3, shard_size: int | None = None, nodes: NodeTopology | None = None, **policy: Any) -> Any:
    """What is observed of a policy: the units of one model."""
    params = [ParamInfo(f"{m}.{i}", (10, 10), "float32", m, 0) for m in ("a.x", "a.y", "b.x") for i in range(3)]
    modules = [ModuleInfo(m) for m in ("", "a", "a.x", "a.y", "b", "b.x")]
    chosen = UnitSizePolicy(**{"max_numel": 400, "persist_numel": 0, **policy})
    options = ShardOptions(stage=stage, policy=chosen, shard_size=shard_size, nodes=nodes)
    return plan(params, 4, options, modules=modules)


def wired(wire: QuantizedComm = EXACT) -> Any:
    """The plan of a bf16 model whose messages are codes."""
    params = [ParamInfo(f"a.{i}", (10, 10), "bfloat16", "a", 0) for i in range(3)]
    options = ShardOptions(stage=3, policy=UnitSizePolicy(persist_numel=0), quantized_comm=wire)
    return plan(params, 4, options, modules=[ModuleInfo(""), ModuleInfo("a")])


def sent(what: str, wire: QuantizedComm = EXACT) -> int:
    """Bytes of one gather, or one reduction, of everything."""
    return sum(unit.sent[what] for unit in wired(wire).units)


CHANGES = {
    "stage": lambda: (units(1).persistent_bytes, units(3).persistent_bytes),
    "reduce_bucket_size": lambda: (len(units().units), len(units(max_numel=100).units)),
    "param_persistence_threshold": lambda: (
        units().persistent_bytes["full"],
        units(persist_numel=100).persistent_bytes["full"],
    ),
    "model_persistence_threshold": lambda: (
        units(persist_numel=100).persistent_bytes["full"],
        units(persist_numel=100, persist_total=250).persistent_bytes["full"],
    ),
    "mics_shard_size": lambda: (units().persistent_bytes, units(shard_size=2).persistent_bytes),
    "zero_hpz_partition_size": lambda: (
        units().persistent_bytes["full"],
        units(nodes=NodeTopology(2, secondary_partition=True)).persistent_bytes["full"],
    ),
    "mics_hierarchical_params_gather": lambda: (
        units().passing,
        units(nodes=NodeTopology(2, hierarchical=True)).passing,
    ),
    "zero_quantized_weights": lambda: (sent("gather"), sent("gather", QuantizedComm(weights=QWZ))),
    "zero_quantized_gradients": lambda: (sent("reduce"), sent("reduce", QuantizedComm(gradients=QGZ))),
    "zeropp_loco_param": lambda: (
        wired(QuantizedComm(gradients=QGZ)).persistent_bytes["grads"],
        wired(QuantizedComm(gradients=QGZ, correction=ErrorFeedbackOptions())).persistent_bytes["grads"],
    ),
    "leaf_module": lambda: (len(units().units), len(units(leaves=frozenset({"a"})).units)),
}
ELSEWHERE = {  # seen by tests that need ranks or another object
    "overlap_comm": "test_order.py: nothing is issued early without it",
    "zero_quantized_nontrainable_weights": "test_wire.py: frozen parameters travel as codes",
    "zenflow": "test_importance.py: the rules; world/test_importance.py: a run beside a loop",
    "enable_sanity_checks": "test_divergence.py: strict raises on every rank",
    "ignore_unused_parameters": "test_divergence.py: what no rank used is an error where it is not ignored",
    "round_robin_gradients": "ds_ckpt's test_regular.py: how parameters lie in files",
    "parameter_alignment": "ds_ckpt's test_regular.py: how parameters lie in files",
    "sub_group_size": "ds_ckpt's test_regular.py: how parameters lie in files",
    "offload_param": "below: what ds-zero is given; test_offload.py: what comes of it",
    "offload_optimizer": "below: what ds-zero is given; test_offload.py: what comes of it",
}


def test_what_says_how_files_lie_is_recorded_in_checkpoints() -> None:
    asked = {"round_robin_gradients": True, "parameter_alignment": True, "sub_group_size": 50}
    assert asked.items() <= zero(**asked).model_dump(mode="json").items()


def test_every_other_key_changes_what_is_done() -> None:
    assert {n for n in KEYS if retired(n) is None} == set(CHANGES) | set(ELSEWHERE)
    for name, observe in CHANGES.items():
        before, after = observe()
        assert before != after, name
    deprecated = {n for n in KEYS if isinstance(retired(n), Deprecated)}
    assert deprecated == {"cpu_offload", "cpu_offload_param"}

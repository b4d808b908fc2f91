"""Placements of state: what is planned, and what goes wrong."""

from __future__ import annotations

from unittest import mock

import pytest

from ds_accel import ProcessMemory
from ds_config.errors import PlanError
from ds_zero import OffloadPolicy, ShardOptions, plan
from ds_zero.layout.shard_options import placed_numel
from ds_zero.layout.units import ModuleInfo, ParamInfo, UnitSizePolicy
from ds_zero.runtime import sharded_model


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"device": "file"}, "offload-placement"),
        ({"device": "host", "folder": "x"}, "offload-placement"),
        ({"ratio": 1.5}, "config-option"),
        ({"buffer_count": 1}, "config-option"),
        ({"max_in_cpu": -1}, "config-option"),
        ({"device": "moon"}, "config-option"),
    ],
)
def test_placements_that_cannot_be(wrong: dict[str, object], code: str) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))) as caught:
        OffloadPolicy(**wrong)  # type: ignore[arg-type]
    assert caught.value.code == code


def test_a_share_is_counted_from_the_end_in_whole_units() -> None:
    assert placed_numel([10, 10, 10, 10], 1.0) == [True] * 4
    assert placed_numel([10, 10, 10, 10], 0.5) == [False, False, True, True]
    assert placed_numel([10, 10, 10, 10], 0.4) == [False, False, True, True]
    assert placed_numel([10, 0, 30], 0.1) == [False, False, True]
    assert placed_numel([10, 10], 0.0) == [False, False]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plan_moves_bytes_and_loses_none(stage: int, precision: str) -> None:
    params = [ParamInfo(f"{m}.{i}", (16, 16), "float32", m, 0, states=2) for m in ("a", "b") for i in range(3)]
    modules = [ModuleInfo(m) for m in ("", "a", "b")]
    policy = UnitSizePolicy(max_numel=768, persist_numel=0)

    def found(tier: str | OffloadPolicy, rest: str | OffloadPolicy = "device") -> object:
        return plan(
            params,
            2,
            ShardOptions(stage=stage, precision=precision, policy=policy, offload_optimizer=tier, offload_params=rest),
            modules=modules,
        )

    shards = 1 if stage == 0 else 2
    here, host, file = found("device"), found(OffloadPolicy()), found(OffloadPolicy("file", "/x", buffer_count=2))
    masters = 1536 * 12 // shards
    size = 2 if precision == "bf16" else 4
    # Gradients are on the host, too, and three units of new weights, of two units in all, are on their way back.
    leaving = 0 if stage == 0 else (1536 * size + 3 * 768 * size) // shards
    assert host.host == masters + leaving  # type: ignore[attr-defined]
    assert file.file == masters  # type: ignore[attr-defined]
    assert file.host == 2 * -(-masters // 2 // 4096) * 4096 + leaving  # type: ignore[attr-defined]  # two buffers, in pages
    assert host.persistent_bytes["shard"] == host.persistent_bytes["optim"] == 0  # type: ignore[attr-defined]
    kept = sum(here.persistent_bytes.values()) - 1536 * 8 // shards  # type: ignore[attr-defined]
    kept -= 0 if stage == 0 else here.persistent_bytes["grads"]  # type: ignore[attr-defined]
    if stage < 3 and precision == "fp32":
        assert sum(host.persistent_bytes.values()) == kept  # type: ignore[attr-defined]  # the master was a part of the parameters
    if stage == 3:
        both = found(OffloadPolicy(), OffloadPolicy())
        assert both.persistent_bytes["full"] == 0  # type: ignore[attr-defined]
        assert both.host - host.host == host.persistent_bytes["full"] - 3 * 768 * size // shards  # type: ignore[attr-defined]
    assert "host" in str(host)
    assert ", host," in str(host.units[0])  # type: ignore[attr-defined]


def test_more_than_the_host_has_is_refused() -> None:
    few = ProcessMemory(0, 0, 0, 1 << 20, 1 << 30)
    with mock.patch.object(sharded_model, "host_memory", return_value=few):
        assert sharded_model.room_refusal(1 << 19, 2, what="nothing") == ""
        assert "2 ranks of this host would keep 640 KiB each" in sharded_model.room_refusal(5 << 17, 2, what="the plan")

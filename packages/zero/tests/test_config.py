"""The sections that ds-zero owns say what becomes of every key of the schema."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ds_config import StrictModel, UnsupportedConfigError, load
from ds_zero.config import BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig, ZeroConfig


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
        "round_robin_gradients",
        "stage3_max_live_parameters",
        "sub_group_size",
        "elastic_checkpoint",
    ],
)
def test_what_the_units_replace_is_accepted_with_one_line(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        zero(**{key: 5 if key[0] == "s" else False})
    assert len(caplog.records) == 1
    assert "has no effect" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "section",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_param": {"device": "nvme", "nvme_path": "/local"}},
        {"cpu_offload": True},
        {"zero_quantized_weights": True},
        {"zero_hpz_partition_size": 8},
        {"mics_shard_size": 8},
        {"zenflow": {"topk_ratio": 0.1}},
        {"ignore_unused_parameters": False},
    ],
)
def test_what_is_not_built_is_refused_by_name(section: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        zero(**section)
    assert "zero_optimization" in caught.value.message


def test_switched_off_sections_are_fine() -> None:
    assert zero(offload_optimizer={"device": "none", "pin_memory": True}, cpu_offload_param=False).stage == 0
    assert zero(mics_shard_size=-1, zero_hpz_partition_size=1, zeropp_loco_param=None).stage == 0


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

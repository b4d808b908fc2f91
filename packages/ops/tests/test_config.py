"""Every key of the `aio` section acts, or says what became of it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from ds_config import ConfigError, StrictModel, UnsupportedConfigError, keys, load
from ds_ops.config import AioConfig
from ds_ops.io import IOSettings
from ds_ops.io_bench import IOBandwidth, IOCase, best_section


class Document(StrictModel):
    aio: AioConfig = AioConfig()


def aio(**section: Any) -> AioConfig:
    return load(Document, {"aio": section}).aio


def test_the_schema_has_every_key_with_its_default() -> None:
    """The keys of the reference schema."""
    reference = {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    defaults = {name: field.default for name, field in AioConfig.model_fields.items()}
    assert {name: defaults[name] for name in reference} == reference
    assert {str(key.path[-1]) for key in keys(AioConfig)} >= set(reference) | {"thread_count"}


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("block_size", 8 << 20, "block_bytes"),
        ("queue_depth", 32, "queue_depth"),
        ("intra_op_parallelism", 4, "workers"),
        ("single_submit", True, "single_submit"),
        ("overlap_events", False, "overlap"),
    ],
)
def test_each_key_changes_the_settings_of_the_transfers(key: str, value: Any, field: str) -> None:
    changed, default = aio(**{key: value}).settings(), aio().settings()
    differing = [f.name for f in dataclasses.fields(IOSettings) if getattr(changed, f.name) != getattr(default, f.name)]
    assert differing == [field]
    assert getattr(changed, field) == value


def test_the_old_name_of_a_key_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert aio(thread_count=3).settings().workers == 3
    assert "intra_op_parallelism" in caplog.text


def test_what_is_not_built_or_not_possible_is_an_error() -> None:
    with pytest.raises(UnsupportedConfigError, match="host memory"):
        aio(use_gds=True)
    assert aio(use_gds=False) == aio()
    with pytest.raises(ConfigError) as caught:
        aio(block_size=1000, queue_depth=0, overlap_event=True)
    assert all(word in str(caught.value) for word in ("block_size", "queue_depth", "overlap_events"))


def test_what_tune_prints_is_a_section() -> None:
    settings = IOSettings(block_bytes=1 << 23, queue_depth=32, workers=2)
    rows = [IOBandwidth(IOCase(write, settings), 1.0) for write in (True, False)]
    assert aio(**best_section(rows)).settings() == settings

"""The checkpoint section: every key used, replaced, or refused; and the engine it asks for."""

import logging

import pytest

import ds_ckpt
from ds_ckpt.config import CheckpointConfig, make_engine
from ds_config import ConfigError, validate


def load(section):
    return validate(CheckpointConfig, section)


def test_the_defaults_are_those_of_the_schema():
    config = load({})
    assert (config.writer, config.saving.asynchronous, config.saving.keep) == (None, False, None)
    schema = {
        "tag_validation",
        "load_universal",
        "use_node_local_storage",
        "parallel_write",
        "checkpoint_serialization",
        "writer",
    }
    assert schema < set(CheckpointConfig.model_fields)
    writer = {
        "type",
        "decoupled",
        "io_buffer_size",
        "io_buffer_double",
        "show_statistics",
        "data_parallel",
        "io_multiplier",
    }
    assert writer == set(CheckpointConfig.model_fields["writer"].annotation.__args__[0].model_fields)


@pytest.mark.parametrize("text", ["Ignore", "ignore", "WARN", "fail"])
def test_tag_validation_takes_any_case_and_says_that_it_is_always_fail(text, caplog):
    with caplog.at_level(logging.WARNING, logger="ds_config"):
        load({"tag_validation": text})
    assert "always an error" in caplog.text


@pytest.mark.parametrize(
    "section",
    [
        {"tag_validation": "maybe"},
        {"parallel_write": {"pipeline_stage": "yes"}},
        {"saving": {"keep": 0}},
        {"writter": {}},
        {"writer": {"decoupled": 1}},
        {"use_node_local_storage": True},
    ],
)
def test_what_is_wrong_or_not_built_is_an_error(section):
    with pytest.raises(ConfigError):
        load(section)


def test_keys_that_no_longer_matter_say_so(caplog):
    with caplog.at_level(logging.WARNING, logger="ds_config"):
        config = load({"checkpoint_serialization": False, "writer": {"io_multiplier": 2}})
    assert config.checkpoint_serialization is True
    for key in ("checkpoint_serialization", "io_multiplier"):
        assert key in caplog.text


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, ds_ckpt.SyncCheckpointer),
        ({"writer": {}}, ds_ckpt.SyncCheckpointer),
        ({"writer": {"decoupled": True}}, ds_ckpt.AsyncCheckpointer),
        ({"saving": {"asynchronous": True, "keep": 3, "buffer_bytes": 10**6}}, ds_ckpt.AsyncCheckpointer),
    ],
)
def test_the_engine_it_asks_for(section, kind):
    engine = make_engine(load(section))
    assert type(engine) is kind
    engine.close()

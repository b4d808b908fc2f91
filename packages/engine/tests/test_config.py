"""The configuration: bad input gets one clear error; nothing is accepted and ignored."""

import argparse
import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_config.errors import ConfigError, DsError, UnsupportedError
from ds_engine import explain_config, load_config
from ds_engine.config import Config, source_of

Write = Callable[[Any], Path]


def refused(source: Any) -> DsError:
    with pytest.raises(DsError) as caught:
        load_config(source)
    return caught.value


def test_a_missing_file_names_the_nearest(written: Write) -> None:
    path = written({"train_batch_size": 8})
    error = refused(path.with_name("confg.json"))
    assert error.code == "config-source"
    assert "confg.json" in error.message
    assert str(path) in error.fix


def test_not_json_has_line_and_column(written: Write) -> None:
    error = refused(written('{\n  "train_batch_size": 8,\n  "optimizer": {"type": \n}'))
    assert error.code == "config-syntax"
    assert "config.json:4" in error.message


def test_not_an_object(written: Write) -> None:
    assert refused(written("[1, 2]")).code == "config-syntax"


def test_every_problem_at_once_with_its_line(written: Write) -> None:
    error = refused(
        written(
            '{\n"train_batch_sizes": 8,\n"zero_optimization": {"stge": 2},\n'
            '"optimizer": {"type": "Adam", "params": {"lrr": 1}},\n"gradient_clipping": -1,\n"bf16": {"enabled": 1}}'
        )
    )
    assert isinstance(error, ConfigError)
    assert len(error.issues) == 5
    for said in ("'train_batch_size'", "'stage'", "'lr'", "gradient_clipping", "bf16.enabled", "config.json:5"):
        assert said in error.message


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", ["8", True, 1.5])
def test_batch_sizes_are_integers(key: str, value: Any) -> None:
    assert key in refused({key: value}).message


def test_integral_floats_and_comments_are_understood(written: Write) -> None:
    config = load_config(written("{ // a comment\n train_batch_size: 3.2e1, \n zero_optimization: { stage: 2, }, }"))
    assert (config.train_batch_size, config.zero_optimization.stage) == (32, 2)


def test_a_dict_text_file_and_base64_are_the_same(written: Write) -> None:
    content = {"train_batch_size": 8, "bf16": {"enabled": True}}
    text = json.dumps(content)
    sources = [content, text, written(content), str(written(content)), base64.urlsafe_b64encode(text.encode()).decode()]
    assert len({load_config(source).model_dump_json() for source in sources}) == 1


@pytest.mark.parametrize(
    ("section", "on", "off"),
    [
        ("tensor_parallel", {"autotp_size": 2, "injection_policy_tuple": ["attn"]}, None),
        ("amp", {"enabled": True}, {"enabled": False}),
    ],
)
def test_what_is_not_built_is_an_error_only_when_asked_for(section: str, on: Any, off: Any) -> None:
    error = refused({"train_batch_size": 8, section: on})
    assert isinstance(error, UnsupportedError)
    assert error.code == "config-unbuilt"
    assert section in error.message
    assert "Instead" in error.message
    assert load_config({"train_batch_size": 8, section: off}).train_batch_size == 8


def test_dead_keys_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config({"train_batch_size": 8, "disable_allgather": True, "vocabulary_size": 50_000})
    assert len(caplog.records) == 2
    assert all("has no effect" in record.getMessage() for record in caplog.records)


def test_unknown_schedule_parameters_are_found() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_step": 5}}
    assert "warmup_num_steps" in refused({"scheduler": scheduler}).message
    assert "total_num_steps: is missing" in refused({"scheduler": {"type": "WarmupDecayLR", "params": {}}}).message


def test_max_grad_norm_says_where_it_belongs() -> None:
    error = refused({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}})
    assert "gradient_clipping" in error.message


def test_explain_names_the_line_of_every_value(written: Write) -> None:
    path = written('{\n"train_batch_size": 8,\n"bf16": {"enabled": true}}')
    lines = {line.split()[0]: line for line in explain_config(path).splitlines()}
    assert lines["train_batch_size"].endswith("config.json:2")
    assert lines["bf16.enabled"].endswith("config.json:3")
    assert lines["gradient_clipping"].endswith("default")


def test_auto_is_resolved_here_or_refused() -> None:
    content = {"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config = load_config(content, auto={"train_batch_size": 16, "optimizer.params.lr": 0.5})
    assert config.train_batch_size == 16
    assert config.optimizer is not None
    assert refused(content).code == "config-auto"


def test_every_key_has_a_description_or_a_reason() -> None:
    from ds_config import keys
    from ds_config.shape import retired

    bare = [
        key.path
        for key in keys(Config)
        if key.model.__module__.startswith("ds_engine.")
        and retired(key.model.model_fields[key.field]) is None
        and not key.model.model_fields[key.field].description
        and key.path[-1] not in ("type", "params")
        and len(key.path) > 1
    ]
    assert bare == []


class Calculated:
    """Arguments as GPT-NeoX has them: what they hold is computed, in slots or properties."""

    __slots__ = ()

    @property
    def deepspeed_config(self) -> dict[str, int]:
        return {"a": 2}


def test_one_source_exactly() -> None:
    args = argparse.Namespace(deepspeed_config="a.json", deepscale_config=None)
    assert source_of(None, None, args) == "a.json"
    assert source_of({"a": 1}, None, argparse.Namespace()) == {"a": 1}
    assert source_of(None, "b.json") == "b.json"
    assert source_of(None, None, Calculated()) == {"a": 2}
    for given in ((None, None, None), ("c.json", None, args), ("c.json", "d.json", None)):
        with pytest.raises(ConfigError) as caught:
            source_of(*given)
        assert caught.value.code == "config-source"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"momentum": 0.9}}}, "is a key of other types of optimizer, not of this one. Known here: betas"),
        ({"bf16": {"typo": 1}}, "did you mean optimizer.type or scheduler.type or"),
        ({"compile": {"enabled": True}}, "compile.enabled: is unknown. Nothing has a similar name."),
    ],
)  # fmt: skip
def test_a_hint_names_each_place_once_and_none_where_there_are_many(section: dict[str, Any], said: str) -> None:
    error = refused({"train_batch_size": 1, **section})
    assert error.code == "config-unknown-key"
    assert said in error.message

"""Keys with a history: aliases, deprecated, dead and unbuilt keys."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from ds_config import Alias, Deprecated, Provenance, StrictModel, Unsupported, explain, load
from ds_config.errors import ConfigError


def test_aliases_are_silent_also_for_whole_sections(train: type[StrictModel], warnings_said: list[str]) -> None:
    record = Provenance()
    text = '{"bfloat16": {\n"enabled": true,\n"initial_scale_power": 4.0},\n"zero_optimization": {"stage3_prefetch_bucket_size": 5e8}}'
    model = load(train, text, provenance=record)
    assert model.bf16.enabled is True
    assert model.bf16.initial_scale_power == 4
    assert model.zero_optimization.prefetch_bucket_size == 500_000_000
    assert warnings_said == []
    assert str(record.of(("bf16", "initial_scale_power"))) == "text:3"
    assert str(record.of(("bf16",))) == "text:1 (written as 'bfloat16')"


def test_problems_inside_an_aliased_section_keep_their_lines(train: type[StrictModel]) -> None:
    with pytest.raises(ConfigError, match=r"text:2 bf16.enabled: found 1, expected true or false"):
        load(train, '{"bfloat16": {\n"enabled": 1}}')


def test_a_deprecated_key_moves_with_exactly_one_warning(train: type[StrictModel], warnings_said: list[str]) -> None:
    model = load(train, '{"zero_optimization": {\n"cpu_offload": true, "gather_fp16_weights": true}}')
    assert model.zero_optimization.offload_optimizer.device == "cpu"
    assert model.zero_optimization.gather_weights is True
    assert model.zero_optimization.cpu_offload is False, "a retired field keeps its default"
    assert warnings_said == [
        "text:2 zero_optimization.cpu_offload is deprecated: use zero_optimization.offload_optimizer",
        "text:2 zero_optimization.gather_fp16_weights is deprecated: use zero_optimization.gather_weights",
    ]


def test_a_deprecated_key_may_move_into_a_section(train: type[StrictModel], warnings_said: list[str]) -> None:
    zero = {"offload_buffers": 8.0, "offload_optimizer": {"device": "cpu"}}
    model = load(train, {"zero_optimization": zero})
    assert model.zero_optimization.offload_optimizer.buffer_count == 8
    assert model.zero_optimization.offload_optimizer.device == "cpu"
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert len(warnings_said) == 1
    assert (
        load(train, {"zero_optimization": {"offload_buffers": 2}}).zero_optimization.offload_optimizer.buffer_count == 2
    )


@pytest.mark.parametrize(
    ("zero", "old", "new"),
    [
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "cpu_offload", "offload_optimizer"),
        ({"cpu_offload": False, "offload_optimizer": None}, "cpu_offload", "offload_optimizer"),
        (
            {"offload_buffers": 2, "offload_optimizer": {"buffer_count": 2}},
            "offload_buffers",
            "offload_optimizer.buffer_count",
        ),
        (
            {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1},
            "stage3_prefetch_bucket_size",
            "prefetch_bucket_size",
        ),
    ],
)
def test_old_and_new_together_are_an_error(train: type[StrictModel], zero: dict[str, Any], old: str, new: str) -> None:
    with pytest.raises(ConfigError, match="two names of one setting") as caught:
        load(train, {"zero_optimization": zero})
    assert caught.value.code == "config-both-keys"
    assert f"zero_optimization.{old}: and '{new}'" in caught.value.message


def test_the_type_of_a_retired_key_is_still_checked(train: type[StrictModel], warnings_said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(train, {"zero_optimization": {"cpu_offload": "yes", "elastic_checkpoint": 3, "round_robin_gradients": 1}})
    assert [str(issue) for issue in caught.value.issues] == [
        'zero_optimization.cpu_offload: found "yes", expected true or false.',
        "zero_optimization.elastic_checkpoint: found 3, expected true or false.",
        "zero_optimization.round_robin_gradients: found 1, expected true or false.",
    ]
    assert warnings_said == []


def test_what_a_conversion_makes_is_checked(train: type[StrictModel]) -> None:
    with pytest.raises(
        ConfigError, match=r"text:1 \(written as 'offload_buffers'\) zero_optimization.offload_optimizer.buffer_count"
    ) as caught:
        load(train, '{"zero_optimization": {"offload_buffers": 0}}')
    assert "found 0, expected an integer >= 1" in caught.value.message


def test_a_dead_key_is_accepted_with_one_line(train: type[StrictModel], warnings_said: list[str]) -> None:
    load(train, {"zero_optimization": {"elastic_checkpoint": True}})
    assert warnings_said == ["dict zero_optimization.elastic_checkpoint has no effect: checkpoints are always elastic"]


@pytest.mark.parametrize("off", [None, {"enabled": False}, {"enabled": False, "mode": "fixed"}])
def test_an_unbuilt_section_may_be_off(train: type[StrictModel], off: Any, warnings_said: list[str]) -> None:
    assert (
        load(train, {"sparse_attention": off, "zero_optimization": {"round_robin_gradients": False}}).sparse_attention
        is None
    )
    assert warnings_said == []


def test_retired_keys_are_in_no_dump_and_no_explanation(train: type[StrictModel]) -> None:
    record = Provenance()
    model = load(train, {"zero_optimization": {"cpu_offload": True}}, provenance=record)
    assert "cpu_offload" not in model.model_dump()["zero_optimization"]
    assert "sparse_attention" not in model.model_dump(mode="json")
    text = explain(model, record)
    assert "cpu_offload " not in text
    assert "dict (written as 'cpu_offload')" in text


def test_python_construction_follows_the_same_history(zero: type[StrictModel], warnings_said: list[str]) -> None:
    assert zero(stage3_prefetch_bucket_size=7.0).prefetch_bucket_size == 7
    assert zero(cpu_offload=True).offload_optimizer.device == "cpu"
    assert warnings_said == ["Zero.cpu_offload is deprecated: use offload_optimizer"]
    with pytest.raises(ValidationError, match="two names of one setting"):
        zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=1)
    with pytest.raises(ValidationError, match=r"which is not built here\. Instead: leave it out"):
        zero(round_robin_gradients=True)


def test_a_script_that_configures_no_logging_reads_it_once() -> None:
    code = """
from typing import Annotated
from ds_config import NoEffect, Deprecated, StrictModel, load
class Train(StrictModel):
    new: int = 1
    old: Annotated[int, Deprecated("new")] = 1
    gone: Annotated[int, NoEffect("nothing reads it")] = 1
for _ in range(2):
    load(Train, {"old": 2, "gone": 3})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    said = [line.rpartition("] ")[2] for line in done.stderr.splitlines()]
    assert said == ["dict old is deprecated: use new", "dict gone has no effect: nothing reads it"]
    assert done.stdout == ""


def test_a_deprecated_section_with_a_model_type() -> None:
    class Inner(StrictModel):
        a: int = 1

    class Outer(StrictModel):
        new: Inner = Inner()
        old: Annotated[Inner | None, Deprecated("new")] = None
        other: Annotated[int, Alias("o1"), Alias("o2")] = 0
        gone: Annotated[int | None, Unsupported("use new")] = None

    assert load(Outer, {"old": {"a": 5.0}}).new.a == 5
    with pytest.raises(ConfigError, match=r"old.aa: is unknown|new.aa: is unknown"):
        load(Outer, {"old": {"aa": 5}})
    with pytest.raises(ConfigError, match="two names of one setting"):
        load(Outer, {"o1": 1, "o2": 2})
    assert load(Outer, {"o2": 2}).other == 2
    assert load(Outer, {"gone": None}).gone is None


def test_false_is_not_off_where_the_default_is_true() -> None:
    class Model(StrictModel):
        corrected: Annotated[bool, Unsupported("true")] = True

    assert load(Model, {"corrected": True}).corrected is True
    with pytest.raises(ConfigError) as caught:
        load(Model, {"corrected": False})
    assert caught.value.code == "config-unbuilt"


def test_where_the_default_is_true_false_asks_for_something() -> None:
    class Loop(StrictModel):
        managed: Annotated[bool, Unsupported("true")] = True
        factor: Annotated[float, Unsupported("1")] = 1.0

    assert load(Loop, {"managed": True, "factor": 1}).managed is True
    with pytest.raises(ConfigError, match="managed: asks for false, which is not built here"):
        load(Loop, {"managed": False})
    with pytest.raises(ConfigError, match=r"factor: asks for 2.0, which is not built here"):
        load(Loop, {"factor": 2.0})


def test_a_conversion_may_refuse() -> None:
    def halved(value: int) -> int:
        if value % 2:
            raise ValueError("it must be even")
        return value // 2

    class Sizes(StrictModel):
        pairs: int = 0
        items: Annotated[int, Deprecated("pairs", convert=halved)] = 0

    assert load(Sizes, {"items": 6}).pairs == 3
    with pytest.raises(ConfigError, match=r"items: found 5: it must be even\."):
        load(Sizes, {"items": 5})


def test_an_unbuilt_section_is_off_while_it_says_nothing_but_its_defaults() -> None:
    class Tuning(StrictModel):
        enabled: bool = False
        fast: bool = True

    class Memory(StrictModel):
        partition: bool = False
        number: int | None = None

    class Model(StrictModel):
        tuning: Annotated[Tuning | None, Unsupported("leave it out")] = None
        memory: Annotated[Memory | None, Unsupported("leave it out")] = None

    for off in ({"tuning": {"fast": False}}, {"memory": {"partition": False, "number": None}}, {"memory": {}}):
        assert load(Model, off).memory is None
    for asks in ({"tuning": {"enabled": True}}, {"memory": {"number": 4}}):
        with pytest.raises(ConfigError) as caught:
            load(Model, asks)
        assert caught.value.code == "config-unbuilt"
    with pytest.raises(ConfigError, match=r"tuning.fats: is unknown; did you mean 'fast'"):
        load(Model, {"tuning": {"enabled": False, "fats": 3}})

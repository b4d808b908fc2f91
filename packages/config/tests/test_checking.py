"""One report with every problem of a document, each with its place; and `auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from ds_config import USE_DEFAULT, Issue, Provenance, StrictModel, examine, load, read, validate
from ds_config.errors import ConfigError, UnsupportedError

BAD = """{
  // every line has its own problem
  "train_batch_size": "32",
  "train_micro_batch_size_per_gpu": -4,
  "stage": 2,
  "gradient_clipp1ng": 0.5,
  "zero_optimization": {
    "stage": 5,
    "reduce_bucket_size": 5.5,
    "offload_optimizer": {"device": "cpuu", "ratio": 2},
    "round_robin_gradients": true,
    "stage3_prefetch_bucket_size": 1e7,
    "prefetch_bucket_size": 5e7
  },
  "train_batch_size": 64,
  "optimizer": {"params": {"lr": "auto"}},
  "groups": {"g1": {"bits": 8.5}, "g2": {}},
  "layers": [{"bits": 4}, {"bits": "4"}],
  "betas": [0.9],
  "tag_validation": "warn",
  "fp16": []
}"""


def issues_of(model: type[StrictModel], source: Any, **kwargs: Any) -> list[Issue]:
    with pytest.raises(ConfigError) as caught:
        load(model, source, **kwargs)
    return [issue for issue in caught.value.issues if isinstance(issue, Issue)]


def test_every_problem_is_in_one_report_with_its_line(train: type[StrictModel], tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load(train, file)
    lines = caught.value.message.splitlines()
    assert lines[0] == f"18 problems in the configuration ({file}):"
    assert [line.replace(f"  {file}:", "") for line in lines[1:]] == [
        '3 train_batch_size: found "32", expected an integer > 0 or null. Write 32 without quotation marks.',
        "4 train_micro_batch_size_per_gpu: found -4, expected an integer > 0 or null.",
        "5 stage: is unknown here; it belongs in zero_optimization.stage.",
        "6 gradient_clipp1ng: is unknown; did you mean 'gradient_clipping'?",
        "8 zero_optimization.stage: found 5, expected 0, 1, 2 or 3.",
        "9 zero_optimization.reduce_bucket_size: found 5.5, expected an integer >= 0.",
        '10 zero_optimization.offload_optimizer.device: found "cpuu", expected "none", "cpu" or "nvme". Did you mean "cpu"?',
        "10 zero_optimization.offload_optimizer.ratio: found 2, expected a number >= 0 and <= 1.",
        "11 zero_optimization.round_robin_gradients: asks for true, which is not built here. Instead: leave it out.",
        "12 zero_optimization.stage3_prefetch_bucket_size: and 'prefetch_bucket_size' are two names of one setting, "
        "and both are given. Keep 'prefetch_bucket_size'.",
        "15 train_batch_size: given twice in one object: first at line 3, again at line 15. Keep one 'train_batch_size'.",
        '16 optimizer.params.lr: is "auto", and no value was supplied for it. Write the value.',
        "17 groups.g1.bits: found 8.5, expected an integer.",
        "17 groups.g2.bits: is missing; expected an integer.",
        '18 layers[1].bits: found "4", expected an integer. Write 4 without quotation marks.',
        "19 betas: found [0.9], expected a list of 2 (a number, a number).",
        '20 tag_validation: found "warn", expected "Warn" or "Fail". Did you mean "Warn"?',
        "21 fp16: found [], expected an object.",
    ]
    assert caught.value.code == "config-invalid"


def test_a_dict_has_the_same_problems_without_lines(train: type[StrictModel]) -> None:
    data = read(BAD.replace('"train_batch_size": 64,', "")).data
    assert len(issues_of(train, data)) == 17
    assert {str(issue.origin) for issue in issues_of(train, data)} == {"dict"}


@pytest.mark.parametrize(
    ("document", "code", "path", "said"),
    [
        ({"zero_optimizatoin": {}}, "config-unknown-key", ("zero_optimizatoin",), "did you mean 'zero_optimization'?"),
        (
            {"zero_optimization": {"fp16": {}}},
            "config-unknown-key",
            ("zero_optimization", "fp16"),
            "it belongs in fp16",
        ),
        ({"device": "cpu"}, "config-unknown-key", ("device",), "zero_optimization.offload_optimizer.device or"),
        ({"enabled": True}, "config-unknown-key", ("enabled",), "it belongs in fp16.enabled or bf16.enabled."),
        (
            {"devise": "cpu"},
            "config-unknown-key",
            ("devise",),
            "did you mean zero_optimization.offload_optimizer.device",
        ),
        ({"tokenizer": "x"}, "config-unknown-key", ("tokenizer",), "is unknown. Nothing has a similar name."),
        (
            {"fp16": {"qqq": 1}},
            "config-unknown-key",
            ("fp16", "qqq"),
            "Known here: enabled, initial_scale_power, loss_scale.",
        ),
        ({"fp16": None}, "config-value", ("fp16",), "found null, expected an object"),
        ({"optimizer": "Adam"}, "config-value", ("optimizer",), 'found "Adam", expected an object'),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "config-value", (), "fp16 and bf16 are both enabled."),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "config-value",
            ("zero_optimization", "offload_param"),
            "device nvme needs nvme_path.",
        ),
    ],
)
def test_one_problem_has_its_own_code(
    train: type[StrictModel], document: dict[str, Any], code: str, path: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(train, document)
    (issue,) = caught.value.issues
    assert isinstance(issue, Issue)
    assert (caught.value.code, issue.path) == (code, path)
    assert said in str(issue)


def test_suggestions_are_full_paths(train: type[StrictModel]) -> None:
    (issue,) = issues_of(train, {"zero_optimization": {"stag": 1}})
    assert issue.suggestions == ("zero_optimization.stage",)
    (issue,) = issues_of(train, {"layers": [{"bits": 1}, {"bits": 1, "module": []}]})
    assert (issue.path, issue.suggestions) == (("layers", 1, "module"), ("layers[1].modules",))


def test_only_unbuilt_is_also_an_unsupported_error(train: type[StrictModel]) -> None:
    with pytest.raises(UnsupportedError, match=r"which is not built here\. Instead: torch's FlexAttention") as caught:
        load(train, {"sparse_attention": {"mode": "fixed"}})
    assert isinstance(caught.value, ConfigError)
    assert caught.value.code == "config-unbuilt"
    with pytest.raises(ConfigError) as mixed:
        load(train, {"sparse_attention": {"mode": "fixed"}, "x": 1})
    assert not isinstance(mixed.value, UnsupportedError)


def test_the_given_mapping_is_not_changed(train: type[StrictModel]) -> None:
    data = {"zero_optimization": {"cpu_offload": True, "stage3_prefetch_bucket_size": 5e8}, "betas": [0.9, 1]}
    before = repr(data)
    load(train, data)
    assert repr(data) == before


# --- auto


def test_auto_is_resolved_from_the_callers_table(train: type[StrictModel]) -> None:
    record = Provenance()
    model = load(
        train,
        '{"train_batch_size": "auto",\n "zero_optimization": {"stage3_prefetch_bucket_size": "auto", "overlap_comm": "auto"},\n'
        ' "optimizer": {"params": {"lr": "auto", "betas": [0.9, "auto"]}}}',
        auto={
            "train_batch_size": 64.0,
            "zero_optimization.prefetch_bucket_size": USE_DEFAULT,
            "zero_optimization.overlap_comm": True,
            "optimizer.params.lr": 1e-3,
            "optimizer.params.betas[1]": 0.95,
        },
        provenance=record,
    )
    assert model.train_batch_size == 64
    assert model.zero_optimization.prefetch_bucket_size == 50_000_000
    assert model.zero_optimization.overlap_comm is True
    assert model.optimizer == {"params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    assert str(record.of(("train_batch_size",))) == 'derived: "auto" at text:1'
    assert str(record.of(("zero_optimization", "prefetch_bucket_size"))).startswith('default ("auto" at text:2')
    assert repr(USE_DEFAULT) == "USE_DEFAULT"


def test_every_auto_without_a_value_is_named(train: type[StrictModel]) -> None:
    found = issues_of(
        train, {"train_batch_size": "auto", "groups": {"g": {"bits": "auto"}}, "optimizer": {"lr": "auto"}}
    )
    assert [issue.path for issue in found] == [("train_batch_size",), ("groups", "g", "bits"), ("optimizer", "lr")]
    assert {issue.code for issue in found} == {"config-auto"}
    assert "Write an integer > 0 or null." in str(found[0])


def test_a_wrong_value_for_auto_is_a_problem_too(train: type[StrictModel]) -> None:
    (issue,) = issues_of(train, {"train_batch_size": "auto"}, auto={"train_batch_size": 0})
    assert "found 0, expected an integer > 0" in str(issue)
    assert str(issue.origin) == 'derived: "auto" at dict'


def test_auto_stays_where_it_is_a_value(train: type[StrictModel]) -> None:
    assert load(train, {"top_k": "auto"}).top_k == "auto"
    # For a key that no longer does anything it is nothing to resolve.
    assert load(train, {"zero_optimization": {"cpu_offload": "auto"}}).zero_optimization.offload_optimizer is None


# --- no document makes it fail in another way

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 10**19), st.floats(), st.sampled_from(["auto", "cpu", "", "1", "x"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["stage", "device", "enabled", "bits", "params", "modules", "cpu_offload", "x", "offload_buffers"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
TOP = st.sampled_from(
    [
        "train_batch_size",
        "zero_optimization",
        "fp16",
        "bf16",
        "bfloat16",
        "optimizer",
        "groups",
        "layers",
        "betas",
        "top_k",
        "tag_validation",
    ]
)


@given(st.dictionaries(TOP, VALUES, max_size=5))
@example({"optimizer": {"stage": float("inf")}})
@settings(max_examples=400, deadline=None)
def test_any_document_gives_a_model_or_a_config_error(train: type[StrictModel], document: dict[str, Any]) -> None:
    try:
        model = validate(train, document)
    except ConfigError as error:
        assert error.issues  # noqa: PT017
        assert len({str(issue) for issue in error.issues}) == len(error.issues)  # noqa: PT017
    else:
        again = validate(train, model.model_dump(mode="json"))
        assert again == model


def test_an_error_ends_with_the_places_that_explain_its_keys() -> None:
    class Group(StrictModel):
        bits: int = 8

    class Outer(StrictModel):
        KEYS_COMMAND = "ds config key"
        stage: int = 0
        groups: dict[str, Group] | None = None
        inner: Group = Group()

    with pytest.raises(ConfigError) as caught:
        load(Outer, {"stag": 1, "inner": {"bit": 1}, "groups": {"mine": {"bits": "4"}}})
    assert "  ds config key stage inner.bits groups.*.bits" in str(caught.value).splitlines()


def test_examine_keeps_what_is_right() -> None:
    class Inner(StrictModel):
        size: int = Field(default=1, gt=0)
        name: str

    class Outer(StrictModel):
        inner: Inner | None = None
        rate: float = 0.5
        count: int = 2

    found, wrong = examine(Outer, {"rate": "fast", "count": 3, "cuont": 4, "inner": {"size": 0, "name": "a"}})
    assert found == Outer(count=3, inner=Inner(name="a"))
    assert wrong is not None
    assert {issue.path for issue in wrong.issues} == {("cuont",), ("rate",), ("inner", "size")}
    found, wrong = examine(Outer, {"inner": {"size": 2}})  # a section without what it must have counts as left out
    assert (found, wrong is None) == (Outer(), False)
    assert examine(Outer, {"count": 3}) == (Outer(count=3), None)

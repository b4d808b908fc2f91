"""Single-edit typos over a schema: all refused, nearly all explained."""

from __future__ import annotations

from typing import Annotated

import pytest
from typos import check_typos, single_edits, typos

from ds_config import Alias, StrictModel, keys, load
from ds_config.errors import ConfigError


@pytest.mark.slow
def test_a_thousand_typos_of_the_sample_schema(train: type[StrictModel]) -> None:
    report = check_typos(train, samples=1000, seed=1)
    assert report.total == report.rejected == 1000
    assert report.suggested >= 950, report.missed[:20]
    assert len(report.missed) == report.total - report.suggested


def test_every_key_of_every_section_is_misspelt(train: type[StrictModel]) -> None:
    all_keys = {key.path for key in keys(train)}
    found = {typo.key.path for typo in typos(train)}
    assert found == all_keys
    assert ("groups", "*", "bits") in all_keys
    assert ("layers", 0, "modules") in all_keys
    assert ("zero_optimization", "stage3_prefetch_bucket_size") in all_keys


def test_documents_of_typos_go_through_lists_and_maps(train: type[StrictModel]) -> None:
    shapes = {typo.path: typo.document() for typo in typos(train) if typo.wrong == "bist"}
    assert shapes == {
        ("groups", "*", "bist"): {"groups": {"*": {"bist": None}}},
        ("layers", 0, "bist"): {"layers": [{"bist": None}]},
    }


def test_a_typo_that_is_another_key_is_none() -> None:
    class Close(StrictModel):
        top: int = 1
        tops: Annotated[int, Alias("stop")] = 1

    assert {"tops", "top", "stop"}.isdisjoint(typo.wrong for typo in typos(Close))
    assert load(Close, {"stop": 3}).tops == 3


def test_a_schema_that_is_not_strict_is_caught() -> None:
    class Loose(StrictModel):
        model_config = {"extra": "allow"}  # noqa: RUF012
        width: int = 1

    report = check_typos(Loose, samples=20)
    assert report.rejected == report.suggested == 0
    assert load(Loose, {"widht": {"a": 1}}).model_extra == {"widht": {"a": 1}}
    with pytest.raises(ConfigError, match=r'widht\.a: is "auto"'):
        load(Loose, {"widht": {"a": "auto"}})


def test_edits_are_distinct_and_never_the_name() -> None:
    wrong = [text for text, _ in single_edits("zero_stage")]
    assert len(wrong) == len(set(wrong)) > 400
    assert "zero_stage" not in wrong
    assert {"zerostage", "zero-stage", "Zero_stage", "ezro_stage", "zero_stag", "zero_stagee", "zero_stave"} <= set(
        wrong
    )

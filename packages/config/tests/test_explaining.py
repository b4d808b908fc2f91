"""Every value has an origin, and explain shows it."""

from __future__ import annotations

from pathlib import Path

from ds_config import Origin, Provenance, StrictModel, explain, load
from ds_config.origin import DEFAULT


def test_file_derived_and_default(train: type[StrictModel], tmp_path: Path) -> None:
    file = tmp_path / "cfg.json"
    file.write_text('{\n"train_batch_size": 8,\n"zero_optimization": {\n "stage": 2},\n"groups": {"a": {"bits": 4}}\n}')
    record = Provenance()
    model = load(train, file, provenance=record)
    model = model.model_copy(update={"gradient_accumulation_steps": 4})
    record.derived(("gradient_accumulation_steps",), "train_batch_size 8 / (micro batch 2 x world 1)")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in explain(model, record).splitlines()}
    assert rows["train_batch_size"] == ["8", f"{file}:2"]
    assert rows["zero_optimization.stage"] == ["2", f"{file}:4"]
    assert rows["zero_optimization.reduce_bucket_size"] == ["500000000", "default"]
    assert rows["gradient_accumulation_steps"] == ["4", "derived: train_batch_size 8 / (micro batch 2 x world 1)"]
    assert rows["groups.a.bits"] == ["4", f"{file}:5"]
    assert rows["groups.a.modules"] == ["['*']", "default"]
    assert rows["fp16.enabled"] == ["false", "default"]
    assert "zero_optimization.cpu_offload" not in rows


def test_without_a_record_only_given_and_default_are_known(train: type[StrictModel]) -> None:
    model = load(train, {"train_batch_size": 8, "layers": [{"bits": 3}]})
    lines = explain(model, defaults=False).splitlines()
    assert [line.split() for line in lines] == [["train_batch_size", "8", "given"], ["layers[0].bits", "3", "given"]]
    assert len(explain(model).splitlines()) > 20


def test_columns_are_aligned_and_long_values_are_cut(train: type[StrictModel]) -> None:
    model = load(train, {"optimizer": {"name": "x" * 500}})
    lines = explain(model).splitlines()
    assert max(map(len, lines)) < 150
    assert any('xxx..."' in line for line in lines)


def test_a_record_forgets_what_was_inside() -> None:
    record = Provenance({("a",): Origin("f", 1), ("a", "b"): Origin("f", 2), ("c",): Origin("f", 3)})
    assert record.of(("a", "b", "x")) == Origin("f", 2)
    assert record.of(("z",)) is DEFAULT
    record.derived(("a",), "why")
    assert str(record.of(("a", "b"))) == "derived: why"
    assert len(record) == 2
    assert set(record) == {("a",), ("c",)}
    assert ("a", "b") not in record


def test_a_failed_load_keeps_the_places_for_messages(train: type[StrictModel]) -> None:
    assert str(Origin("cfg.json", 3)) == "cfg.json:3"
    assert str(Origin("dict")) == "dict"
    assert str(Origin("cfg.json", 3, "written as 'x'")) == "cfg.json:3 (written as 'x')"

"""What is told in confidence is written nowhere: not in checkpoints, events, plans, dumps or error messages."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import ds_engine
import ds_monitor
from ds_config.errors import ConfigError
from ds_engine import load_config
from ds_engine.config import explain_config

WORD = "hunter2-0123"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_key_reaches_its_service_and_no_file(
    make_model: Callable[[], nn.Module],
    config: Callable[..., dict[str, Any]],
    rows: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    given: list[Any] = []
    experiment = SimpleNamespace(
        set_name=print,
        log_metrics=lambda *a, **k: None,
        log_parameters=lambda *a, **k: told.append(str((a, k))),
        end=lambda: None,
    )
    told: list[str] = []
    service = SimpleNamespace(start=lambda **options: given.append(options) or experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    sink, log = ds_monitor.MemorySink(), io.StringIO()
    ds_monitor.attach([sink])
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    asked = config(
        comet={"enabled": True, "api_key": WORD},
        dump_state=True,
        csv_monitor={"enabled": True, "output_path": str(tmp_path / "csv")},
        checkpoint={"saving": {"asynchronous": asynchronous}},
    )
    try:
        engine, *_ = ds_engine.initialize(model=make_model(), config=asked, training_data=rows)
        engine.train_batch()
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved") if not asynchronous else None
        engine.close()
    finally:
        ds_monitor.detach([sink])
        logging.getLogger().removeHandler(handler)
    assert given[0]["api_key"] == WORD
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 2
    for path in written:
        assert WORD.encode() not in path.read_bytes(), path
    assert any("engine/plan" in record.name for record in sink.records)
    assert WORD not in str(sink.records) + str(told) + log.getvalue() + str(engine.plan) + repr(engine.plan) + str(
        engine.record()
    )


def test_nor_is_it_explained_or_named_in_an_error() -> None:
    assert WORD not in explain_config({"train_batch_size": 8, "comet": {"api_key": WORD}})
    for wrong in ([WORD], {"key": WORD}):
        with pytest.raises(ConfigError, match=r"comet\.api_key: found a value that is not shown") as caught:
            load_config({"train_batch_size": 8, "comet": {"api_key": wrong}})
        assert WORD not in str(caught.value) + repr(caught.value.issues) + repr(caught.value.__context__)

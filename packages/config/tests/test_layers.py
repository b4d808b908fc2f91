"""Layers of a configuration: the same values as pydantic-settings gives, includes below files, later layers win."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from ds_config import ConfigError, Provenance, StrictModel, layered, load


class Zero(StrictModel):
    stage: int = 0
    bucket: float = 1.0
    device: str = "none"


class Config(StrictModel):
    batch: int = 1
    sizes: list[int] = Field(default_factory=list)
    zero: Zero = Zero()


def test_environment_and_command_line_equal_pydantic_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pytest.importorskip("pydantic_settings")

    class PeerZero(BaseModel):
        stage: int = 0
        bucket: float = 1.0
        device: str = "none"

    class Peer(settings.BaseSettings):  # type: ignore[misc, name-defined]
        model_config = settings.SettingsConfigDict(env_prefix="DS_CONFIG__", env_nested_delimiter="__")
        batch: int = 1
        sizes: list[int] = Field(default_factory=list)
        zero: PeerZero = PeerZero()

    environ = {
        "DS_CONFIG__zero__stage": "2",
        "DS_CONFIG__batch": "8",
        "DS_CONFIG__sizes": "[1, 2]",
        "DS_CONFIG__zero__device": "cpu",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ours = load(Config, layered({"zero": {"bucket": 2.5}, "batch": 4}, environ={**environ, "OTHER": "1"}))
    assert ours.model_dump() == {**Peer(zero={"bucket": 2.5}).model_dump(), "batch": 8}
    assert load(Config, layered({"batch": 4}, environ=environ, overrides=["batch=16", "--zero.stage=3"])).batch == 16


def test_files_include_others(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.json").write_text(
        '{"batch": 2, "sizes": [1, 2], "zero": {"stage": 1, "device": "cpu"}}'
    )
    (tmp_path / "more.json").write_text('{"zero": {"bucket": 7.0}, "include": "shared/base.json"}')
    run = tmp_path / "run.hjson"
    run.write_text('{include: ["more.json"]\n sizes: [3]\n zero: {stage: 2}}')
    origins = Provenance()
    config = load(Config, layered(run, overrides=["zero.device=none"]), provenance=origins)
    assert str(origins.of(("sizes",))) == f"{run}:2"
    assert str(origins.of(("batch",))).endswith("base.json:1")
    assert str(origins.of(("zero", "device"))) == "zero.device=none"
    assert config.model_dump() == {"batch": 2, "sizes": [3], "zero": {"stage": 2, "bucket": 7.0, "device": "none"}}
    assert layered(run, overrides=["batch=1"]).name.endswith("run.hjson + command line")
    (tmp_path / "shared" / "base.json").write_text('{"include": "../run.hjson"}')
    with pytest.raises(ConfigError, match="includes itself") as error:
        layered(run)
    assert error.value.code == "config-layer"


@pytest.mark.parametrize("bad", ["batch", "=3", "batch.inner=1", "zero..stage=1"])
def test_overrides_that_say_nothing(bad: str) -> None:
    with pytest.raises(ConfigError) as error:
        layered({"batch": 4}, overrides=[bad])
    assert error.value.code == "config-layer"


def test_an_unknown_key_of_an_override_is_an_error() -> None:
    with pytest.raises(ConfigError, match="stage"):
        load(Config, layered({}, overrides=["zero.stag=1"]))

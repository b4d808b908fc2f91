"""The section of the configuration."""

from __future__ import annotations

import pytest

from ds_config import load
from ds_config.errors import ConfigError
from ds_parallel.config import ActivationCheckpointingConfig


def test_buffers_need_a_number() -> None:
    with pytest.raises(ConfigError, match="number_checkpoints"):
        load(ActivationCheckpointingConfig, {"contiguous_memory_optimization": True})
    found = load(ActivationCheckpointingConfig, {"contiguous_memory_optimization": True, "number_checkpoints": 2})
    assert found.number_checkpoints == 2


@pytest.mark.parametrize("bad", [{"number_checkpoints": 0}, {"partition_activation": True}, {"modules": "layers"}])
def test_what_is_no_good_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        load(ActivationCheckpointingConfig, bad)

"""Folders of safetensors that are torn: an error that names the file, never one of another library, never a wait."""

from __future__ import annotations

import pytest

from ds_config.errors import CheckpointError
from ds_testing.torn_files import SPOILS, write_folder
from ds_zero.access.sharded_init import _entries


@pytest.mark.parametrize("spoil", SPOILS)
def test_torn_safetensors(tmp_path, spoil):
    write_folder(tmp_path)
    assert sorted(_entries(tmp_path)) == ["a", "b"]
    SPOILS[spoil](tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _entries(tmp_path)

"""Folders of safetensors that are torn: an error that names the file, never one of another library, never a wait."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ds_config.errors import CheckpointError
from ds_moe.expert_files import _ExpertFiles
from ds_testing.torn_files import SPOILS, write_folder


def _read(folder, *names):
    with ExitStack() as stack:
        files = _ExpertFiles(folder, stack)
        return [files.part(name, None) for name in names]


@pytest.mark.parametrize("spoil", SPOILS)
def test_torn_safetensors(tmp_path, spoil):
    write_folder(tmp_path)
    assert len(_read(tmp_path, "a", "b")) == 2
    SPOILS[spoil](tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _read(tmp_path, "a", "b")


def test_a_tensor_that_the_index_has_and_the_file_has_not(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "c": "1.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _read(tmp_path, "a", "c")

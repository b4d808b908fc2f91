"""Pipes, devices and links where files are expected: an error at once, never a wait."""

import errno
import os

import pytest

from ds_config.json_files import read_json, read_weight_map
from ds_config.regular_file import (
    leads_out,
    read_regular,
    read_regular_text,
    replace_text,
    replacing,
)


def test_a_regular_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a").write_text("\ufeffhello")
    assert read_regular(tmp_path / "a", 4) == b"\xef\xbb\xbfh"
    assert read_regular_text(tmp_path / "a") == "hello"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_regular_text(tmp_path / "a", 3)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", b"[" * 100000, b"7", None])
def test_what_is_no_json_object_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(LookupError, match=str(path)):
        read_json(path, LookupError)
    with pytest.raises(LookupError, match=str(path)):
        read_weight_map(tmp_path, LookupError)


def test_an_index_of_weights(tmp_path):
    assert read_weight_map(tmp_path, LookupError) is None
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one"}}')
    assert read_weight_map(tmp_path, LookupError) == {"a": tmp_path / "one"}
    for wrong in ('{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}', "{}"):
        index.write_text(wrong)
        with pytest.raises(LookupError, match="has no weight_map"):
            read_weight_map(tmp_path, LookupError)


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(tmp_path / name, 10)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 10)


def test_a_pipe_that_this_process_holds_is_read(tmp_path):
    there, here = os.pipe()
    os.write(here, b"{}")
    os.close(here)
    try:
        assert read_regular(f"/dev/fd/{there}", 10) == b"{}"
    finally:
        os.close(there)


@pytest.mark.parametrize("name", ["", "..", "../a", "a/../../b", "/etc", "out", "out/deeper", "a\0b", "."])
def test_names_that_lead_out(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    assert leads_out(folder, name)


@pytest.mark.parametrize("name", ["a", "a/b", "in", ".hidden", "..."])
def test_names_that_stay(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "in").symlink_to(tmp_path / "a")
    assert not leads_out(tmp_path, name)


def test_text_is_replaced_whole_and_not_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("thesis")
    (tmp_path / "latest").symlink_to(tmp_path / "theirs")
    replace_text(tmp_path / "latest", "step-1")
    assert (tmp_path / "latest").read_text() == "step-1"
    assert (tmp_path / "theirs").read_text() == "thesis"
    assert sorted(os.listdir(tmp_path)) == ["latest", "theirs"]


def test_what_a_library_writes_takes_a_name_at_its_end_or_never(tmp_path):
    (tmp_path / "theirs").write_text("thesis")
    (tmp_path / "model.bin").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "model.bin") as draft:
        (draft / "part").write_bytes(b"half")
    assert (tmp_path / "model.bin").is_symlink()
    with replacing(tmp_path / "model.bin") as draft:
        assert draft.suffix == ".bin"
        draft.write_bytes(b"whole")
    assert (tmp_path / "model.bin").read_bytes() == b"whole"
    assert (tmp_path / "theirs").read_text() == "thesis"
    assert sorted(os.listdir(tmp_path)) == ["model.bin", "theirs"]


def test_a_disk_error_that_a_library_has_wrapped_is_raised_as_itself(tmp_path):
    def save(draft):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch.save does

    with pytest.raises(OSError, match="No space left"), replacing(tmp_path / "model.bin") as draft:
        save(draft)
    assert os.listdir(tmp_path) == []

"""Visible devices: numbers, UUIDs, MIG instances, none; and device files where no variable is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_config.errors import ConfigError
from ds_launcher.devices import Devices, find_devices, restrict


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("4,5", ("4", "5")),
        (" 4, 5 ", ("4", "5")),
        ("GPU-8932f937-d72c,GPU-11112222", ("GPU-8932f937-d72c", "GPU-11112222")),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),  # the driver stops at the first that is none
    ],
)
def test_the_variable_decides(value: str, visible: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert find_devices({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == Devices("cuda", "CUDA_VISIBLE_DEVICES", visible)


def test_device_files_where_no_variable_is_set(tmp_path: Path) -> None:
    assert find_devices({}, tmp_path) == Devices()
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    assert find_devices({}, tmp_path) == Devices()  # a screen's card, not ours
    (tmp_path / "dev/kfd").touch()
    assert find_devices({}, tmp_path) == Devices("rocm", "HIP_VISIBLE_DEVICES", ("0",))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert find_devices({}, tmp_path) == Devices("cuda", "CUDA_VISIBLE_DEVICES", ("0", "1"))


def test_slots_are_positions_among_the_visible_devices() -> None:
    devices = Devices("cuda", "CUDA_VISIBLE_DEVICES", ("4", "5", "GPU-x"))
    assert restrict(devices, (0, 2)) == {"CUDA_VISIBLE_DEVICES": "4,GPU-x"}
    assert restrict(Devices(), (0, 1)) == {}
    with pytest.raises(ConfigError, match=r"slots 3 were asked for.*4,5,GPU-x"):
        restrict(devices, (0, 3))

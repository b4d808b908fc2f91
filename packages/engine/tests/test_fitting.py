"""What fits so many devices, from numbers; and upstream's formulas, where they are right."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_engine.memory_fit import DeviceCluster, cluster_of, fits_of, numel_of, shapes_of_numbers
from ds_launcher.cli import main as ds


def _rows(cluster: DeviceCluster, numel: int, layers: int = 32) -> dict[tuple[int, str], tuple[int, int]]:
    shapes = shapes_of_numbers(numel, layers)
    return {(row.stage, row.tier): (row.device_bytes, row.host_bytes) for row in fits_of(cluster, shapes)}


OPTIMIZER, BOTH = "optimizer in host memory", "optimizer and parameters in host memory"


@given(st.integers(10**8, 10**11), st.sampled_from([2, 8, 64]), st.integers(16, 96))
@settings(max_examples=15, deadline=None)
def test_upstreams_formulas_agree_where_they_are_right(numel: int, ranks: int, layers: int) -> None:
    """2 bytes of parameters, 16 of gradients, masters and Adam's state; upstream counts bf16 gradients of 2 bytes, too, which nobody keeps here.

    What passes within a step is not in upstream's stage 2, and at stage 3 it is 4 bytes of the largest layer: two gathered layers.
    """
    rows = _rows(DeviceCluster(1, ranks, 80 * 10**9), numel, layers)
    layer = numel / layers
    low = 2 * numel + 16 * numel / ranks
    assert low * 0.999 <= rows[2, "device"][0] <= low + 2 * numel * 4 * 3 / min(layers, 8)
    upstream = 4 * layer + 18 * numel / ranks
    # Two gathered layers as upstream has it, and gradients of up to three on their way.
    assert upstream * 0.98 <= rows[3, "device"][0] <= (upstream + 3 * 4 * layer) * 1.02
    # Offloaded: masters and state of 12 bytes a parameter, gradients of 2, where upstream has 4, and three units of new weights; 2 more
    # of the parameters.
    assert 14 * numel * 0.99 <= rows[2, OPTIMIZER][1] <= (14 * numel + 3 * 2 * numel / min(layers, 8)) * 1.02
    assert rows[3, BOTH][1] >= 16 * numel * 0.99
    assert rows[3, BOTH][1] <= 18 * numel * 1.5


@given(st.integers(10**6, 10**10), st.sampled_from([1, 2, 8]))
@settings(max_examples=15, deadline=None)
def test_higher_stages_and_more_devices_need_less_of_each(numel: int, ranks: int) -> None:
    rows, more = (_rows(DeviceCluster(1, n, 10**10), numel) for n in (ranks, 2 * ranks))
    for stage in (1, 2, 3):
        assert more[stage, "device"][0] <= rows[stage, "device"][0] * 1.01
        if ranks > 1:
            # A small model's shards are padded, and stage 3 holds some layers gathered.
            assert rows[stage, "device"][0] <= rows[0, "device"][0] * 1.01


def test_numbers_are_read_as_people_write_them() -> None:
    assert cluster_of("8x80GB") == DeviceCluster(1, 8, 80 * 10**9)
    assert cluster_of("4x8x64GiB") == DeviceCluster(4, 8, 64 << 30)
    assert [numel_of(t) for t in ("7B", "350M", "1.3e9", "gpt.py:make")] == [
        7 * 10**9,
        350 * 10**6,
        1_300_000_000,
        None,
    ]
    for wrong in ("80GB", "0x80GB", "8x", "8x80 apples"):
        with pytest.raises(ConfigError) as caught:
            cluster_of(wrong)
        assert caught.value.code == "plan-size"


def test_the_command_answers_without_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds(["plan", "--fit", "8x80GB", "70B", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["fits"] for row in rows if row["stage"] == 0] == [False]
    assert rows[-1]["fits"]
    assert ds(["plan", "--fit", "8x80GB", "7B"]) == 0
    assert "the first that fits: stage 1" in capsys.readouterr().out
    assert ds(["plan", "--fit", "many", "7B"]) == 1

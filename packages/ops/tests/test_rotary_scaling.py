"""Scaled rotary tables: against transformers where it is installed, and by what each scaling promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_config.errors import KernelError, UnsupportedError
from ds_ops.rotary import scaled_tables
from ds_ops.rotary_scaling import RotarySpec, rotary_frequencies

TRAINED = "original_max_position_embeddings"
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, TRAINED: 512},
    {"rope_type": "yarn", "factor": 8.0, TRAINED: 512, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, TRAINED: 512, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "factor": 40.0, TRAINED: 512, "attention_factor": 0.7},
    {
        "rope_type": "longrope",
        TRAINED: 512,
        "short_factor": [1.0 + i / 9 for i in range(16)],
        "long_factor": [1.0 + i for i in range(16)],
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, TRAINED: 512},
]


@pytest.mark.parametrize("length", [0, 300, 5000])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: str(s["rope_type"]))
def test_against_transformers(scaling: dict[str, Any], length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )
    ours = rotary_frequencies(RotarySpec(32, 5000.0, scaling, 2048), length)
    if scaling["rope_type"] == "default":
        theirs, magnitude = 5000.0 ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        theirs, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length or None)
    torch.testing.assert_close(ours.angles.float(), theirs, rtol=2e-6, atol=0)
    assert ours.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: str(s["rope_type"]))
def test_no_pair_turns_faster_than_unscaled_or_slower_than_the_factor_asks(scaling: dict[str, Any]) -> None:
    plain = rotary_frequencies(RotarySpec(32)).angles
    scaled = rotary_frequencies(RotarySpec(32, scaling=scaling, max_positions=2048)).angles
    factor = max([scaling.get("factor", 1.0), *scaling.get("short_factor", [])])
    assert bool((scaled <= plain * (1 + 1e-12)).all())
    assert bool((scaled >= plain / factor * (1 - 1e-12)).all())


def test_tables_carry_angles_and_magnitude() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, TRAINED: 64}
    positions = torch.tensor([[0, 3], [70, 255]])
    cos, sin = scaled_tables(positions, RotarySpec(8, 100.0, scaling), length=256)
    f = rotary_frequencies(RotarySpec(8, 100.0, scaling), 256)
    angles = positions.double()[..., None] * f.angles
    torch.testing.assert_close(cos, (angles.cos() * f.magnitude).float())
    torch.testing.assert_close(sin, (angles.sin() * f.magnitude).float())
    assert cos.shape == (2, 2, 4)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="llama3"):
        rotary_frequencies(RotarySpec(8, scaling={"rope_type": "other"}))
    for scaling, words in (
        ({"rope_type": "yarn"}, f"factor, {TRAINED} missing"),
        ({"rope_type": "linear", "factor": -1.0}, "factor = -1.0"),
        ({"rope_type": "linear", "factor": "4"}, "factor = '4'"),
        ({"rope_type": "longrope", TRAINED: 8, "short_factor": [1.0], "long_factor": [1.0]}, "4 numbers"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, TRAINED: 8},
            "not below",
        ),
    ):
        with pytest.raises(KernelError, match=words):
            rotary_frequencies(RotarySpec(8, scaling=scaling))
    with pytest.raises(KernelError, match="even"):
        rotary_frequencies(RotarySpec(3))

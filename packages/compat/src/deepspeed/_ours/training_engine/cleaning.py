"""`redundancy_clean` as programs expect it that change the number of heads of their modules themselves afterwards."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_compress.cleaning import clean_layers
from ds_compress.compress import is_compressed
from ds_compress.students import is_student


def redundancy_clean(model: nn.Module, deepspeed_config: Any = None, mpu: Any = None) -> nn.Module:
    """Make a compressed model, or an engine's, final; returns it. See `ds_compress.redundancy_clean`.

    Counts of heads (`num_attention_heads`, `all_head_size`, the model's `config`) stay as they were, and a student by layer
    reduction alone is left as it is.
    """
    del mpu
    whole: nn.Module = getattr(model, "module", model)
    if is_compressed(whole) or not is_student(whole):
        clean_layers(whole, deepspeed_config)
    return model

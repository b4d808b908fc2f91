"""`deepspeed.module_inject.replace_policy`: the classes that programs name a family's layers by.

`init_inference(injection_policy={GPT2Block: HFGPT2LayerPolicy})` finds a family and its layers by itself: a policy adds nothing to that, so it
names no linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed._ours.base.raising import refused

_NAMES = (
    "HFBertLayerPolicy", "HFGPTNEOLayerPolicy", "GPTNEOXLayerPolicy", "HFGPTJLayerPolicy", "MegatronLayerPolicy", "HFGPT2LayerPolicy",
    "BLOOMLayerPolicy", "HFOPTLayerPolicy", "HFCLIPLayerPolicy", "HFDistilBertLayerPolicy", "LLAMALayerPolicy", "LLAMA2LayerPolicy",
    "InternLMLayerPolicy",
)  # fmt: skip


class _NamesNoLayer(type):
    def __iter__(cls) -> Iterator[str]:
        return iter(())


class DSPolicy(metaclass=_NamesNoLayer):
    """A value of `injection_policy`: the layers of the family are found by init_inference."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        raise refused("policy-made", type(self).__name__)


replace_policies = [_NamesNoLayer(name, (DSPolicy,), {"__doc__": DSPolicy.__doc__}) for name in _NAMES]
globals().update({policy.__name__: policy for policy in replace_policies})

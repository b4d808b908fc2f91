"""What is done to a model before it trains, in this order; undone in the other one.

A pipeline's stages and parts of layers come before parts of state: ZeRO shards whatever is left on a rank. `docs/how-to/
add-a-transform.md` says how to add one.
"""

from typing import Any

from ds_engine.transforms.activation_checkpointing import Activations
from ds_engine.transforms.compression import CompressionTransform
from ds_engine.transforms.expert_parallel import ExpertTransform
from ds_engine.transforms.megatron_layers import OwnTensor
from ds_engine.transforms.model_kernels import Kernels
from ds_engine.transforms.quantized_weights import QuantizedWeights
from ds_engine.transforms.sequence_parallel import Sequence
from ds_engine.transforms.sparse import SparseAttention
from ds_engine.transforms.stages import Stages
from ds_engine.transforms.tensor_parallel import Tensor
from ds_engine.transforms.token_routing import Routing
from ds_engine.transforms.transform import Applied, BuildContext, Transform, TransformInput, apply_all, decide_all
from ds_engine.transforms.zero_stage import Zero

__all__ = ["TRANSFORMS", "Applied", "BuildContext", "Transform", "TransformInput", "apply_all", "decide_all"]

TRANSFORMS: tuple[Transform[Any, Any], ...] = (
    Stages(),
    Tensor(),
    OwnTensor(),
    ExpertTransform(),
    Sequence(),
    SparseAttention(),
    QuantizedWeights(),
    CompressionTransform(),
    Kernels(),
    Routing(),
    Activations(),
    Zero(),
)

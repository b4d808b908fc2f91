"""What is done to a model before it trains, in this order; undone in the other one.

A pipeline's stages and parts of layers come before parts of state: ZeRO shards whatever is left on a rank. `docs/how-to/
add-a-transform.md` says how to add one.
"""

from typing import Any

from ds_engine.transforms.activations import Activations
from ds_engine.transforms.base import Applied, Asked, Site, Transform, apply_all, decide_all
from ds_engine.transforms.compression import Compression
from ds_engine.transforms.experts import Experts
from ds_engine.transforms.own_layers import OwnTensor
from ds_engine.transforms.routing import Routing
from ds_engine.transforms.sequence import Sequence
from ds_engine.transforms.sparse import SparseAttention
from ds_engine.transforms.stages import Stages
from ds_engine.transforms.tensor import Tensor
from ds_engine.transforms.weights import QuantizedWeights
from ds_engine.transforms.zero import Zero

__all__ = ["TRANSFORMS", "Applied", "Asked", "Site", "Transform", "apply_all", "decide_all"]

TRANSFORMS: tuple[Transform[Any, Any], ...] = (
    Stages(),
    Tensor(),
    OwnTensor(),
    Experts(),
    Sequence(),
    SparseAttention(),
    QuantizedWeights(),
    Compression(),
    Routing(),
    Activations(),
    Zero(),
)

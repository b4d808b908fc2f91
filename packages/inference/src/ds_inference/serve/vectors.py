"""Embeddings in the protocol's form."""

from __future__ import annotations

import base64
import struct
from typing import Any

import torch
from torch import Tensor

from ds_inference.serve.protocol import EmbeddingRequest

__all__ = ["embeddings_body"]


def embeddings_body(body: EmbeddingRequest, vectors: Tensor, name: str, tokens: int) -> dict[str, Any]:
    """Return vectors [inputs, width], fp32, in the protocol's form.

    With `dimensions` the first ones are kept and scaled to length 1 again, as models that are trained for it expect (Kusupati 2022).
    """
    if body.dimensions is not None:
        vectors = torch.nn.functional.normalize(vectors[:, : body.dimensions], dim=-1)
    rows: list[Any] = vectors.tolist()
    if body.encoding_format == "base64":
        rows = [base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode() for row in rows]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}

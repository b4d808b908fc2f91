"""Families of decoders as declarations: what their configuration means, and where their checkpoints keep what.

A new family is one function and one table, in the module of its kind. Configurations are plain dicts (`config.json`, or
`config.to_dict()`), of transformers 4 and 5 alike.
"""

from __future__ import annotations

from ds_config.errors import UnsupportedError
from ds_inference.families.family_spec import Config, DecoderFamily, Sources, ends_of, sees_later_tokens, undeclared
from ds_inference.families.llama import LLAMA_LIKE
from ds_inference.families.moe_weights import SPARSE
from ds_inference.families.older import OLDER
from ds_inference.families.variants import VARIANTS

__all__ = ["FAMILIES", "Config", "DecoderFamily", "Sources", "ends_of", "family_of", "undeclared"]

FAMILIES: dict[str, DecoderFamily] = dict(sorted({**LLAMA_LIKE, **SPARSE, **OLDER, **VARIANTS}.items()))


def family_of(config: Config) -> DecoderFamily:
    """Return the declared model family of a configuration.

    Raises:
        UnsupportedError: the family is not declared, or its tokens see later ones ("inference-family").
    """
    kind = str(config.get("model_type"))
    if sees_later_tokens(config):
        raise UnsupportedError(
            f"a {kind} model whose tokens see those that come later (use_bidirectional_attention, or is_causal false)",
            code="inference-family",
            fix="Use load_embedder: such a model makes vectors, not answers.",
        )
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"model_type {kind!r} has no declaration; there are {', '.join(sorted(FAMILIES))}",
            code="inference-family",
            fix="Load the model with transformers and pass the module: it then runs through its own forward, slower.",
        )
    return FAMILIES[kind]

"""`deepspeed.sequence.auto_sp` and its like: vision-language models of which every rank has a part of each sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepspeed._ours.base.forwarding import reads
from deepspeed._ours.base.raising import refused
from deepspeed._ours.monitor.upstream_logging import logger
from ds_parallel.sequence import vision

_TEXT = frozenset({
    "FalconAttention", "GPTNeoXAttention", "GemmaAttention", "InternLM2Attention", "LlamaAttention", "MistralAttention", "MptAttention",
    "Phi3Attention", "Qwen2Attention",
})  # fmt: skip


class UlyssesSPViTAttention(vision.GatheredAttention):
    """`ds_parallel`'s, under upstream's names."""

    def __init__(self, attn: nn.Module, process_group: Any, has_cls_token: bool = True) -> None:
        super().__init__(attn, process_group, has_cls_token)

    process_group = reads("_group.pg", "The ranks that share the sequences.")
    world_size = reads("_group.size", "Their number.")


def auto_wrap_model_for_sp(model: nn.Module, process_group: Any) -> nn.Module:
    """Let the attentions over patches of a model share their sequences, in place, and return the model.

    Attention over text is left alone.

    Raises:
        ConfigError: no attention of a known class; a ValueError, too ("compat-argument").
    """
    names = vision.gather_vision_attention(model, process_group, UlyssesSPViTAttention)
    text = sorted({type(module).__name__ for module in model.modules()} & _TEXT)
    if not names and not text:
        raise refused("no-attention", type(model).__name__, ", ".join(vision.CLASS_TOKENS))
    if text:
        logger.warning("%s is left alone: UlyssesSPAttentionHF.register_with_transformers shares it", ", ".join(text))
    return model


class ModalityFusionSPAdapter(nn.Module):
    """A projection of image features, whose tokens it puts into the text; each rank has a part of the images, and gets one of the whole.

    Args:
        projection: Of this rank's features, [batch, tokens, features].
        process_group: The ranks that share the sequences.
        image_token_id: What stands for an image in the text.
    """

    def __init__(self, projection: nn.Module, process_group: Any, image_token_id: int = -200) -> None:
        super().__init__()
        self.projection, self.process_group, self.image_token_id = projection, process_group, image_token_id

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """Return this rank's part of the whole sequence. Collective."""
        image = self.projection(visual_features)

        def splice(text: Tensor, images: Tensor) -> Tensor:
            return self._splice_visual_into_text(text, images, input_ids)

        return vision.spliced(text_embeds, image, self.process_group, splice)

    def _splice_visual_into_text(self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """Return the text with all images in it. Subclasses say how."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its model puts images into text")


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """Puts each image in the place of one token."""

    def _splice_visual_into_text(self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor) -> Tensor:
        return vision.replace_tokens(text_embeds, visual_embeds, input_ids, self.image_token_id)


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """Puts one token of an image in the place of each of the text's for it."""

    def _splice_visual_into_text(self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor) -> Tensor:
        return vision.fill_runs(text_embeds, visual_embeds, input_ids, self.image_token_id)


class Qwen2VLFusionAdapter(ModalityFusionSPAdapter):
    """Puts one token of an image in the place of each between the two that bound it."""

    def __init__(
        self, projection: nn.Module, process_group: Any, vision_start_token_id: int, vision_end_token_id: int
    ) -> None:
        super().__init__(projection, process_group)
        self.vision_start_token_id, self.vision_end_token_id = vision_start_token_id, vision_end_token_id

    def _splice_visual_into_text(self, text_embeds: Tensor, visual_embeds: Tensor, input_ids: Tensor) -> Tensor:
        bounds = self.vision_start_token_id, self.vision_end_token_id
        return vision.fill_between(text_embeds, visual_embeds, input_ids, *bounds)

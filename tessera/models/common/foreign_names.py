"""Names that modules have in other systems: Megatron and MindSpeed-MM, and the classes of transformers.

A file written for one of these systems (`fsdp2_config.yaml`) selects modules of our families by their names there.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, tuple[str, ...]]
TRANSFORMER_LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"  # selected by its class


def _decoder(layers: str, embedding: str, norm: str, rotary: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the parts of a text decoder. Rotations have no parameters, and no module here."""
    return {layers: ("text.layers",), embedding: ("text.embed",), norm: ("text.norm",), rotary: ()}


def _in_megatron(prefix: str) -> dict[str, tuple[str, ...]]:
    parts = (f"{prefix}{name}" for name in ("decoder.layers", "embedding", "decoder.final_layernorm", "rotary_pos_emb"))
    return {**_decoder(*parts), f"{prefix}output_layer": ("head",)}


def _in_transformers(prefix: str) -> dict[str, tuple[str, ...]]:
    return _decoder(*(f"{prefix}{name}" for name in ("layers", "embed_tokens", "norm", "rotary_emb")))


_MEGATRON_CLASSES: Names = {
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding": ("text.embed",),
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding": (),
}
TEXT_NAMES: Names = {
    **_in_megatron(""),
    **_in_transformers("model."),
    "lm_head": ("head",),
    **_MEGATRON_CLASSES,
    TRANSFORMER_LAYER: ("text.layers.{*}",),
}

# Model types of transformers -> its classes of vision blocks and of decoder layers.
_LAYER_CLASSES = {
    "qwen2_vl": ("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionBlock", "Qwen2_5_VLDecoderLayer"),
    "qwen3_vl": ("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer"),
    "qwen3_vl_moe": ("Qwen3VLMoeVisionBlock", "Qwen3VLMoeTextDecoderLayer"),
    "glm4v": ("Glm4vVisionBlock", "Glm4vTextDecoderLayer"),
}
_LAYERS = ("vision.blocks.{*}", "text.layers.{*}")
_VISION = {
    "": ("vision", "projector"),
    ".blocks": ("vision.blocks",),
    ".merger": ("projector",),
    ".deepstack_merger_list": ("projector.taps",),
}
VISION_LANGUAGE_NAMES: Names = {
    **_in_megatron("text_decoder."),
    "image_encoder": ("vision", "projector"),
    "image_encoder.encoder": ("vision",),
    "image_encoder.encoder.blocks.layers": ("vision.blocks",),
    "image_encoder.encoder.encoder.layers": ("vision.blocks",),  # InternVL
    "image_encoder.projector": ("projector",),
    **_in_transformers("model."),
    **_in_transformers("model.language_model."),
    "model.language_model": ("text",),
    "lm_head": ("head",),
    **{f"{prefix}visual{part}": paths for prefix in ("", "model.") for part, paths in _VISION.items()},
    **_MEGATRON_CLASSES,
    TRANSFORMER_LAYER: _LAYERS,
    "mindspeed_mm.models.vision.vision_model.VisionModel": ("vision", "projector"),
    **{
        f"transformers.models.{kind}.modeling_{kind}.{name}": (path,)
        for kind, classes in _LAYER_CLASSES.items()
        for name, path in zip(classes, _LAYERS, strict=True)
    },
}

# A generation job of MindSpeed-MM has the transformer as `predictor`, beside encoders that are no part of a model here.
GENERATION_NAMES: Names = {
    "predictor.blocks": ("blocks",),  # Wan
    "predictor.head": ("head",),
    "predictor.double_blocks": ("blocks",),  # HunyuanVideo
    "predictor.single_blocks": ("single_blocks",),
    "predictor.videodit_blocks": ("blocks",),  # CogVideoX
    **dict.fromkeys(("ae", "text_encoder", "image_encoder"), ()),
}

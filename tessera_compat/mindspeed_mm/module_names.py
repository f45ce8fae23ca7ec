"""The names that modules of Tessera have in Megatron, MindSpeed-MM and transformers.

A file written for one of these systems, such as `fsdp2_config.yaml`, selects modules by these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Names = Mapping[str, tuple[str, ...]]
_LAYERS, _BLOCKS, _HEARING = ("text.layers.{*}",), ("vision.blocks.{*}",), ("audio.blocks.{*}",)


def _decoder(layers: str, embedding: str, norm: str, rotary: str) -> dict[str, tuple[str, ...]]:
    """Return the names of modules in a text decoder. Rotary embeddings are no module in Tessera."""
    return {layers: ("text.layers",), embedding: ("text.embed",), norm: ("text.norm",), rotary: ()}


def _in_megatron(prefix: str) -> dict[str, tuple[str, ...]]:
    parts = (f"{prefix}{name}" for name in ("decoder.layers", "embedding", "decoder.final_layernorm", "rotary_pos_emb"))
    container = {f"{prefix}decoder": (*_LAYERS, "text.norm")}
    return {**container, **_decoder(*parts), f"{prefix}output_layer": ("head",)}


def _in_transformers(prefix: str) -> dict[str, tuple[str, ...]]:
    return _decoder(*(f"{prefix}{name}" for name in ("layers", "embed_tokens", "norm", "rotary_emb")))


# Class name -> module paths in Tessera. Files name classes by import paths, which may include a folder name
# (transformers_modules.FOLDER).
_CLASSES: Names = {
    "LanguageModelEmbedding": ("text.embed",),
    "RotaryEmbedding": (),
    "TransformerLayer": (*_BLOCKS, *_HEARING, *_LAYERS),  # class of Megatron
    "VisionModel": ("vision", "projector"),  # classes of MindSpeed-MM
    "AudioModel": ("audio", "audio_projector"),
    **dict.fromkeys(("Qwen2_5OmniDecoderLayer", "Qwen3OmniMoeThinkerTextDecoderLayer"), _LAYERS),
    **dict.fromkeys(("Qwen2_5OmniVisionBlock", "Qwen3OmniMoeVisionBlock"), _BLOCKS),
    **dict.fromkeys(("Qwen2_5OmniAudioEncoderLayer", "Qwen3OmniMoeAudioEncoderLayer"), _HEARING),
    **dict.fromkeys(("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer"), _LAYERS),
    **dict.fromkeys(("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"), _LAYERS),
    **dict.fromkeys(("Qwen3VLMoeTextDecoderLayer", "Glm4vTextDecoderLayer"), _LAYERS),
    **dict.fromkeys(("Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock", "Qwen3VLVisionBlock"), _BLOCKS),
    **dict.fromkeys(("Qwen3VLMoeVisionBlock", "Glm4vVisionBlock", "CLIPEncoderLayer", "SiglipEncoderLayer"), _BLOCKS),
    **dict.fromkeys(("InternVisionEncoderLayer", "InternVLVisionLayer"), _BLOCKS),
}
TEXT_NAMES: Names = {
    **_in_megatron(""),
    "model": ("text",),
    **_in_transformers("model."),
    "lm_head": ("head",),
    **_CLASSES,
}
_VISION = {
    "": ("vision", "projector"),
    ".blocks": ("vision.blocks",),
    ".pos_embed": ("vision.table",),
    ".merger": ("projector",),
    ".patch_embed": ("vision.patch_embed",),
    **dict.fromkeys((".deepstack_merger_list", ".merger_list"), ("projector.taps",)),
}
# Audio encoders. Position embeddings without weights are no module in Tessera.
_AUDIO = {
    **dict.fromkeys(("audio_encoder", "audio_encoder.encoder", "audio_tower"), ("audio", "audio_projector")),
    "audio_encoder.encoder.blocks": _HEARING,
    **dict.fromkeys(("audio_encoder.encoder.blocks.layers", "audio_tower.layers"), ("audio.blocks",)),
    **{
        f"{tower}.{name}": (path,) if path else ()
        for tower in ("audio_encoder.encoder", "audio_tower")
        for name, path in (
            ("positional_embedding", ""),
            *((f"conv{dimensions}1", "audio.convs.first") for dimensions in ("", "2d")),
            *((f"conv{dimensions}2", "audio.convs.second") for dimensions in ("", "2d")),
            ("conv2d3", "audio.convs.third"),
            ("conv_out", "audio.convs.proj"),
            ("proj", "audio_projector.proj"),
            ("proj1", "audio_projector.up"),
            ("proj2", "audio_projector.down"),
        )
    },
}
# Module paths of InternVL and LLaVA encoders in the original code and in transformers.
_TOWERS = {
    "": ("vision",),
    ".embeddings": ("vision.patch_embed", "vision.table"),
    ".encoder": _BLOCKS,
    **dict.fromkeys((".encoder.layers", ".encoder.layer"), ("vision.blocks",)),
}
_TOWER_PATHS = ("vision_model", "vision_tower", "vision_tower.vision_model")
VISION_LANGUAGE_NAMES: Names = {
    "text_decoder": ("text", "head"),
    **_in_megatron("text_decoder."),
    "image_encoder": ("vision", "projector"),
    "image_encoder.encoder": ("vision",),
    "image_encoder.encoder.blocks": _BLOCKS,
    "image_encoder.encoder.blocks.layers": ("vision.blocks",),
    "image_encoder.encoder.encoder": _BLOCKS,  # InternVL
    "image_encoder.encoder.encoder.layers": ("vision.blocks",),
    "image_encoder.projector": ("projector",),
    **_in_transformers("model."),
    "language_model": ("text", "head"),
    "language_model.model": ("text",),
    "language_model.lm_head": ("head",),
    **_in_transformers("language_model."),
    **_in_transformers("language_model.model."),
    "model.language_model": ("text",),
    **_in_transformers("model.language_model."),
    **dict.fromkeys(("mlp1", "multi_modal_projector", "model.multi_modal_projector"), ("projector",)),
    "lm_head": ("head",),
    **{f"{prefix}visual{part}": paths for prefix in ("", "model.") for part, paths in _VISION.items()},
    **{
        f"{prefix}{tower}{part}": paths
        for prefix in ("", "model.")
        for tower in _TOWER_PATHS
        for part, paths in _TOWERS.items()
    },
    **_AUDIO,
    **_CLASSES,
}

# Generation jobs call the transformer `predictor`. In Tessera its encoders are not part of the model.
GENERATION_NAMES: Names = {
    "predictor": ("blocks.{*}", "single_blocks.{*}"),
    "predictor.blocks": ("blocks",),  # Wan
    "predictor.head": ("head",),
    "predictor.double_blocks": ("blocks",),  # HunyuanVideo
    "predictor.single_blocks": ("single_blocks",),
    "predictor.videodit_blocks": ("blocks",),  # CogVideoX
    **dict.fromkeys(("ae", "text_encoder", "image_encoder"), ()),
}


def module_names(model: nn.Module) -> Names:
    """Return name of a module in other systems -> module paths in Tessera that it selects."""
    from tessera_compat.mindspeed_mm.classes import TransformersModel

    if isinstance(model, TransformersModel):  # jobs name modules by their paths inside of the wrapped model
        return {name: (f"model.{name}",) for name, _ in model.model.named_children()}
    if not any(base.__module__.partition(".")[0] in ("tessera", "tessera_compat") for base in type(model).__mro__):
        return {}
    parts = dict(model.named_children())
    if "text" in parts:
        names = VISION_LANGUAGE_NAMES if "vision" in parts else TEXT_NAMES
        return {**names, "model": ("text",)} if "audio" in parts else names  # Qwen-Omni calls its decoder `model`
    return GENERATION_NAMES if "blocks" in parts else {}

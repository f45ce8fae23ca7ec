"""How InternVL may be dealt out over devices."""

from __future__ import annotations

from tessera.core.types import Carry, ModelPlan, Stage, TensorStyle
from tessera.models._text.plan import layer_weights, text_stages, text_styles
from tessera.models._vision.plan import seeing_plan
from tessera.models.internvl.config import InternVLConfig

EVEN = 8  # ranks that commonly compute layers together


def plan(config: InternVLConfig) -> ModelPlan:
    return seeing_plan(
        config.text,
        {**_vision_styles(config), **_whole_tables(config)},
        _stages(config),
        tied=config.tie_word_embeddings,
        vision_heads=config.vision.num_attention_heads,
    )


def _whole_tables(config: InternVLConfig) -> dict[str, TensorStyle]:
    """Published tables have 151674 or 92553 words, which ranks cannot share evenly: each keeps all of them."""
    if config.text.vocab_size % EVEN == 0:
        return {}
    styles = text_styles(config.text, config.tie_word_embeddings)
    return {name: "replicate" for name, style in styles.items() if style == "vocab"}


def _vision_styles(config: InternVLConfig) -> dict[str, TensorStyle]:
    vision = config.vision
    # Queries and keys that are normalised over all heads are needed whole: then each rank computes all of attention.
    whole = vision.use_qk_norm
    norm = "weight" if vision.norm_type == "rms_norm" else "{weight,bias}"
    styles: dict[str, TensorStyle] = {
        "vision.patch_embed.{weight,bias}": "replicate",
        "vision.table.{weight,class_token}": "replicate",
        f"vision.blocks.{{*}}.{{attn_norm,mlp_norm}}.{norm}": "replicate",
        "vision.blocks.{*}.{attn_scale,mlp_scale}.weight": "replicate",
        "vision.blocks.{*}.attn.qkv.weight": "replicate" if whole else "column",
        "vision.blocks.{*}.attn.proj.weight": "replicate" if whole else "row",
        "vision.blocks.{*}.attn.proj.bias": "replicate",
        "vision.blocks.{*}.mlp.up.{weight,bias}": "column",
        "vision.blocks.{*}.mlp.down.weight": "row",
        "vision.blocks.{*}.mlp.down.bias": "replicate",
        "projector.norm.{weight,bias}": "replicate",
        "projector.up.{weight,bias}": "column",
        "projector.down.weight": "row",
        "projector.down.bias": "replicate",
    }
    if vision.attention_bias:
        styles["vision.blocks.{*}.attn.qkv.bias"] = "replicate" if whole else "column"
    if vision.use_qk_norm:
        styles["vision.blocks.{*}.attn.{q_norm,k_norm}.weight"] = "replicate"
    if not vision.use_mean_pooling:
        styles["vision.norm_after.{weight,bias}"] = "replicate"
    return styles


def _stages(config: InternVLConfig) -> tuple[Stage, ...]:
    """Costs are weights per token, in those of one text layer. A tile has merge^2 patches for each of its tokens."""
    text, vision = config.text, config.vision
    layer = layer_weights(text)
    patches = vision.spatial_merge_size**2
    block = (4 * vision.hidden_size + 2 * vision.intermediate_size) * vision.hidden_size
    joined = vision.hidden_size * patches
    # One row more for each token than it has patches: a class token for each tile has to go somewhere.
    carry = Carry(patches + 1, vision.hidden_size)
    return (
        Stage("vision.patch_embed", patches * vision.patch_values * vision.hidden_size / layer),
        Stage("vision.table", 0.0),
        Stage("vision.blocks.{*}", patches * block / layer, "vision", carry),
        *(() if vision.use_mean_pooling else (Stage("vision.norm_after", 0.0),)),
        Stage("projector", (joined + text.hidden_size) * text.hidden_size / layer),
        *text_stages(text),
    )

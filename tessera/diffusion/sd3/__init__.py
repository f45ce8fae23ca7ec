"""Stable Diffusion 3 and 3.5: images from text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.diffusion.joint import CONDITIONS, double_rules, joint_family, plain_rules
from tessera.diffusion.sd3.config import SD3Config
from tessera.weights.map import Rule, WeightMap, fused_rules
from tessera.weights.operations import GroupByHead, Reshape, SwappedHalves

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 64,
        "dual_attention_layers": (0, 1),
        "qk_norm": "rms_norm",
    },
    "3-medium": {
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 192,
    },
    "3.5-medium": {
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    "3.5-large": {
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
}
_NAMES = (
    ("embed.latents.bias", "pos_embed.proj.bias"),
    ("embed.text.{kind}", "context_embedder.{kind}"),
    *CONDITIONS,
)
_DUAL = (
    ("attn2.latent.{h}.{kind}", "attn2.to_{h}.{kind}"),
    ("attn2.latent_norm.{h}.weight", "attn2.norm_{h}.weight"),
    ("attn2.latent_out.{kind}", "attn2.to_out.0.{kind}"),
)


# (parameter name of a block in Tessera, parameter name in the original checkpoint).
_ORIGINAL_BLOCK = (
    *(
        (f"attn.{native}_norm.{which}.weight", f"{theirs}_block.attn.ln_{which}.weight")
        for native, theirs in (("latent", "x"), ("text", "context"))
        for which in ("q", "k")
    ),
    *((f"attn2.latent_norm.{which}.weight", f"x_block.attn2.ln_{which}.weight") for which in ("q", "k")),
    ("attn.latent_out.{kind}", "x_block.attn.proj.{kind}"),
    ("attn.text_out.{kind}", "context_block.attn.proj.{kind}"),
    ("attn2.latent_out.{kind}", "x_block.attn2.proj.{kind}"),
    ("latent_modulation.{kind}", "x_block.adaLN_modulation.1.{kind}"),
    ("text_modulation.{kind}", "context_block.adaLN_modulation.1.{kind}"),
    ("latent_mlp.up.{kind}", "x_block.mlp.fc1.{kind}"),
    ("latent_mlp.down.{kind}", "x_block.mlp.fc2.{kind}"),
    ("text_mlp.up.{kind}", "context_block.mlp.fc1.{kind}"),
    ("text_mlp.down.{kind}", "context_block.mlp.fc2.{kind}"),
)
_ORIGINAL = (
    ("embed.latents.bias", "x_embedder.proj.bias"),
    ("embed.text.{kind}", "context_embedder.{kind}"),
    ("embed.time.up.{kind}", "t_embedder.mlp.0.{kind}"),
    ("embed.time.down.{kind}", "t_embedder.mlp.2.{kind}"),
    ("embed.pooled.up.{kind}", "y_embedder.mlp.0.{kind}"),
    ("embed.pooled.down.{kind}", "y_embedder.mlp.2.{kind}"),
)


def weights(config: SD3Config) -> WeightMap:
    """Return the parameter names and shapes in diffusers folders."""
    return WeightMap(
        (
            *plain_rules(_NAMES),
            *_reshaped(config, "pos_embed.proj.weight", "pos_embed.pos_embed", "proj_out.{kind}"),
            *double_rules(),
            *double_rules(_DUAL),
        )
    )


def original(config: SD3Config) -> WeightMap:
    """Return the parameter names and shapes in original checkpoints, where queries, keys and values are one layer."""
    # The text modulation of the last block and the output modulation consist of scale and shift only. The order of
    # scale and shift in original checkpoints is the reverse.
    last = config.num_layers - 1
    ending = (
        Rule("head.modulation.{kind}", "final_layer.adaLN_modulation.1.{kind}", SwappedHalves()),
        Rule(
            f"blocks.{last}.text_modulation.{{kind}}",
            f"joint_blocks.{last}.context_block.adaLN_modulation.1.{{kind}}",
            SwappedHalves(),
        ),
    )
    rules = (
        *ending,
        *plain_rules(_ORIGINAL),
        *_reshaped(config, "x_embedder.proj.weight", "pos_embed", "final_layer.linear.{kind}"),
        *(Rule("blocks.{i}." + native, "joint_blocks.{i}." + foreign) for native, foreign in _ORIGINAL_BLOCK),
        *fused_rules("blocks.{i}.attn.latent", "qkv", "joint_blocks.{i}.x_block.attn.qkv"),
        *fused_rules("blocks.{i}.attn.text", "qkv", "joint_blocks.{i}.context_block.attn.qkv"),
        *fused_rules("blocks.{i}.attn2.latent", "qkv", "joint_blocks.{i}.x_block.attn2.qkv"),
    )
    return WeightMap(rules, mark="x_embedder.proj.weight")


def _reshaped(config: SD3Config, patch: str, table: str, head: str) -> tuple[Rule, ...]:
    """Return the rules of tensors that have another shape or order in weight files than in the model.

    `patch`, `table`, `head`: their names in the files.
    """
    shape, side, channels = config.shape, config.patch_size, config.in_channels
    hidden, places = config.hidden, (shape.table**2, config.hidden)
    return (
        Rule("embed.latents.weight", patch, Reshape((hidden, shape.latent_values), (hidden, channels, side, side))),
        Rule("embed.table.weight", table, Reshape(places, (1, *places))),
        # Published models order the values of a predicted patch by position, then channel. Here channels come first.
        Rule("head.proj.{kind}", head, GroupByHead(config.out_channels or channels, side**2)),
    )


SPEC = joint_family("sd3", SD3Config, PRESETS, weights, original)

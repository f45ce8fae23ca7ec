"""Stable Diffusion 3 and 3.5: images from text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.core.weightmap import GroupByHead, Reshape, Rule, WeightMap
from tessera.models.common.joint import CONDITIONS, double_rules, joint_family, plain_rules
from tessera.models.sd3.config import SD3Config

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


def weights(config: SD3Config) -> WeightMap:
    """Return the names and shapes of diffusers folders."""
    shape, side, channels = config.shape, config.patch_size, config.in_channels
    hidden, table = config.hidden, (shape.table**2, config.hidden)
    patches = Reshape((hidden, shape.latent_values), (hidden, channels, side, side))
    # Predictions of the published models are ordered by place in the patch, then by channel; here, as inputs are.
    by_channel = GroupByHead(config.out_channels or channels, side**2)
    return WeightMap(
        (
            *plain_rules(_NAMES),
            Rule("embed.latents.weight", "pos_embed.proj.weight", patches),
            Rule("embed.table.weight", "pos_embed.pos_embed", Reshape(table, (1, *table))),
            Rule("head.proj.{kind}", "proj_out.{kind}", by_channel),
            *double_rules(),
            *double_rules(_DUAL),
        )
    )


SPEC = joint_family("sd3", SD3Config, PRESETS, weights)

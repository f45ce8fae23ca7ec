"""Parameter names of HunyuanVideo 1.5 in diffusers folders."""

from __future__ import annotations

from tessera.diffusion.hunyuan_video.weights import shared_rules
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.joint import plain_rules
from tessera.weights.map import WeightMap

_OWN = (
    ("embed.text_2.norm.{kind}", "context_embedder_2.norm.{kind}"),
    ("embed.text_2.first.{kind}", "context_embedder_2.linear_1.{kind}"),
    ("embed.text_2.mlp.up.{kind}", "context_embedder_2.linear_2.{kind}"),
    ("embed.text_2.mlp.down.{kind}", "context_embedder_2.linear_3.{kind}"),
    ("embed.image_embeds.in_norm.{kind}", "image_embedder.norm_in.{kind}"),
    ("embed.image_embeds.mlp.up.{kind}", "image_embedder.linear_1.{kind}"),
    ("embed.image_embeds.mlp.down.{kind}", "image_embedder.linear_2.{kind}"),
    ("embed.image_embeds.out_norm.{kind}", "image_embedder.norm_out.{kind}"),
    ("embed.kind.weight", "cond_type_embed.weight"),
    ("embed.time.up.{kind}", "time_embed.timestep_embedder.linear_1.{kind}"),
    ("embed.time.down.{kind}", "time_embed.timestep_embedder.linear_2.{kind}"),
    ("head.modulation.{kind}", "norm_out.linear.{kind}"),
    ("embed.second_time.up.{kind}", "time_embed.timestep_embedder_r.linear_1.{kind}"),
    ("embed.second_time.down.{kind}", "time_embed.timestep_embedder_r.linear_2.{kind}"),
)


def weights(config: HunyuanVideo15Config) -> WeightMap:
    return WeightMap((*shared_rules(config), *plain_rules(_OWN)))

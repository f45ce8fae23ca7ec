"""LTX-Video: how it may be split over devices."""

from __future__ import annotations

from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.diffusion.cross import BOTH, cross_plan
from tessera.diffusion.ltx_video.config import LTXVideoConfig

# Every head is rotated by angles of its own, so ranks do not split the heads of attention among latents.
_STYLES: dict[str, TensorStyle] = {
    f"blocks.{{*}}.attn.qkv.{{q,k,v}}.{BOTH}": "replicate",
    "blocks.{*}.attn.{q_norm,k_norm}.weight": "replicate",
    f"blocks.{{*}}.attn.out.{BOTH}": "replicate",
}


def plan(config: LTXVideoConfig) -> ModelPlan:
    shape = config.shape
    heads = dict.fromkeys(("cross.q", "cross.kv", "cross.kv.{k,v}"), config.num_attention_heads)
    return cross_plan(shape, _STYLES, heads, embed=(shape.latent_values + shape.text_width + shape.width) * shape.width)

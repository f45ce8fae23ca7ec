"""Parameter names of CogVideoX in diffusers folders."""

from __future__ import annotations

from tessera.diffusion.cogvideox.config import CogVideoXConfig
from tessera.weights.map import Reshape, Rule, WeightMap

_PAIRS = (
    ("embed.latents.{kind}", "patch_embed.proj.{kind}"),
    ("embed.text.{kind}", "patch_embed.text_proj.{kind}"),
    ("embed.time.up.{kind}", "time_embedding.linear_1.{kind}"),
    ("embed.time.down.{kind}", "time_embedding.linear_2.{kind}"),
    ("embed.offset.up.{kind}", "ofs_embedding.linear_1.{kind}"),
    ("embed.offset.down.{kind}", "ofs_embedding.linear_2.{kind}"),
    ("blocks.{i}.attn_modulation.{kind}", "transformer_blocks.{i}.norm1.linear.{kind}"),
    ("blocks.{i}.attn_norm.{kind}", "transformer_blocks.{i}.norm1.norm.{kind}"),
    ("blocks.{i}.attn.qkv.{x}.{kind}", "transformer_blocks.{i}.attn1.to_{x}.{kind}"),
    ("blocks.{i}.attn.{x}_norm.{kind}", "transformer_blocks.{i}.attn1.norm_{x}.{kind}"),
    ("blocks.{i}.attn.out.{kind}", "transformer_blocks.{i}.attn1.to_out.0.{kind}"),
    ("blocks.{i}.mlp_modulation.{kind}", "transformer_blocks.{i}.norm2.linear.{kind}"),
    ("blocks.{i}.mlp_norm.{kind}", "transformer_blocks.{i}.norm2.norm.{kind}"),
    ("blocks.{i}.mlp.up.{kind}", "transformer_blocks.{i}.ff.net.0.proj.{kind}"),
    ("blocks.{i}.mlp.down.{kind}", "transformer_blocks.{i}.ff.net.2.{kind}"),
    ("head.norm.{kind}", "norm_final.{kind}"),
    ("head.modulation.{kind}", "norm_out.linear.{kind}"),
    ("head.modulated_norm.{kind}", "norm_out.norm.{kind}"),
    ("head.proj.{kind}", "proj_out.{kind}"),
)


def weights(config: CogVideoXConfig) -> WeightMap:
    """Return the weight map. Patches of one frame are embedded by a convolution in folders."""
    size, rules = config.hidden_size, [Rule(native, foreign) for native, foreign in _PAIRS]
    if config.patch_size_t is None:
        patch = (config.in_channels, config.patch_size, config.patch_size)
        flat = Reshape((size, config.in_channels * config.patch_size**2), (size, *patch))
        rules.insert(0, Rule("embed.latents.weight", "patch_embed.proj.weight", flat))
    if config.use_learned_positional_embeddings:
        places = config.learned_places
        table = Reshape((places, size), (1, places, size))
        rules.append(Rule("embed.places.weight", "patch_embed.pos_embedding", table))
    return WeightMap(tuple(rules))

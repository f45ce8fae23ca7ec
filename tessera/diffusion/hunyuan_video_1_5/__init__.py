"""HunyuanVideo 1.5: videos from text, or from text and a first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import FULL, Training
from tessera.diffusion.hunyuan_video.weights import shared_rules
from tessera.diffusion.hunyuan_video.weights import work as refined_work
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.hunyuan_video_1_5.model import CONDITIONS, GLYPHS_INNER, HunyuanVideo15Model
from tessera.diffusion.joint import JOINT_STREAM, batch_measures, joint_family, joint_plan, plain_rules
from tessera.diffusion.plan import BOTH
from tessera.models.text.costs import Measures
from tessera.weights.map import WeightMap

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 9,
        "out_channels": 4,
        "num_layers": 4,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "text_embed_dim": 64,
        "text_embed_2_dim": 32,
        "image_embed_dim": 32,
        "rope_axes_dim": (8, 12, 12),
        "task_type": "t2v",
    },
    "480p-t2v": {"task_type": "t2v"},
    "480p-i2v": {},
    "720p-t2v": {"task_type": "t2v", "target_size": 960},
    "720p-i2v": {"target_size": 960},
}
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
)


def weights(config: HunyuanVideo15Config) -> WeightMap:
    return WeightMap((*shared_rules(config), *plain_rules(_OWN)))


def plan(config: HunyuanVideo15Config) -> ModelPlan:
    """Return the parallel plan. The main sequence contains text, second text and image embeddings."""
    places = tuple(f"{name}_index" for name in CONDITIONS)
    embed = (
        *("text_2.{norm,first}", "{text_2,image_embeds}.mlp.{up,down}", "image_embeds.{in_norm,out_norm}", "kind"),
    )
    return joint_plan(
        config.shape,
        replace(JOINT_STREAM, positions=(*places, "latent_index")),
        styles={f"embed.{name}.{BOTH}": "replicate" for name in embed},
    )


def measures(batch: Batch) -> dict[str, np.ndarray]:
    """Return the numbers of tokens of each sample of a batch, also of text, second text and image embeddings."""
    names = {"refined": "text", "text_2": "text_2", "image_embeds": "image_embeds"}
    kinds = {key: np.array(batch.segments[of].lengths) for key, of in names.items() if of in batch.segments}
    return {**batch_measures(batch, CONDITIONS), **kinds}


def work(config: HunyuanVideo15Config, measures: Measures, training: Training) -> np.ndarray:
    passes, size = training.get("embed", FULL), config.hidden_size
    wide, features = config.text_embed_2_dim, config.image_embed_dim
    costs = {"text_2": GLYPHS_INNER * (wide + GLYPHS_INNER + size), "image_embeds": features * (features + size)}
    total = refined_work(config, measures, training)
    for name, cost in costs.items():
        if name in measures:
            total = total + passes.weights * 2 * measures[name] * cost
    return total


SPEC = joint_family(
    "hunyuan_video_1_5",
    HunyuanVideo15Config,
    PRESETS,
    weights,
    build=HunyuanVideo15Model,
    plan=plan,
    work=work,
    measures=measures,
)

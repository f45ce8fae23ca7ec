"""HunyuanVideo 1.5: how it may be split over devices, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.cross import BOTH
from tessera.diffusion.hunyuan_video.plan import refined_plan
from tessera.diffusion.hunyuan_video.plan import work as refined_work
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.hunyuan_video_1_5.model import CONDITIONS, GLYPHS_INNER
from tessera.diffusion.joint import JOINT_STREAM, batch_measures
from tessera.models.text.costs import Measures

_PLACES = tuple(f"{name}_index" for name in CONDITIONS)
_STREAM = replace(JOINT_STREAM, positions=(*_PLACES, "latent_index"))


def plan(config: HunyuanVideo15Config) -> ModelPlan:
    times = "{time,second_time}" if config.use_meanflow else "time"
    embed: dict[str, TensorStyle] = {
        f"embed.latents.{BOTH}": "replicate",
        f"embed.{times}.{{up,down}}.{BOTH}": "replicate",
        f"embed.text_2.{{norm,first}}.{BOTH}": "replicate",
        f"embed.{{text_2,image_embeds}}.mlp.{{up,down}}.{BOTH}": "replicate",
        f"embed.image_embeds.{{in_norm,out_norm}}.{BOTH}": "replicate",
        "embed.kind.weight": "replicate",
    }
    return replace(refined_plan(config, embed), streams={"latents": _STREAM})


def measures(batch: Batch) -> dict[str, np.ndarray]:
    """Return the measures of each sample of a batch, with those of each kind of condition."""
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

"""HunyuanVideo 1.5: how it may be split over devices, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.diffusion.hunyuan_video.plan import refined_plan, refined_work
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.diffusion.hunyuan_video_1_5.model import CONDITIONS, GLYPHS_INNER
from tessera.diffusion.joint import JOINT_STREAM, batch_measures, joint_example
from tessera.models.text.costs import Measures

_BOTH = "{weight,bias}"
_PLACES = tuple(f"{name}_index" for name in CONDITIONS)
_STREAM = replace(JOINT_STREAM, positions=(*_PLACES, "latent_index"))


def plan(config: HunyuanVideo15Config) -> ModelPlan:
    times = "{time,second_time}" if config.use_meanflow else "time"
    embed: dict[str, TensorStyle] = {
        f"embed.latents.{_BOTH}": "replicate",
        f"embed.{times}.{{up,down}}.{_BOTH}": "replicate",
        f"embed.text_2.{{norm,first}}.{_BOTH}": "replicate",
        f"embed.{{text_2,image_embeds}}.mlp.{{up,down}}.{_BOTH}": "replicate",
        f"embed.image_embeds.{{in_norm,out_norm}}.{_BOTH}": "replicate",
        "embed.kind.weight": "replicate",
    }
    return replace(refined_plan(config, embed), streams={"latents": _STREAM})


def work(
    config: HunyuanVideo15Config, measures: Measures, training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    return refined_work(config, measures, measures["text"], training)


def flops(config: HunyuanVideo15Config, batch: Batch, training: Training = MappingProxyType({})) -> float:
    text = np.array(batch.segments["text"].lengths)
    second, image = (sum(batch.segments[name].lengths) if name in batch.segments else 0 for name in CONDITIONS[1:])
    passes, size = training.get("embed", FULL), config.hidden_size
    wide, features = config.text_embed_2_dim, config.image_embed_dim
    inner = second * GLYPHS_INNER * (wide + GLYPHS_INNER + size) + image * features * (features + size)
    blocks = refined_work(config, batch_measures(batch, CONDITIONS), text, training)["latents"]
    return float(blocks.sum() + passes.weights * 2 * inner)


def example(config: HunyuanVideo15Config, tokens: int) -> Batch:
    return joint_example(config.shape, tokens)

"""HunyuanVideo 1.5: embeddings of two text encoders and of a conditioning image, in one sequence with latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.diffusion.hunyuan_video.model import make_layout, make_refiner, rank_part
from tessera.diffusion.hunyuan_video_1_5.config import HunyuanVideo15Config
from tessera.nn.dit import FeedForward, TimeEmbedding
from tessera.nn.joint_attention import JointLayout
from tessera.nn.joint_transformer import TIME_FEATURES, JointTransformer
from tessera.nn.layers import LayerNorm
from tessera.nn.vit import PatchEmbed

# Packed batch tensors of conditions. `<name>_index` contains their positions in the main sequence.
CONDITIONS = ("text", "text_2", "image_embeds")
GLYPHS_INNER = 2048
_EPS = 1e-5


class GlyphProjection(nn.Module):
    """Project the states of the second text encoder, which reads words that appear in the video."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width, _EPS)
        self.first = nn.Linear(width, GLYPHS_INNER)
        self.mlp = FeedForward(GLYPHS_INNER, GLYPHS_INNER, size, F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(F.gelu(self.first(self.norm(x))))


class SiglipProjection(nn.Module):
    """Project the embeddings of a conditioning image."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.in_norm, self.out_norm = LayerNorm(width, _EPS), LayerNorm(size, _EPS)
        self.mlp = FeedForward(width, width, size, F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_norm(self.mlp(self.in_norm(x)))


class HunyuanVideo15Embeddings(nn.Module):
    """Embed latents, the conditions (two texts and image embeddings), and the time of each sample."""

    def __init__(self, config: HunyuanVideo15Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.latents = PatchEmbed(config.in_channels * config.patch_values, size, bias=True)
        self.text = make_refiner(config)
        self.text_2 = GlyphProjection(config.text_embed_2_dim, size)
        self.image_embeds = SiglipProjection(config.image_embed_dim, size)
        self.widths = (config.text_embed_dim, config.text_embed_2_dim, config.image_embed_dim)
        self.kind = nn.Embedding(len(CONDITIONS), size)
        self.time = TimeEmbedding(TIME_FEATURES, size)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedded latents, the concatenated embeddings of all conditions, and the input of the modulations."""
        latents, times = self.latents(batch["latents"]), batch["timesteps"]
        # A missing input is replaced by an empty tensor, so that its weights still get a gradient of zero.
        blank = [latents.new_zeros(0, width) for width in self.widths]
        inputs = [batch[name].to(x.dtype) if name in batch else x for name, x in zip(CONDITIONS, blank, strict=True)]
        embedded = [
            self.text(inputs[0], times, batch.segments["text"]),
            self.text_2(inputs[1]),
            self.image_embeds(inputs[2]),
        ]
        parts = [
            rank_part(x + kind, batch, f"{name}_index")
            for name, x, kind in zip(CONDITIONS, embedded, self.kind.weight, strict=True)
        ]
        return latents, torch.cat(parts), F.silu(self.time(times).to(latents.dtype))


class HunyuanVideo15Model(JointTransformer):
    """Predict a velocity for each latent token. Text and latents are one sequence.

    Besides `text` a batch may have `text_2`, from a character-level encoder, and `image_embeds`. Each is packed with
    segments of its name. `text_index`, `text_2_index` and `image_embeds_index` are their positions in the main
    sequence.
    """

    def __init__(self, config: HunyuanVideo15Config) -> None:
        super().__init__(config.shape, HunyuanVideo15Embeddings(config))
        self.config = config

    def _layout(self, batch: Batch) -> JointLayout:
        places = [batch[f"{name}_index"] for name in CONDITIONS if f"{name}_index" in batch]
        return make_layout(self.config, batch.with_tensors(text_index=torch.cat(places)))

"""A vision-language model assembled from its towers. It knows no family: the towers come as modules."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, LanguageOutput
from tessera.nn.cache import CacheStep, KVCache
from tessera.nn.decoder import TextDecoder
from tessera.nn.vit import VisionTower


class TiedHead(nn.Module):
    """Hidden states to logits by the table of token embeddings. A head with a table of its own is a plain `nn.Linear`.

    It asks the embedding for the weight each time instead of holding it: the weight then has one name in every state,
    and stays one through moves off the meta device and through sharding, both of which replace parameters.
    """

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self._embed = (embed,)  # in a tuple, so that it does not become a submodule

    @property
    def weight(self) -> Tensor:
        return self._embed[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class VisionLanguageModel(nn.Module):
    """`vision` makes features of pictures, `projector` makes embeddings of them, `text` reads these among the words.

    Batch: `tokens` [T], `positions` [3, T] or [T], segments "text"; with media what the vision tower reads, and
    `media_slots` [M]: the places among the tokens where the embeddings of the pictures go, in order.
    """

    def __init__(
        self,
        vision: VisionTower,
        projector: nn.Module,
        text: TextDecoder,
        head: nn.Module,
        initializer_range: float,
    ) -> None:
        super().__init__()
        self.vision = vision
        self.projector = projector
        self.text = text
        self.head = head
        self.initializer_range = initializer_range

    def forward(
        self, batch: Batch, logits: bool | Literal["last"] = False, cache: KVCache | None = None
    ) -> LanguageOutput:
        """`logits="last"` gives those of the last token of each segment only. An empty cache is filled, one row per
        segment; a filled one is read, and takes one more token per row."""
        tokens = batch["tokens"]
        decoding = cache is not None and not cache.empty
        step = self._cache_step(batch, cache)
        x = self.text.embed(tokens)
        if not decoding:
            x = self._with_media(x, batch, generating=cache is not None)
        segments = None if decoding else batch.segments["text"]
        hidden = self.text(x, batch["positions"], segments, step)
        if step is not None:
            step.commit()
        if not logits:
            return LanguageOutput(hidden, self.head)
        wanted = hidden
        if logits == "last" and segments is not None:
            wanted = hidden.index_select(0, segments.bounds[1:] - 1)
        return LanguageOutput(hidden, self.head, self.head(wanted))

    def _cache_step(self, batch: Batch, cache: KVCache | None) -> CacheStep | None:
        if cache is None:
            return None
        count = batch["tokens"].shape[0]
        return cache.prefill(batch.segments["text"], count) if cache.empty else cache.decode(count)

    def _with_media(self, x: Tensor, batch: Batch, generating: bool) -> Tensor:
        pixels = batch.get("pixels")
        if pixels is not None and pixels.shape[0] > 0:
            media: Tensor = self.projector(self.vision(batch))
            slots = batch["media_slots"]
            if slots.shape[0] != media.shape[0]:
                raise TesseraError(
                    f"the batch has {slots.shape[0]} places for visual tokens, its pictures make {media.shape[0]}",
                    where="batch tensors media_slots and pixels",
                    fix="processor and model must agree on patch size and merge size",
                )
            return x.index_copy(0, slots, media.to(x.dtype))
        if generating:
            return x
        # Other ranks may have pictures. Running the towers on a blank one keeps every collective in step, forward and
        # backward, and gives each parameter a gradient: zero. Evaluation needs it as much as training.
        blank: Tensor = self.projector(self.vision(self.vision.blank(x.device)))
        return x.index_add(0, x.new_zeros(1, dtype=torch.int64), blank[:1].to(x.dtype) * 0.0)

    def new_cache(
        self,
        rows: int,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        shape = self.text.shape
        weight = self.text.embed.weight
        return KVCache(
            shape.layers,
            rows,
            capacity,
            shape.kv_heads,
            shape.head_dim,
            device=weight.device if device is None else device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fills the whole tensor of parameter `name` as a new model starts with it."""
        *path, kind = name.split(".")
        if kind == "bias":
            tensor.zero_()
        elif path[-1].endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, self.initializer_range, generator=generator)

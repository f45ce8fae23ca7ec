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
from tessera.nn.language import Answering
from tessera.nn.moe import TokenRows
from tessera.nn.vit import VisionTower, has_pictures


class VisionLanguageModel(Answering):
    """`vision` makes features of pictures, `projector` makes embeddings of them, `text` reads these among the words.

    Batch: `tokens` [T], `positions` [3, T] or [T], segments "text"; with media what the vision tower reads, and
    `media_slots` [M]: the places among the tokens where the embeddings of the pictures go, in order. `media_rows` [M],
    if it is there, says which embedding goes to each slot: a batch may hold a part of the tokens and all pictures.
    `media_patches`, if it is there, says which of the tower's features the projector gets. `media_index` [M] or [M, K],
    and then `media_weights` [M, K], say which of the projector's embeddings each visual token is, or is between.

    Parts that are None lie in another stage of a pipeline: then the model goes on from the `carry` of the stage before,
    or returns its own for the next one. Text begins in the stage that has the projector.
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
        self.vision: VisionTower | None = vision
        self.projector: nn.Module | None = projector
        self.text: TextDecoder | None = text
        self.head: nn.Module | None = head
        self.token_rows = TokenRows() if text.experts is not None else None
        self.initializer_range = initializer_range

    def forward(
        self,
        batch: Batch,
        logits: bool | Literal["last"] = False,
        cache: KVCache | None = None,
        carry: Tensor | None = None,
    ) -> LanguageOutput | Tensor:
        """`logits="last"` gives those of the last token of each segment only. An empty cache is filled, one row per
        segment; a filled one is read, and takes one more token per row."""
        tokens = batch["tokens"]
        decoding = cache is not None and not cache.empty
        step = self._cache_step(batch, cache)
        x = carry
        if carry is None or self.projector is not None:
            looks = has_pictures(batch) if cache is not None else True  # alone, nobody waits for a blank picture
            media = None if decoding or not looks else self._media(batch, carry)
            if self.projector is None:  # the tower goes on in the next stage
                return self._handed_on(media, step)
            assert self.text is not None
            x = self._with_media(self.text.embed(tokens), media, batch)
        elif self.vision is not None:
            return self._handed_on(self.vision(batch, carry) if carry.shape[0] else None, step)
        segments = None if decoding else batch.segments["text"]
        assert x is not None
        return self._read(x, batch, step, segments, logits)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if self.vision is not None and self.vision.shape.layer_scale is not None and name.endswith("_scale.weight"):
            tensor.fill_(self.vision.shape.layer_scale)
        else:
            super().initialize(name, tensor, generator)

    def _handed_on(self, features: Tensor | None, step: CacheStep | None) -> Tensor:
        """What a stage that ends within the tower gives to the next one: nothing, where there is nothing to see."""
        if step is not None:
            step.commit()
        assert self.vision is not None
        if features is None:
            return next(self.parameters()).new_empty(0, self.vision.shape.width)
        return features

    def _media(self, batch: Batch, carry: Tensor | None) -> Tensor:
        assert self.vision is not None
        features: Tensor = self.vision(batch, carry)
        if self.projector is None:
            return features
        kept = batch.get("media_patches")
        if kept is not None:
            features = features.index_select(0, kept)
        embedded: Tensor = self.projector(features)
        index, weights = batch.get("media_index"), batch.get("media_weights")
        if index is None:
            return embedded
        chosen = embedded.index_select(0, index.flatten())
        if weights is None:
            return chosen
        shares = weights.to(chosen.dtype).unsqueeze(-1)
        return (chosen.view(*index.shape, -1) * shares).sum(1)

    def _with_media(self, x: Tensor, media: Tensor | None, batch: Batch) -> Tensor:
        if media is None:
            return x
        slots, rows = batch.get("media_slots"), batch.get("media_rows")
        if slots is None:
            slots = batch["tokens"].new_empty(0)
        if rows is not None:
            media = media.index_select(0, rows)
        elif not has_pictures(batch):
            media = media[:0]  # of a blank picture nothing is used, which still gives its tower a gradient: zero
        if slots.shape[0] != media.shape[0]:
            raise TesseraError(
                f"the batch has {slots.shape[0]} places for visual tokens, its pictures make {media.shape[0]}",
                where="batch tensors media_slots and pixels",
                fix="processor and model must agree on patch size and merge size",
            )
        if media.shape[1] > x.shape[1]:  # behind the embeddings, what is added after the first layers
            x = F.pad(x, (0, media.shape[1] - x.shape[1]))
        return x.index_copy(0, slots, media.to(x.dtype))

"""Images and videos with captions, which a model learns to make: read from media files, or from features of them."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import EncodedMedia, RowSource
from tessera.data.kinds import RowRequest
from tessera.data.kinds.chat import pack_rows
from tessera.data.media.read import ChatProcessor, MediaProcessor

log = logging.getLogger("tessera")
COUNTS = ("samples", "tokens", "latents", "text", "trained", "images", "frames")


def build(request: RowRequest) -> RowSource:
    section, processor = request.section, request.processor
    if not isinstance(processor, MediaProcessor) or isinstance(processor, ChatProcessor):
        raise TesseraError(
            f"{type(processor).__name__} does not serve images and videos with captions",
            where="data.kind=generation",
            fix="use a family that generates images or videos, such as wan; or data.kind=chat",
        )
    for key, plain in (("truncate", "never"), ("train_on", ["assistant"]), ("mask_history", False)):
        if getattr(section, key) != plain:
            raise TesseraError(
                f"{key} is about turns of a conversation, and has no effect on captions",
                where=f"data.{key}",
                fix=f"leave data.{key} out",
            )
    captioned = {
        name: [source.model_copy(update={"format": "generation"}) for source in getattr(section, name)]
        for name in ("train", "eval")
    }
    rows = pack_rows(
        replace(request, section=section.model_copy(update=captioned)), processor, hole=EncodedMedia, count_names=COUNTS
    )
    cut = int(np.sum(rows.index.column("cut_captions")))
    if cut:
        log.warning(
            "%d of %d captions have more tokens than the model reads and are cut; to leave such samples out: "
            "data.processor.long_captions=leave_out",
            *(cut, len(rows.index)),
        )
    return rows


KIND = build

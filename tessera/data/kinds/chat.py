"""Conversations with pictures and clips, from JSON and JSONL files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tessera.core.errors import TesseraError
from tessera.core.run_config import DataSection
from tessera.core.types import Processor, RowSource
from tessera.data.forms import ROLES
from tessera.data.images import Limits
from tessera.data.index import ChatProcessor, build_index
from tessera.data.order import Order, make_packs
from tessera.data.rows import ChatRows


def build(
    section: DataSection,
    split: Literal["train", "eval"],
    processor: Processor,
    seed: int,
    cache_folder: Path | None = None,
) -> RowSource:
    """Rows of a split. Held-out rows have the same order for every seed, so that runs can be compared."""
    if not isinstance(processor, ChatProcessor):
        raise TesseraError(
            f"{type(processor).__name__} cannot serve conversations",
            where="data.kind=chat",
            fix="the processor needs fingerprint, sampling and training_on (tessera.data.index.ChatProcessor)",
        )
    if not section.train_on or any(role not in ROLES for role in section.train_on):
        raise TesseraError(f"not roles to train on: {section.train_on}", where="data.train_on", allowed=ROLES)
    processor = processor.training_on(section.train_on)
    limits = Limits(max_image_pixels=section.max_image_pixels)
    index = build_index(
        section.train if split == "train" else section.eval,
        processor,
        length=section.length,
        limits=limits,
        on_bad_sample=section.on_bad_sample,
        cache_folder=cache_folder,
    )
    seed = seed if split == "train" else 0
    packs = make_packs(index.column("tokens"), section.length, seed, pack=section.pack, shuffle=section.shuffle)
    return ChatRows(
        index,
        Order(packs, seed, section.shuffle),
        processor,
        length=section.length,
        limits=limits,
        on_bad_sample=section.on_bad_sample,
    )


KIND = build

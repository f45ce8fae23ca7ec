"""A data kind whose batches hold the keyword arguments of a class. A row is a function of its number and the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.runtime.rng import derive, generator
from tests.toys.digits import load_digits
from tests.toys.hf_folders import AUDIO_FRAMES, IMAGE_SLOTS, IMAGE_TOKEN, MELS, SIDE, VOCABULARY

ROWS = 16
LENGTH = 12


def digits(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    pixels, labels = load_digits()
    return {"pixels": pixels[number], "labels": labels[number]}


def words(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    """Padded on the right; as many labels as there are words, so that rows weigh differently."""
    tokens = torch.randint(10, VOCABULARY, (LENGTH,), generator=chance)
    used = torch.arange(LENGTH) < LENGTH - number % 5
    return {
        "input_ids": tokens,
        "attention_mask": used.long(),
        "labels": torch.where(used, tokens, IGNORE),
    }


def picture_and_words(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    row = words(number, chance)
    row["input_ids"][1 : 1 + IMAGE_SLOTS] = IMAGE_TOKEN
    row["labels"][: 1 + IMAGE_SLOTS] = IGNORE
    return {**row, "pixel_values": torch.randn(3, SIDE, SIDE, generator=chance)}


def speech(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(MELS, AUDIO_FRAMES, generator=chance),
        "labels": words(number, chance)["labels"],
    }


def rated_words(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    """One number for all words, which a head of one number learns by regression."""
    row = words(number, chance)
    return {**row, "labels": torch.tensor(number / ROWS)}


def sorted_words(number: int, chance: torch.Generator) -> dict[str, Tensor]:
    """One of three classes for all words."""
    return {**words(number, chance), "labels": torch.tensor(number % 3)}


MAKERS: dict[str, Callable[[int, torch.Generator], dict[str, Tensor]]] = {
    maker.__name__: maker for maker in (digits, words, rated_words, sorted_words, picture_and_words, speech)
}


class KeywordRows(RowSource):
    def __init__(self, make: str, seed: int) -> None:
        self.make = make
        self.seed = seed

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Sequence[int]) -> Batch:
        numbers = [row % ROWS for row in rows]
        samples = [MAKERS[self.make](n, generator("cpu", self.seed, "row", n)) for n in numbers]
        return Batch(
            {name: torch.stack([row[name] for row in samples]) for name in samples[0]},
            sample_ids=tuple(f"{self.make}-{n}" for n in numbers),
            counts={"samples": len(numbers)},
            seeds=tuple(derive(self.seed, "row", n) for n in numbers),
        )


def KIND(request: RowRequest) -> KeywordRows:
    return KeywordRows(request.section.options["make"], request.seed)

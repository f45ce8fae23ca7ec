"""Describe vision-language families, as tiny random models beside those of transformers.

A family's own module (`qwen2_vl_cases.py`) fills this in, `vision_language_families.py` lists it, and the tests of
`test_vision_language_numerics.py` and `test_vision_language_folders.py` hold for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from parity import from_foreign, reference_model
from torch import Tensor

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.spec import ModelSpec


@dataclass(frozen=True)
class Pair:
    """Hold the same weights twice: as a model of transformers and as one of ours."""

    config: Any
    reference: Any
    model: Any


@dataclass
class Case:
    """Hold one sample. `media`: its images and videos, as its family keeps them."""

    tokens: Tensor
    labels: Tensor  # of each token
    positions: Tensor  # [3, tokens] or [tokens]
    media: Any


class VisionLanguageFamily(ABC):
    """Say how the tiny models and samples of one family are made, and how they are compared."""

    spec: ClassVar[ModelSpec]
    shapes: ClassVar[Sequence[Any]]  # what varies between the tiny models
    folders: ClassVar[Sequence[int]] = (0, 1, 3)  # shapes that go to folders and back
    alone: ClassVar[Sequence[int]] = (0,)  # shapes for which samples are compared one by one, too
    # Shapes that `make test` compares: together they set nearly every option of the family. The others are slow tests.
    quick: ClassVar[Sequence[int]] = (0, 4)
    quick_folders: ClassVar[Sequence[int]] = (1,)  # a head with its own weights
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def config(self, number: int, **changes: Any) -> Any: ...

    @abstractmethod
    def media(self, number: int) -> dict[str, list[Any]]:
        """By name, what samples show: nothing ("text"), "one" picture, "several", and "video" and "mixed" if the shape
        takes clips."""

    @abstractmethod
    def case(self, pair: Pair, media: list[Any], seed: int) -> Case: ...

    @abstractmethod
    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        """What transformers' forward takes."""

    @abstractmethod
    def pack(self, config: Any, cases: Sequence[Case], padding: int = 0) -> Batch:
        """All cases in one row, with a tail of padding that is a segment of its own."""

    def state(self, reference: Any) -> dict[str, Tensor]:
        """Weights under names that our table knows."""
        return dict(reference.state_dict())

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        """Theirs, shaped as folders store weights."""
        return {name: parameter.grad for name, parameter in pair.reference.named_parameters()}

    def beside(self, name: str) -> str:
        """Whose gradient an error in that of `name` is measured by."""
        return name

    def pair(self, number: int, seed: int, **changes: Any) -> Pair:
        config = self.config(number, **changes)
        reference = reference_model(config, seed)
        return Pair(config, reference, from_foreign(self.spec, config, self.state(reference)).train())

    def cases(self, pair: Pair, number: int, names: Sequence[str], seed: int) -> list[Case]:
        media = self.media(number)
        return [self.case(pair, media[name], seed + at) for at, name in enumerate(names)]


def word_maker(seed: int, ids: tuple[int, int]) -> tuple[torch.Generator, Callable[..., list[int]]]:
    """Says so many words, from so many to so many, each with an id in `ids`."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int = 2, high: int = 7) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(*ids, (count,), generator=generator).tolist()

    return generator, words


def labels_of(tokens: Tensor, words: int) -> Tensor:
    """The last two thirds are trained on, as far as they are words: below that id."""
    labels = tokens.clone()
    labels[: len(tokens) // 3] = IGNORE
    labels[tokens >= words] = IGNORE
    return labels


def packed_text(cases: Sequence[Case], padding: int) -> tuple[dict[str, Tensor], dict[str, Segments]]:
    """What batches of all families have: tensors and segments."""
    lengths = [case.tokens.numel() for case in cases] + ([padding] if padding else [])
    labels = [torch.cat([case.labels[1:], torch.tensor([IGNORE])]) for case in cases]
    tail = torch.arange(padding).expand(*cases[0].positions.shape[:-1], -1)
    tensors = {
        "tokens": torch.cat([*(case.tokens for case in cases), torch.zeros(padding, dtype=torch.int64)]),
        "labels": torch.cat([*labels, torch.full((padding,), IGNORE)]),
        "positions": torch.cat([*(case.positions for case in cases), tail], dim=-1),
    }
    return tensors, {"text": Segments.of(lengths)}

"""The files beside the weights (tokenizer, preprocessor, chat template, generation settings), copied to exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, Encoded, MediaSize, Sample
from tessera.models.common.side_files import copy_side_files, side_folder
from tessera.models.transformers.config import TransformersConfig


class SideFiles:
    """Take the place of a processor: it copies side files and makes no batches, which a data kind does."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def load(
        cls, config: TransformersConfig, folder: Path | None, train_on: Sequence[str] = (), **options: Any
    ) -> SideFiles:
        if options:
            raise TesseraError(
                f"family transformers has no processor options: {', '.join(options)}",
                where="data.processor",
                fix="options of a data kind of your own belong into data.options",
            )
        return cls(side_folder(folder or config.folder))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            copy_side_files(self.folder, folder)

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        self._no_batches()

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        self._no_batches()

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        self._no_batches()

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        self._no_batches()

    def decode(self, tokens: Sequence[int]) -> str:
        self._no_batches()

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def _no_batches(self) -> NoReturn:
        raise TesseraError(
            "family transformers has no processor of its own: it takes batches as they are",
            where="data.kind",
            fix="name a data kind of your own, whose batches hold the keyword arguments of the class",
        )

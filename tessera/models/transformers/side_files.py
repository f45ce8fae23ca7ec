"""The files beside the weights (tokenizer, preprocessor, chat template, generation settings): kept and handed on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, Encoded, MediaSize, Sample
from tessera.models.transformers.config import TransformersConfig

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Written anew for every export, or about weights that have changed.
NOT_COPIED = ("config.json", "tessera_export.json")
MAX_BYTES = 256 << 20


class SideFiles:
    """Stands where a family has its processor. It copies files and makes no batches: a data kind does that."""

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
        folder = folder or config.folder
        if folder is not None and (folder / "config.yaml").is_file():  # a run, which keeps them apart; or a checkpoint
            folder = folder / "processor"
        return cls(folder)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is None or not self.folder.is_dir() or self.folder.resolve() == folder.resolve():
            return
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and is_side_file(path):
                shutil.copyfile(path, folder / path.name)

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


def is_side_file(path: Path) -> bool:
    weights_index = path.name.endswith(".index.json")
    return (
        path.suffix in SUFFIXES
        and path.name not in NOT_COPIED
        and not weights_index
        and path.stat().st_size <= MAX_BYTES
    )

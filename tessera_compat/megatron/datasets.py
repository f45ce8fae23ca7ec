"""Make mock GPT data: `MockGPTDataset`, its configuration and builder, and a tokenizer for text made of token ids.

Documents count 1, 2, 3, ... up to a random length and end with the end-of-document token, as in release 0.12.1; here
the ids stay below the tokenizer's vocabulary, which they exceed there. Samples are slices of the shuffled documents.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tessera.errors import TesseraError
from tessera_compat.megatron.config import CheckedFields

_DOCUMENTS, _LONGEST = 100_000, 4096


class Split(enum.Enum):
    """Name the three parts of a data set."""

    train = 0
    valid = 1
    test = 2


class MegatronTokenizer:
    """Declare the methods of a tokenizer that data sets call."""

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    @property
    def eod(self) -> int:
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError


class _NullTokenizer(MegatronTokenizer):
    """Parse text that consists of token ids. The end-of-document token has the next id after the vocabulary."""

    def __init__(self, vocab_size: int | str) -> None:
        self._size = int(vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def vocab_size(self) -> int:
        return self._size + 1

    @property
    def eod(self) -> int:
        return self._size


@dataclass
class BlendedMegatronDatasetConfig(CheckedFields):
    """Configure the sources of a data set."""

    random_seed: int = 0
    sequence_length: int = 0
    blend: Any = None
    blend_per_split: Any = None
    renormalize_blend_weights: bool = False
    split: str | None = None
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005

    def __post_init__(self) -> None:
        """Raise if token files are configured: only mock data is supported."""
        self.mock = self.blend is None and self.blend_per_split is None
        if not self.mock:
            raise TesseraError(
                "data sets in .bin and .idx files are not supported",
                where=f"{type(self).__name__}.blend",
                fix="remove blend to train on mock data, or use a torch Dataset in the script",
                code="megatron.indexed-dataset",
            )
        if self.sequence_length < 1:
            raise TesseraError(
                f"sequence_length is {self.sequence_length}", where=type(self).__name__, code="megatron.dataset-length"
            )
        try:
            weights = [float(part) for part in (self.split or "1,1,1").split(",")]
        except ValueError:
            weights = []
        if not 0 < len(weights) <= 3 or min(weights) < 0 or not sum(weights):
            raise TesseraError(
                f"split {self.split!r} is not one to three numbers, none below 0 and not all 0",
                where="split",
                fix="split='969,30,1'",
                code="megatron.dataset-split",
            )
        shares = np.cumsum([0.0, *weights, *[0.0] * (3 - len(weights))]) / sum(weights)
        self.split_matrix = [(a, b) if b > a else None for a, b in itertools.pairwise(shares)]


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Configure the samples of a GPT model."""

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    s3_cache_path: str | None = None

    def __post_init__(self) -> None:
        """Raise if a required value is missing."""
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                raise TesseraError(
                    f"GPTDatasetConfig needs a value for {name}",
                    where="GPTDatasetConfig",
                    fix=f"pass {name}=...",
                    code="megatron.dataset-field-missing",
                )


class MockGPTDataset(Dataset[dict[str, Tensor]]):
    """Generate samples of mock documents: tokens, labels, attention_mask (true: masked), loss_mask, position_ids."""

    def __init__(self, documents: range, num_samples: int | None, config: GPTDatasetConfig) -> None:
        self.config = config
        chance = np.random.RandomState(config.random_seed)
        lengths = np.random.RandomState(0).randint(1, _LONGEST, size=_DOCUMENTS)[documents.start : documents.stop]
        step, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
        per_epoch = (int(lengths.sum()) - extra) // step
        if per_epoch < 1:
            raise TesseraError(
                "this split has too few tokens for one sample",
                where="GPTDatasetConfig.split",
                code="megatron.dataset-too-small",
            )
        count = per_epoch if num_samples is None else num_samples
        epochs = -(-count * step // int(lengths.sum())) + 1 if count > per_epoch else 1
        order = np.concatenate([chance.permutation(lengths) for _ in range(epochs)])
        self._ends = np.cumsum(order)  # end position of each document in the joined token stream
        self._starts = self._ends - order
        available = (int(self._ends[-1]) - extra) // step
        self._order = chance.permutation(available)[:count]

    def __len__(self) -> int:
        return len(self._order)

    def _text(self, index: int) -> Any:
        step = self.config.sequence_length
        at = int(self._order[index]) * step + np.arange(step + int(self.config.add_extra_token_to_sequence))
        document = np.searchsorted(self._ends, at, side="right")
        number = at - self._starts[document]
        tokenizer = self.config.tokenizer
        ids = 1 + number % max(1, tokenizer.vocab_size - 2)
        return np.where(at == self._ends[document] - 1, tokenizer.eod, ids).astype(np.int64)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        text = torch.from_numpy(self._text(index or 0))
        if self.config.add_extra_token_to_sequence:
            tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        else:
            tokens, labels = text, torch.roll(text, -1)
        mask, loss_mask, positions = get_ltor_masks_and_position_ids(tokens, self.config)
        if not self.config.add_extra_token_to_sequence:
            loss_mask[-1] = 0.0  # the last token has no label
        if index is None:  # this sample only fills the last batch, and is not trained on
            loss_mask = torch.zeros_like(loss_mask)
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        return sample if mask is None else {**sample, "attention_mask": mask}


def get_ltor_masks_and_position_ids(tokens: Tensor, config: GPTDatasetConfig) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the attention mask [1, s, s], the loss mask [s] and the positions [s] of one sequence."""
    length = tokens.shape[0]
    ends = tokens == config.tokenizer.eod
    document = ends.cumsum(0) - ends.long()  # the end-of-document token belongs to the document that it ends
    positions = torch.arange(length)
    mask = None
    if config.create_attention_mask:
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        if config.reset_attention_mask:
            mask |= document[:, None] != document[None, :]
        mask = mask[None]
    if config.reset_position_ids:
        is_first = torch.ones(length, dtype=torch.bool)
        is_first[1:] = document[1:] != document[:-1]
        positions = positions - torch.where(is_first, positions, 0).cummax(0).values
    loss_mask = torch.ones(length)
    if config.eod_mask_loss:
        loss_mask[ends] = 0.0
    return mask, loss_mask, positions


class BlendedMegatronDatasetBuilder:
    """Build the train, valid and test sets."""

    def __init__(
        self,
        cls: type,
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if cls is not MockGPTDataset:
            raise TesseraError(
                f"data sets of the class {cls.__name__} are not supported",
                where=type(self).__name__,
                allowed=["MockGPTDataset"],
                code="megatron.dataset-class",
            )
        if len(sizes) != len(Split):
            raise TesseraError(
                f"{len(sizes)} sizes are passed, 3 are needed",
                where=type(self).__name__,
                fix="train, valid, test",
                code="megatron.dataset-sizes",
            )
        assert isinstance(config, GPTDatasetConfig)
        self.sizes = sizes
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[MockGPTDataset | None]:
        """Return three data sets. An entry is None for a split without documents, and on ranks that build no data."""
        sets: list[MockGPTDataset | None] = []
        for size, share in zip(self.sizes, self.config.split_matrix, strict=True):
            if share is None or size == 0 or not self.is_built_on_rank():
                sets.append(None)
                continue
            documents = range(round(share[0] * _DOCUMENTS), round(share[1] * _DOCUMENTS))
            sets.append(MockGPTDataset(documents, size, self.config))
        return sets


def compile_helpers() -> None:
    """Do nothing: numpy computes the indices, and no helper is compiled."""

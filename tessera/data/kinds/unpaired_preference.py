"""Data kind `unpaired_preference`: single answers with a label, good or bad, for `train.task=kto`.

A sample is a question with one answer and a label. A row of several samples also contains each question with the answer
of another sample: KTO estimates the KL divergence from such mismatched answers. So a sample takes twice its tokens.
`pair` [T] has the segment of each token: 2 n for sample n, 2 n + 1 for its question with another answer, -1 for other
tokens. `desirable` [samples] has the label, `pair_row` [samples] the row in the batch, and `pair_ids` [samples] is 0,
1, 2, ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import IGNORE, Batch
from tessera.core.row_source import RowSource
from tessera.core.sample import Encoded, MediaSize, Message, Sample
from tessera.data.kinds import RowRequest
from tessera.data.kinds.chat import chat_processor
from tessera.data.kinds.preference import PairProcessor, answer_rows
from tessera.data.sources.formats import CHOSEN, REJECTED


@dataclass
class RatedAnswer(Encoded):
    """Hold a question, its answer and the label. The length also counts the question with another sample's answer."""

    desirable: bool = True

    @property
    def length(self) -> int:
        return 2 * len(self.tokens)


@dataclass(frozen=True)
class RatedProcessor(PairProcessor):
    """Wrap a `ChatProcessor` for samples whose last turn is an answer with a label, good or bad."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"rated 1 {self.inner.fingerprint}".encode()).hexdigest()

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        measures = self.inner.measure(self.conversation(sample), sizes)
        return {**{name: 2 * value for name, value in measures.items()}, "samples": 1}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Any:
        encoded = self.inner.encode(self.conversation(sample), media, sizes)
        counts = {name: 2 * value for name, value in encoded.counts.items()}
        good = sample.messages[-1].role == CHOSEN
        return RatedAnswer(encoded.id, encoded.tokens, encoded.labels, encoded.positions, encoded.streams, counts, good)

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        spread, marks = [], []
        pair = torch.full((length * len(rows),), -1, dtype=torch.int64)
        count = 0
        for number, row in enumerate(rows):
            at = number * length
            rated = [item for item in row if isinstance(item, RatedAnswer)]
            moved = [with_answer_of(answer, rated[position - 1]) for position, answer in enumerate(rated)]
            moved = moved if len(rated) > 1 else []
            sides: tuple[Sequence[Encoded], ...] = (rated, moved)
            for side, segments in enumerate(sides):
                for position, answer in enumerate(segments):
                    pair[at : at + len(answer.tokens)] = 2 * (count + position) + side
                    at += len(answer.tokens)
            marks += [(answer.desirable, number) for answer in rated]
            count += len(rated)
            # The masked tokens of unreadable samples come last in a row, so that the other samples are where `pair` is.
            spread.append([*rated, *moved, *(item for item in row if not isinstance(item, RatedAnswer))])
        batch = self.inner.collate(spread, length)
        return replace(
            batch.with_tensors(
                pair=pair,
                pair_ids=torch.arange(count),
                pair_row=torch.tensor([row for _, row in marks], dtype=torch.int64),
                desirable=torch.tensor([good for good, _ in marks], dtype=torch.bool),
            ),
            counts={**batch.counts, "samples": sum(len(row) for row in rows)},
        )

    def conversation(self, sample: Sample) -> Sample:
        *question, answer = sample.messages
        assert answer.role in (CHOSEN, REJECTED), "a rated sample ends with its answer"
        return Sample(sample.id, (*question, Message("assistant", answer.parts)))


def with_answer_of(question: Encoded, answer_of: Encoded) -> Encoded:
    """Join the question of one sample and the answer of another. Positions of the answer continue the question's."""
    asks, begins = _answer_start(question), _answer_start(answer_of)
    answer = answer_of.tokens[begins:]
    ahead = torch.arange(len(answer)) + _position_after(question.positions[..., :asks])
    return Encoded(
        question.id,
        torch.cat([question.tokens[:asks], answer]),
        torch.cat([question.labels[:asks], answer_of.labels[begins:]]),
        torch.cat([question.positions[..., :asks], ahead.expand(*question.positions.shape[:-1], -1)], dim=-1),
        question.streams,
        {},
    )


def _answer_start(encoded: Encoded) -> int:
    """Return the index of the first token with a label: the beginning of the answer."""
    trained = (encoded.labels != IGNORE).nonzero()
    return int(trained[0]) if len(trained) else len(encoded.tokens)


def _position_after(positions: Tensor) -> Tensor:
    return positions.max() + 1 if positions.numel() else torch.zeros((), dtype=positions.dtype)


def build(request: RowRequest) -> RowSource:
    processor = RatedProcessor(chat_processor(request, "unpaired_preference"))
    return answer_rows(replace(request, processor=processor), "unpaired_preference")


KIND = build

"""Data kind `preference`: pairs of a chosen and a rejected answer to one question, for `train.task=dpo` and others.

A pair is one sample: two segments in one row, each with the full question. Media is decoded once and used twice.
`pair` [T] has the answer of each token: 2 n for the chosen answer of pair n, 2 n + 1 for the rejected one, -1 for
padding and masked tokens. `pair_ids` [pairs] is 0, 1, 2, ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.sample import Encoded, MediaSize, Message, PartKind, Sample
from tessera.data.kinds import RowRequest
from tessera.data.kinds.chat import build as build_chat
from tessera.data.kinds.chat import chat_processor, with_format
from tessera.data.media.read import ChatProcessor, PadsSamples
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.formats import CHOSEN, REJECTED
from tessera.errors import TesseraError


@dataclass
class EncodedPair(Encoded):
    """Hold the question with the chosen answer, then with the rejected answer; `answers` holds them separately."""

    answers: tuple[Encoded, ...] = ()


@dataclass(frozen=True)
class PairProcessor:
    """Wrap a `ChatProcessor` for samples whose last two turns are the chosen and the rejected answer."""

    inner: ChatProcessor

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"pairs 1 {self.inner.fingerprint}".encode()).hexdigest()

    @property
    def sampling(self) -> VideoSampling:
        return self.inner.sampling

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.inner.stop_tokens

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        return self.inner.target(kind, size)

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        """Return a processor that trains on the last answer only, whatever the arguments are."""
        return replace(self, inner=self.inner.training_on(["assistant"], last_only=True))

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        both = [self.inner.measure(conversation, sizes) for conversation in _apart(sample)]
        summed = {name: sum(measures[name] for measures in both) for name in both[0]}
        return {**summed, "samples": 1, "token_pairs": sum(measures["tokens"] ** 2 for measures in both)}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> EncodedPair:
        answers = tuple(self.inner.encode(conversation, media, sizes) for conversation in _apart(sample))
        counts = {name: sum(answer.counts[name] for answer in answers) for name in answers[0].counts}
        return EncodedPair(
            sample.id,
            torch.cat([answer.tokens for answer in answers]),
            torch.cat([answer.labels for answer in answers]),
            torch.cat([answer.positions for answer in answers], dim=-1),
            {},
            counts,
            answers,
        )

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        spread = [
            [answer for item in row for answer in (item.answers if isinstance(item, EncodedPair) else (item,))]
            for row in rows
        ]
        batch = self.inner.collate(spread, length)
        pair = torch.full((length * len(rows),), -1, dtype=torch.int64)
        count = 0
        for number, row in enumerate(rows):
            at = number * length
            for item in row:
                if isinstance(item, EncodedPair):
                    for side, answer in enumerate(item.answers):
                        pair[at : at + len(answer.tokens)] = 2 * count + side
                        at += len(answer.tokens)
                    count += 1
                else:  # masked tokens in place of an unreadable sample
                    at += len(item.tokens)
        counts = {**batch.counts, "samples": sum(len(row) for row in rows), "pairs": count}
        return replace(batch.with_tensors(pair=pair, pair_ids=torch.arange(count)), counts=counts)

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        return self.inner.prompt([self.conversation(sample) for sample in samples], media, sizes)

    def conversation(self, sample: Sample) -> Sample:
        """Return the conversation that ends with the chosen answer."""
        return _apart(sample)[0]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(tokens)

    def spell(self, tokens: Sequence[int]) -> str:
        return self.inner.spell(tokens)

    def save(self, folder: Path) -> None:
        self.inner.save(folder)


def _apart(sample: Sample) -> tuple[Sample, Sample]:
    """Return the conversation with the chosen answer, and the one with the rejected answer."""
    *question, better, worse = sample.messages
    assert (better.role, worse.role) == (CHOSEN, REJECTED), "a pair ends with its two answers"
    chosen, rejected = (Sample(sample.id, (*question, Message("assistant", m.parts))) for m in (better, worse))
    return chosen, rejected


def answer_rows(request: RowRequest, kind: Literal["preference", "unpaired_preference"]) -> RowSource:
    """Return the rows of samples that end with answers, which cannot be truncated."""
    if request.section.truncate != "never":
        raise TesseraError(
            f"samples of data.kind={kind} cannot be truncated: their answers are the last turns",
            where="data.truncate",
            allowed=["never"],
            code="data.cannot-truncate",
        )
    return build_chat(replace(request, section=with_format(request.section, kind)))


def build(request: RowRequest) -> RowSource:
    processor = chat_processor(request, "preference")
    if isinstance(processor, PadsSamples):
        raise TesseraError(
            "data.kind=preference does not support the family transformers yet",
            where="data.kind=preference",
            fix="use a model that has its own family, or data.kind=chat",
            code="data.pairs-not-supported",
        )
    return answer_rows(replace(request, processor=PairProcessor(processor)), "preference")


KIND = build

"""An export proves itself: plain `transformers` loads the folder and gives the same answers as we do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError
from tessera.data.media.images import Limits
from tessera.data.media.read import decode
from tessera.data.media.video import VideoSampling
from tessera.data.questions import Question, questions
from tessera.evaluate.answers import answer_all, held_out_sources
from tessera.infer.load import load
from tessera.tools.reference import Reference


@dataclass(frozen=True)
class Agreement:
    answers: list[tuple[str, str, str]]  # sample id, our answer, theirs

    @property
    def same(self) -> int:
        return sum(ours == theirs for _, ours, theirs in self.answers)

    @property
    def complete(self) -> bool:
        return self.same == len(self.answers)

    def lines(self) -> list[str]:
        total = len(self.answers)
        out = [f"agreement with transformers: {self.same / total:.2%} of {total} held-out answers"]
        different = [row for row in self.answers if row[1] != row[2]]
        out += [f"  {name}: ours {ours!r}, theirs {theirs!r}" for name, ours, theirs in different[:10]]
        return out


def compare(
    folder: str | Path,
    data: str | Path,
    *,
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
) -> Agreement:
    """Both sides answer greedily from the same messages and pictures. We read the files and decode the pictures for
    both; all that follows is done here, and again by transformers' own processor, chat template and model."""
    folder = Path(folder)
    if (folder / "config.yaml").is_file():
        raise TesseraError(
            "this is a run or a checkpoint, which transformers cannot load",
            where=str(folder),
            fix=f"`tessera convert {folder} FOLDER` writes a Hugging Face folder; with checkpoint.export it is RUN/hf",
        )
    sources = held_out_sources(folder, data, root, max_samples)
    asked = [q for q in questions(sources) if isinstance(q, Question)]
    if not asked:
        raise TesseraError("no sample could be used", where=str(data))
    model, processor = load(folder)
    processor = replace(processor, limits=replace(processor.limits, draft=False))  # as the other side decodes
    ours: list[str] = []
    for at in range(0, len(asked), batch):
        ours += answer_all(model, processor, asked[at : at + batch], max_new_tokens)
    reference = Reference(folder)
    inputs = [reference.inputs(question.sample.messages, _pictures(question)) for question in asked]
    theirs = reference.answer(inputs, max_new_tokens, batch)
    return Agreement([(q.sample.id, a, b) for q, a, b in zip(asked, ours, theirs, strict=True)])


def _pictures(question: Question) -> list[Any]:
    if any(part.kind != "image" for part in question.sample.media()):
        raise TesseraError(f"sample {question.sample.id} has a video: comparing serves pictures and text")
    return [decode(part, question.root, Limits(), VideoSampling()) for part in question.sample.media()]

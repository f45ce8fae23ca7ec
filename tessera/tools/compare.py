"""Check an exported Hugging Face folder: compare its files with their hashes, and its outputs with `transformers`.

Tessera and transformers each load the folder with their own processor, and compute logits and, with data, answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.checkpoint.publish import MARK
from tessera.config.run_config import ModelSection
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, decode
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.evaluation.evaluate import check_max_samples, held_out_sources
from tessera.hub.config import local_model
from tessera.inference.answering import numbered_answers
from tessera.inference.export_record import changes_since, read_record
from tessera.inference.load import load
from tessera.inference.proof import Proof, Prove, check_choice, prove_folder
from tessera.inference.questions import Question, questions
from tessera.inference.reference import TransformersReference
from tessera.lora.exchange import is_adapters
from tessera.models import resolve
from tessera.runtime.progress import WorkProgress
from tessera.weights.layouts import CONFIG_FILE, detect_layout, no_such_folder

_MOST = 20  # limit of printed problems
_BATCH = 64  # number of samples that are answered together


@dataclass(frozen=True)
class Agreement:
    """Hold the result of a comparison: problems of the folder, and the answers of Tessera and of transformers."""

    answers: list[tuple[str, str, str]]  # sample id, answer of Tessera, answer of transformers
    problems: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()  # lines that tell what was compared, or why a comparison was skipped

    @property
    def same(self) -> int:
        return sum(answer == expected for _, answer, expected in self.answers)

    @property
    def complete(self) -> bool:
        return not self.problems and self.same == len(self.answers)

    def lines(self) -> list[str]:
        out = [*self.compared, *(f"wrong: {problem}" for problem in self.problems[:_MOST])]
        if len(self.problems) > _MOST:
            out.append(f"wrong: {len(self.problems) - _MOST} more")
        total = len(self.answers)
        if total:
            out.append(f"agreement with transformers: {self.same / total:.2%} of {total} held-out answers")
        different = [row for row in self.answers if row[1] != row[2]]
        out += [f"  {name}: Tessera {answer!r}, transformers {other!r}" for name, answer, other in different[:10]]
        return out


def compare(
    folder: str | Path,
    data: str | Path | None = None,
    *,
    family: str | None = None,
    prove: Prove = "auto",
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
) -> Agreement:
    """Check a Hugging Face folder, and return the result.

    If the folder is an export of Tessera, its files are compared with the hashes in its record. `prove`: whether logits
    are compared with those of transformers, see `prove_folder`. `data`: chat samples; Tessera and transformers answer
    them by greedy decoding. `family`: as `model.family` of a recipe, such as the import path of a family of your own;
    None: the family that reads the folder.
    """
    check_choice(prove)
    check_max_samples(max_samples)
    folder = local_model(folder)
    if detect_layout(folder) is None and is_adapters(folder):
        raise TesseraError(
            "this folder contains adapters, and only full models can be compared",
            where=str(folder),
            fix=f"tessera convert {folder} MERGED merges them (add --like MODEL if they do not name their model), then "
            "tessera compare MERGED",
            code="adapter.compare-unmerged",
        )
    if not folder.is_dir():
        raise no_such_folder(folder)
    if (folder / "config.yaml").is_file():
        raise TesseraError(
            "this folder is a run or a checkpoint, which transformers cannot load",
            where=str(folder),
            fix=f"tessera convert {folder} FOLDER writes a Hugging Face folder; compare that folder",
            code="weights.not-hf-folder",
        )
    if detect_layout(folder) is None and not any(folder.glob("*.safetensors")):
        raise TesseraError(
            f"this is not a Hugging Face folder: {CONFIG_FILE} is missing",
            where=str(folder),
            fix="convert DCP folders and shards first: tessera convert SOURCE FOLDER --like MODEL",
            code="weights.no-config-file",
        )
    record = read_record(folder)
    if record is None:
        compared = "the folder has no tessera_export.json: its bytes are not checked"
    elif problems := changes_since(folder, record):  # do not load a changed folder: it may be damaged
        meant = f"the folder was changed after its export; if you meant to change it, remove {folder / MARK}"
        return Agreement([], tuple(problems), (meant,))
    else:
        compared = f"unchanged since the export: {len(record.files)} files"
    proof = _proof(folder, family, prove, exported=record is not None)
    answers = [] if data is None else _answers(folder, family, data, root, max_samples, max_new_tokens)
    return Agreement(answers, proof.problems + proof.warnings, (compared, proof.line))


def _proof(folder: Path, family: str | None, prove: Prove, exported: bool) -> Proof:
    try:
        spec, config = resolve(ModelSection(path=folder, family=family))
    except TesseraError as error:
        # An export of the user's own model class has no family in Tessera; only its files are checked.
        if not exported or family is not None:
            raise
        return Proof(f"not compared with transformers: {error.what}")
    return prove_folder(folder, spec, config, prove)


def _answers(
    folder: Path,
    family: str | None,
    data: str | Path,
    root: str | Path | None,
    max_samples: int | None,
    max_new_tokens: int,
) -> list[tuple[str, str, str]]:
    """Return the answers of Tessera and of transformers to the same messages, decoded images and recordings.

    Both sides use their own preprocessing, chat template and model, and decode greedily.
    """
    sources = held_out_sources(folder, data, root, max_samples)
    samples = [q for q in questions(sources) if isinstance(q, Question)]
    if not samples:
        raise TesseraError("the data has no usable chat sample", where=str(data), code="data.no-usable-sample")
    model, processor = load(folder, family=family)
    processor = replace(
        processor, limits=replace(processor.limits, jpeg_draft=False)
    )  # decode JPEG files in full size, as transformers does
    answers: dict[int, str] = {}
    with WorkProgress("answers of Tessera", len(samples), "samples") as progress:
        for number, _, answer in numbered_answers(
            model, processor, enumerate(samples), Question.prompt, max_new_tokens, total=len(samples), at_once=_BATCH
        ):
            if isinstance(answer, BaseException):
                raise answer
            answers[number] = answer.text
            progress.count()
    reference = TransformersReference(folder)
    sampling = processor.processor.sampling if isinstance(processor.processor, ChatProcessor) else VideoSampling()
    inputs = [reference.inputs(question.sample.messages, _media(question, sampling)) for question in samples]
    with WorkProgress("answers of transformers", len(samples), "samples") as progress:
        expected = reference.answer(inputs, max_new_tokens, _BATCH, progress.count)
    pairs = enumerate(zip(samples, expected, strict=True))
    return [(question.sample.id, answers[number], other) for number, (question, other) in pairs]


def _media(question: Question, sampling: VideoSampling) -> list[Any]:
    if any(part.kind not in ("image", "audio") for part in question.sample.media()):
        raise TesseraError(
            f"sample {question.sample.id} contains videos or codes: only images, audio and text can be compared",
            fix="use samples without videos and speech codes",
            code="media.video-not-comparable",
        )
    return [decode(part, question.root, Limits(), sampling) for part in question.sample.media()]

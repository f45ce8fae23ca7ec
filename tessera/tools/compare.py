"""Check a Hugging Face folder: against its record, against the folder it came from, and against plain `transformers`.

Transformers loads the same folder with its own processor, and computes logits and, where there is data, answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.checkpoint.publish import MARK
from tessera.config.run_config import ModelSection
from tessera.data.media.files import Limits
from tessera.data.media.read import decode
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.source import Question, questions
from tessera.errors import TesseraError
from tessera.evaluation.evaluate import answer_all, held_out_sources
from tessera.hub.config import local_model
from tessera.inference.export_record import SAME_NAMES, ExportRecord, changes_since, differences_from, read_record
from tessera.inference.load import load
from tessera.inference.proof import Proof, Prove, check_choice, prove_folder
from tessera.inference.reference import TransformersReference
from tessera.lora.exchange import is_adapters
from tessera.models import resolve
from tessera.models.files.exported_config import config_differences
from tessera.models.files.side_files import side_file_differences
from tessera.runtime.progress import WorkProgress
from tessera.weights.layouts import CLASS_NAME, CONFIG_FILE, detect_layout, folder_layout, no_such_folder

_MOST = 20  # problems in a report


@dataclass(frozen=True)
class Agreement:
    """Hold the problems of a folder, and the answers of both sides."""

    answers: list[tuple[str, str, str]]  # sample id, answer of Tessera, answer of transformers
    problems: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()  # what was compared, or why it was not

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
    base: str | Path | None = None,
    prove: Prove = "auto",
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
) -> Agreement:
    """Check everything that can be checked about a folder, and return the result.

    Its files are compared with its record, if it is an export of Tessera. `base`: the folder that its weights came
    from, which has the same names, shapes, types and side files. `prove`: whether logits are compared with those of
    transformers, see `prove_folder`. `data`: chat samples, which both sides answer greedily.
    """
    folder = local_model(folder)
    base = None if base is None else local_model(base, "--base")
    check_choice(prove)
    if detect_layout(folder) is None and is_adapters(folder):
        raise TesseraError(
            "these are adapters, and only models are compared with other libraries",
            where=str(folder),
            fix=f"merge them and compare the result: tessera convert {folder} MERGED, and tessera compare MERGED "
            "--base MODEL (adapters that do not name their model: convert with --like MODEL)",
            code="adapter.compare-unmerged",
        )
    if not folder.is_dir():
        raise no_such_folder(folder)
    if (folder / "config.yaml").is_file():
        raise TesseraError(
            "this is a run or a checkpoint, which transformers cannot load",
            where=str(folder),
            fix=f"`tessera convert {folder} FOLDER` writes a Hugging Face folder; with checkpoint.export it is RUN/hf",
            code="weights.not-hf-folder",
        )
    if detect_layout(folder) is None and not any(folder.glob("*.safetensors")):
        raise TesseraError(
            f"no Hugging Face folder: it has no {CONFIG_FILE}",
            where=str(folder),
            fix="`tessera convert SHARDS FOLDER --like BASE` makes one of shards and of DCP folders",
            code="weights.no-config-file",
        )
    record = read_record(folder)
    compared, problems = _files(folder, record, None if base is None else Path(base))
    if problems:  # a damaged folder may be unreadable
        return Agreement([], tuple(problems), tuple(compared))
    proof = _proof(folder, prove, exported=record is not None)
    answers = [] if data is None else _answers(folder, data, root, max_samples, max_new_tokens, batch)
    return Agreement(answers, proof.problems + proof.warnings, (*compared, proof.line))


def _files(folder: Path, record: ExportRecord | None, base: Path | None) -> tuple[list[str], list[str]]:
    """Return lines about the comparisons, and the problems of tensors and files."""
    compared, problems = ["no record of an export here: bytes are not checked"], []
    if record is not None:
        problems = changes_since(folder, record)
        meant = f"compared with its record; if the changes are meant, remove {folder / MARK}"
        compared = [meant] if problems else [f"as it was written: {record.summary()}"]
    if base is not None and not problems:
        spec, config = resolve(ModelSection(path=base))
        # The record lists what the export changed on purpose: other types of all weights, and some files.
        problems = differences_from(folder, base, spec.main.weight_map(config) or SAME_NAMES, types=record is None)
        changed = [] if record is None else [name for name, one in record.files.items() if one.base == "changed"]
        problems += _config_differences(folder, base) if record is None else []
        problems += [
            difference for name, difference in side_file_differences(folder, base).items() if name not in changed
        ]
        alike = "names, shapes, types, config.json" if record is None else "names, shapes"
        compared += [] if problems else [f"{alike} and side files are those of {base}"]
    return compared, problems


def _config_differences(folder: Path, base: Path) -> list[str]:
    """Return the fields of config.json that differ from the base's, as the family reads and writes them, and those that
    no family reads but both files have."""
    (_, config), (_, other) = (resolve(ModelSection(path=one)) for one in (folder, base))
    if type(config) is not type(other):
        return [f"config.json: it is a {type(config).__name__}, and {base} has a {type(other).__name__}"]
    fields = config_differences(config.to_hf(), other.to_hf(), base.name)  # type: ignore[attr-defined]
    here, there = (folder_layout(one).config() for one in (folder, base))
    same = all(here.get(name) == there.get(name) for name in ("model_type", CLASS_NAME))  # else keys mean other things
    more = config_differences(here, there, base.name, shared=True) if same and not fields else []
    return [f"config.json: {one}" for one in dict.fromkeys([*fields, *more])]


def _proof(folder: Path, prove: Prove, exported: bool) -> Proof:
    try:
        spec, config = resolve(ModelSection(path=folder))
    except TesseraError as error:
        if not exported:
            raise
        return Proof(f"not compared with transformers: {error.what}")  # a model of the user's own
    return prove_folder(folder, spec, config, prove)


def _answers(
    folder: Path,
    data: str | Path,
    root: str | Path | None,
    max_samples: int | None,
    max_new_tokens: int,
    batch: int,
) -> list[tuple[str, str, str]]:
    """Generate greedily on both sides from the same messages and decoded images.

    Everything after decoding is done twice: here, and by the processor, chat template and model of transformers.
    """
    sources = held_out_sources(folder, data, root, max_samples)
    samples = [q for q in questions(sources) if isinstance(q, Question)]
    if not samples:
        raise TesseraError("no sample could be used", where=str(data), code="data.no-usable-sample")
    model, processor = load(folder)
    processor = replace(processor, limits=replace(processor.limits, jpeg_draft=False))  # as the other side decodes
    answers: list[str] = []
    with WorkProgress("answers of Tessera", len(samples), "samples") as progress:
        for at in range(0, len(samples), batch):
            group = samples[at : at + batch]
            answers += answer_all(model, processor, group, max_new_tokens)
            progress.count(len(group))
    reference = TransformersReference(folder)
    inputs = [reference.inputs(question.sample.messages, _images(question)) for question in samples]
    with WorkProgress("answers of transformers", len(samples), "samples") as progress:
        expected = reference.answer(inputs, max_new_tokens, batch, progress.count)
    return [(q.sample.id, a, b) for q, a, b in zip(samples, answers, expected, strict=True)]


def _images(question: Question) -> list[Any]:
    if any(part.kind != "image" for part in question.sample.media()):
        raise TesseraError(
            f"sample {question.sample.id} has a video: only images and text can be compared",
            code="media.video-not-comparable",
        )
    return [decode(part, question.root, Limits(), VideoSampling()) for part in question.sample.media()]

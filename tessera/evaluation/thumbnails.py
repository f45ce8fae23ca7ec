"""Write small copies of the images and recordings of questions into the folder of an evaluation, for its report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tessera.data.media.files import Limits, opened
from tessera.data.media.images import TINY, decode_image, small_copy
from tessera.data.media.sound_preview import beginning, encode_preview
from tessera.errors import TesseraError
from tessera.evaluation.answers import Row
from tessera.evaluation.benchmark import AnswerMetric, Benchmark, BenchmarkQuestion
from tessera.observe.report.answers import RECORDING
from tessera.observe.report.recorded import image_size
from tessera.runtime.files import read_json_mapping, replace_file

MOST_CARDS = 600  # limit of answers of a benchmark in a report
MOST_IMAGES = 240  # after copies of this many images, a report copies no media of further questions of a benchmark
_MOST_RECORDINGS = 60  # the same for recordings
_PER_QUESTION = 6
_FOLDER = "images"


def chosen_rows(rows: Sequence[Row], scores: Sequence[float], higher_is_better: bool) -> list[Row]:
    """Return the rows that a report shows, the worst answers first.

    Of more than `MOST_CARDS` rows, half of the cards are the worst ones, and half are evenly spaced among the others.
    """
    order = sorted(range(len(rows)), key=lambda at: scores[at] if higher_is_better else -scores[at])
    if len(rows) <= MOST_CARDS:
        return [rows[at] for at in order]
    worst, rest = order[: MOST_CARDS // 2], order[MOST_CARDS // 2 :]
    stride = len(rest) / (MOST_CARDS - len(worst))
    return [rows[at] for at in [*worst, *(rest[int(number * stride)] for number in range(MOST_CARDS - len(worst)))]]


def write_thumbnails(out: Path, benchmark: Benchmark, rows: Sequence[Row], metric: AnswerMetric) -> None:
    """Copy the images and recordings of the questions that the report shows. Unreadable ones are left out.

    Questions after the limit of images or recordings have none.
    """
    marked = [row for row in rows if "unusable" not in row]
    chosen = chosen_rows(marked, [metric.score(row["values"]) for row in marked], metric.higher_is_better)
    copies: dict[str, list[Any]] = {}
    count = recordings = 0
    for row in chosen:
        if count >= MOST_IMAGES or recordings >= _MOST_RECORDINGS:
            break
        for _, question in benchmark.questions(range(row["index"], row["index"] + 1)):
            if isinstance(question, BenchmarkQuestion):
                images = [*_copies(out, question, question.root or benchmark.root)]
                sounds = [*_recordings(out, question, question.root or benchmark.root)]
                copies[str(row["index"])] = [*images, *sounds]
                count, recordings = count + len(images), recordings + len(sounds)
    (out / _FOLDER).mkdir(exist_ok=True)
    replace_file(_list_of(out, benchmark.title), json.dumps(copies).encode())


def read_thumbnails(out: Path, title: str) -> dict[str, list[tuple[str, tuple[int, int]]]]:
    """Return {index of a question: copied images, then recordings}, each as file name and size in pixels."""
    path = _list_of(out, title)
    if not path.exists():
        return {}
    copies: dict[str, list[tuple[str, tuple[int, int]]]] = {}
    for index, images in read_json_mapping(path).items():
        for image in images if isinstance(images, list) else ():
            if not isinstance(image, dict) or not isinstance(image.get("file"), str):
                continue
            if image["file"].endswith(RECORDING):
                copies.setdefault(str(index), []).append((image["file"], (0, 0)))
            elif (size := image_size(image)) is not None:
                copies.setdefault(str(index), []).append((image["file"], size))
    return copies


def _copies(out: Path, question: BenchmarkQuestion, root: Path) -> Iterable[dict[str, Any]]:
    images = [part for part in question.sample.media() if part.kind == "image"]
    for part in images[:_PER_QUESTION]:
        try:
            with opened(part.value, root, "image") as source:
                image, _ = decode_image(source, Limits())
        except (TesseraError, OSError, ValueError):  # unreadable, such as the URL of an image
            continue
        width, height = image.size
        suffix = "png" if max(image.size) <= TINY else "jpg"
        yield {"file": _written(out, small_copy(image)[0], f".{suffix}"), "width": width, "height": height}


def _recordings(out: Path, question: BenchmarkQuestion, root: Path) -> Iterable[dict[str, Any]]:
    for part in [part for part in question.sample.media() if part.kind == "audio"][:_PER_QUESTION]:
        try:
            content = encode_preview(*beginning(part, root, Limits()))
        except (TesseraError, OSError):
            continue
        if content is not None:
            yield {"file": _written(out, content, RECORDING)}


def _written(out: Path, content: bytes, suffix: str) -> str:
    """Write a copy of a file into the folder of copies, unless it exists. Return its path, named by a content hash."""
    name = f"{_FOLDER}/{hashlib.sha256(content).hexdigest()[:20]}{suffix}"
    if not (out / name).exists():
        (out / _FOLDER).mkdir(exist_ok=True)
        replace_file(out / name, content)
    return name


def _list_of(out: Path, title: str) -> Path:
    return out / _FOLDER / f"{hashlib.sha256(title.encode('utf-8', 'surrogatepass')).hexdigest()[:20]}.json"

"""Read a folder of generated images or videos, with the prompts they were generated from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.sample import Part
from tessera.data.media.files import Limits
from tessera.data.media.read import decode
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError, few_names
from tessera.evaluation.generation.suite import PROTOCOL, RECORDS, SAMPLES, finished_samples, read_suite
from tessera.runtime.files import leads_out, parse_row, read_bytes, read_json, read_json_mapping, read_text

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".gif", ".webm", ".mov", ".mkv", ".avi")
MOST_FILES = 1_000_000
_LIMIT = 256 << 20  # size limit of a file of prompts, in bytes
_EVERY_FRAME = VideoSampling(fps=0.0, rule="pace", multiple=1, max_frames=100_000)
_NUMBERED = re.compile(r"(.*)-\d+")
_COLUMNS = ("file", "image", "video", "file_name")


@dataclass(frozen=True)
class GeneratedSample:
    """Name a file, its prompt, and its seed if a record states it."""

    path: Path
    prompt: str | None = None
    seed: int | None = None

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in VIDEOS

    def frames(self) -> np.ndarray:
        """Return all frames, uint8 [F, H, W, 3]. An image has one frame."""
        kind, root = ("video" if self.is_video else "image"), self.path.parent
        try:
            pixels = np.asarray(decode(Part(kind, self.path.name), root, Limits(), _EVERY_FRAME))  # type: ignore[arg-type]
        except TesseraError as error:
            raise TesseraError(
                f"a sample cannot be read: {error.what}",
                where=str(self.path),
                fix="generate or copy this file again",
                code="evaluation.unreadable-sample",
            ) from error
        return pixels if pixels.ndim == 4 else pixels[None]


@dataclass(frozen=True)
class SampleSet:
    """Hold the samples of a folder. `generation`: the protocol by which they were generated, if the folder states it.

    `unsampled`: prompts of a VBench file without any sample.
    """

    folder: Path
    samples: tuple[GeneratedSample, ...]
    generation: Mapping[str, Any] | None = None
    unsampled: int = 0

    @property
    def are_videos(self) -> bool:
        return self.samples[0].is_video

    def content_digest(self) -> str:
        """Return a hash of all files."""
        total = hashlib.sha256()
        for sample in self.samples:
            with sample.path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def read_samples(folder: Path, prompts: Path | None = None) -> SampleSet:
    """Read a folder of `tessera generate --vbench`, or a folder of media files with a file of prompts.

    `prompts`: VBench_full_info.json for files named PROMPT-INDEX; JSON {file: prompt}; JSON lines with `file` and
    `prompt`; or a text with a prompt for each file, in the order of their names.
    """
    recorded = (folder / PROTOCOL).is_file() and (folder / RECORDS).is_file()
    if recorded and prompts is None:
        return _recorded(folder)
    home = folder / SAMPLES if recorded else folder
    files = media_files(home)
    if prompts is None:
        return SampleSet(folder, tuple(map(GeneratedSample, files)))
    by_name, unsampled = _prompts_of(files, prompts)
    lost = [path.name for path in files if path.name not in by_name]
    extra = [name for name in by_name if name not in {path.name for path in files}]
    if lost or extra:
        problem = f"no prompt for {few_names(lost, 3)}" if lost else f"no file for {few_names(extra, 3)}"
        raise TesseraError(
            f"prompts and samples do not match: {problem}",
            where=str(prompts),
            fix="name every file of the folder once, and no other",
            code="evaluation.prompts-do-not-match",
        )
    samples = tuple(GeneratedSample(path, by_name[path.name]) for path in files)
    return SampleSet(folder, samples, unsampled=unsampled)


def media_files(folder: Path) -> list[Path]:
    """Return the images or the videos of a folder, by name. Raise if there are none, both kinds, or links out of it."""
    if not folder.is_dir():
        raise TesseraError(
            "there is no such folder of samples",
            where=str(folder),
            fix="name a folder with images or videos",
            code="evaluation.no-such-folder",
        )
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (*IMAGES, *VIDEOS))
    kinds = {path.suffix.lower() in VIDEOS for path in files}
    if len(kinds) != 1 or len(files) > MOST_FILES:
        problem = "no image and no video" if not files else "images and videos"
        problem = f"more than {MOST_FILES:,} files" if len(files) > MOST_FILES else problem
        raise TesseraError(
            f"the folder has {problem}",
            where=str(folder),
            allowed=[*IMAGES, *VIDEOS],
            fix="name a folder of images, or a folder of videos",
            code="evaluation.not-a-sample-folder",
        )
    outside = [path.name for path in files if leads_out(path, folder)]
    if outside:
        raise TesseraError(
            f"files of the folder are links to outside of it: {few_names(outside, 3)}",
            where=str(folder),
            fix="copy the files into the folder",
            code="evaluation.sample-outside-folder",
        )
    return files


def _recorded(folder: Path) -> SampleSet:
    """Read a folder that `tessera generate --vbench` has written. Raise if samples are missing."""
    protocol = read_json_mapping(folder / PROTOCOL)
    rows = {str(row["file"]): row for row in finished_samples(folder) if isinstance(row.get("prompt"), str)}
    prompts, sampling = protocol.get("prompts"), protocol.get("sampling")
    count = sampling.get("count") if isinstance(sampling, dict) else None
    if not isinstance(prompts, list) or not isinstance(count, int):
        raise TesseraError(
            "the protocol states no prompts or no number of samples",
            where=str(folder / PROTOCOL),
            fix="generate the samples again into a new folder",
            code="evaluation.damaged-protocol",
        )
    if len(rows) < len(prompts) * count:
        raise TesseraError(
            f"{len(rows)} of {len(prompts) * count} samples exist",
            where=str(folder),
            fix="run the same tessera generate --vbench command again: it generates the missing ones",
            code="evaluation.samples-missing",
        )
    files = media_files(folder / SAMPLES)
    stray = [path.name for path in files if path.name not in rows]
    if stray:
        raise TesseraError(
            f"the folder has files that were not recorded: {few_names(stray, 3)}",
            where=str(folder / SAMPLES),
            fix="remove them",
            code="evaluation.prompts-do-not-match",
        )
    samples = [GeneratedSample(path, rows[path.name]["prompt"], rows[path.name].get("seed")) for path in files]
    return SampleSet(folder, tuple(samples), protocol)


def _prompts_of(files: Sequence[Path], prompts: Path) -> tuple[dict[str, str], int]:
    """Return the prompt of each file name, and the number of prompts without a sample."""
    suffix = prompts.suffix.lower()
    if suffix not in (".json", ".jsonl"):
        lines = [line.strip() for line in read_text(prompts, _LIMIT).splitlines() if line.strip()]
        if len(lines) != len(files):
            raise TesseraError(
                f"the file has {len(lines)} prompts, and the folder {len(files)} samples",
                where=str(prompts),
                fix="write a line for each file in the order of their names, or JSON {file: prompt}",
                code="evaluation.prompts-do-not-match",
            )
        return dict(zip((path.name for path in files), lines, strict=True)), 0
    if suffix == ".json":
        content = read_json(prompts, _LIMIT)
        if isinstance(content, dict) and all(isinstance(text, str) for text in content.values()):
            return {Path(name).name: text for name, text in content.items()}, 0
        return _by_file_name(files, prompts)
    rows = [parse_row(line) for line in read_bytes(prompts, _LIMIT).splitlines() if line.strip()]
    table = {}
    for number, row in enumerate(rows, 1):
        name = next((row[key] for key in _COLUMNS if isinstance(row.get(key), str)), None) if row else None
        if row is None or name is None or not isinstance(row.get("prompt"), str):
            raise TesseraError(
                f"row {number} has no file or no prompt",
                where=str(prompts),
                fix='write {"file": "0001.png", "prompt": "a red kite"}',
                code="evaluation.bad-prompt-row",
            )
        table[Path(name).name] = row["prompt"]
    return table, 0


def _by_file_name(files: Sequence[Path], prompts: Path) -> tuple[dict[str, str], int]:
    """Return the prompt of each file that is named PROMPT-INDEX, and the number of prompts without a file.

    `prompts`: a VBench file. Files of other prompts are left out.
    """
    texts = {prompt.text for prompt in read_suite(prompts)}
    named = ((path.name, _NUMBERED.fullmatch(path.stem)) for path in files)
    table = {name: match[1] for name, match in named if match is not None and match[1] in texts}
    return table, len(texts - set(table.values()))

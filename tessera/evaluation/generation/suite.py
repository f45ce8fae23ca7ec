"""The prompts of a benchmark of image or video generation, and its folder in the layout of VBench.

OUT/samples/PROMPT-0.mp4 ... PROMPT-4.mp4   nothing else: VBench takes the suffix of any file in this folder
OUT/full_info.json                          the columns of VBench_full_info.json, with `video_list`
OUT/samples.jsonl                           a line for each finished sample: file, prompt, index, seed, pixels
OUT/protocol.json                           what determines the samples
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.diffusion.sampling.request import check_prompt_count
from tessera.errors import TesseraError, few_names
from tessera.runtime.files import parse_row, read_bytes, read_json, read_jsonl, read_text

SAMPLES, FULL_INFO, RECORDS, PROTOCOL = "samples", "full_info.json", "samples.jsonl", "protocol.json"
PER_PROMPT = 5  # number of samples for each prompt, as in VBench
PROMPT, DIMENSIONS, EXTRA, VIDEOS = "prompt_en", "dimension", "auxiliary_info", "video_list"
# The dimensions that VBench can measure for any prompt, because they need no labels.
CUSTOM_DIMENSIONS = (
    *("subject_consistency", "background_consistency", "motion_smoothness", "dynamic_degree"),
    *("aesthetic_quality", "imaging_quality"),
)
_NAME_BYTES = 255  # limit of file systems for a file name
_LIMIT = 64 << 20


@dataclass(frozen=True)
class SuitePrompt:
    """Hold a prompt, and the other fields of its entry in VBench_full_info.json."""

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dimensions(self) -> list[str]:
        return list(self.columns.get(DIMENSIONS) or CUSTOM_DIMENSIONS)

    def file_name(self, index: int, suffix: str) -> str:
        """Return the file name that VBench expects of sample `index`."""
        return f"{self.text}-{index}{suffix}"


def read_suite(path: Path) -> list[SuitePrompt]:
    """Read prompts: VBench_full_info.json, a JSON list of texts, JSON lines with `prompt`, or text with one prompt per
    line.

    A prompt that occurs again is left out, and its dimensions join those of the first.
    """
    rows: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(_entries(path)):
        row = {PROMPT: entry} if isinstance(entry, str) else entry
        text = row.get(PROMPT, row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise _bad_row(path, number, f"has no text under {PROMPT} or prompt")
        columns: dict[str, Any] = {key: value for key, value in row.items() if key != "prompt"}
        named = columns.get(DIMENSIONS, [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise _bad_row(path, number, f"has a {DIMENSIONS} that is not a list of names")
        joined = rows.setdefault(text.strip(), columns | {PROMPT: text.strip()})
        joined[DIMENSIONS] = list(dict.fromkeys([*joined.get(DIMENSIONS, []), *named]))
        if isinstance(columns.get(EXTRA), dict) and isinstance(joined.setdefault(EXTRA, {}), dict):
            joined[EXTRA] = {**columns[EXTRA], **joined[EXTRA]}
    return [SuitePrompt(text, columns) for text, columns in rows.items()]


def _entries(path: Path) -> Sequence[Any]:
    suffix = path.suffix.lower()
    if suffix == ".json":
        content = read_json(path, _LIMIT)
        if not isinstance(content, list):
            raise TesseraError(
                "the file is not a JSON list of prompts",
                where=str(path),
                fix="use VBench_full_info.json, or a text file with one prompt per line",
                code="generation.not-a-prompt-list",
            )
        entries = content
    elif suffix == ".jsonl":
        lines = [line for line in read_bytes(path, _LIMIT).splitlines() if line.strip()]
        entries = [parse_row(line) for line in lines]
    else:
        entries = [line for line in read_text(path, _LIMIT).splitlines() if line.strip()]
    check_prompt_count(len(entries), path)
    return entries


def _bad_row(path: Path, number: int, problem: str) -> TesseraError:
    return TesseraError(
        f"row {number + 1} {problem}",
        where=str(path),
        fix='write {"prompt_en": "a red kite", "dimension": ["overall_consistency"]}, or {"prompt": "a red kite"}',
        code="generation.bad-prompt-row",
    )


def check_names(prompts: Sequence[SuitePrompt], count: int, suffix: str, where: str) -> None:
    """Raise if a prompt cannot be part of a file name."""
    for prompt in prompts:
        name = prompt.file_name(count - 1, suffix)
        problem = None
        if "/" in name or not name.isprintable():
            problem = "contains a slash or a control character"
        elif len(name.encode("utf-8", "replace")) > _NAME_BYTES:
            problem = f"is longer than {_NAME_BYTES} bytes with its ending"
        if problem is not None:
            raise TesseraError(
                f"VBench needs the prompt in the file name, but the prompt {prompt.text[:60]!r} {problem}",
                where=where,
                fix="change or remove this prompt",
                code="generation.prompt-not-a-file-name",
            )


def full_info(prompts: Sequence[SuitePrompt], count: int, suffix: str) -> str:
    """Return the content of full_info.json: the published columns, and the files of each prompt."""
    rows = []
    for prompt in prompts:
        files = [f"{SAMPLES}/{prompt.file_name(index, suffix)}" for index in range(count)]
        rows.append({**prompt.columns, PROMPT: prompt.text, DIMENSIONS: prompt.dimensions, VIDEOS: files})
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def finished_samples(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records of samples whose files exist."""
    for row in read_jsonl(folder / RECORDS):
        name = row.get("file")
        if isinstance(name, str) and Path(name).name == name and (folder / SAMPLES / name).is_file():
            yield row


def check_protocol(folder: Path, protocol: Mapping[str, Any]) -> bool:
    """Return whether the folder has samples of this protocol already; raise if it has samples of another protocol, or
    other files.

    Versions and devices count as well: samples of two versions of torch differ.
    """
    file = folder / PROTOCOL
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise TesseraError(
                "the folder is not empty, and its files are not from this command",
                where=str(folder),
                fix="name a new folder: --out FOLDER",
                code="output.other-files",
            )
        if folder.exists() and not folder.is_dir():
            raise TesseraError(
                f"{folder} is a file, and --vbench writes a folder",
                where="--out",
                fix="name a new folder",
                code="output.not-a-folder",
            )
        return False
    stored = read_json(file)
    wanted = json.loads(json.dumps(protocol))
    if stored != wanted:
        before = stored if isinstance(stored, dict) else {}
        keys = sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key))
        raise TesseraError(
            f"the folder has samples of other settings: {few_names(keys)}",
            where=str(folder),
            fix="use the same settings to continue, or name a new folder: --out FOLDER",
            code="output.other-settings",
        )
    return True

"""Side files, the files beside a model's weights: tokenizer, chat template, preprocessors, generation config, licence.

They are copied unchanged from the folder of the weights into the run folder, and from there into every export. The
processor writes the files that the folder lacks, and replaces files that contradict the recipe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.core.spec import LanguageProcessor, Processor
from tessera.data.media.read import ChatProcessor
from tessera.errors import TesseraError
from tessera.runtime.files import leads_out, read_json, read_json_mapping, replace_file

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
BOTH_FILE = "processor_config.json"  # settings of all preprocessors in one file (newer folders)
# Preprocessor file -> keys of its settings in processor_config.json. Audio settings are stored in the image file.
_PARTS = {IMAGE_FILE: ("image_processor", "feature_extractor"), VIDEO_FILE: ("video_processor",)}
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
SEAL = ".sha256.json"  # hashes of the side files in a run folder, written when the run starts
# Further template files. They are not copied if the processor writes its own template.
_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_LEGAL = re.compile(r"(?:licen[cs]e|notice|usage_policy|use_policy)(?:[-_.].*)?", re.IGNORECASE)
# Not copied: files that every export writes itself, indices of weight files, trainer state, and the index of a
# diffusers pipeline (an export contains one component).
_NOT_COPIED = (
    *("config.json", "base_config.json", "tessera_export.json", "adapter_config.json", "trainer_state.json"),
    "model_index.json",
)
_MAX_BYTES = 256 << 20
_MAX_FILES = 200
_log = logging.getLogger("tessera")


def side_folder(path: Path | None) -> Path | None:
    """Return the folder with the tokenizer and other side files of the weights at `path`; None if it does not exist.

    A run folder keeps them in its subfolder `processor`, which its checkpoints share.
    """
    if path is None or not path.is_dir():
        return None
    if not (path / "config.yaml").is_file():
        return path
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return run / "processor" if (run / "processor").is_dir() else None


def side_files(folder: Path, code: bool = False) -> dict[str, Path]:
    """Return the side files of a folder by relative path. `code`: also Python files.

    Files above 256 MiB, and all after the first 200, are left out. A symlink to a target outside the folder is skipped
    with a warning: its target may be private. Symlinks inside the download cache of Hugging Face are followed.
    """
    files: dict[str, Path] = {}
    for name, path in _candidates(folder, code):
        real = path.resolve()
        if leads_out(path, folder):
            _log.warning("%s is not copied: it is a symlink to %s, outside of its folder", path, real)
        elif real.is_file() and real.stat().st_size <= _MAX_BYTES:
            files[name] = real
        if len(files) >= _MAX_FILES:
            break
    return files


def _candidates(folder: Path, code: bool) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if _is_side_file(path.name) or (code and path.suffix == ".py"):
            yield path.name, path
    more = folder / _OTHER_TEMPLATES[1]
    if more.is_dir():
        yield from ((f"{more.name}/{path.name}", path) for path in sorted(more.glob("*.jinja")))


def _is_side_file(name: str) -> bool:
    if name.startswith(".") or name in _NOT_COPIED or name.endswith(".index.json") or name.lower().startswith("readme"):
        return False
    return is_legal(name) or Path(name).suffix in _SUFFIXES


def is_legal(name: str) -> bool:
    return _LEGAL.fullmatch(name) is not None


def copy_side_files(
    source: Path, target: Path, wanted: Callable[[str], bool] = lambda name: True, *, code: bool = False
) -> list[str]:
    """Copy side files to another folder and return their names. `code`: also copy Python files, without running
    them."""
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return []
    copied = [(name, path) for name, path in side_files(source, code).items() if wanted(name)]
    for name, path in copied:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return [name for name, _ in copied]


def seal_side_files(folder: Path) -> None:
    """Write the SHA-256 of every file in `folder` to `.sha256.json`, so that a resumed run notices changed files."""
    hashes = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != SEAL}
    (folder / SEAL).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def damaged_side_files(folder: Path) -> list[str]:
    """Return the files that are missing or changed since `seal_side_files`; empty if that was never called."""
    if not (folder / SEAL).is_file():
        return []
    try:
        hashes = read_json_mapping(folder / SEAL)
    except TesseraError:
        return [SEAL]
    return [name for name, digest in hashes.items() if not _has_digest(folder / Path(name).name, digest)]


def _has_digest(path: Path, digest: object) -> bool:
    return path.is_file() and _sha256(path) == digest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_side_files(
    target: Path,
    processor: Processor | None,
    *,
    read: Callable[[Path], Processor] | None,
    source: Path | None,
    weights: Path | None = None,
) -> None:
    """Write all files except weights to a new model folder: tokenizer, preprocessors, chat template, generation config.

    `source`: folder of `processor`, whose files are copied. `weights`: folder of the weights, whose generation config
    and licence files are copied if it is another folder. `read` loads a processor from the new folder. If the
    fingerprint of this processor differs from that of `processor`, files that `processor` writes replace the copied
    files.
    """
    target.mkdir(parents=True, exist_ok=True)
    if weights is not None and weights.is_dir() and weights != source:
        copy_side_files(weights, target, lambda name: name == GENERATION or is_legal(name))
    if processor is None:
        return
    # First of all, because this renders the chat template: if rendering exceeds its limits, nothing has been written.
    stops = list(processor.stop_tokens) if isinstance(processor, LanguageProcessor) else []
    processor.save(target)
    if source is None or not source.is_dir() or source.resolve() == target.resolve():
        _stop_where_trained(target / GENERATION, stops)
        return
    written = {path.name: path.read_bytes() for path in target.iterdir() if path.suffix in (".json", ".jinja")}
    writer = _Writer(target, source, written, frozenset(copy_side_files(source, target)))
    for preprocessors, template in _CANDIDATES:
        writer.write_preprocessors(preprocessors)
        writer.write_template(template)
        if read is None or _means_the_same(processor, read, target):
            break
    _stop_where_trained(target / GENERATION, stops)


# Preprocessor files and the chat template are copied from the source folder or written by the processor. These
# combinations are tried in order until a processor loaded from the new folder has the same fingerprint.
_CANDIDATES = [(files, template) for template in ("copied", "written") for files in ("copied", "written")]


class _Writer:
    """Write preprocessor files and the chat template into a folder."""

    def __init__(self, target: Path, source: Path, written: Mapping[str, bytes], copied: frozenset[str]) -> None:
        self._target, self._source, self._written, self._copied = target, source, written, copied

    def write_preprocessors(self, origin: str) -> None:
        both = self._read_copied(BOTH_FILE)
        for name, parts in _PARTS.items():
            if name not in self._written:
                continue
            if origin == "copied" and name in self._copied:
                continue
            if origin == "copied" and any(part in both for part in parts):
                (self._target / name).unlink(missing_ok=True)
                continue
            for part in parts:
                both.pop(part, None)
            (self._target / name).write_bytes(self._written[name])
        if origin == "written" and BOTH_FILE in self._copied:
            self._put(BOTH_FILE, {**both, **self._read_written(BOTH_FILE)})

    def write_template(self, origin: str) -> None:
        copied, written = self._read_copied(TOKENIZER_CONFIG), self._read_written(TOKENIZER_CONFIG)
        if copied:
            config = _with_named_words(copied, written.get("extra_special_tokens"))
            if origin == "written" and "chat_template" in written:
                config = {**config, "chat_template": written["chat_template"]}
            if config != copied:
                self._put(TOKENIZER_CONFIG, config)
        has_template = copied.get("chat_template") or self._copied & {TEMPLATE, _OTHER_TEMPLATES[0]}
        if origin == "written" and TEMPLATE in self._written:
            (self._target / TEMPLATE).write_bytes(self._written[TEMPLATE])
            (self._target / _OTHER_TEMPLATES[0]).unlink(missing_ok=True)
            shutil.rmtree(self._target / _OTHER_TEMPLATES[1], ignore_errors=True)
        elif has_template and TEMPLATE not in self._copied:
            (self._target / TEMPLATE).unlink(missing_ok=True)

    def _read_written(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._written[name]) if name in self._written else {}
        return content

    def _read_copied(self, name: str) -> dict[str, Any]:
        data = read_json(self._source / name) if name in self._copied else {}
        return data if isinstance(data, dict) else {}

    def _put(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (self._target / name).write_text(text, encoding="utf-8")


def _with_named_words(config: Mapping[str, Any], words: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a tokenizer_config.json with the special tokens that transformers' processor looks up by name."""
    named = config.get("extra_special_tokens") or {}
    special = words if isinstance(words, Mapping) else {}  # if it is a list, the tokens have no names
    missing = {name: word for name, word in special.items() if name not in config and name not in named}
    if not missing or not isinstance(named, dict):
        return dict(config)
    return {**config, "extra_special_tokens": {**named, **missing}}


def _means_the_same(processor: Processor, read: Callable[[Path], Processor], folder: Path) -> bool:
    try:
        return _fingerprint(read(folder)) == _fingerprint(processor)
    except TesseraError:
        return False


def _fingerprint(processor: Processor) -> str:
    """Return the processor's fingerprint without the trained roles, which are set by recipes and not by files."""
    return processor.training_on(()).fingerprint if isinstance(processor, ChatProcessor) else ""


def _stop_where_trained(path: Path, stops: Sequence[int]) -> None:
    """Add the stop tokens of training to `eos_token_id` in generation_config.json, unless it contains one of them."""
    if not stops:
        return
    settings = read_json(path) if path.is_file() else {}
    if not isinstance(settings, dict):
        return
    stored = settings.get("eos_token_id")
    ends = stored if isinstance(stored, list) else [] if stored is None else [stored]
    # Is a stop token of a turn listed already? The last of several stop tokens ends plain text, not a turn.
    if set(ends) & set(stops[:-1] or stops):
        return
    padding = {} if settings.get("pad_token_id") is not None else {"pad_token_id": stops[-1]}
    settings = {**settings, "eos_token_id": [*ends, *(stop for stop in stops if stop not in ends)], **padding}
    # Atomically: a run that starts again after a kill reads this file before it writes it.
    replace_file(path, (json.dumps(settings, indent=2) + "\n").encode())

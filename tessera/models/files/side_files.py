"""The files beside a model's weights: tokenizer, chat template, preprocessors, generation settings, licence.

They belong to the folder that the weights came from, and are copied as they are: into the run's own folder, and from
there into every export. What a processor writes itself stands in for files that the folder does not have, and for those
that say something else than what the recipe trained with.
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
from tessera.runtime.files import leads_out, read_json, read_json_mapping

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
BOTH_FILE = "processor_config.json"  # newer folders keep both in one
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
SEAL = ".sha256.json"  # of a run's own copy: what each of its files was when the run was started
# Further files with templates; they are not copied where the processor writes a template of its own.
_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_LEGAL = re.compile(r"(?:licen[cs]e|notice|usage_policy|use_policy)(?:[-_.].*)?", re.IGNORECASE)
# Written anew for every export, or about weights that have changed, or about how others were trained; or the index of a
# pipeline, of which one component is exported.
_NOT_COPIED = (
    *("config.json", "base_config.json", "tessera_export.json", "adapter_config.json", "trainer_state.json"),
    "model_index.json",
)
_MAX_BYTES = 256 << 20
_MAX_FILES = 200
_log = logging.getLogger("tessera")


def side_folder(path: Path | None) -> Path | None:
    """Return where the files beside the weights at `path` lie; None: nowhere.

    A run keeps them in a folder apart, which serves its checkpoints too.
    """
    if path is None or not path.is_dir():
        return None
    if not (path / "config.yaml").is_file():
        return path
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return run / "processor" if (run / "processor").is_dir() else None


def side_files(folder: Path, code: bool = False) -> dict[str, Path]:
    """Return the files to copy by their names below the folder; with `code`, also the Python files that it carries.

    A link that leads out of the folder is left out, with a warning: what lies there was not meant to be published.
    The cache of downloads, whose folders are links to files beside them, is known.
    """
    found: dict[str, Path] = {}
    for name, path in _candidates(folder, code):
        real = path.resolve()
        if leads_out(path, folder):
            _log.warning("%s is not copied: it is a link out of its folder, to %s", path, real)
        elif real.is_file() and real.stat().st_size <= _MAX_BYTES:
            found[name] = real
        if len(found) >= _MAX_FILES:
            break
    return found


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
    """Copy side files to another folder and return their names. `code`: see `side_files`; nothing of it is run."""
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return []
    copied = [(name, path) for name, path in side_files(source, code).items() if wanted(name)]
    for name, path in copied:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return [name for name, _ in copied]


def side_file_differences(folder: Path, base: Path) -> dict[str, str]:
    """Return, by name, what is wrong with each side file of `base` in a folder that should have it, in words."""
    wrong = {}
    for name, path in side_files(base).items():
        own = folder / name
        if not own.is_file():
            wrong[name] = f"{name} is missing"
        elif _sha256(own) != _sha256(path):
            wrong[name] = f"{name} is not that of {base.name}"
    return wrong


def seal_side_files(folder: Path) -> None:
    """Note the hash of every file in `folder`, so that a resume knows whether they are still what was trained with."""
    hashes = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != SEAL}
    (folder / SEAL).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def damaged_side_files(folder: Path) -> list[str]:
    """Return the names of files that are gone or not what `seal_side_files` saw; none, where nothing was noted."""
    if not (folder / SEAL).is_file():
        return []
    try:
        hashes = read_json_mapping(folder / SEAL)
    except TesseraError:
        return [SEAL]
    return [name for name, known in hashes.items() if not _is_whole(folder / Path(name).name, known)]


def _is_whole(path: Path, known: object) -> bool:
    return path.is_file() and _sha256(path) == known


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_side_files(
    target: Path,
    processor: Processor | None,
    *,
    read: Callable[[Path], Processor] | None,
    own: Path | None,
    weights: Path | None = None,
) -> None:
    """Write everything beside the weights of a new folder.

    `own`: the folder that the processor was read from. `weights`: the folder that the weights came from, where that
    is another one. `read` gives the processor that a folder stands for when a recipe says nothing: it tells whether a
    folder's own files still mean what was trained with.
    """
    target.mkdir(parents=True, exist_ok=True)
    if weights is not None and weights.is_dir() and weights != own:
        copy_side_files(weights, target, lambda name: name == GENERATION or is_legal(name))
    if processor is None:
        return
    # Before files are compared: a chat template that exceeds its limits is found out by it, once.
    stops = list(processor.stop_tokens) if isinstance(processor, LanguageProcessor) else []
    processor.save(target)
    if own is None or not own.is_dir() or own.resolve() == target.resolve():
        _stop_where_trained(target / GENERATION, stops)
        return
    made = {path.name: path.read_bytes() for path in target.iterdir() if path.suffix in (".json", ".jinja")}
    copied = copy_side_files(own, target)
    writer = _Writer(target, own, made, frozenset(copied))
    for choice in _CHOICES:
        writer.write(*choice)
        if read is None or _means_the_same(processor, read, target):
            break
    _stop_where_trained(target / GENERATION, stops)


# Whose files are tried in turn, (preprocessors, template), until what they say together is what was trained with.
_CHOICES = [(files, template) for template in ("own", "made") for files in ("own", "joined", "made")]


class _Writer:
    """Write preprocessor files and chat template into a folder: its own, those of a processor, or both joined."""

    def __init__(self, target: Path, own: Path, made: Mapping[str, bytes], copied: frozenset[str]) -> None:
        self._target, self._own, self._made, self._copied = target, own, made, copied

    def write(self, files: str, template: str) -> None:
        self._preprocessors(files)
        self._template(template)

    def _preprocessors(self, choice: str) -> None:
        both = self._read(BOTH_FILE)
        for name, part in ((IMAGE_FILE, "image_processor"), (VIDEO_FILE, "video_processor")):
            made, nested = self._json(name), both.get(part)
            if made is None:
                continue
            if isinstance(nested, dict) and choice != "made":
                both[part] = {**nested, **(made if choice == "joined" else {})}
                if name not in self._copied:  # one file says it
                    (self._target / name).unlink(missing_ok=True)
                    continue
            own = self._read(name)
            if choice == "made" or not own:
                both.pop(part, None)
                self._put(name, made)
            elif choice == "joined":
                self._put(name, {**own, **made})
        if both and choice != "own":
            made = self._json(BOTH_FILE) or {}
            self._put(BOTH_FILE, {**both, **made})

    def _template(self, choice: str) -> None:
        own, made = self._read(TOKENIZER_CONFIG), self._json(TOKENIZER_CONFIG) or {}
        if own:
            config = _with_named_words(own, made.get("extra_special_tokens"))
            if choice == "made" and "chat_template" in made:
                config = {**config, "chat_template": made["chat_template"]}
            if config != own:
                self._put(TOKENIZER_CONFIG, config)
        has_own = bool(own.get("chat_template")) or any(
            name in self._copied for name in (TEMPLATE, _OTHER_TEMPLATES[0])
        )
        if choice == "made" and TEMPLATE in self._made:
            (self._target / TEMPLATE).write_bytes(self._made[TEMPLATE])
            (self._target / _OTHER_TEMPLATES[0]).unlink(missing_ok=True)
            shutil.rmtree(self._target / _OTHER_TEMPLATES[1], ignore_errors=True)
        elif has_own and TEMPLATE not in self._copied:
            (self._target / TEMPLATE).unlink(missing_ok=True)

    def _json(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = json.loads(self._made[name]) if name in self._made else None
        return found

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._copied:
            return {}
        data = read_json(self._own / name)
        return data if isinstance(data, dict) else {}

    def _put(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (self._target / name).write_text(text, encoding="utf-8")


def _with_named_words(config: Mapping[str, Any], words: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the settings with the special words that the family's processor asks the tokenizer for by name."""
    named = config.get("extra_special_tokens") or {}
    given = words if isinstance(words, Mapping) else {}  # a list of words has no names
    missing = {name: word for name, word in given.items() if name not in config and name not in named}
    if not missing or not isinstance(named, dict):
        return dict(config)
    return {**config, "extra_special_tokens": {**named, **missing}}


def _means_the_same(processor: Processor, read: Callable[[Path], Processor], folder: Path) -> bool:
    try:
        return _fingerprint(read(folder)) == _fingerprint(processor)
    except TesseraError:
        return False


def _fingerprint(processor: Processor) -> str:
    """Return a hash of what the files say. Which roles are trained on is not in them but in recipes."""
    return processor.training_on(()).fingerprint if isinstance(processor, ChatProcessor) else ""


def _stop_where_trained(path: Path, stops: Sequence[int]) -> None:
    """Add the words that end a trained turn to the generation settings, unless these know one of them."""
    if not stops:
        return
    settings = read_json(path) if path.is_file() else {}
    if not isinstance(settings, dict):
        return
    known = settings.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if set(ends) & set(stops[:-1] or stops):  # the last is what plain text ends with
        return
    padding = {} if settings.get("pad_token_id") is not None else {"pad_token_id": stops[-1]}
    settings = {**settings, "eos_token_id": [*ends, *(stop for stop in stops if stop not in ends)], **padding}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

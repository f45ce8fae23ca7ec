"""Choose which files of a repository to download: weights, texts and media, never code and never pickles."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NoReturn

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, few_names

Split = Literal["train", "eval"]
MODEL_SUFFIXES = ("safetensors", "json", "txt", "model", "jinja")
RECORD_SUFFIXES = ("parquet", "jsonl", "json", "csv", "tsv", "tar", "txt")  # the most preferred format first
_INLINE = ("parquet", "tar")  # formats that contain their media
IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
VIDEOS = ("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg")
AUDIOS = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")
_MEDIA = (*IMAGES, *VIDEOS, *AUDIOS)
DATA_SUFFIXES = (*RECORD_SUFFIXES, "caption", *_MEDIA)
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")  # metadata, not records
_OTHER_FORMS = ("onnx/", "openvino/", "original/", "coreml/", "gguf/", "tf/", "flax/")
_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "eval": ("validation", "valid", "val", "dev", "eval", "test"),
}
_SPLIT_WORDS = tuple(word for words in _SPLITS.values() for word in words)


def suffix_of(name: str) -> str:
    """Return the part of a file name after its last dot, in lower case."""
    base, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return suffix.lower() if base and dot else ""


def is_plain(name: str) -> bool:
    """Return whether a file name is safe: no absolute or parent path, no hidden part, no control characters."""
    if not name.isprintable() or "\\" in name:
        return False
    return all(part and not part.startswith(".") and len(part.encode()) < 256 for part in name.split("/"))


def model_files(names: Sequence[str], id: HubId, *, weights: bool, include: Sequence[str] = ()) -> list[str]:
    """Return the files of a model: configuration, tokenizer and, if `weights`, the weights without duplicates."""
    below = f"{id.inside}/" if id.inside else ""
    here = [name for name in names if is_plain(name) and name.startswith(below)]
    chosen = [name for name in here if suffix_of(name) in MODEL_SUFFIXES]
    if include:
        chosen = [name for name in chosen if any(fnmatchcase(name, pattern) for pattern in include)]
    else:
        chosen = _each_once(chosen)
    if not chosen or (not include and not _has_weights(chosen)):
        _nothing_to_fetch(id, here, include)
    return chosen if weights else [name for name in chosen if not name.endswith(".safetensors")]


def _has_weights(names: Sequence[str]) -> bool:
    tokenizers = any(name.endswith(("tokenizer.json", "tokenizer.model")) for name in names)
    return tokenizers or any(name.endswith(".safetensors") for name in names)


def _each_once(names: Sequence[str]) -> list[str]:
    """Remove duplicates of weights: copies in another precision or in the format of another program."""
    present = set(names)
    # Not downloaded: single files beside the folders of a diffusers pipeline, and Mistral's consolidated file.
    beside = r"[^/]*\.safetensors" if "model_index.json" in present else r"(?!)"
    if any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        beside += r"|(?:.*/)?consolidated[^/]*\.safetensors"
    chosen = [name for name in names if not name.startswith(_OTHER_FORMS) and not re.fullmatch(beside, name)]
    twins = {name: re.sub(r"\.(?:fp16|bf16|fp32)(?=[.-])", "", name) for name in chosen}
    return [name for name, twin in twins.items() if twin == name or twin not in present]


def _nothing_to_fetch(id: HubId, names: Sequence[str], include: Sequence[str]) -> NoReturn:
    pickles = [name for name in names if suffix_of(name) in ("bin", "pt", "pth", "ckpt", "pkl", "h5", "msgpack")]
    if pickles and not include:
        raise TesseraError(
            f"{id} has its weights only as pickles ({few_names(pickles, 3)}). Pickles can run code and are never "
            "downloaded",
            fix="choose a revision with safetensors, such as @refs/pr/N, or another repository of the model",
            code="hub.only-pickles",
        )
    _refuse(id, "matches " + ", ".join(include) if include else "is a file of weights or a tokenizer", names)


def _refuse(id: HubId, wanted: str, names: Sequence[str]) -> NoReturn:
    script = any(name.endswith(".py") for name in names) and id.kind == "dataset"
    raise TesseraError(
        f"nothing in {id} {wanted}"
        + ("; a script generates this data set, and scripts are never run" if script else ""),
        allowed=[f"*.{suffix}" for suffix in (RECORD_SUFFIXES if id.kind == "dataset" else MODEL_SUFFIXES)],
        fix=f"choose from its files: {few_names([name for name in names if is_plain(name)]) or '(none)'}"
        + ("; the revision @refs/convert/parquet often has the same data as Parquet files" if script else ""),
        code="hub.no-such-files",
    )


# ---------------------------------------------------------------------------------------------- data sets


@dataclass(frozen=True)
class DataFiles:
    """Hold the files to download, and their path or glob pattern in a recipe, relative to the folder."""

    files: tuple[str, ...]
    path: str


def data_files(names: Sequence[str], id: HubId, split: Split, include: Sequence[str] = ()) -> DataFiles:
    """Return the files of a split: those of `include` or `id.inside`, else by metadata files or words in file names.

    `id.inside` is a file, a folder or a glob pattern. The words are train, test and others; with a metadata file, all
    files of its folder belong to the split.
    """
    readable = [name for name in names if is_plain(name) and suffix_of(name) in DATA_SUFFIXES]
    if include:
        matching = [name for name in readable if any(fnmatchcase(name, pattern) for pattern in include)]
        return DataFiles(tuple(matching or _refuse(id, f"matches {', '.join(include)}", names)), "")
    if id.inside:
        below = [name for name in readable if name.startswith(f"{id.inside}/")]
        matching = [name for name in readable if _glob_matches(id.inside, name)]
        chosen = below or _with_media(matching, id.inside, readable) or _refuse(id, "is there: no such file", names)
        return DataFiles(tuple(chosen), id.inside)
    for name in _METADATA:
        for folder in ("", *(f"{word}/" for word in _SPLITS[split])):
            if f"{folder}{name}" in readable:
                return DataFiles(tuple(file for file in readable if file.startswith(folder)), folder.rstrip("/"))
    records = [
        name for name in readable if name.rpartition("/")[2] not in _ABOUT and suffix_of(name) in RECORD_SUFFIXES
    ]
    if not records:
        _refuse(id, "is a file of records", names)
    suffix = min((suffix_of(name) for name in records), key=RECORD_SUFFIXES.index)
    chosen = _of_split([name for name in records if suffix_of(name) == suffix], split)
    allowed, fix = [f"{id}/{name}" for name in (chosen or records)[:12]], "name the files to read"
    if not chosen:
        what = f"no file name of {id} tells the split {split}"
        raise TesseraError(what, allowed=allowed, fix=fix, code="hub.unknown-split")
    pattern = _pattern(chosen, readable)
    if pattern is None:
        raise TesseraError(f"{id} has several groups of files", allowed=allowed, fix=fix, code="hub.several-datasets")
    return DataFiles(_with_media(chosen, pattern, readable), pattern)


def _of_split(records: Sequence[str], split: Split) -> list[str]:
    """Return the files of a split, by words (train, test) in file names. If no name has one, all are for training."""
    words = {name: set(re.split(r"[/_.\-]", name.lower())) for name in records}
    if split == "train" and not any(words[name] & set(_SPLIT_WORDS) for name in records):
        return list(records)
    matching = ([name for name in records if word in words[name]] for word in _SPLITS[split])
    return next((files for files in matching if files), [])


def _pattern(chosen: Sequence[str], readable: Sequence[str]) -> str | None:
    """Return a path or glob pattern within one folder that matches exactly these files; None if that is impossible."""
    if len(chosen) == 1:
        return chosen[0]
    first = os.path.commonprefix(chosen)  # noqa: RUF071 - common characters, also within a file name
    last = os.path.commonprefix([name[len(first) :][::-1] for name in chosen])[::-1]  # noqa: RUF071
    pattern = f"{first}*{last}"
    if len({name.rpartition("/")[0] for name in chosen}) > 1:
        return None
    return pattern if {name for name in readable if _glob_matches(pattern, name)} == set(chosen) else None


def _glob_matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name.

    `*` matches within a folder name, `**` across folders, and a range such as {000..127} any number.
    """
    parts = re.split(r"(\*\*/|\*\*|\*|\{\d+\.\.\d+\})", pattern)
    written = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*"}
    expression = "".join(
        written.get(part, r"\d+" if re.fullmatch(r"\{\d+\.\.\d+\}", part) else re.escape(part)) for part in parts
    )
    return re.fullmatch(expression, name) is not None


def _with_media(chosen: Sequence[str], pattern: str, readable: Sequence[str]) -> tuple[str, ...]:
    """Return the record files and, unless these contain their media, all media files below their folder."""
    if all(suffix_of(name) in _INLINE for name in chosen):
        return tuple(chosen)
    folder = re.split(r"[*{]", pattern)[0].rpartition("/")[0]
    below = f"{folder}/" if folder else ""
    media = [name for name in readable if suffix_of(name) in _MEDIA and name.startswith(below)]
    return (*chosen, *media)

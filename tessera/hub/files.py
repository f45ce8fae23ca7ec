"""Choose the files of a repository to download: weights, texts and media, never code and never a pickle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, few_names

Split = Literal["train", "eval"]
MODEL_SUFFIXES = ("safetensors", "json", "txt", "model", "jinja")
RECORD_SUFFIXES = ("parquet", "jsonl", "json", "csv", "tsv", "tar", "txt")  # in the order of preference
_INLINE = ("parquet", "tar")  # media is in the file itself
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
_VIDEOS = ("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg")
_MEDIA = (*_IMAGES, *_VIDEOS, "wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")
DATA_SUFFIXES = (*RECORD_SUFFIXES, "caption", *_MEDIA)
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")  # records of none
_OTHER_FORMS = ("onnx/", "openvino/", "original/", "coreml/", "gguf/", "tf/", "flax/")
_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "eval": ("validation", "valid", "val", "dev", "eval", "test"),
}
_SPLIT_WORDS = tuple(word for words in _SPLITS.values() for word in words)


def suffix_of(name: str) -> str:
    base, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return suffix.lower() if base and dot else ""


def is_plain(name: str) -> bool:
    """Return whether a name stays inside of the folder that it is put into, is not hidden, and can be one of a file."""
    if not name.isprintable() or "\\" in name:
        return False
    return all(part and not part.startswith(".") and len(part.encode()) < 256 for part in name.split("/"))


def model_files(names: Sequence[str], id: HubId, *, weights: bool, include: Sequence[str] = ()) -> list[str]:
    """Return the files of a model: weights once, and what belongs beside them. `weights`: False leaves those out."""
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
    """Leave out duplicates of weights: in another precision, in the original format, for other programs."""
    present = set(names)
    pipeline = "model_index.json" in present
    sharded = any(name.startswith("model") and name.endswith(".safetensors") for name in names)
    chosen = []
    for name in names:
        folder, _, base = name.rpartition("/")
        twin = re.sub(r"\.(?:fp16|bf16|fp32)(?=[.-])", "", name)
        second = twin != name and twin in present
        second = second or (pipeline and not folder and base.endswith(".safetensors"))
        second = second or (sharded and base.startswith("consolidated") and base.endswith(".safetensors"))
        if not second and not name.startswith(_OTHER_FORMS):
            chosen.append(name)
    return chosen


def _nothing_to_fetch(id: HubId, names: Sequence[str], include: Sequence[str]) -> None:
    pickles = [name for name in names if suffix_of(name) in ("bin", "pt", "pth", "ckpt", "pkl", "h5", "msgpack")]
    if pickles and not include:
        raise TesseraError(
            f"{id} has its weights as pickles alone ({few_names(pickles, 3)}), which are never downloaded: opening one "
            "runs code",
            fix="look for a revision with safetensors, such as @refs/pr/N, or for another copy of the model",
            code="hub.only-pickles",
        )
    missing = f"matches {', '.join(include)}" if include else "is a file of weights or a tokenizer"
    raise TesseraError(
        f"nothing in {id} {missing}",
        allowed=[f"*.{suffix}" for suffix in MODEL_SUFFIXES],
        fix=f"it has {few_names(names) or 'no files'}",
        code="hub.no-such-files",
    )


# ---------------------------------------------------------------------------------------------- data sets


@dataclass(frozen=True)
class DataFiles:
    """Hold the files of a data set to download, and the path in it that a recipe would name."""

    files: tuple[str, ...]
    path: str


def data_files(names: Sequence[str], id: HubId, split: Split, include: Sequence[str] = ()) -> DataFiles:
    """Return the files of a split of a data set. `id.inside` names a file, a folder or a pattern of files; without it,
    the names of the files decide."""
    readable = [name for name in names if is_plain(name) and suffix_of(name) in DATA_SUFFIXES]
    if include:
        matching = [name for name in readable if any(fnmatchcase(name, pattern) for pattern in include)]
        return DataFiles(tuple(matching or _no_records(id, names, f"nothing matches {', '.join(include)}")), "")
    if id.inside:
        return _named(readable, id, names)
    for name in _METADATA:
        for folder in ("", *(f"{word}/" for word in _SPLITS[split])):
            if f"{folder}{name}" in readable:
                return DataFiles(tuple(file for file in readable if file.startswith(folder)), folder.rstrip("/"))
    records = [
        name for name in readable if name.rpartition("/")[2] not in _ABOUT and suffix_of(name) in RECORD_SUFFIXES
    ]
    suffix = next((suffix for suffix in RECORD_SUFFIXES if any(suffix_of(name) == suffix for name in records)), None)
    chosen = _of_split([name for name in records if suffix_of(name) == suffix], id, split, names)
    pattern = _pattern(chosen, readable)
    if pattern is None:
        folders = sorted({name.rpartition("/")[0] for name in chosen})
        listed = [f"{id}/{folder}/{'*' if split not in folder else ''}*.{suffix}" for folder in folders]
        raise TesseraError(
            f"{id} has several sets in it",
            allowed=listed[:12],
            fix=f"say which files, such as {id}/{chosen[0]}",
            code="hub.several-datasets",
        )
    return DataFiles(_with_media(chosen, pattern, readable), pattern)


def _named(readable: Sequence[str], id: HubId, names: Sequence[str]) -> DataFiles:
    if re.search(r"[*{]", id.inside):
        matching = [name for name in readable if _glob_matches(id.inside, name)]
        return DataFiles(
            _with_media(matching or _no_records(id, names, "no file matches"), id.inside, readable), id.inside
        )
    if id.inside in readable:
        return DataFiles(_with_media([id.inside], id.inside, readable), id.inside)
    below = [name for name in readable if name.startswith(f"{id.inside}/")]
    return DataFiles(tuple(below or _no_records(id, names, "no such file or folder")), id.inside)


def _no_records(id: HubId, names: Sequence[str], why: str) -> list[str]:
    code = any(name.endswith(".py") for name in names)
    raise TesseraError(
        f"{id}: {why}" + ("; it is made by a script, which is never run" if code else ""),
        allowed=[f"*.{suffix}" for suffix in RECORD_SUFFIXES],
        fix=f"it has {few_names([name for name in names if is_plain(name)]) or 'no files'}"
        + ("; @refs/convert/parquet often has the same as Parquet files" if code else ""),
        code="hub.no-such-files",
    )


def _of_split(records: Sequence[str], id: HubId, split: Split, names: Sequence[str]) -> list[str]:
    if not records:
        _no_records(id, names, "no file of records")
    words = {name: set(re.split(r"[/_.\-]", name.lower())) for name in records}
    if not any(words[name] & set(_SPLIT_WORDS) for name in records):
        if split == "train":
            return list(records)
        raise TesseraError(
            f"{id} does not say which of its files are held out",
            allowed=[f"{id}/{name}" for name in records[:8]],
            fix="name the files, or leave data.eval out",
            code="hub.unknown-split",
        )
    for word in _SPLITS[split]:
        matching = [name for name in records if word in words[name]]
        if matching:
            return matching
    raise TesseraError(
        f"{id} has no files of the split {split}",
        allowed=[f"{id}/{name}" for name in records[:8]],
        fix="name the files to read",
        code="hub.unknown-split",
    )


def _pattern(chosen: Sequence[str], readable: Sequence[str]) -> str | None:
    """Return a path or pattern that matches these files and no others; None if they are in several folders."""
    if len(chosen) == 1:
        return chosen[0]
    if len({name.rpartition("/")[0] for name in chosen}) > 1:
        return None
    first = _common_start(chosen)
    last = _common_start([name[len(first) :][::-1] for name in chosen])[::-1]
    pattern = f"{first}*{last}"
    return pattern if {name for name in readable if _glob_matches(pattern, name)} == set(chosen) else None


def _common_start(words: Sequence[str]) -> str:
    low, high = min(words), max(words)
    return low[: next((at for at, letter in enumerate(low) if high[at : at + 1] != letter), len(low))]


def _glob_matches(pattern: str, name: str) -> bool:
    """Match as a path of a recipe does: `*` stays within a folder, `**` does not, {000..127} is a range."""
    parts = re.split(r"(\*\*/|\*\*|\*|\{\d+\.\.\d+\})", pattern)
    written = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*"}
    expression = "".join(
        written.get(part, r"\d+" if re.fullmatch(r"\{\d+\.\.\d+\}", part) else re.escape(part)) for part in parts
    )
    return re.fullmatch(expression, name) is not None


def _with_media(chosen: Sequence[str], pattern: str, readable: Sequence[str]) -> tuple[str, ...]:
    """Add the media below the folder of the records, where these can name some."""
    if all(suffix_of(name) in _INLINE for name in chosen):
        return tuple(chosen)
    folder = re.split(r"[*{]", pattern)[0].rpartition("/")[0]
    below = f"{folder}/" if folder else ""
    media = [name for name in readable if suffix_of(name) in _MEDIA and name.startswith(below)]
    return (*chosen, *media)

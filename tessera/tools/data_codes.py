"""Write codes of a data set: encode the recordings of every row once with a codec, for training of models that speak.

The rows are written as JSONL files of many rows each (shards), to a folder that gets its name when all are complete.
Ranks take shards in turn and skip complete ones, so a killed run continues where it stopped, on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch

from tessera.config.run_config import DataSection, ParallelSection, RunConfig, SourceSection
from tessera.core.sample import BadSample, Message, Part, Sample, count_codes
from tessera.data.bad_share import check_measured
from tessera.data.index.measure import default_workers
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits, limits_of
from tessera.data.media.read import MediaSampling, decode
from tessera.data.sources.container import RecordError, bad_sample, bad_sample_error
from tessera.data.sources.source import Source, open_source
from tessera.diffusion.feature_facts import weights_hash
from tessera.diffusion.feature_folder import key_of
from tessera.diffusion.features import PLAN, keep_plan, publish
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config, local_model
from tessera.models.speech.codec import Codec, has_codec, load_codec
from tessera.models.speech.processor import SpeechProcessor
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks
from tessera.runtime.files import read_json_mapping
from tessera.runtime.progress import WorkProgress
from tessera.tools.data_convert import messages_row
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model
from tessera.weights.layouts import FolderLayout
from tessera.workers.pool import Lost, Note, Pool
from tessera.workers.worker import time_limit

RECORDS = ".codes"  # folder with the settings, and with a record of each complete shard
QUARANTINE = "quarantine.txt"
SHARD = 1000


@dataclass
class Codes:
    """Hold the result of encoding: number of rows and of files. `missing`: files that other ranks still write."""

    folder: Path
    shards: int
    rows: int = 0
    before: int = 0  # rows in files that an earlier run has written
    missing: int = 0
    bad: list[BadSample] = field(default_factory=list)
    seconds: float = 0.0  # length of all recordings that were encoded
    root: Path | None = None  # value of `root` for the new data set; None: its rows name no files

    def lines(self) -> list[str]:
        lines = [
            f"{self.rows} rows written, {self.seconds / 60:.1f} minutes of speech; {self.before} were there before"
        ]
        lines += [f"left out: {bad}" for bad in self.bad[:20]]
        if len(self.bad) > 20:
            lines.append(f"{len(self.bad)} are left out: {count_codes(bad.code for bad in self.bad)}")
        if self.missing:
            return [*lines, f"{self.missing} of {self.shards} shards are still to be made, by other ranks"]
        root = f" and its root {self.root}" if self.root else ""
        return [*lines, f"{self.folder}: {self.shards} shards. Train with data.train={self.folder}{root}"]


def write_codes(
    recipe: str | Path | Mapping[str, Any],
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    split: Literal["train", "eval"] = "train",
    shard: int = SHARD,
    codec: str | Path | None = None,
) -> Codes:
    """Encode the recordings of a split of the recipe's data, and write the rows with codes as shards to `folder`.

    `shard`: rows per shard. `codec`: folder of the codec; None: the folder of the model contains it. All ranks of a
    launcher share the work.
    """
    config = load_local_config(recipe, dict(overrides or {}))
    # Ignore the recipe's parallelism: each rank has the full codec, and encodes other rows.
    config = config.model_copy(update={"parallel": ParallelSection()})
    setup = build_meta_model(config, 1)
    processor = build_processor(config, setup)
    if not isinstance(processor, SpeechProcessor):
        raise TesseraError(
            f"{setup.spec.name} generates neither images or videos nor speech, so it has no features to write",
            where="model",
            fix="use a recipe of a generation family, such as wan, or of a family that speaks, such as csm",
            code="generation.model-does-not-speak",
        )
    rank, ranks, local = environment_ranks()
    encoder = load_codec(_codec_folder(config, codec)).to(devices.resolve(config.train.device, local))
    encoder.encode(torch.empty(0), len(processor.sizes))  # raise before rows are read if the codec does not fit
    return CodeWriter(
        encoder,
        sources_of(config.data, split),
        codebooks=len(processor.sizes),
        roles=None if processor.reads_all_speech else tuple(config.data.train_on),
        section=config.data,
        digest=weights_hash(FolderLayout(_codec_folder(config, codec)).weight_files()),
    ).write(folder, shard, rank, ranks)


def _codec_folder(config: RunConfig, codec: str | Path | None) -> Path:
    if codec is not None:
        return local_model(codec, "--codec")
    if config.model.path is None or not has_codec(config.model.path):
        raise TesseraError(
            "the folder of the model contains no codec",
            where="model.path",
            fix="name the codec that the model was trained with: --codec hf://kyutai/mimi",
            code="media.no-codec",
        )
    return config.model.path


def sources_of(section: DataSection, split: Literal["train", "eval"]) -> list[Source]:
    """Return the data sets of a split. Raise if there is none, or if one has a weight."""
    sections: Sequence[SourceSection] = section.train if split == "train" else section.eval
    if any(source.weight is not None for source in sections):
        raise TesseraError(
            "data sets with weights cannot share a folder of codes, since a run draws from each by its weight",
            where=f"data.{split}",
            fix="write a folder of codes for each data set, and set the weights of the folders when you train",
            code="data.features-of-weighted-sets",
        )
    if not sections:
        raise TesseraError(
            "the recipe names no data set", where=f"data.{split}", fix="set this key", code="data.no-samples"
        )
    return [open_source(source) for source in sections]


# ---------------------------------------------------------------------------------------------- one row


@dataclass(frozen=True)
class UnencodedRow:
    """Hold a row with decoded recordings, to be encoded. `sounds`: index in `sample.media()` -> recording."""

    sample: Sample
    flat: bool  # whether to write the row as a text with codes, not as a conversation
    sounds: dict[int, np.ndarray]

    def row(self, codec: Codec, codebooks: int) -> dict[str, Any]:
        """Encode the recordings, and return the row with codes in their place, as a mapping for JSON."""
        codes = {n: codec.encode(torch.from_numpy(sound), codebooks).cpu().numpy() for n, sound in self.sounds.items()}
        if self.flat:
            question, answer = self.sample.messages
            prompt = "".join(part.value for part in question.parts if part.kind == "text")
            return {
                "id": self.sample.id,
                **({"instruction": prompt} if prompt else {}),
                "text": answer.parts[0].value,
                **({"speaker": answer.speaker} if answer.speaker else {}),
                "audio_codes": codes[0].tolist(),
            }
        number, messages = -1, []
        for message in self.sample.messages:
            parts = []
            for part in message.parts:
                number += part.kind != "text"
                encoded = part.kind != "text" and number in codes
                parts.append(Part("codes", codes[number]) if encoded else part)
            messages.append(Message(message.role, tuple(parts), message.speaker))
        return messages_row(Sample(self.sample.id, tuple(messages)))


@dataclass(frozen=True)
class ReadSpeech:
    """Decode the recordings in messages of `roles`, as the work of a `Pool`. Other recordings stay as they are."""

    sources: Sequence[Source]
    roles: tuple[str, ...] | None  # roles whose recordings are decoded; None: all
    sampling: MediaSampling
    limits: Limits
    timeout_s: float

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def at(self, number: int) -> tuple[Source, int]:
        """Return the data set that contains a row, and the index of the row in it."""
        for source in self.sources:
            if number < len(source):
                return source, number
            number -= len(source)
        raise IndexError(number)

    def __call__(self, number: int, note: Note) -> UnencodedRow | BadSample:
        note(number)
        source, row = self.at(number)
        id = source.location(row)
        try:
            with time_limit(self.timeout_s):
                sample = source.read(row)
                id = sample.id
                return self._decoded(source, sample)
        except (TesseraError, OSError) as error:
            return bad_sample(str(error.where) if isinstance(error, RecordError) and error.where else id, error)

    def _decoded(self, source: Source, sample: Sample) -> UnencodedRow:
        flat = source.record_format == "transcript"
        media = [(message, part) for message in sample.messages for part in message.parts if part.kind != "text"]
        wanted = {
            number: part
            for number, (message, part) in enumerate(media)
            if part.kind == "audio" and (flat or self.roles is None or message.role in self.roles)
        }
        if flat and len(wanted) != 1:
            raise RecordError(
                f"a text needs exactly one recording, but this one has {len(wanted)}",
                where=sample.id,
                code="data.several-recordings",
            )
        if not wanted and not any(part.kind == "codes" for _, part in media):
            roles = f" in messages of {', '.join(self.roles)}" if self.roles else ""
            raise RecordError(f"the row has no recording{roles}", where=sample.id, code="data.no-audio")
        sounds = {n: decode(part, source.root, self.limits, self.sampling) for n, part in wanted.items()}
        return UnencodedRow(sample, flat, sounds)


# ---------------------------------------------------------------------------------------------- shards


@dataclass
class CodeWriter:
    """Write the rows of data sets with codes. `digest`: hash of the codec's weights."""

    codec: Codec
    sources: Sequence[Source]
    codebooks: int
    roles: tuple[str, ...] | None
    section: DataSection
    digest: str = ""

    def write(self, folder: Path, shard: int = SHARD, rank: int = 0, ranks: int = 1) -> Codes:
        """Write the shards of this rank that are not complete yet, and publish the folder if all are complete."""
        sampling = MediaSampling(audio=AudioSampling(self.codec.rate))
        timeout = self.section.sample_timeout_s
        reader = ReadSpeech(self.sources, self.roles, sampling, limits_of(self.section), timeout)
        facts = {
            "codec": self.digest,
            "codebooks": self.codebooks,
            "roles": self.roles,
            "data": [source.facts() for source in self.sources],
            "shard": shard,
        }
        home, key = _home(folder), key_of(json.loads(json.dumps(facts)))
        keep_plan(home / RECORDS, facts)
        starts = range(0, len(reader), shard)
        mine = [_Shard(home, number, key) for number in range(rank, len(starts), ranks)]
        done = Codes(folder, len(starts), root=self._root())
        for file in mine:
            if (record := file.record()) is not None:
                done.before += record["rows"]
                done.bad += [BadSample(*map(str, words)) for words in record["bad"]]
        missing = [file for file in mine if file.record() is None]
        numbers = [range(starts[file.number], min(starts[file.number] + shard, len(reader))) for file in missing]
        workers = default_workers() if self.section.workers == "auto" else self.section.workers
        progress = WorkProgress(f"codes in {folder.name}", sum(map(len, numbers)), "rows")
        with Pool(reader, min(workers, sum(map(len, numbers))), timeout_s=timeout) as pool, progress:
            read = pool.map(number for some in numbers for number in some)
            for file, some in zip(missing, numbers, strict=True):
                try:
                    self._write(file, some, read, reader, done, progress)
                except TesseraError:
                    if home == folder or not (folder / RECORDS / PLAN).is_file():
                        raise
                    break  # another process has written the same codes, and has published the folder
        done.missing = _finish(home, folder, len(starts), key)
        return done

    def _write(
        self,
        file: _Shard,
        numbers: range,
        read: Iterator[tuple[int, Any]],
        reader: ReadSpeech,
        done: Codes,
        progress: WorkProgress,
    ) -> None:
        lines, bad = [], []
        for number, _ in zip(numbers, numbers, strict=True):
            _, speech = next(read)
            if isinstance(speech, Lost):
                source, row = reader.at(number)
                speech = BadSample(source.location(row), speech.reason, "data.item-ends-worker")
            if isinstance(speech, UnencodedRow):
                done.seconds += sum(len(sound) for sound in speech.sounds.values()) / self.codec.rate
                lines.append(json.dumps(speech.row(self.codec, self.codebooks), ensure_ascii=False))
            else:
                bad.append(speech)
            progress.count(1)
        done.bad += bad
        if bad and self.section.on_bad_sample == "fail":
            raise bad_sample_error(bad[0], str(self.sources[0].path), len(bad) - 1)
        sections = [SourceSection(path=source.path, root=source.root) for source in self.sources]
        check_measured(len(done.bad), len(reader), self.section.max_bad_share, sections, done.bad)
        file.write(lines, bad)
        done.rows += len(lines)

    def _root(self) -> Path | None:
        """Return the root folder of the media that written rows still refer to: recordings that are not encoded."""
        if self.roles is None or all(source.record_format == "transcript" for source in self.sources):
            return None
        return self.sources[0].root.resolve()


@dataclass(frozen=True)
class _Shard:
    """Name the files of a shard: its rows, and the record that is written after them."""

    home: Path
    number: int
    key: str

    @property
    def rows(self) -> Path:
        return self.home / f"codes-{self.number:05d}.jsonl"

    @property
    def _record(self) -> Path:
        return self.home / RECORDS / f"{self.number:05d}.json"

    def record(self) -> dict[str, Any] | None:
        """Return the record of a complete shard; None if it must be written."""
        try:
            record = read_json_mapping(self._record)
            content = self.rows.read_bytes() if record["rows"] else b""
        except (TesseraError, OSError, KeyError):
            return None
        return record if record.get("key") == self.key and record.get("crc32") == crc32(content) else None

    def write(self, lines: Sequence[str], bad: Sequence[BadSample]) -> None:
        content = "".join(f"{line}\n" for line in lines).encode()
        if lines:
            publish(self.rows, content)
        record = {"key": self.key, "crc32": crc32(content), "rows": len(lines), "bad": bad}
        publish(self._record, json.dumps(record).encode())


def _home(folder: Path) -> Path:
    """Return the folder to write to: `folder` if it is complete, otherwise `folder` with the suffix `.part`."""
    if (folder / RECORDS / PLAN).is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TesseraError(
            f"{folder} exists, and it is no folder of codes",
            where="--out",
            fix="name another folder",
            code="output.exists",
        )
    return folder.with_name(f"{folder.name}.part")


def _finish(home: Path, folder: Path, shards: int, key: str) -> int:
    """Publish the folder if all shards are complete. Return the number of missing shards."""
    if home == folder:
        return 0
    records = [_Shard(home, number, key).record() for number in range(shards)]
    missing = sum(record is None for record in records)
    if missing:
        # If the folder is published already, another rank did it, and so moved the shards away.
        return 0 if (folder / RECORDS / PLAN).is_file() else missing
    bad = [BadSample(*map(str, words)) for record in records if record for words in record["bad"]]
    if not any(record["rows"] for record in records if record):
        raise TesseraError(
            f"no row could be encoded ({count_codes(sample.code for sample in bad)}); the first: {bad[0]}",
            where=str(folder),
            code="data.no-row-written",
        )
    try:
        if bad:
            publish(home / QUARANTINE, "".join(f"{sample}\n" for sample in bad).encode())
        for leftover in home.glob("*.part"):  # temporary files of killed processes
            leftover.unlink(missing_ok=True)
        home.rename(folder)
    except (TesseraError, FileNotFoundError):
        if not (folder / RECORDS / PLAN).is_file():  # if it exists, another rank has published the folder meanwhile
            raise
    return 0

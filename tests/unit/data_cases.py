"""A small world of conversations and pictures for the tests of the data room, with a processor of their own making."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.sample import Encoded, MediaSize, Sample
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError


@dataclass(frozen=True)
class LetterProcessor:
    """One token for each letter, one for each 10x10 pixels: enough to see where every sample went."""

    train_on: tuple[str, ...] = ("assistant",)
    sampling: VideoSampling = field(default_factory=VideoSampling)
    stop_tokens: tuple[int, ...] = (0,)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> LetterProcessor:
        return replace(self, train_on=tuple(roles))

    def target(self, kind: str, size: MediaSize) -> None:
        return None

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        if any(size.width > 100 * size.height for size in sizes):
            raise TesseraError("too wide", code="media.image-too-narrow")
        tokens, trained = self._letters(sample)
        media = sum(size.width * size.height * size.frames // 100 for size in sizes)
        return {"samples": 1, "tokens": len(tokens) + media, "trained": sum(trained), "images": len(sizes)}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        sizes = sizes or [MediaSize(*item.size) for item in media]
        letters, trained = self._letters(sample)
        counts = self.measure(sample, sizes)
        tokens = torch.tensor([1] * (counts["tokens"] - len(letters)) + letters)
        flags = torch.tensor([False] * (counts["tokens"] - len(letters)) + trained)
        return Encoded(sample.id, tokens, torch.where(flags, tokens, IGNORE), torch.arange(len(tokens)), {}, counts)

    def _letters(self, sample: Sample) -> tuple[list[int], list[bool]]:
        said = [(m.role, str(p.value)) for m in sample.messages for p in m.parts if p.kind == "text"]
        tokens = [2 + ord(c) for _, words in said for c in words]
        return tokens, [role in self.train_on for role, words in said for _ in words]

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        for into, row in zip(tokens, rows, strict=True):
            joined = torch.cat([item.tokens for item in row])
            into[: len(joined)] = joined
        counts: dict[str, int] = {}
        for item in (item for row in rows for item in row):
            for name, count in item.counts.items():
                counts[name] = counts.get(name, 0) + count
        lengths = [len(item.tokens) for row in rows for item in row]
        return Batch({"tokens": tokens.flatten()}, {"text": Segments.of(lengths)}, counts=counts)

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t - 2) for t in tokens if t > 2)

    def spell(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def save(self, folder: Path) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class TroubleProcessor(LetterProcessor):
    """Does to its process what bad files do, when a sample says the word; and writes down whom it measured."""

    tally: Path | None = None  # a byte for each sample that was measured
    pause: float = 0.0
    slow: float = 0.7  # seconds

    @property
    def fingerprint(self) -> str:
        return "trouble"

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        said = "".join(str(p.value) for m in sample.messages for p in m.parts if p.kind == "text")
        if self.tally is not None:
            with self.tally.open("ab") as file:
                file.write(b".")
        time.sleep(self.pause)
        if "CRASH" in said:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "SLOW" in said:
            time.sleep(self.slow)
        if "STUCK" in said:  # as a decoder that does not come back: no signal reaches the interpreter
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(600)
        return super().measure(sample, sizes)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(request: str, said: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": request}, {"role": "assistant", "content": said}], **more}


def seen(image: str, **more: Any) -> dict[str, Any]:
    """A LLaVA row about one picture."""
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A thing."}]
    return {"conversations": turns, "image": image, **more}


def texts(folder: Path, count: int) -> Path:
    """Conversations of many lengths, each with its number as id."""
    rows = [row("q" * (1 + 7 * i % 23), f"{i:03d}" + "a" * (i * 13 % 31), id=f"s{i}") for i in range(count)]
    return write_jsonl(folder / "texts.jsonl", rows)


def pictures(folder: Path, names: Sequence[str], size: tuple[int, int] = (20, 20)) -> None:
    for name in names:
        Image.new("RGB", size, (200, 30, 30)).save(folder / name)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")

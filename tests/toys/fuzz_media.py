"""Reads damaged media files in a process of its own: `python -m tests.toys.fuzz_media FOLDER SEED START STOP SECONDS`.

FOLDER holds sound files. Prints the number of each file before it is read and the outcome, as JSON, after: whoever
started the process sees where it died.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize, Part, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tessera.errors import TesseraError
from tessera.workers.worker import time_limit
from tests.toys import media_zoo
from tests.toys.memory import peak_mib

TARGET = (28, 28)
SAMPLING = MediaSampling(frames=4, audio=AudioSampling(16_000))


def kinds(name: str) -> list[PartKind]:
    if name.startswith("moving"):
        return ["image", "video"]
    return ["audio"] if name.startswith("sound") else ["video"] if name in media_zoo.CLIPS else ["image"]


def smaller_size(size: MediaSize) -> tuple[int, int]:
    return TARGET if TARGET[0] * TARGET[1] < size.width * size.height else (size.width, size.height)


def as_promised(kind: PartKind, media: Any, size: MediaSize) -> bool:
    if kind == "audio":
        return bool(media.shape == (size.samples,) and media.dtype == np.float32 and np.isfinite(media).all())
    if kind == "image":
        return isinstance(media, Image.Image) and media.mode == "RGB" and media.size == smaller_size(size)
    return bool(media.shape == (size.frames, *smaller_size(size)[::-1], 3) and media.dtype == np.uint8)


def outcome(kind: PartKind, data: bytes, limits: Limits) -> str:
    part = Part(kind, data)
    try:
        size = probe(part, Path("/"), limits, SAMPLING)
        media = decode(part, Path("/"), limits, SAMPLING, lambda kind, size: TARGET)
        return "pixels" if as_promised(kind, media, size) else "not as promised"
    except TesseraError as error:
        return "refused: " + error.what.split(":")[0].split("(")[0].strip()
    except BaseException as error:
        return f"escaped: {type(error).__name__}: {error}"[:200]


def main(folder: str, seed: int, start: int, stop: int, seconds: float) -> None:
    files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    limits = Limits(max_image_pixels=16_000_000, max_video_pixels=16_000_000)
    for number, (name, damage, data) in enumerate(media_zoo.mutations(files, start, stop, seed), start):
        for kind in kinds(name):
            print(json.dumps({"number": number, "name": name, "kind": kind, "damage": damage}), flush=True)
            began = time.perf_counter()
            try:
                with time_limit(seconds):
                    said = outcome(kind, data, limits)
            except TesseraError:  # between two statements of ours
                said = "refused: took too long"
            took = time.perf_counter() - began
            print(json.dumps({"outcome": said, "seconds": round(took, 3), "peak_mib": peak_mib()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:5]), float(sys.argv[5]))

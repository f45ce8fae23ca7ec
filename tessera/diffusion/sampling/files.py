"""Write generated images and videos, and a JSON file with the model, the settings and a hash of the pixels."""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.diffusion.sampling.request import MediaRequest
from tessera.errors import TesseraError, first_line, nearest
from tessera.runtime.files import replace_file
from tessera.version import package_versions

SUFFIXES = (".png", ".gif", ".mp4")
FPS = 16.0  # default frame rate
_VERSION = 1  # version of the metadata format
_LIBRARIES = ("tessera-mm", "torch", "diffusers", "transformers")


@dataclass(frozen=True)
class Generated:
    """Hold one generated image or video."""

    prompt: str
    seed: int
    frames: np.ndarray  # [F, H, W, 3] uint8; an image has one frame

    @property
    def digest(self) -> str:
        """Return a hash of the pixels, independent of the file format."""
        shape = ",".join(map(str, self.frames.shape)).encode()
        return hashlib.blake2b(shape + np.ascontiguousarray(self.frames).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Record:
    """Hold what the metadata of a generated file records: the model, the request and the adapters."""

    model: Path
    parts: Path  # diffusers folder with VAE and text encoders
    dtype: str
    request: MediaRequest
    adapters: Mapping[Path, float] = field(default_factory=dict)  # adapters merged into the model, and their strengths
    adapters_2: Mapping[Path, float] = field(default_factory=dict)  # adapters merged into the second expert


def check_out(out: Path, frames: int) -> None:
    """Raise if the file `out` cannot store a sample with this many frames. Call it before sampling."""
    if out.suffix.lower() not in SUFFIXES:
        raise TesseraError(
            f"{out.name} has no supported suffix",
            where="--out",
            allowed=SUFFIXES,
            nearest=nearest(out.suffix.lower(), SUFFIXES),
            code="output.unknown-format",
        )
    if out.suffix.lower() == ".png" and frames > 1:
        raise TesseraError(
            f"a PNG file contains one image, not {frames} frames",
            where="--out",
            fix="name a .mp4 or .gif file, or set --frames 1",
            code="output.png-holds-one-image",
        )
    if out.suffix.lower() == ".mp4":
        _av()
    if out.is_dir():
        raise TesseraError(
            f"{out} is a folder",
            where="--out",
            fix=f"name a file in it, such as {out / 'sample.png'}",
            code="output.is-a-folder",
        )


def sample_paths(out: Path, count: int) -> list[Path]:
    """Return the path of each sample: `out` itself, or numbered files beside it."""
    if count == 1:
        return [out]
    digits = len(str(count - 1))
    return [out.with_name(f"{out.stem}-{number:0{digits}d}{out.suffix}") for number in range(count)]


def metadata_path(out: Path) -> Path:
    return out.with_suffix(".json")


def write_samples(out: Path, record: Record, samples: Sequence[Generated], facts: Mapping[str, str]) -> Path:
    """Write all samples, then the metadata file. Return the path of the metadata file. `facts`: further entries
    of its key `made_with`."""
    paths = sample_paths(out, len(samples))
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    described = {
        "version": _VERSION,
        "model": str(record.model.absolute()),
        "parts": str(record.parts.absolute()),
        "dtype": record.dtype,
        **{
            key: {str(path.absolute()): strength for path, strength in merged.items()}
            for key, merged in (("adapters", record.adapters), ("adapters_2", record.adapters_2))
            if merged
        },
        "request": record.request.model_dump(mode="json"),
        "samples": [
            {"file": path.name, "prompt": sample.prompt, "seed": sample.seed, "pixels": sample.digest}
            for path, sample in zip(paths, samples, strict=True)
        ],
        "made_with": {**machine, **package_versions(_LIBRARIES), **facts},
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, sample in zip(paths, samples, strict=True):
            replace_file(path, encoded(sample.frames, path.suffix.lower(), record.request.fps or FPS))
        replace_file(metadata_path(out), (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise TesseraError(
            f"{out} cannot be written: {first_line(error)}", where="--out", code="output.not-writable"
        ) from None
    return metadata_path(out)


def encoded(frames: np.ndarray, suffix: str, fps: float) -> bytes:
    """Return frames [F, H, W, 3] as the content of a file."""
    images = [Image.fromarray(frame) for frame in frames]
    held = io.BytesIO()
    if suffix == ".png":
        images[0].save(held, format="PNG")
    elif suffix == ".gif":
        rest, milliseconds = images[1:], round(1000 / fps)
        images[0].save(held, format="GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0)
    else:
        _write_mp4(held, frames, fps)
    return held.getvalue()


def _write_mp4(held: io.BytesIO, frames: np.ndarray, fps: float) -> None:
    av = _av()
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise TesseraError(
            f"MP4 needs even height and width, and this video has {width}x{height} pixels",
            where="--out",
            fix="name a .gif file",
            code="output.mp4-odd-size",
        )
    with av.open(held, "w", format="mp4") as container:
        names = [name for name in ("libx264", "mpeg4") if name in av.codecs_available]
        options = {"crf": "16"} if names[0] == "libx264" else {"qscale": "2"}
        stream = container.add_stream(names[0], rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise TesseraError(
            "PyAV, which writes MP4 files, is not installed",
            where="--out",
            fix="pip install tessera-mm[video]; or name a .gif file",
            code="environment.pyav-missing",
        ) from None
    return av

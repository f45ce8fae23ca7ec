"""Small images and videos with captions, and the folder of a pipeline with just what a processor reads of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tessera.config.reader import build as build_section
from tessera.config.run_config import DataSection
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.order.packed_rows import PackedRows
from tessera.diffusion.captions import Captions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.processor import GenerationProcessor

WORDS = ("a", "red", "green", "blue", "square", "moving", "left", "right", "up", "down")
CROSS = GenerationFamily(channels=4, patch=(1, 2, 2), captions=(Captions(length=8),))
JOINT = GenerationFamily(channels=4, patch=(1, 2, 2), joint=True, captions=(Captions(length=8),))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words, which ends every text as those of T5 do."""
    vocab = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def pipeline_folder(folder: Path) -> Path:
    """Write the tokenizer and the configuration of a VAE, of which a latent stands for 4 frames of 8 x 8 pixels."""
    write_tokenizer(folder / "tokenizer")
    vae = {"_class_name": "AutoencoderKLWan", "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps(vae))
    return folder


def write_image(path: Path, size: tuple[int, int] = (32, 32), shade: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 40, 200 - shade)).save(path)


def write_video(
    path: Path,
    frames: int,
    rate: int = 8,
    size: tuple[int, int] = (32, 32),
    times: Sequence[int] | None = None,
    turned: int = 0,
    grey_step: int = 10,
) -> None:
    """Write a video whose frame n has the grey `grey_step` (n mod 25).

    `times`: when frames are shown, in ticks of 1 / rate.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, rate)
        for number in range(frames):
            grey = np.full((size[1], size[0], 3), grey_step * (number % 25), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts = number if times is None else times[number]
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if turned:
        _turn(path)


def _turn(path: Path) -> None:
    """Turn a video by a quarter: its track header says how it is shown."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # the matrix behind version, times, id, duration and layer
    quarter = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    data[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in quarter)
    path.write_bytes(data)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def processor_of(folder: Path, family: GenerationFamily = CROSS, **options: Any) -> GenerationProcessor:
    return GenerationProcessor.load(family, folder, **options)


def rows_of(processor: GenerationProcessor, train: Any, cache: Path | None = None, **data: Any) -> PackedRows:
    section = build_section(DataSection, {"kind": "generation", "train": train, "workers": 0, **data}, "data")
    rows = KINDS.get("generation")(RowRequest(section, "train", processor, 0, cache))
    assert isinstance(rows, PackedRows)
    return rows

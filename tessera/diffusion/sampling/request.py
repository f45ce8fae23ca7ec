"""Declare a sampling request: prompts, sizes, steps, guidance and seed. Most fields have defaults by family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tessera.config.reader import Section
from tessera.errors import TesseraError
from tessera.runtime.files import read_text

MOST_PROMPTS = 10_000
Text = Annotated[str, Field(max_length=100_000)]
Side = Annotated[int, Field(ge=1, le=16_384)]
Scale = Annotated[float, Field(ge=0, le=1000)]


class MediaRequest(Section):
    """Declare the options of `tessera generate` for images and videos. Each prompt is sampled `count` times."""

    prompts: list[Text] = Field(min_length=1, max_length=MOST_PROMPTS)
    negative: Text | None = Field(None, description="negative prompt for guidance")
    height: Side | None = Field(None, description="height of a frame, in pixels")
    width: Side | None = None
    frames: int | None = Field(None, ge=1, le=100_000, description="number of frames; 1: an image")
    steps: int | None = Field(None, ge=1, le=10_000, description="number of denoising steps")
    guidance: Scale | None = Field(None, description="guidance scale, embedded if the model has that; 1: none")
    guidance_2: Scale | None = Field(None, description="guidance scale of the expert for low noise; default: guidance")
    true_guidance: Scale | None = Field(None, description="guidance by a negative prompt, besides embedded guidance")
    solver: str | None = Field(None, max_length=64, description="euler, unipc or dpm++; default: that of the folder")
    shift: float | None = Field(None, gt=0, le=1000, description="shift of noise levels; default: that of the folder")
    seed: int = Field(0, ge=0, lt=1 << 62, description="seed of the first sample; each further sample adds 1")
    count: int = Field(1, ge=1, le=MOST_PROMPTS, description="number of samples for each prompt")
    images: list[Path] = Field(default_factory=list, description="the first frame, or the images to edit")
    last_image: Path | None = Field(None, description="last frame")
    reference_pixels: int = Field(1 << 20, ge=1, le=1 << 26, description="pixels to which images to edit are resized")
    dynamic_guidance: bool = Field(False, description="vary the guidance scale over the steps, as CogVideoX")
    fps: float | None = Field(None, gt=0, le=1000, description="frames per second of the written video")
    batch: int = Field(1, ge=1, le=1024, description="number of samples that are computed together")
    vae_tiling: bool = Field(False, description="decode large frames in overlapping tiles: less memory")
    vae_slicing: bool = Field(False, description="decode the samples of a batch one after another: less memory")

    @property
    def texts(self) -> list[str]:
        """Return the prompts, repeated for each sample."""
        return [prompt for prompt in self.prompts for _ in range(self.count)]


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a text file, one per line, without empty lines."""
    prompts = [line.strip() for line in read_text(path, 64 << 20).splitlines() if line.strip()]
    check_prompt_count(len(prompts), path)
    return prompts


def check_prompt_count(count: int, path: Path) -> None:
    """Raise if a file has no prompts, or too many."""
    if not count:
        raise TesseraError(
            "the file has no prompts",
            where=str(path),
            fix="write one prompt per line",
            code="generation.no-prompts-in-file",
        )
    if count > MOST_PROMPTS:
        raise TesseraError(
            f"the file has {count} prompts",
            where=str(path),
            allowed=[f"up to {MOST_PROMPTS}"],
            code="generation.too-many-prompts",
        )

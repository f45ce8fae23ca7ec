"""Declare a request for samples: prompts, sizes, steps, guidance and seed; a family has defaults for most of it."""

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


class Request(Section):
    """Declare the options of `tessera generate` for images and videos: each prompt is sampled `count` times."""

    prompts: list[Text] = Field(min_length=1, max_length=MOST_PROMPTS)
    negative: Text | None = Field(None, description="what guidance leads away from")
    height: Side | None = Field(None, description="of a frame, in pixels")
    width: Side | None = None
    frames: int | None = Field(None, ge=1, le=100_000, description="1: an image")
    steps: int | None = Field(None, ge=1, le=10_000, description="of the solver")
    guidance: Scale | None = Field(None, description="1: without; embedded guidance where the model has that")
    guidance_2: Scale | None = Field(None, description="of the expert for little noise; default: that of the other")
    true_guidance: Scale | None = Field(None, description="with a negative prompt, besides embedded guidance")
    solver: str | None = Field(None, max_length=64, description="euler, unipc or dpm++; default: the folder's")
    shift: float | None = Field(None, gt=0, le=1000, description="of the noise levels; default: the folder's")
    seed: int = Field(0, ge=0, lt=1 << 62, description="of the first sample; the next ones count on")
    count: int = Field(1, ge=1, le=MOST_PROMPTS, description="samples of each prompt")
    images: list[Path] = Field(default_factory=list, description="first frame, or references for editing")
    last_image: Path | None = Field(None, description="last frame")
    reference_pixels: int = Field(1 << 20, ge=1, le=1 << 26, description="size that references are brought to")
    dynamic_guidance: bool = Field(False, description="guidance that grows from 1, as CogVideoX has it")
    fps: float | None = Field(None, gt=0, le=1000, description="frames shown in a second")
    batch: int = Field(1, ge=1, le=1024, description="samples that are computed together")
    vae_tiling: bool = Field(False, description="decode large frames in overlapping tiles: less memory")
    vae_slicing: bool = Field(False, description="decode the samples of a batch one after another: less memory")

    @property
    def texts(self) -> list[str]:
        """Return the prompt of each sample."""
        return [prompt for prompt in self.prompts for _ in range(self.count)]


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a text file, one per line; empty lines are skipped."""
    prompts = [line.strip() for line in read_text(path, 64 << 20).splitlines() if line.strip()]
    if not prompts:
        raise TesseraError(
            "no prompt in this file",
            where=str(path),
            fix="write one prompt a line",
            code="generation.no-prompts-in-file",
        )
    if len(prompts) > MOST_PROMPTS:
        raise TesseraError(
            f"{len(prompts)} prompts",
            where=str(path),
            allowed=[f"up to {MOST_PROMPTS}"],
            code="generation.too-many-prompts",
        )
    return prompts

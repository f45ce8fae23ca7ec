"""The processor of GLM-4.1V: conversations with images and videos to batches, and tokens back to text.

Each pair of video frames is a run of visual tokens with its time in seconds written after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tessera.core.sample import Part
from tessera.data.media.video_frames import Rule, VideoSampling
from tessera.errors import TesseraError
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.model import bicubic_positions
from tessera.models.processing.chat import ChatSpan, ChatTemplate, MediaWords, Turn
from tessera.models.processing.grounding import Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.vision.grid_processor import GridOptions, TimestampedVideoProcessor
from tessera.models.vision.patches import Patches
from tessera.models.vision.preprocessor_files import Bounds, GridFiles, Sizes, read_json, read_sampling

GLM4V = ChatTemplate(
    special=(
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
    turns={
        "system": Turn("<|system|>\n", ""),
        "user": Turn("<|user|>\n", ""),
        "assistant": Turn("<|assistant|>\n", ""),
        "tool": Turn("<|observation|>\n", ""),
    },
    media={
        "video": MediaWords("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "image": MediaWords("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    },
    begin="[gMASK]<sop>",
    system=None,
    next_turns=("<|user|>", "<|observation|>"),
)


class Glm4vOptions(GridOptions):
    """Declare the keys of `data.processor`. Missing keys get the values of the model's folder.

    Pixel bounds apply to all frames of a video together. An image counts as two frames, the number in a temporal patch.
    """

    min_pixels: int | None = Field(
        None, gt=0, le=10**12, description="smaller images are enlarged; each pixel counts twice"
    )
    max_pixels: int | None = Field(
        None, gt=0, le=10**12, description="larger images are scaled down; each pixel counts twice"
    )
    video_min_pixels: int | None = Field(
        None, gt=0, le=10**12, description="the same bounds for all frames of a video together"
    )
    min_frames: int = Field(1, gt=0, le=10**6, description="taken even from a short video, if it has them")
    max_frames: int = Field(600, gt=0, le=10**6, description="taken even from a long video")

    def sampling(self, folder: Path) -> VideoSampling:
        """Return the video sampling. If a preprocessor file has a frame rate, its number of frames is ignored."""
        sampling, stored = super().sampling(folder), read_sampling(folder)
        if "fps" in stored:
            sampling = replace(sampling, frames=self.frames)
        max_length = read_json(folder / VIDEO_FILE).get("max_duration")
        free = "max_frames" not in stored.keys() | self.model_fields_set
        if free and isinstance(max_length, (int, float)) and max_length > 0:  # max_length is in seconds
            sampling = replace(sampling, max_frames=max(1, int(max_length * sampling.fps)))
        return sampling


@dataclass(frozen=True)
class Glm4vFiles(GridFiles):
    processor: str = "Glm4vProcessor"
    image: str = "Glm4vImageProcessor"
    video: str = "Glm4vVideoProcessor"
    image_bounds: tuple[int, int] = (112 * 112, 14 * 14 * 8 * 6144)
    video_bounds: tuple[int, int] = (112 * 112, 28 * 28 * 2 * 30000)
    whole_clips: bool = True

    def read(
        self, folder: Path, sizes: Sizes, *, image_bounds: Bounds, video_bounds: Bounds
    ) -> tuple[Patches, Patches]:
        """Return the patch settings of images and of videos. An image counts as a video of one temporal patch."""
        _refuse_others(folder, self.processor)
        image, video = super().read(folder, sizes, image_bounds=image_bounds, video_bounds=video_bounds)
        return replace(image, whole_clips=True), video


@dataclass(frozen=True, eq=False)
class Glm4vProcessor(TimestampedVideoProcessor):
    version: ClassVar[str] = "glm4v 2"
    frames_rule: ClassVar[Rule] = "clock"
    position_table = staticmethod(bicubic_positions)
    tokenizer_kind: ClassVar[str | None] = "PreTrainedTokenizerFast"
    options: ClassVar[type[GridOptions]] = Glm4vOptions
    chat: ClassVar[ChatTemplate] = GLM4V
    grounding: ClassVar[Grounding | None] = Grounding(
        box="[[{}, {}, {}, {}]]", point="[[{}, {}]]", around=("<|begin_of_box|>", "<|end_of_box|>")
    )
    files: ClassVar[GridFiles] = Glm4vFiles()

    ends: tuple[int, ...] = ()  # ids of further stop tokens, from the model's configuration

    @classmethod
    def of_model(cls, config: Glm4vConfig) -> dict[str, Any]:
        return {"table_side": config.vision.table_side, "ends": config.end_tokens}

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the stop tokens of the template and of config.json. The template's end of text is the last one."""
        *words, end = super().stop_tokens
        return (*dict.fromkeys([*words, *(token for token in self.ends if token != end)]), end)

    def timestamp(self, first: float, last: float) -> str:
        return str(int(first))

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        if part.kind != "video":
            return self.template.show(part, role)
        words, still = self.template.media["video"], Part("image", None)
        spans = [ChatSpan(words.before, role, special=True)]
        for timestamp in layout.timestamps:
            spans += [*self.template.show(still, role), ChatSpan(timestamp, role)]
        return [*spans, ChatSpan(words.after, role, special=True)]


def _refuse_others(folder: Path, processor: str) -> None:
    """Refuse folders of later GLM models: same architecture and `model_type`, but a different chat format."""
    for name in (IMAGE_FILE, BOTH_FILE):
        writer = read_json(folder / name).get("processor_class")
        if writer not in (None, processor):
            raise TesseraError(
                f"this folder's processor class is {writer}, whose chat format is not supported",
                where=str(folder / name),
                allowed=[processor],
                fix="use the tokenizer and preprocessor files of GLM-4.1V, or set model.family=transformers",
                code="tokenizer.unknown-conversation",
            )

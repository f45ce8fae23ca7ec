"""The processor of Qwen2.5-Omni: conversations with images, videos and sound to batches, and tokens back to text.

With `use_audio_in_video`, the sound track of a video is read, too. Its tokens alternate with those of the frames, a
chunk of seconds at a time, and both count time positions from the same start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, Part, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.read import MediaSampling
from tessera.models.audio.features import LogMel
from tessera.models.audio.processor import AUDIO_STREAMS, ClipCutter, check_bins, read_extractor
from tessera.models.processing.chat import ChatSpan, ChatTemplate, MediaWords
from tessera.models.processing.streams import MediaLayout, MediaStreams
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.models.qwen2_5_omni.model import POOL
from tessera.models.qwen2_5_vl.processor import Qwen25VLProcessor
from tessera.models.vision.grid_processor import GridOptions, token_grid
from tessera.models.vision.preprocessor_files import GridFiles
from tessera.models.vision.processor import VISION_STREAMS

OMNI = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
    media={
        "image": MediaWords("<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>"),
        "video": MediaWords("<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
        "audio": MediaWords("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    },
)


MEL = LogMel(bins=128, seconds=300)
# Convolutions and attention see one window of the sound at a time. Two elements become one token.
CLIPS = ClipCutter(MEL, stride=2, reach=2, pool=POOL, chunk=200, fills=False)


class OmniOptions(GridOptions):
    use_audio_in_video: bool = Field(
        False, description="read the sound track of videos, in chunks that alternate with their frames"
    )


@dataclass(frozen=True, eq=False)
class Qwen25OmniProcessor(Qwen25VLProcessor):
    version: ClassVar[str] = "qwen2_5_omni 1"
    options: ClassVar[type[GridOptions]] = OmniOptions
    chat: ClassVar[ChatTemplate] = OMNI
    files: ClassVar[GridFiles] = GridFiles(processor="Qwen2_5OmniProcessor")
    streams: ClassVar[MediaStreams] = {**VISION_STREAMS, **AUDIO_STREAMS}

    seconds_per_chunk: int = 2  # seconds of a video that its sound follows, before the next frames
    clips: ClipCutter = CLIPS

    @classmethod
    def of_model(cls, config: Any) -> dict[str, Any]:
        return {
            "window": config.vision.window,
            "tokens_per_second": config.position_id_per_seconds,
            "seconds_per_chunk": config.seconds_per_chunk,
        }

    @classmethod
    def load(cls, config: Qwen25OmniConfig, folder: Path, **options: Any) -> Self:
        loaded = super().load(config, folder, **options)
        chosen = build(OmniOptions, options, "data.processor")
        data = read_extractor(Path(folder))
        stored = "feature_extractor_type" in data
        mel = LogMel.read(data, str(folder)) if stored else replace(MEL, bins=config.audio.num_mel_bins)
        check_bins(mel, config.audio.num_mel_bins, Path(folder))
        clips = replace(CLIPS, mel=mel, chunk=2 * config.audio.n_window)
        audio = AudioSampling(mel.rate, clips.max_seconds)
        sampling = MediaSampling(**asdict(loaded.sampling), audio=audio, video_sound=chosen.use_audio_in_video)
        return replace(loaded, sampling=sampling, clips=clips)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), asdict(self.clips), self.seconds_per_chunk]

    def save_preprocessor(self, folder: Path) -> None:
        self.files.write(folder, self.image, self.video, self.sampling, **self.clips.mel.write())

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        if kind == "audio":
            return self.clips.layout(size.samples)
        layout = super().layout(kind, size)
        if kind != "video" or self.clips.frames(size.samples) <= self.clips.stride:  # no sound, or not a token of it
            return layout
        track = self.clips.layout(size.samples)
        chunk = self.tokens_per_second * self.seconds_per_chunk
        each = sum(layout.tokens) // len(layout.times)  # tokens of a temporal patch
        frames = _chunks([(time, each) for time in layout.times], chunk)
        tokens = _chunks([(index, 1) for index in range(sum(track.tokens))], chunk)
        return replace(layout, tokens=tuple(frames), sound=replace(track, tokens=tuple(tokens)))

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        return self.clips.elements(np.asarray(media)) if kind == "audio" else super().elements(kind, media, layout)

    def times(self, count: int, size: MediaSize) -> tuple[int, ...]:
        # Two products in fp32, as in transformers.
        seconds = np.arange(count, dtype=np.float32) * self.seconds(size)
        return tuple(int(time) for time in seconds * np.float32(self.tokens_per_second))

    def named_tokens(self) -> dict[str, str]:
        named = {f"{kind}_token": words.word for kind, words in self.template.media.items()}
        ends = [(name, end) for name in ("vision", "audio") for end in ("bos", "eos")]
        return {**named, **{f"{name}_{end}_token": f"<|{name}_{end}|>" for name, end in ends}}

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        if layout.sound is None:
            return super().show(part, role, layout)
        video, audio = self.template.media["video"], self.template.media["audio"]
        runs = [(kind or "video", (audio if kind == "audio" else video).word) for kind, _ in layout.runs()]
        return [
            *(ChatSpan(word, role, special=True) for word in (video.before, audio.before)),
            *(ChatSpan(word, role, special=True, media=kind) for kind, word in runs),
            *(ChatSpan(word, role, special=True) for word in (audio.after, video.after)),
        ]

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        """Return positions [3, length] (time, height, width).

        Text and sound advance all three axes. Tokens of an image or video count from the position where it begins;
        what follows continues one past its largest position. A video and its sound track count from the same
        position, the two tokens before them share a position, and so do the two tokens after them, which continue
        one past the last run.
        """
        positions = np.empty((3, length), dtype=np.int64)
        at = position = 0
        remaining = iter(spans)
        for layout in layouts:
            runs = [(kind, *next(remaining)) for kind, _ in layout.runs()]
            if not layout.grid:  # sound alone counts like text
                continue
            begin = runs[0][1] - (layout.sound is not None)  # the second of two tokens that share a position
            positions[:, at:begin] = np.arange(position, position + begin - at)
            position += begin - at
            positions[:, begin : runs[0][1]] = position - 1
            grid = token_grid(layout.grid, self.image.merge, layout.times)
            sound = np.tile(np.arange(0 if layout.sound is None else sum(layout.sound.tokens)), (3, 1))
            for kind, start, count in runs:
                if kind == "audio":
                    chunk, sound = sound[:, :count] + position, sound[:, count:]
                else:
                    chunk, grid = grid[:, :count] + position, grid[:, count:]
                positions[:, start : start + count] = chunk
                at, following = start + count, int(chunk.max()) + 1
            position = following
            if layout.sound is not None:
                positions[:, at] = position
                at += 1
        positions[:, at:] = np.arange(position, position + length - at)
        return positions


def _chunks(tokens: Iterable[tuple[int, int]], chunk: int) -> list[int]:
    """Return the number of tokens in each chunk of a video or of its sound track.

    `tokens`: time position, and the number of tokens with it. A chunk begins at the first token at or after its time,
    as in transformers: each token begins at most one, so a long pause makes chunks of one token.
    """
    starts, at = [0], 0
    for time, count in tokens:
        reached = time // chunk + 1 - len(starts)
        starts += range(at, at + min(max(reached, 0), count))
        at += count
    return [end - start for start, end in pairwise([*starts, at])]

"""The base class of processors for conversations with images, videos and audio.

With `use_audio_in_video`, the sound track of a video is read, too. Audio tokens then alternate with frame tokens, and
the time positions of both start at the same value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, Part, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.read import MediaSampling
from tessera.models.audio.features import LogMel
from tessera.models.audio.processor import AUDIO_STREAMS, AudioSplitter, check_bins, read_extractor
from tessera.models.processing.chat import ChatSpan
from tessera.models.processing.streams import MediaLayout, MediaStreams
from tessera.models.vision.grid_processor import GridOptions, GridProcessor, token_grid
from tessera.models.vision.processor import VISION_STREAMS


class OmniOptions(GridOptions):
    use_audio_in_video: bool = Field(
        False, description="read the sound track of videos, in chunks that alternate with their frames"
    )


@dataclass(frozen=True, eq=False)
class OmniProcessor(GridProcessor):
    options: ClassVar[type[GridOptions]] = OmniOptions
    streams: ClassVar[MediaStreams] = {**VISION_STREAMS, **AUDIO_STREAMS}
    # Whether the two begin tokens of a video with a sound track share one position, and so do its two end tokens.
    ends_share: ClassVar[bool] = False

    tokens_per_second: int = field(kw_only=True)  # time positions per second of a video
    clips: AudioSplitter = field(kw_only=True)

    @classmethod
    @abstractmethod
    def splitter(cls, config: Any, mel: LogMel) -> AudioSplitter:
        """Return the object that splits recordings into audio frames of the encoder."""
        ...

    @abstractmethod
    def interleave(self, frames: MediaLayout, track: MediaLayout) -> tuple[list[int], list[int]]:
        """Split a video's tokens into alternating runs: return the lengths of its frame runs and of its audio runs.

        The first run is of frames.
        """
        ...

    @classmethod
    def of_model(cls, config: Any) -> dict[str, Any]:
        clips = cls.splitter(config, LogMel(bins=config.audio.num_mel_bins, seconds=300))
        return {"tokens_per_second": config.position_id_per_seconds, "clips": clips}

    @classmethod
    def load(cls, config: Any, folder: Path, **options: Any) -> Self:
        loaded = super().load(config, folder, **options)
        chosen = build(OmniOptions, options, "data.processor")
        data, clips = read_extractor(Path(folder)), loaded.clips
        if "feature_extractor_type" in data:
            clips = cls.splitter(config, LogMel.read(data, str(folder)))
        check_bins(clips.mel, config.audio.num_mel_bins, Path(folder))
        audio = AudioSampling(clips.mel.rate, clips.max_seconds)
        sampling = MediaSampling(**asdict(loaded.sampling), audio=audio, video_sound=chosen.use_audio_in_video)
        return replace(loaded, sampling=sampling, clips=clips)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), asdict(self.clips)]

    def save_preprocessor(self, folder: Path) -> None:
        self.files.write(folder, self.image, self.video, self.sampling, **self.clips.mel.write())

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        if kind == "audio":
            return self.clips.layout(size.samples)
        layout = super().layout(kind, size)
        if kind != "video" or not self.clips.tokens(size.samples):
            return layout
        track = self.clips.layout(size.samples)
        frames, sound = self.interleave(layout, track)
        return replace(layout, tokens=tuple(frames), sound=replace(track, tokens=tuple(sound)))

    def times(self, count: int, size: MediaSize) -> tuple[float, ...]:
        # Multiply in the order of transformers: in fp32, another order rounds differently.
        seconds = np.arange(count, dtype=np.float32) * self.seconds(size)
        return tuple((seconds * np.float32(self.tokens_per_second)).astype(self.position_type).tolist())

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        return self.clips.elements(np.asarray(media)) if kind == "audio" else super().elements(kind, media, layout)

    def named_tokens(self) -> dict[str, str]:
        named = {f"{kind}_token": words.word for kind, words in self.template.media.items()}
        for name, words in (("vision", self.template.media["image"]), ("audio", self.template.media["audio"])):
            named |= {f"{name}_bos_token": words.before, f"{name}_eos_token": words.after}
        return named

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

        Text and audio advance all three axes. Positions of an image or a video start at the next free position, and
        the tokens after it start one past its largest position. A video and its sound track start at the same
        position; the tokens after them start one past the largest position of the last run.
        """
        positions = np.empty((3, length), dtype=self.position_type)
        at, position = 0, np.zeros((), dtype=self.position_type)
        remaining = iter(spans)
        for layout in layouts:
            runs = [(kind, *next(remaining)) for kind, _ in layout.runs()]
            if not layout.grid:  # audio without a video is numbered like text
                continue
            begin, after = runs[0][1], runs[-1][1] + runs[-1][2]
            shared = int(self.ends_share and layout.sound is not None)  # 1 if two begin tokens share a position
            positions[:, at : begin - shared] = position + np.arange(begin - shared - at)
            position = position + (begin - shared - at)
            positions[:, begin - shared : begin] = position - 1
            grid = token_grid(layout.grid, self.image.merge, layout.times).astype(self.position_type)
            sound = np.tile(np.arange(0 if layout.sound is None else sum(layout.sound.tokens)), (3, 1))
            for kind, start, count in runs:
                if kind == "audio":
                    run, sound = sound[:, :count] + position, sound[:, count:]
                else:
                    run, grid = grid[:, :count] + position, grid[:, count:]
                positions[:, start : start + count] = run
            at, position = after + shared, positions[:, runs[-1][1] : after].max() + 1
            positions[:, after:at] = position
        positions[:, at:] = position + np.arange(length - at)
        return positions

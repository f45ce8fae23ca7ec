"""The audio stream of a batch, the encoder input of recordings, and the base class of audio processors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from tessera.config.reader import build
from tessera.core.model_plan import Stream
from tessera.core.sample import MediaSize, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.read import MediaSampling
from tessera.errors import TesseraError
from tessera.models.audio.config import CHUNK_STRIDE
from tessera.models.audio.features import LogMel, mel_windows
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE
from tessera.models.processing.chat import ChatTemplate
from tessera.models.processing.conversation import (
    ConversationProcessor,
    TextOptions,
    check_special_tokens,
    with_system,
)
from tessera.models.processing.streams import MediaLayout, MediaStream, MediaStreams
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer
from tessera.models.vision.preprocessor_files import read_json, write_json

AUDIO = "audio"
# The stream of an audio encoder (see `Stream`). A family adds the encoder's width and blank input.
MEL = Stream(
    tensors=("mel", "mel_positions"),
    segments=AUDIO,
    module=AUDIO,
    projector="audio_projector",
    slots="audio_slots",
)
AUDIO_STREAMS: MediaStreams = {AUDIO: MediaStream(MEL, ("audio",), "audio_frames", "audio_pairs")}


@dataclass(frozen=True)
class AudioSplitter:
    """Split recordings into audio frames, the sequence positions of an audio encoder after its convolutions.

    Convolutions run over one chunk of mel frames at a time, attention over one window of chunks.
    """

    mel: LogMel
    stride: int  # `stride` and `reach` of the convolutions, as in `AudioShape`
    reach: int
    pool: int = 1  # number of audio frames that become one token
    chunk: int = 3000  # mel frames of a chunk
    window: int = 1  # chunks of an attention window
    # Whether the last chunk of a recording is padded to the length of the others. The padding gets no
    # audio frames.
    fills: bool = True
    silence: bool = True  # pad samples with silence to `mel.longest`; False: pad mel frames with zeros
    least: int = 0  # minimum number of samples; shorter recordings are padded with silence

    @classmethod
    def of_chunks(cls, mel: LogMel, chunk: int, window: int, least: int = 0) -> Self:
        """Return the splitter for a `ChunkAudioConfig`. `window`: number of mel frames in an attention window."""
        stride = CHUNK_STRIDE
        return cls(mel, stride, stride - 1, chunk=chunk, window=window // chunk, silence=False, least=least)

    @property
    def max_seconds(self) -> float:
        """Return the seconds of the longest recording that is accepted."""
        return float(self.mel.seconds) if self.silence else AudioSampling.max_seconds

    def frames(self, samples: int) -> int:
        """Return the number of mel frames of a recording."""
        samples = max(samples, self.least)
        if self.silence:
            return self.mel.frames(samples)
        # The STFT pads each end with the reflection of half a window, which a shorter recording does not have.
        return samples // self.mel.hop if samples > self.mel.fft // 2 else 0

    def layout(self, samples: int) -> MediaLayout:
        if samples > self.max_seconds * self.mel.rate:
            raise TesseraError(
                f"the audio lasts {samples / self.mel.rate:.0f} s, and this model reads at most {self.max_seconds:g} s",
                fix="split the recording into shorter ones",
                code="media.audio-too-long",
            )
        tokens, counts = self.tokens(samples), self._elements(samples)
        if not tokens:
            raise TesseraError(
                f"the audio has {samples} samples, which is too short for one token of this model",
                fix="remove such samples",
                code="media.audio-too-short",
            )
        return MediaLayout(
            (tokens,),
            tuple(sum(counts[at : at + self.window]) for at in range(0, len(counts), self.window)),
            # If `pool` does not divide the number of audio frames, the last ones are attended to but become no token.
            selected=np.arange(tokens * self.pool) if self.pool > 1 else None,
        )

    def tokens(self, samples: int) -> int:
        """Return the number of tokens of a recording."""
        return sum(self._elements(samples)) // self.pool

    def elements(self, sound: np.ndarray) -> dict[str, np.ndarray]:
        chunks = self._chunks(len(sound))
        padded = np.pad(sound, (0, max(0, self.least - len(sound))))
        if self.silence:
            total = self.mel.longest // self.mel.hop
            read = sum(chunks) + self.reach if self.fills else sum(chunks)
            mel = self.mel(padded, self.mel.longest, min(total, read))
        else:
            mel = self.mel(padded)
        parts = [
            mel_windows(
                mel[self.chunk * number :][: self.chunk if self.fills else frames],
                -(-frames // self.stride),
                self.chunk if self.fills else frames,
                self.stride,
                self.reach,
            )
            for number, frames in enumerate(chunks)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _elements(self, samples: int) -> list[int]:
        """Return the number of audio frames in each chunk of a recording."""
        return [-(-frames // self.stride) for frames in self._chunks(samples)]

    def _chunks(self, samples: int) -> list[int]:
        """Return the number of mel frames in each chunk of a recording."""
        frames = self.frames(samples)
        return [min(self.chunk, frames - start) for start in range(0, frames, self.chunk)]


@dataclass(frozen=True, eq=False)
class AudioProcessor(ConversationProcessor):
    """Turn conversations with recordings into batches."""

    axes: ClassVar[int] = 1
    streams: ClassVar[MediaStreams] = AUDIO_STREAMS
    chat: ClassVar[ChatTemplate]
    processor_class: ClassVar[str]  # names in preprocessor_config.json
    extractor_class: ClassVar[str] = "WhisperFeatureExtractor"

    clips: AudioSplitter

    @classmethod
    @abstractmethod
    def splitter(cls, config: Any, data: Mapping[str, Any], where: str) -> AudioSplitter:
        """Return how recordings are split. `data`: content of preprocessor_config.json; empty if there is none."""
        ...

    @classmethod
    def load(cls, config: Any, folder: Path, **options: Any) -> Self:
        """Load the processor from a folder with tokenizer.json; preprocessor files are optional."""
        folder = Path(folder)
        chosen = build(TextOptions, options, "data.processor")
        template = with_system(cls.chat, chosen, folder)
        encoder = ChatEncoder(load_tokenizer(folder))
        check_special_tokens(encoder, template, config.special_token_ids, config.text.vocab_size, folder)
        clips = cls.splitter(config, read_extractor(folder), str(folder / IMAGE_FILE))
        check_bins(clips.mel, config.audio.num_mel_bins, folder)
        sampling = MediaSampling(audio=AudioSampling(clips.mel.rate, clips.max_seconds))
        return cls(encoder, template, sampling, chosen.train_on, False, clips)

    def fingerprint_fields(self) -> list[Any]:
        return [asdict(self.clips)]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        return self.clips.layout(size.samples)

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        return self.clips.elements(np.asarray(media))

    def save_preprocessor(self, folder: Path) -> None:
        fields = {**self.clips.mel.write(self.extractor_class), **self.extractor_fields()}
        write_json(folder / IMAGE_FILE, {"processor_class": self.processor_class, **fields})

    def extractor_fields(self) -> dict[str, Any]:
        """Return fields of preprocessor_config.json besides those of `LogMel`."""
        return {}


def read_extractor(folder: Path) -> dict[str, Any]:
    """Return the settings of the feature extractor of a folder, from its own file or from processor_config.json."""
    nested = read_json(folder / BOTH_FILE).get("feature_extractor")
    return read_json(folder / IMAGE_FILE) or (nested if isinstance(nested, dict) else {})


def check_bins(mel: LogMel, bins: int, folder: Path) -> None:
    """Raise an error unless the features of a folder have as many mel bins as the model's encoder reads."""
    if mel.bins != bins:
        raise TesseraError(
            f"the folder's features have {mel.bins} mel bins, and the model's encoder reads {bins}",
            where=str(folder / IMAGE_FILE),
            fix=f"set feature_size to {bins}, or num_mel_bins of the model to {mel.bins}",
            code="media.audio-features-differ",
        )

"""Audio: its length from the header, and its samples decoded to one channel at one rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.sample import MediaSize
from tessera.data.media.containers import container, decoder
from tessera.data.media.files import Limits, Opened, refused, refusing, size_of
from tessera.errors import TesseraError

# Formats whose length FFmpeg only estimates from the bit rate. For these, the durations of all packets are added up.
_GUESSED = {"mp3", "aac", "amr", "amrnb", "amrwb", "ac3", "eac3"}
_SLACK_SECONDS = 0.1  # tolerated difference from the length in the header: encoders add silence at both ends
_SLACK_SHARE = 0.005
_RATES = range(1000, 768_001)
_WAV_CHUNKS = 100  # limit of RIFF chunks before the samples
_WAV_UNKNOWN = 0x7FFF0000  # bytes: programs that write to a pipe put a larger size into the header, for unknown


@dataclass(frozen=True)
class AudioSampling:
    """State how audio is decoded: to one channel of `rate` samples per second. Audio above `max_seconds` is refused."""

    rate: int
    max_seconds: float = 1800.0


def has_sound(source: Opened, limits: Limits) -> bool:
    """Return whether a video has a sound track."""
    with container(source, "video", limits) as held:
        return bool(held.streams.audio)


def probe(source: Opened, limits: Limits, sampling: AudioSampling) -> MediaSize:
    _check_wav(source)
    with container(source, "audio", limits) as held:
        return MediaSize(0, 0, 0, samples=_sample_count(held, source.name, sampling))


def decode(source: Opened, limits: Limits, sampling: AudioSampling) -> tuple[np.ndarray, MediaSize]:
    """Return float32 [samples] between -1 and 1, as many samples as `probe` returned, and the size."""
    _check_wav(source)
    with container(source, "audio", limits) as held:
        expected = _sample_count(held, source.name, sampling)
    slack = round(sampling.rate * _SLACK_SECONDS + expected * _SLACK_SHARE)
    with container(source, "audio", limits) as held, refusing("damaged audio", source.name):
        chunks = list(_decoded_chunks(held, _stream(held, source.name), sampling.rate, expected + slack))
    decoded = sum(len(chunk) for chunk in chunks)
    if abs(decoded - expected) > slack:
        length = "more" if decoded > expected else f"only {decoded / sampling.rate:.2f} s"
        why = f"the header states {expected / sampling.rate:.2f} s, {length} could be decoded"
        raise refused("damaged audio", source.name, why)
    sound = np.concatenate([*chunks, np.zeros(max(0, expected - decoded))], dtype=np.float32)[:expected]
    return sound, MediaSize(0, 0, 0, samples=expected)


def _check_wav(source: Opened) -> None:
    """Raise if a WAV file is truncated. FFmpeg would read it without an error."""
    source.file.seek(0)
    head, at, size = source.file.read(12), 12, size_of(source.file)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return
    for _ in range(_WAV_CHUNKS):
        source.file.seek(at)
        name, length = source.file.read(4), int.from_bytes(source.file.read(4), "little")
        if name == b"data" or at >= size:
            break
        at += 8 + length + length % 2
    if name == b"data" and size < at + 8 + length < _WAV_UNKNOWN:
        why = f"the header states {length} bytes of samples, the file has {size - at - 8}"
        raise refused("damaged audio", source.name, why)


def _stream(held: Any, name: str) -> Any:
    if not held.streams.audio:
        raise TesseraError(f"unreadable audio: {name} (no audio stream)", code="media.no-such-stream")
    return held.streams.audio[0]


def _sample_count(held: Any, name: str, sampling: AudioSampling) -> int:
    stream = _stream(held, name)
    with refusing("unreadable audio", name):
        rate = int(stream.codec_context.sample_rate) if stream.codec_context is not None else 0
        seconds = 0.0
        if not _GUESSED & set(held.format.name.split(",")):
            if stream.duration and stream.time_base:
                seconds = float(stream.duration * stream.time_base)
            elif held.duration and not held.streams.video:  # a video may be longer than its sound track
                seconds = held.duration / 1e6
        if seconds <= 0 and stream.time_base:
            ticks = sum(packet.duration or 0 for packet in held.demux(stream) if packet.size)
            seconds = float(ticks * stream.time_base)
    if rate not in _RATES or seconds <= 0:
        raise refused("unreadable audio", name, f"{seconds:.2f} s at {rate} samples per second")
    if seconds > sampling.max_seconds:
        raise TesseraError(
            f"audio is too long: {name} lasts {seconds:.0f} s, the limit is {sampling.max_seconds:g} s",
            fix="shorten the file, or raise max_seconds",
            code="media.audio-too-long",
        )
    return max(1, round(seconds * sampling.rate))


def _decoded_chunks(held: Any, stream: Any, rate: int, most: int) -> Iterator[np.ndarray]:
    """Yield the decoded audio frame by frame. Stop after more than `most` samples."""
    from av import AudioResampler

    decoder(stream)
    # Channels are averaged below: FFmpeg's own mix adds them, which exceeds 1.
    resampler = AudioResampler(format="fltp", rate=rate)
    decoded = 0
    for frame in held.decode(stream):
        frame.pts = None  # otherwise the resampler fills gaps between timestamps
        for chunk in resampler.resample(frame):
            decoded += chunk.samples
            yield chunk.to_ndarray().mean(axis=0)
        if decoded > most:
            return
    for chunk in resampler.resample(None):
        yield chunk.to_ndarray().mean(axis=0)

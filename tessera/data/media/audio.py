"""Read audio: its length without decoding, and its samples decoded to one channel at one rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tessera.core.sample import MediaSize
from tessera.data.media.clips import AudioClip, AudioSamples, is_sound
from tessera.data.media.containers import container, decoder
from tessera.data.media.files import Limits, Opened, refused, refusing, size_of
from tessera.errors import TesseraError

# Formats whose length FFmpeg only estimates from the bit rate: their length is the sum of the durations of all packets.
_GUESSED = {"mp3", "aac", "amr", "amrnb", "amrwb", "ac3", "eac3"}
_SLACK_SECONDS = 0.1  # tolerated difference from the length in the header: encoders add silence at both ends
_SLACK_SHARE = 0.005
_SEEK_SECONDS = 1.0  # audio decoded before a clip starts: codecs such as MP3 and Opus depend on what precedes
_RATES = range(1000, 768_001)
_WAV_CHUNKS = 100  # limit of RIFF chunks before the samples
_WAV_UNKNOWN = 0x7FFF0000  # size limit in bytes: programs that write to a pipe state a larger size, which means unknown


@dataclass(frozen=True)
class AudioSampling:
    """State how audio is decoded: to one channel of `rate` samples per second. Audio above `max_seconds` is refused."""

    rate: int
    max_seconds: float = 1800.0


def has_sound(source: Opened, limits: Limits) -> bool:
    """Return whether a video has a sound track."""
    with container(source, "video", limits) as held:
        return bool(held.streams.audio)


def probe(source: Opened, limits: Limits, sampling: AudioSampling, clip: AudioClip | None = None) -> MediaSize:
    """Return the number of samples of a recording, or of a clip of it, from the header or the packets."""
    _check_wav(source)
    with container(source, "audio", limits) as held:
        return MediaSize(0, 0, 0, samples=_sample_count(held, source.name, sampling, clip))


def stored_rate(source: Opened, limits: Limits) -> int:
    """Return the sampling rate of a recording from its header, in samples per second."""
    with container(source, "audio", limits) as held:
        rate = _rate(_stream(held, source.name))
    return _checked_rate(rate, source.name)


def decode(
    source: Opened, limits: Limits, sampling: AudioSampling, clip: AudioClip | None = None
) -> tuple[np.ndarray, MediaSize]:
    """Return float32 [samples] between -1 and 1, as many samples as `probe` returned, and the size.

    Of a clip, only the recording from one second before its start to its end is decoded.
    """
    size = probe(source, limits, sampling, clip)
    expected = size.samples
    slack = round(sampling.rate * _SLACK_SECONDS + expected * _SLACK_SHARE)
    decoded = 0  # samples at `rate`, with those before the clip
    with container(source, "audio", limits) as held, refusing("damaged audio", source.name):
        stream, length_is_stated = _stream(held, source.name), not _is_guessed(held)
        decoder(stream)
        if clip is not None:
            _seek(held, stream, clip.start)
        frames, skipped = held.decode(stream), 0
        if clip is not None:
            frames, skipped = _from(frames, stream, clip.start, sampling.rate, source.name)
        chunks = []
        for chunk in _decoded_chunks(frames, sampling.rate, skipped + expected + slack):
            chunks.append(chunk[max(0, skipped - decoded) :])
            decoded += len(chunk)
    sound = np.concatenate([*chunks, np.empty(0)], dtype=np.float32)
    if len(sound) < expected - slack or (clip is None and len(sound) > expected + slack):
        if clip is not None and not length_is_stated:
            raise _outside(clip, source.name, clip.start + (decoded - skipped) / sampling.rate)
        length = "more" if len(sound) > expected else f"only {len(sound) / sampling.rate:.2f} s"
        if clip is None:
            why = f"the header states {expected / sampling.rate:.2f} s, {length} could be decoded"
        else:
            why = f"the part {clip.start:g} to {clip.end:g} s: {length} could be decoded, then the recording ends"
        raise refused("damaged audio", source.name, why)
    if not is_sound(sound):
        raise refused("damaged audio", source.name, "a sample is not a number, or far above full scale")
    return np.concatenate([sound, np.zeros(max(0, expected - len(sound)), np.float32)])[:expected], size


def resampled(samples: AudioSamples, sampling: AudioSampling) -> tuple[np.ndarray, MediaSize]:
    """Resample audio that is decoded already, and return it as `decode` does."""
    size = decoded_size(samples, sampling)
    sound = samples.mono()
    if samples.rate != sampling.rate:
        from av import AudioFrame

        frame = AudioFrame.from_ndarray(sound[None], format="flt", layout="mono")
        frame.sample_rate = samples.rate
        sound = np.concatenate(list(_decoded_chunks([frame], sampling.rate, size.samples)))
    sound = np.concatenate([sound, np.zeros(max(0, size.samples - len(sound)), np.float32)])
    return sound[: size.samples].astype(np.float32), size


def decoded_size(samples: AudioSamples, sampling: AudioSampling) -> MediaSize:
    """Return the number of samples that decoded audio has after resampling."""
    count = len(samples.mono())
    return MediaSize(0, 0, 0, samples=_checked_count(count / samples.rate, samples.rate, "audio in memory", sampling))


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


def _sample_count(held: Any, name: str, sampling: AudioSampling, clip: AudioClip | None) -> int:
    stream = _stream(held, name)
    with refusing("unreadable audio", name):
        rate = _rate(stream)
        seconds = 0.0 if _is_guessed(held) else _stated_seconds(held, stream)
        if seconds <= 0 and clip is None and stream.time_base:
            most, ticks = (sampling.max_seconds + 1) / stream.time_base, 0
            for packet in held.demux(stream):
                ticks += (packet.duration or 0) if packet.size else 0
                if ticks > most:
                    break
            seconds = float(ticks * stream.time_base)
    if clip is None:
        return _checked_count(seconds, rate, name, sampling)
    slack = _SLACK_SECONDS + (clip.end - clip.start) * _SLACK_SHARE
    if seconds > 0 and clip.end > seconds + slack:
        raise _outside(clip, name, seconds)
    return _checked_count(clip.end - clip.start, rate, name, sampling)


def _is_guessed(held: Any) -> bool:
    """Return whether FFmpeg estimates the length of this format from the size of the file."""
    return bool(_GUESSED & set(held.format.name.split(",")))


def _outside(clip: AudioClip, name: str, seconds: float) -> TesseraError:
    return TesseraError(
        f"the part {clip.start:g} to {clip.end:g} s ends after the recording: {name} lasts {seconds:.2f} s",
        fix="correct start and end, which are seconds",
        code="media.clip-outside",
    )


def _rate(stream: Any) -> int:
    return int(stream.codec_context.sample_rate) if stream.codec_context is not None else 0


def _checked_rate(rate: int, name: str) -> int:
    if rate not in _RATES:
        raise refused("unreadable audio", name, f"{rate} samples per second")
    return rate


def _stated_seconds(held: Any, stream: Any) -> float:
    """Return the length that the header states, in seconds; 0 if it states none."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # A video may be longer than its sound track.
    return held.duration / 1e6 if held.duration and not held.streams.video else 0.0


def _checked_count(seconds: float, rate: int, name: str, sampling: AudioSampling) -> int:
    """Return how many samples a recording has after resampling. Raise if it is too long, or has none."""
    _checked_rate(rate, name)
    if seconds <= 0:
        raise refused("unreadable audio", name, f"{seconds:.2f} s")
    if seconds > sampling.max_seconds:
        raise TesseraError(
            f"audio is too long: {name} lasts {seconds:.0f} s or more, the limit is {sampling.max_seconds:g} s",
            fix="name a part of it by start and end in seconds, such as talk.flac#t=12.5,17.25",
            code="media.audio-too-long",
        )
    return max(1, round(seconds * sampling.rate))


def _seek(held: Any, stream: Any, start: float) -> None:
    """Seek to a position before `start` at which a decoder can begin, so that it also decodes some earlier audio."""
    before = max(0.0, start - _SEEK_SECONDS)
    if before > 0:
        held.seek(round(before / stream.time_base) + (stream.start_time or 0), stream=stream)


def _from(frames: Iterator[Any], stream: Any, start: float, rate: int, name: str) -> tuple[Iterator[Any], int]:
    """Return the frames, and how many samples, at `rate`, the first frame begins before `start`."""
    first = next(frames, None)
    if first is None or first.pts is None:
        raise refused("damaged audio", name, f"nothing could be decoded at {start:g} s")
    began = float((first.pts - (stream.start_time or 0)) * stream.time_base)
    if began > start + _SLACK_SECONDS:
        raise refused("damaged audio", name, f"{start:g} s cannot be reached, only {began:.2f} s")
    return chain([first], frames), max(0, round((start - began) * rate))


def _decoded_chunks(frames: Iterable[Any], rate: int, most: int) -> Iterator[np.ndarray]:
    """Yield the decoded audio frame by frame, one channel at `rate`. Stop after more than `most` samples."""
    from av import AudioResampler

    # Channels are averaged here: FFmpeg's own mix adds them, which exceeds 1. They are interleaved: PyAV crashes on
    # eight or more separate ones.
    resampler = AudioResampler(format="flt", rate=rate)
    decoded = 0

    def mixed(chunk: Any) -> np.ndarray:
        sound: np.ndarray = chunk.to_ndarray().reshape(chunk.samples, -1).mean(axis=1)
        return sound

    for frame in frames:
        frame.pts = None  # with timestamps the resampler would fill gaps between frames
        for chunk in resampler.resample(frame):
            decoded += chunk.samples
            yield mixed(chunk)
        if decoded > most:
            return
    for chunk in resampler.resample(None):
        yield mixed(chunk)

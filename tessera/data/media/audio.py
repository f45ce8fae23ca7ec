"""Sound: how long it is, from the header; and one channel of it at one rate, decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize
from tessera.data.media.containers import container, decoder, reason
from tessera.data.media.files import Opened
from tessera.data.media.images import Limits

# Headers of these tell their length by guessing from the bit rate: packets are read (not decoded) and counted.
_GUESSED = {"mp3", "aac", "amr", "amrnb", "amrwb", "ac3", "eac3"}
_SLACK_SECONDS = 0.1  # encoders put a little silence before and behind
_SLACK_SHARE = 0.005
_RATES = range(1000, 768_001)


@dataclass(frozen=True)
class AudioSampling:
    """What sound is brought to: one channel of `rate` samples a second. Longer than `max_seconds` is refused."""

    rate: int = 16_000
    max_seconds: float = 1800.0


def probe(source: Opened, limits: Limits, sampling: AudioSampling) -> MediaSize:
    with container(source, "audio", limits) as held:
        return MediaSize(0, 0, 0, samples=_promised(held, source.name, sampling))


def decode(source: Opened, limits: Limits, sampling: AudioSampling) -> tuple[np.ndarray, MediaSize]:
    """float32 [samples] in -1..1, as many as `probe` says."""
    with container(source, "audio", limits) as held:
        promised = _promised(held, source.name, sampling)
    slack = round(sampling.rate * _SLACK_SECONDS + promised * _SLACK_SHARE)
    with container(source, "audio", limits) as held:
        try:
            pieces = list(_pieces(held, _stream(held, source.name), sampling.rate, promised + slack))
        except TesseraError:
            raise
        except Exception as error:  # what a decoder raises on foreign bytes is not listed anywhere
            raise TesseraError(f"damaged audio: {source.name} ({reason(error)})") from None
    heard = sum(len(piece) for piece in pieces)
    if abs(heard - promised) > slack:
        raise TesseraError(
            f"damaged audio: {source.name} (its header says {promised / sampling.rate:.2f} s, "
            f"{'more' if heard > promised else f'{heard / sampling.rate:.2f} s'} could be decoded)"
        )
    sound = np.zeros(promised, dtype=np.float32)
    at = 0
    for piece in pieces:
        taken = min(len(piece), promised - at)
        sound[at : at + taken] = piece[:taken]
        at += taken
    return sound, MediaSize(0, 0, 0, samples=promised)


def _stream(held: Any, name: str) -> Any:
    if not held.streams.audio:
        raise TesseraError(f"unreadable audio: {name} (no sound in it)")
    return held.streams.audio[0]


def _promised(held: Any, name: str, sampling: AudioSampling) -> int:
    stream = _stream(held, name)
    try:
        rate = int(stream.codec_context.sample_rate) if stream.codec_context is not None else 0
        seconds = 0.0
        if not _GUESSED & set(held.format.name.split(",")):
            if stream.duration and stream.time_base:
                seconds = float(stream.duration * stream.time_base)
            elif held.duration:
                seconds = held.duration / 1e6
        if seconds <= 0 and stream.time_base:
            ticks = sum(packet.duration or 0 for packet in held.demux(stream) if packet.size)
            seconds = float(ticks * stream.time_base)
    except TesseraError:
        raise
    except Exception as error:  # see `containers.container`
        raise TesseraError(f"unreadable audio: {name} ({reason(error)})") from None
    if rate not in _RATES or seconds <= 0:
        raise TesseraError(f"unreadable audio: {name} ({seconds:.2f} s at {rate} samples a second)")
    if seconds > sampling.max_seconds:
        raise TesseraError(
            f"audio header claims too much: {name} lasts {seconds:.0f} s, {sampling.max_seconds:g} are allowed",
            fix="cut it, or raise max_seconds",
        )
    return max(1, round(seconds * sampling.rate))


def _pieces(held: Any, stream: Any, rate: int, most: int) -> Iterator[np.ndarray]:
    """Stretches of sound as they are decoded; ends when there is more than was promised."""
    from av import AudioResampler

    decoder(stream)
    # Channels are joined by their mean: FFmpeg would add them up, beyond 1.
    resampler = AudioResampler(format="fltp", rate=rate)
    heard = 0
    for frame in held.decode(stream):
        frame.pts = None  # gaps in the times of a file are not filled
        for piece in resampler.resample(frame):
            heard += piece.samples
            yield piece.to_ndarray().mean(axis=0)
        if heard > most:
            return
    for piece in resampler.resample(None):
        yield piece.to_ndarray().mean(axis=0)

"""Spoken digits from espeak-ng: words in many voices, at several speeds and pitches, as sound of 16 kHz."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import espeakng_loader
import numpy as np

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc", "en-029")
SPEAKERS = (
    *("m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "f5"),
    *("Andy", "Annie", "Alex", "Diogo", "Gene", "Jacky", "Lee", "Mario", "Michael", "Mike", "Reed", "Storm"),
    *("Alicia", "Andrea", "Denis", "Hugo", "Marco", "adam", "anika", "belinda", "david", "ed", "grandma", "grandpa"),
    *("john", "linda", "max", "paul", "rob", "sandro", "steph", "travis", "victor", "zac"),
)
HELD_OUT = ("m3", "f2", "Lee", "belinda", "paul", "Andrea")  # speakers of the held-out set, of no other

_SYNCHRONOUS = 2
_RATE, _PITCH, _RANGE = 1, 3, 4  # numbers of parameters
_UTF8 = 1


@dataclass(frozen=True)
class Voice:
    accent: str
    speaker: str
    words_per_minute: int
    pitch: int  # 0 to 100
    range: int  # 0: monotone, 100: lively

    @staticmethod
    def drawn(chance: Random, speakers: Sequence[str]) -> Voice:
        return Voice(
            chance.choice(ACCENTS),
            chance.choice(speakers),
            chance.randint(130, 210),
            chance.randint(30, 70),
            chance.randint(20, 80),
        )


class Synthesizer:
    """Speak with espeak-ng. Its library allows one speaker per process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = str(espeakng_loader.get_data_path()).encode()
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        if self._rate <= 0:
            raise SystemExit(f"espeak-ng does not start: error {self._rate}")
        self._heard: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._hear)  # kept here: the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _: int | None) -> int:
        if samples and count:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def __call__(self, text: str, voice: Voice) -> np.ndarray:
        """Return the sound of a text, float32 between -1 and 1."""
        name = f"{voice.accent}+{voice.speaker}"
        if self._library.espeak_SetVoiceByName(name.encode()):
            raise SystemExit(f"espeak-ng has no voice {name}")
        for number, value in ((_RATE, voice.words_per_minute), (_PITCH, voice.pitch), (_RANGE, voice.range)):
            self._library.espeak_SetParameter(number, value, 0)
        self._heard.clear()
        spoken = text.encode()
        self._library.espeak_Synth(spoken, len(spoken) + 1, 0, 0, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        sound = np.concatenate([*self._heard, np.zeros(0, np.int16)]).astype(np.float32) / 32_768
        return resampled(sound, self._rate)


def resampled(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return the sound at 16 kHz. Frequencies above 8 kHz are cut off, in the spectrum of the clip."""
    count = round(len(sound) * RATE / rate)
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / max(1, len(sound)))).astype(np.float32)


def noisy(sound: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Return the sound at another loudness, with some silence at both ends, in noise of 15 to 40 dB below it."""
    before, after = chance.integers(0, RATE // 10, 2)
    padded = np.pad(sound, (before, after))
    loud = np.sqrt(np.mean(sound**2)) + 1e-6
    noise = chance.standard_normal(len(padded)) * loud * 10 ** (-chance.uniform(15, 40) / 20)
    mixed = (padded + noise) * chance.uniform(0.3, 1.0) / max(1e-3, np.abs(padded).max())
    return np.clip(mixed, -1, 1).astype(np.float32)

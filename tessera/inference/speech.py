"""Speak: generate the codes of speech for a text with a loaded model, and decode them to sound with its codec."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.config.trust import Trust
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.core.spec import ModelSpec
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode
from tessera.engine.failures import not_finite_error
from tessera.engine.request import Request, Sampling
from tessera.engine.sampler import Sampler
from tessera.errors import TesseraError, with_fix
from tessera.hub.config import local_model
from tessera.inference.answering import context_of, room_after
from tessera.inference.found_model import find_model
from tessera.inference.frozen import frozen_module
from tessera.inference.load import AdapterPaths, load
from tessera.inference.loaded import LoadedModel
from tessera.inference.messages import sample_of
from tessera.models import resolve
from tessera.models.speech.codec import Codec, SoundStream, has_codec, load_codec
from tessera.models.speech.generation import Speaks, SpeaksAnswers, SpeechPrompts, generate_codes
from tessera.nn.codes import SpeechModel

SPEECH = "speech"  # `ModelSpec.task` of families that speak
# As published models sample by default: at temperature 0 speech often does not end.
TEMPERATURE, TOP_K = 0.9, 50
SECONDS, LONGEST_SECONDS = 60.0, 86_400.0
OnFrame = Callable[[int, Tensor], None]  # (row, codes of a frame)
OnSound = Callable[[np.ndarray], None]  # (float32 samples)
_OPEN = 0xFFFFFFFF  # length in the header of a WAV file whose end is not known
_OTHER_SEED = 0x5DEECE66D  # the depth decoder draws other random numbers than the main head


@dataclass(frozen=True)
class Speech:
    """Hold generated speech: codes [frames, codebooks], and sound, float32 [samples]."""

    codes: Tensor
    sound: np.ndarray
    rate: int  # samples per second
    complete: bool = True  # False: the maximum length was reached before the end
    prompt_tokens: int = 0  # positions that were read before the first frame

    def pcm(self) -> bytes:
        """Return the sound as 16 bit samples."""
        return pcm_of(self.sound)

    def wav(self) -> bytes:
        """Return the sound as a WAV file of 16 bit samples."""
        pcm = self.pcm()
        return wav_header(self.rate, len(pcm)) + pcm


def pcm_of(sound: np.ndarray) -> bytes:
    """Return samples as 16 bit integers."""
    samples: np.ndarray = (np.clip(sound, -1, 1) * 32767).round().astype("<i2")
    return samples.tobytes()


def wav_header(rate: int, size: int | None = None) -> bytes:
    """Return the header of a WAV file of 16 bit samples. `size`: of the samples in bytes; None: not known yet."""
    riff, data = (_OPEN, _OPEN) if size is None else (36 + size, size)
    about = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + about + struct.pack("<4sI", b"data", data)


@dataclass(frozen=True)
class SpeechSampling:
    """State how speech is sampled. `temperature` 0: the likeliest codes."""

    temperature: float = TEMPERATURE
    top_k: int = TOP_K
    top_p: float = 1.0
    seed: int = 0
    max_seconds: float = SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.max_seconds <= LONGEST_SECONDS:
            raise TesseraError(
                f"max_seconds={self.max_seconds} is out of range",
                where="sampling",
                allowed=[f"above 0, at most {LONGEST_SECONDS:g}"],
                code="generation.sampling-out-of-range",
            )

    def sampling(self, penalty: float) -> Sampling:
        """Return these settings as `Sampling`. `penalty`: repetition penalty; 1 for all codebooks but the first."""
        return Sampling(self.temperature, self.top_k, self.top_p, seed=self.seed, repetition_penalty=penalty)


def speaks(path: Path, trust: Trust = False, family: str | None = None) -> bool:
    """Return whether the model at a path speaks. Weights are not read. `family`: see `load`."""
    return _spec(path, trust, family).task == SPEECH


def family_of_answers(path: Path, trust: Trust = False, family: str | None = None) -> str | None:
    """Return the family that speaks the answers of the model at a path; None: its answers are text only."""
    return _spec(path, trust, family).speech_family


def _spec(path: Path, trust: Trust, family: str | None) -> ModelSpec:
    return resolve(find_model(local_model(path), None, trust, family=family).section)[0]


def load_speaker(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    codec: str | Path | None = None,
    adapters: AdapterPaths | None = None,
    family: str | None = None,
    trust: Trust = False,
    answers: LoadedModel | None = None,
) -> Speaker:
    """Load a model that speaks, with its codec.

    `codec`: folder of the codec; None: the folder of the model, or of the base model of a run, contains it. `answers`:
    the loaded model of the same folder whose answers are spoken. The speaker reads its outputs, and loads no copy. The
    other arguments are those of `load`.
    """
    folder = local_model(path)
    spec = _spec(folder, trust, family)
    if spec.task != SPEECH:  # before the weights are read
        raise _does_not_speak(spec, folder)
    model, processor = load(folder, device, dtype, adapters=adapters, family=family, trust=trust)
    model.freeze()
    if not isinstance(processor.processor, Speaks) or not isinstance(model.module, SpeechModel):
        raise _does_not_speak(model.spec, folder)
    places = [local_model(codec, "codec")] if codec is not None else [folder, *([model.base] if model.base else [])]
    home = next((folder for folder in places if has_codec(folder)), None)
    if home is None:
        raise TesseraError(
            f"no codec is in {' or '.join(map(str, places))}",
            where="codec",
            fix="name the codec of the model: --codec hf://kyutai/mimi, or codec= in Python",
            code="media.no-codec",
        )
    return Speaker(model, load_codec(home).to(model.device), processor.limits, _encoder(model, folder, answers))


def _does_not_speak(spec: ModelSpec, folder: Path) -> TesseraError:
    talker = spec.speech_family
    return TesseraError(
        f"{spec.name} does not speak",
        where=str(folder),
        fix="use a model of a family that speaks, such as csm"
        if talker is None
        else f'load its talker: family="{talker}", or --family {talker}; tessera.answer_speaker speaks answers',
        code="generation.model-does-not-speak",
    )


def _encoder(model: LoadedModel, folder: Path, answers: LoadedModel | None) -> Callable[[Batch], Batch]:
    """Return a function that adds the outputs of a frozen component to a batch, such as those of a thinker."""
    frozen = model.spec.frozen_input
    component = None if frozen is None else frozen.component(model.config)
    if frozen is None or component is None:
        return lambda batch: batch
    if answers is not None:
        return frozen.reader(model.config, answers.module)
    home = model.base or folder
    module = frozen_module(component, model.spec, model.config, home).to(model.device).requires_grad_(False).eval()
    return lambda batch: frozen.encode(module, batch)


@dataclass
class Speaker:
    """Speak texts with a loaded model and its codec."""

    model: LoadedModel
    codec: Codec
    limits: Limits = field(default_factory=Limits)
    encode: Callable[[Batch], Batch] = lambda batch: batch  # adds the outputs of a frozen component

    @cached_property
    def processor(self) -> Speaks:
        assert isinstance(self.model.processor, Speaks), "checked by `load_speaker`"
        return self.model.processor

    def say(
        self,
        text: str,
        *,
        speaker: str = "",
        examples: Sequence[tuple[Any, str]] = (),
        sampling: SpeechSampling | None = None,
        on_frame: OnFrame | None = None,
        on_sound: OnSound | None = None,
    ) -> Speech:
        """Return the speech of a text.

        `speaker`: name or number of the voice. `examples`: recordings of the voice, each with the text that is said in
        it. Recordings are paths, bytes, or {"array": samples, "sampling_rate": 24000}. `on_frame`, `on_sound`: see
        `speak`.
        """
        before = [self._example(recording, words, speaker) for recording, words in examples]
        messages = (*before, Message("assistant", (Part("text", text),), speaker))
        prompts = self.text_prompts([Sample("speech", messages)])
        (speech,) = self.speak(prompts, sampling or SpeechSampling(), on_frame, on_sound)
        return speech

    def text_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for the last message of each sample. Recordings in the samples are codes already."""
        for sample in samples:
            if not any(part.kind == "text" and part.spelled().strip() for part in sample.messages[-1].parts):
                raise TesseraError(
                    "there is no text to speak",
                    fix="write the text: `Good evening.`",
                    code="generation.no-prompt",
                )
        return self.processor.speech_prompts(samples)

    def answer_prompt(self, prompt: Batch, answer: Sequence[int], speaker: str = "") -> SpeechPrompts:
        """Return the prompt for the tokens of an answer. `prompt`: the prompt of the model that wrote the answer."""
        assert isinstance(self.processor, SpeaksAnswers), "the family speaks the answers of another one"
        return self.processor.answer_prompt(prompt.to("cpu"), answer, speaker)

    def encoded(self, prompts: SpeechPrompts) -> SpeechPrompts:
        """Return prompts on the device of the model, with the outputs of the frozen component."""
        return replace(prompts, batch=self.encode(prompts.batch.to(self.model.device)))

    def speak(
        self,
        prompts: SpeechPrompts,
        options: SpeechSampling,
        on_frame: OnFrame | None = None,
        on_sound: OnSound | None = None,
    ) -> list[Speech]:
        """Return the speech of each prompt.

        `on_frame(row, codes)` is called with each frame. `on_sound(samples)` is called with each new part of the sound
        of a single prompt; an error that either raises ends the speech.
        """
        most = self._frames(prompts, options.max_seconds)
        if on_sound is None:
            rows, lengths = self._codes(prompts, options, most, on_frame), prompts.batch.segments["text"].lengths
            return [
                self._speech(codes, self.codec.decode(codes), most, length)
                for codes, length in zip(rows, lengths, strict=True)
            ]
        assert len(prompts.beside) == 1, "the sound of a single prompt is streamed"
        stream, parts = SoundStream(self.codec), list[Tensor]()

        def send(part: Tensor | None) -> None:
            if part is not None and part.numel():
                parts.append(part)
                on_sound(_samples(part))

        def on_each(row: int, codes: Tensor) -> None:
            if on_frame is not None:
                on_frame(row, codes)
            send(stream.add(codes))

        (codes,) = self._codes(prompts, options, most, on_each)
        send(stream.close())
        sound = torch.cat(parts) if parts else torch.empty(0)
        return [self._speech(codes, sound, most, max(prompts.batch.segments["text"].lengths))]

    def check_voice(self, name: str) -> None:
        """Raise unless the model has a voice of this name."""
        self.text_prompts([Sample("voice", (Message("assistant", (Part("text", "a"),), name),))])

    def _speech(self, codes: Tensor, sound: Tensor, most: int, prompt: int) -> Speech:
        return Speech(codes, _samples(sound), self.codec.rate, len(codes) < most, prompt)

    def codes_of(self, recording: Any) -> np.ndarray:
        """Return the codes of a recording, int64 [frames, codebooks]."""
        sampling = MediaSampling(audio=AudioSampling(self.codec.rate))
        sample = sample_of([{"role": "user", "content": [{"type": "audio", "audio": recording}]}], "", Path.cwd())
        (part,) = sample.media()
        with with_fix("example of the voice", "use a file that exists and can be decoded"):
            sound = decode(part, Path(Path.cwd().anchor or "/"), self.limits, sampling)
        return self.codec.encode(torch.from_numpy(sound), self.processor.codebooks).cpu().numpy()

    def _example(self, recording: Any, words: str, speaker: str) -> Message:
        parts = (Part("text", words), Part("codes", self.codes_of(recording)))
        return Message("assistant", parts, speaker)

    def _frames(self, prompts: SpeechPrompts, seconds: float) -> int:
        """Return the largest number of frames. Raise if the prompt fills the context of the model."""
        wanted = max(1, round(seconds * self.codec.rate / self.codec.stride))
        return room_after(max(prompts.batch.segments["text"].lengths), wanted, context_of(self.model.config))

    def _codes(
        self, prompts: SpeechPrompts, options: SpeechSampling, most: int, on_frame: OnFrame | None
    ) -> list[Tensor]:
        module, rows = self.model.module, len(prompts.beside)
        assert isinstance(module, SpeechModel), "checked by `load_speaker`"
        first = options.sampling(prompts.repetition_penalty)
        others = replace(options.sampling(1.0), seed=options.seed ^ _OTHER_SEED)
        return generate_codes(
            module,
            replace(prompts, batch=prompts.batch.to(self.model.device)),
            max_frames=most,
            first=_Choice(rows, first, self.codec.size, prompts.end, checked=True),
            others=_Choice(rows, others, self.codec.size, prompts.end, checked=False),
            encode=self.encode,
            on_frame=on_frame,
        )


def _samples(sound: Tensor) -> np.ndarray:
    """Return decoded sound as float32 [samples]. Raise if a sample is not finite: as 16 bit it would be silence."""
    if not sound.isfinite().all():
        raise TesseraError(
            "the sound of the codec is not finite",
            fix="the weights of the codec are damaged: download its folder again, or name another one: --codec FOLDER",
            code="generation.output-not-finite",
        )
    samples: np.ndarray = sound.float().numpy()
    return samples


class _Choice:
    """Sample codes of speech for `rows` rows of the batch.

    `size`: number of codes that the codec decodes; of the codes above it, only `end` is sampled. `checked`: raise if
    logits are not finite. The check waits for the device, so it is done once for each frame.
    """

    def __init__(self, rows: int, sampling: Sampling, size: int, end: int, *, checked: bool) -> None:
        self._rows, self._sampling, self._checked = rows, sampling, checked
        self._size, self._end = size, end
        self._sampler: Sampler | None = None
        self._unknown = torch.empty(0, dtype=torch.int64)  # codes never to sample; set in the first call

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if self._sampler is None:
            self._sampler = self._begun(logits)
        sampled = self._sampler.sample(logits.index_fill(1, self._unknown, -torch.inf), rows)
        if self._checked and sampled.not_finite.any():
            raise not_finite_error()
        return sampled.tokens

    def _begun(self, logits: Tensor) -> Sampler:
        count = logits.shape[-1]
        unknown = [code for code in range(self._size, count) if code != self._end]
        self._unknown = torch.tensor(unknown, dtype=torch.int64, device=logits.device)
        sampler = Sampler(self._rows, count, logits.device)
        # Without the tokens of the prompt, which are not codes: penalties count generated codes only.
        nothing = Batch({"tokens": torch.empty(0, dtype=torch.int64)})
        for row in range(self._rows):
            sampler.join(row, Request(nothing, self._sampling.nth(row)))
        return sampler

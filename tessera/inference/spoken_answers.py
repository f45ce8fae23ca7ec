"""Answer questions in text and speech: a model writes the answer, and the talker of the same folder speaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.config.trust import Trust
from tessera.core.batch import Batch
from tessera.engine.offline import answers_to
from tessera.engine.request import GREEDY, Sampling
from tessera.errors import TesseraError
from tessera.hub.config import local_model
from tessera.inference.chat import question_of
from tessera.inference.load import AdapterPaths, load
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.speech import OnSound, Speaker, Speech, SpeechSampling, load_speaker


@dataclass(frozen=True)
class AnswerWithSpeech:
    """Hold an answer and its speech."""

    text: str
    speech: Speech


def load_answer_speaker(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    codec: str | Path | None = None,
    adapters: AdapterPaths | None = None,
    family: str | None = None,
    trust: Trust = False,
) -> AnswerSpeaker:
    """Load a model whose folder also contains a talker, such as Qwen3-Omni. Its weights are loaded once.

    `adapters`: of the model that answers. The other arguments are those of `load_speaker`.
    """
    folder = local_model(path)
    model, processor = load(folder, device, dtype, adapters=adapters, family=family, trust=trust)
    model.freeze()
    talker = model.spec.speech_family
    if talker is None:
        raise TesseraError(
            f"the family {model.spec.name} has no talker",
            where=str(folder),
            fix="use a model with a talker, such as Qwen3-Omni",
            code="generation.model-does-not-speak",
        )
    speaker = load_speaker(folder, device, dtype, codec=codec, family=talker, trust=trust, answers=model)
    return AnswerSpeaker(model, processor, speaker)


@dataclass(frozen=True)
class AnswerSpeaker:
    """Answer questions in text and speech."""

    model: LoadedModel
    processor: LoadedProcessor
    speaker: Speaker

    def ask(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        system: str | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        speaker: str = "",
        speech: SpeechSampling | None = None,
        on_text: Callable[[str], None] | None = None,
        on_sound: OnSound | None = None,
    ) -> AnswerWithSpeech:
        """Answer one question. Media are as in `Chat.ask`; `speaker` names the voice.

        `sampling`: of the text, `speech`: of the codes. `on_text` and `on_sound` get each new part of text and sound.
        """
        before = [] if system is None else [{"role": "system", "content": system}]
        batch = self.processor([*before, question_of(text, images, videos, audios)])
        return self.answer(batch, max_new_tokens, sampling, speaker, speech, on_text, on_sound)

    def answer(
        self,
        prompt: Batch,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        speaker: str = "",
        speech: SpeechSampling | None = None,
        on_text: Callable[[str], None] | None = None,
        on_sound: OnSound | None = None,
    ) -> AnswerWithSpeech:
        """Answer a batch with one prompt; see `ask`."""
        self.speaker.check_voice(speaker)  # before the text is generated
        inner: Any = self.processor.processor
        (answer,) = answers_to(self.model, prompt, inner.stop_tokens, max_new_tokens, sampling, on_text)
        prompts = self.speaker.encoded(self.speaker.answer_prompt(prompt, answer.tokens, speaker))
        (spoken,) = self.speaker.speak(prompts, speech or SpeechSampling(), on_sound=on_sound)
        return AnswerWithSpeech(answer.text, spoken)

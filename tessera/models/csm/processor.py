"""The processor of CSM: texts of numbered speakers, each followed by its speech as codes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field

from tessera.config.reader import Section, build
from tessera.core.batch import IGNORE, Batch
from tessera.core.sample import Encoded, MediaSize, Message, Sample
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.csm.config import CSMConfig
from tessera.models.files.side_files import IMAGE_FILE
from tessera.models.processing.chat import ChatSpan, ChatTemplate, MediaWords, Turn
from tessera.models.processing.conversation import PromptEnding, check_special_tokens
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer, write_tokenizer
from tessera.models.speech.generation import SpeechPrompts
from tessera.models.speech.processor import SpeechProcessor, SpokenSample
from tessera.models.vision.preprocessor_files import write_json

BEGIN, END, FRAME, END_OF_SPEECH = "<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"
CHAT = ChatTemplate(
    special=(BEGIN, END, END_OF_SPEECH),
    turns={"": Turn("", "")},
    media={"codes": MediaWords(FRAME, after=END_OF_SPEECH)},
    system=None,
    end_of_text=END,
)
# As the chat template of published folders: the role is the number of the speaker.
JINJA = (
    "{% for message in messages %}{{ bos_token }}[{{ message['role'] }}]"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    f"{FRAME}{END_OF_SPEECH}{{% endif %}}{{% endfor %}}{{% endfor %}}"
)
# Recordings are read by the codec, with 24 kHz.
_EXTRACTOR = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": 24_000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "chunk_length_s": None,
    "overlap": None,
    "processor_class": "CsmProcessor",
}
_NUMBERED = re.compile(r"\[[0-9]+\]")


class CSMOptions(Section):
    """Declare the keys of `data.processor`."""

    unlisted: ClassVar[frozenset[str]] = frozenset({"train_on"})  # errors do not list it: recipes set data.train_on
    train_on: tuple[str, ...] = ("assistant",)
    speaker: int = Field(0, ge=0, le=10**6, description="number of the speaker of texts that name none")


@dataclass(frozen=True, eq=False)
class CSMProcessor(SpeechProcessor):
    version: ClassVar[str] = "csm 1"

    speaker: int = 0
    end_code: int = 0  # the code of every codebook at the end of speech

    @classmethod
    def load(cls, config: CSMConfig, folder: Path, **options: Any) -> Self:
        folder = Path(folder)
        chosen = build(CSMOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        check_special_tokens(encoder, CHAT, config.special_token_ids, config.text.vocab_size, folder)
        # The last code of the table may be the padding code, which is no code of the codec.
        padded = config.codebook_pad_token_id == config.codebook_size - 1
        sizes = (min(config.codec_codes, config.codebook_size - padded),) * config.num_codebooks
        sampling, end = VideoSampling(), config.codebook_eos_token_id
        return cls(encoder, CHAT, sampling, chosen.train_on, False, sizes, chosen.speaker, end)

    def fingerprint_fields(self) -> list[Any]:
        return [self.speaker, list(self.sizes)]

    def spoken(self, encoded: Encoded, frames: Sequence[np.ndarray]) -> SpokenSample:
        """Return a sample with its codes. The end of speech is a frame in which all codes are `end_code`."""
        codes = torch.full((len(self.sizes), len(encoded.tokens)), IGNORE)
        if frames:
            codes[:, encoded.tokens == self.encoder.id_of(FRAME)] = torch.from_numpy(np.concatenate(frames)).T
        codes[:, encoded.tokens == self.encoder.id_of(END_OF_SPEECH)] = self.end_code
        trained = encoded.labels != IGNORE
        return SpokenSample(
            encoded.id,
            encoded.tokens,
            codes[0].where(trained, IGNORE),
            encoded.positions,
            counts=encoded.counts,
            codes=codes,
            targets=codes.where(trained, IGNORE),
        )

    def _chat_spans(
        self, sample: Sample, sizes: Sequence[MediaSize], layouts: Sequence[MediaLayout], prompt: bool = False
    ) -> list[ChatSpan]:
        """Return the spans of a conversation: of each message its text, then its speech."""
        turns = [number for number, message in enumerate(sample.messages) if message.role in self.train_on]
        trained = set(turns[-1:] if self.last_only else turns)
        spans: list[ChatSpan] = []
        for number, message in enumerate(sample.messages):
            text = "".join(part.spelled() for part in message.parts if part.kind == "text")
            speech = [part for part in message.parts if part.kind == "codes"]
            role, learned = message.role, number in trained and not prompt
            if text:
                words = ChatSpan(self._numbered(message, text, bool(speech)), role)
                spans += [ChatSpan(BEGIN, role, special=True), words, ChatSpan(END, role, special=True)]
            for _ in speech:
                spans.append(ChatSpan(FRAME, role, learned, special=True, media="codes"))
                spans.append(ChatSpan(END_OF_SPEECH, role, learned, special=True))
        return spans

    def _numbered(self, message: Message, text: str, spoken: bool) -> str:
        """Return a text after the number of its speaker, such as `[0]Hello`; unchanged if it begins with one."""
        if message.role not in ("user", "assistant"):
            raise TesseraError(
                f"this model has no role {message.role}: it speaks texts of user and assistant",
                fix="leave such messages out",
                code="data.role-without-voice",
            )
        if _NUMBERED.match(text):
            return text
        if message.speaker and not (message.speaker.isascii() and message.speaker.isdecimal()):
            raise TesseraError(
                f"speaker {message.speaker!r:.40}: this model knows speakers by their numbers",
                fix="write a number, such as 0, for each voice",
                code="data.speaker-without-number",
            )
        other = message.role == "user" and spoken  # in a spoken dialogue, the user has another voice: the next number
        return f"[{message.speaker or self.speaker + other}]{text}"

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
        ending: PromptEnding = "answer",
    ) -> Batch:
        """Return a batch of prompts. Unless `ending` is "none", the speech of the last message is left out."""
        texts = samples if ending == "none" else [_without_speech(sample) for sample in samples]
        counts = [len(sample.media()) for sample in texts]
        objects = [parts[:count] for parts, count in zip(media, counts, strict=True)]
        if sizes is not None:
            sizes = [of_sample[:count] for of_sample, count in zip(sizes, counts, strict=True)]
        return super().prompt(texts, objects, sizes, "none")

    def speech_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for speech, whose end is decided by all codebooks but the last, as in transformers."""
        texts = [_without_speech(sample) for sample in samples]
        codes = [[part.value for part in sample.media()] for sample in texts]
        sizes = [[MediaSize(0, 0, len(frames)) for frames in of_sample] for of_sample in codes]
        batch = self.prompt(texts, codes, sizes, "none")
        frame = self.encoder.id_of(FRAME)
        return SpeechPrompts(batch, ((),) * len(samples), frame, self.end_code, max(1, self.codebooks - 1))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return no token: speech ends with a frame, and transformers cannot generate if a token is set."""
        return ()

    @property
    def _pad(self) -> int:
        return self.encoder.id_of(END)

    def save(self, folder: Path) -> None:
        words = {"audio_token": FRAME, "audio_eos_token": END_OF_SPEECH}
        write_tokenizer(
            folder,
            self.encoder.json,
            chat_template=JINJA,
            end=END,
            pad=END,
            kind="PreTrainedTokenizerFast",
            named=words,
            begin=BEGIN,
        )
        write_json(folder / IMAGE_FILE, _EXTRACTOR)


def _without_speech(sample: Sample) -> Sample:
    """Return a sample without the speech of its last message."""
    *before, last = sample.messages
    texts = tuple(part for part in last.parts if part.kind != "codes")
    return Sample(sample.id, (*before, replace(last, parts=texts)) if texts else tuple(before))

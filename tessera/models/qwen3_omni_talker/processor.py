"""The processor of the talker of Qwen3-Omni: conversations whose answers have codes of speech to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, Part, PartKind, Sample
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.processing.chat import ChatSpan, MediaWords
from tessera.models.processing.conversation import TextOptions, check_special_tokens, with_system
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.sequence import Opening, TalkerIds, opening_sequence, spoken_sequence
from tessera.models.speech.family import CODED_FRAMES
from tessera.models.speech.generation import SpeechPrompts
from tessera.models.speech.processor import SpeechProcessor, SpokenSample

_PENALTY = 1.05  # repetition penalty of the first codes, as transformers' `generate` has it


class TalkerOptions(TextOptions):
    speaker: str = Field("", description="voice of answers that name none; default: the first of the model")


@dataclass(frozen=True, eq=False)
class TalkerProcessor(SpeechProcessor):
    version: ClassVar[str] = "qwen3_omni_talker 1"
    axes: ClassVar[int] = 3

    ids: TalkerIds = field(kw_only=True)
    speaker: str = field(kw_only=True)  # voice of answers that name none

    @classmethod
    def load(cls, config: TalkerConfig, folder: Path, **options: Any) -> TalkerProcessor:
        chosen = build(TalkerOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        template = replace(with_system(QWEN3_OMNI, chosen, folder), media={"codes": MediaWords("")})
        ids = TalkerIds.of_model(config)
        named = {"<|im_start|>": ids.start, "<|im_end|>": ids.end}
        check_special_tokens(encoder, template, named, config.thinker.text.vocab_size, folder)
        _check_roles(encoder, {"user": ids.user, "assistant": ids.assistant}, folder)
        ids.speaker(chosen.speaker)
        return cls(
            encoder,
            template,
            VideoSampling(),
            chosen.train_on,
            True,
            (config.depth.vocab_size,) * config.num_code_groups,
            ids=ids,
            speaker=chosen.speaker,
        )

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), asdict(self.ids), list(self.sizes)]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        return MediaLayout((), ())  # codes are no part of the conversation that the thinker reads

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        return [] if part.kind == "codes" else super().show(part, role, layout)

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        spans = self._chat_spans(sample, sizes, self._layouts(sample, sizes))
        spoken = self._spoken(sample, spans)
        return {**spoken.counts, CODED_FRAMES: spoken.counts["trained"] - 1}

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Any],
        sizes: Sequence[MediaSize],
        layouts: Sequence[MediaLayout],
        spans: Sequence[ChatSpan],
    ) -> SpokenSample:
        return self._spoken(sample, spans)

    @property
    def codebooks(self) -> int:
        return len(self.sizes)

    def speech_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for the speech of the last message of each sample."""
        items, beside = [], []
        for sample in samples:
            answer = sample.messages[-1]
            tokens, _, _ = self.encoder.encode(self._chat_spans(_text_of(sample), [], []), [])
            opening = Opening.of(tokens, self.ids, self.ids.speaker(answer.speaker or self.speaker))
            items.append(opening_sequence(sample.id, opening, self.codebooks))
            beside.append(opening.beside)
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        batch = replace(batch, sample_ids=tuple(item.id for item in items))
        control = range(self.sizes[0], self.ids.codes)
        return SpeechPrompts(
            batch,
            tuple(beside),
            filler=self.ids.pad,
            end=self.ids.code_stop,
            ends=1,
            suppressed=tuple(code for code in control if code != self.ids.code_stop),
            repetition_penalty=_PENALTY,
        )

    def _spoken(self, sample: Sample, spans: Sequence[ChatSpan]) -> SpokenSample:
        """Return the sequence of the last answer of a conversation."""
        answer = sample.messages[-1]
        parts = [part for part in answer.parts if part.kind == "codes"]
        if answer.role != "assistant" or not parts:
            raise TesseraError(
                "the last message is no answer with codes of speech",
                fix="add codes to the answers of the data set: tessera data features",
                code="data.no-codes",
            )
        tokens, _, _ = self.encoder.encode(spans, [])
        codes = np.concatenate(self.frames(replace(sample, messages=(answer,))))
        return spoken_sequence(sample.id, tokens, codes, self.ids, self.ids.speaker(answer.speaker or self.speaker))


def _text_of(sample: Sample) -> Sample:
    """Return a sample without speech."""
    messages = (
        replace(message, parts=tuple(part for part in message.parts if part.kind != "codes"))
        for message in sample.messages
    )
    return replace(sample, messages=tuple(messages))


def _check_roles(encoder: ChatEncoder, roles: Mapping[str, int], folder: Path) -> None:
    """Raise unless the names of roles have the token ids by which the talker finds the turns of a conversation."""
    for role, token in roles.items():
        tokens, _, _ = encoder.encode([ChatSpan(role, role)], [])
        if tokens != [token]:
            raise TesseraError(
                f"{role!r} is tokenized as {tokens}, and {role}_token_id is {token} in the model's configuration",
                where=str(folder / "tokenizer.json"),
                fix="use the tokenizer that belongs to the model, or set the ids in model.config",
                code="tokenizer.token-id-mismatch",
            )

"""The processor of the talker of Qwen3-Omni: conversations whose answers have codes of speech to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tessera.config.reader import build
from tessera.core.batch import Batch, Segments
from tessera.core.sample import Encoded, MediaSize, Part, PartKind, Sample
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.audio.omni_processor import OmniOptions
from tessera.models.processing.chat import ChatSpan, MediaWords
from tessera.models.processing.conversation import TextOptions, check_special_tokens, with_system
from tessera.models.processing.streams import MediaLayout, media_size, token_runs
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer
from tessera.models.qwen3_omni.processor import QWEN3_OMNI, Qwen3OmniProcessor
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.sequence import (
    Opening,
    SpokenTurns,
    TalkerIds,
    opening_sequence,
    positions_of_turns,
    spoken_sequence,
)
from tessera.models.qwen3_omni_talker.thinker import HEARD, HEARD_FROM, as_question
from tessera.models.speech.family import CODED_FRAMES
from tessera.models.speech.generation import SpeechPrompts
from tessera.models.speech.processor import SpeechProcessor, SpokenSample

_PENALTY = 1.05  # repetition penalty of the first codes, as transformers' `generate` has it
_SPEAKER = Field("", description="voice of answers that name none; default: the first of the model")


class TalkerOptions(TextOptions):
    speaker: str = _SPEAKER


class MediaTalkerOptions(OmniOptions):
    speaker: str = _SPEAKER


@dataclass
class TalkerSample(SpokenSample):
    """Hold a sample whose question has media. `heard` are the positions of media in the talker's sequence, and
    `heard_from` those in the question, which the thinker reads to the end of its media."""

    question: Encoded | None = None
    heard: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    heard_from: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class TalkerProcessor(SpeechProcessor):
    """Turn conversations of text and speech into batches."""

    version: ClassVar[str] = "qwen3_omni_talker 1"
    axes: ClassVar[int] = 3
    reads_all_speech: ClassVar[bool] = False

    ids: TalkerIds = field(kw_only=True)
    speaker: str = field(kw_only=True)  # voice of answers that name none

    @classmethod
    def load(cls, config: TalkerConfig, folder: Path, **options: Any) -> TalkerProcessor:
        """Load the processor from a folder with tokenizer.json. `options`: keys of `data.processor`."""
        chosen: TalkerOptions | MediaTalkerOptions
        ids, sizes = TalkerIds.of_model(config), (config.depth.vocab_size,) * config.num_code_groups
        if config.reads_media:
            chosen = build(MediaTalkerOptions, options, "data.processor")
            of_thinker = {name: value for name, value in options.items() if name != "speaker"}
            thinker = Qwen3OmniProcessor.load(config.thinker, folder, **of_thinker)
            encoder, template, sampling = thinker.encoder, thinker.template, thinker.sampling
        else:
            chosen = build(TalkerOptions, options, "data.processor")
            encoder, template = ChatEncoder(load_tokenizer(folder)), with_system(QWEN3_OMNI, chosen, folder)
            sampling = VideoSampling()
        template = replace(template, media={**template.media, "codes": MediaWords("")})
        named = {**config.thinker.special_token_ids, "<|im_start|>": ids.start, "<|im_end|>": ids.end}
        check_special_tokens(encoder, template, named, config.thinker.text.vocab_size, folder)
        _check_roles(encoder, {"user": ids.user, "assistant": ids.assistant}, folder)
        ids.speaker(chosen.speaker)
        common = (encoder, template, sampling, chosen.train_on, True, sizes)
        if config.reads_media:
            return MediaTalkerProcessor(*common, ids=ids, speaker=chosen.speaker, thinker=thinker)
        return TalkerProcessor(*common, ids=ids, speaker=chosen.speaker)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), asdict(self.ids), list(self.sizes)]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        if kind != "codes":
            raise TesseraError(
                f"the question has {kind} input, and the talker reads text alone",
                fix="set model.config.reads_media=true, which loads the layers of the thinker that see and hear",
                code="media.kind-not-supported",
            )
        return MediaLayout((), ())  # codes are no part of the conversation that the thinker reads

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        return [] if part.kind == "codes" else super().show(part, role, layout)

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        spoken = self._spoken(sample, self._tokens(sample, sizes))
        return {**spoken.counts, CODED_FRAMES: spoken.counts["trained"] - 1}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> SpokenSample:
        return self._spoken(sample, self._tokens(sample, [] if sizes is None else sizes))

    @property
    def codebooks(self) -> int:
        return len(self.sizes)

    def speech_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for the speech of the last message of each sample."""
        openings = [
            Opening.of(self._tokens(sample, []), self.ids, self._voice(sample.messages[-1].speaker))
            for sample in samples
        ]
        return self._prompts([sample.id for sample in samples], openings)

    def answer_prompt(self, prompt: Batch, answer: Sequence[int], speaker: str) -> SpeechPrompts:
        """Return the prompt for the speech of an answer. `prompt`: what the thinker has answered, media included."""
        tokens = [*prompt["tokens"].tolist(), *answer]
        prompts = self._prompts(["answer"], [Opening.of(tokens, self.ids, self._voice(speaker))])
        turns = SpokenTurns.of(tokens, self.ids)
        media = torch.isin(prompt["tokens"], torch.tensor(self.ids.media))
        if not media.any():
            return prompts
        read = torch.tensor(turns.read, dtype=torch.int64)
        inside = media[read]
        if int(inside.sum()) < int(media.sum()):
            raise _outside_question()
        batch, end = prompts.batch, int(media.nonzero().max()) + 1  # later tokens change nothing: attention is causal
        question = {name: tensor for name, tensor in prompt.tensors.items() if name != "labels"}
        question |= {"tokens": prompt["tokens"][:end], "positions": prompt["positions"][:, :end]}
        thought = as_question(Batch(question, {**prompt.segments, "text": Segments.of([end])}))
        tensors = {
            **thought.tensors,
            "positions": positions_of_turns(prompt["positions"], turns, batch["tokens"].shape[0]),
            HEARD: inside.nonzero().flatten(),
            HEARD_FROM: read[inside],
        }
        batch = replace(batch.with_tensors(**tensors), segments={**batch.segments, **thought.segments})
        return replace(prompts, batch=batch)

    def _voice(self, speaker: str) -> int:
        return self.ids.speaker(speaker or self.speaker)

    def _prompts(self, names: Sequence[str], openings: Sequence[Opening]) -> SpeechPrompts:
        named = zip(names, openings, strict=True)
        items = [opening_sequence(name, opening, self.codebooks) for name, opening in named]
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        batch = replace(batch, sample_ids=tuple(names))
        control = range(self.sizes[0], self.ids.codes)
        return SpeechPrompts(
            batch,
            tuple(opening.beside for opening in openings),
            filler=self.ids.pad,
            end=self.ids.code_stop,
            ends=1,
            suppressed=tuple(code for code in control if code != self.ids.code_stop),
            repetition_penalty=_PENALTY,
        )

    def _tokens(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[int]:
        """Return the tokens of a conversation, which the thinker reads."""
        text = _without_speech(sample)
        for part in text.media():
            self.layout(part.kind, MediaSize(0, 0))  # raises an error
        return self.encoder.encode(self._chat_spans(text, [], []), [])[0]

    def _spoken(self, sample: Sample, tokens: Sequence[int]) -> SpokenSample:
        """Return the sequence of the last answer of a conversation."""
        answer = sample.messages[-1]
        if answer.role != "assistant" or not any(part.kind == "codes" for part in answer.parts):
            raise TesseraError(
                "the last message is no answer with codes of speech",
                fix="add codes to the answers of the data set: tessera data features",
                code="data.no-codes",
            )
        codes = np.concatenate(self.frames(replace(sample, messages=(answer,))))
        return spoken_sequence(sample.id, tokens, codes, self.ids, self._voice(answer.speaker))


@dataclass(frozen=True, eq=False)
class MediaTalkerProcessor(TalkerProcessor):
    """Turn conversations with speech into batches; questions may have images, videos and sound."""

    position_type: ClassVar[type[np.generic]] = Qwen3OmniProcessor.position_type

    thinker: Qwen3OmniProcessor = field(kw_only=True)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), *self.thinker.fingerprint_fields()]

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        return None if kind == "codes" else self.thinker.target(kind, size)

    def named_tokens(self) -> dict[str, str]:
        return self.thinker.named_tokens()

    def save_preprocessor(self, folder: Path) -> None:
        self.thinker.save_preprocessor(folder)

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> SpokenSample:
        question, of_media = _without_speech(sample), _of_media(sample, media)
        of_sizes = [media_size(item) for item in of_media] if sizes is None else _of_media(sample, sizes)
        layouts, spans = self._rendered(question, of_sizes)
        tokens, _, runs = self.encoder.encode(spans, token_runs(layouts))
        spoken = self._spoken(sample, tokens)
        if not layouts:
            return spoken
        positions = {index: at for at, index in enumerate(SpokenTurns.of(tokens, self.ids).read)}
        if any(start not in positions for start, _ in runs):
            raise _outside_question()
        here = [(positions[start], count) for start, count in runs]
        heard_from = torch.cat([torch.arange(start, start + count) for start, count in runs])
        end = int(heard_from.max()) + 1  # later tokens change nothing, because attention is causal
        read = self.thinker._encode(question, of_media, of_sizes, layouts, spans)
        return TalkerSample(
            spoken.id,
            spoken.tokens,
            spoken.labels,
            torch.from_numpy(self.thinker.positions(len(spoken.tokens), here, layouts)),
            {},
            spoken.counts,
            spoken.codes,
            spoken.targets,
            replace(read, tokens=read.tokens[:end], labels=read.labels[:end], positions=read.positions[:, :end]),
            torch.cat([torch.arange(start, start + count) for start, count in here]),
            heard_from,
        )

    def _rendered(self, question: Sample, sizes: Sequence[MediaSize]) -> tuple[list[MediaLayout], list[ChatSpan]]:
        layouts = self.thinker._layouts(question, sizes)
        return layouts, self.thinker._chat_spans(question, sizes, layouts)

    def _tokens(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[int]:
        layouts, spans = self._rendered(_without_speech(sample), _of_media(sample, sizes))
        return self.encoder.encode(spans, token_runs(layouts))[0]

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        batch = super()._pack(rows, lengths, whole)
        questions: list[Encoded] = []
        heard, heard_from = [], []
        start = before = 0
        for row, length in zip(rows, lengths, strict=True):
            at = start
            for item in row:
                if isinstance(item, TalkerSample) and item.question is not None:
                    heard.append(item.heard + at)
                    heard_from.append(item.heard_from + before)
                    questions.append(item.question)
                    before += len(item.question.tokens)
                at += len(item.tokens)
            start += length
        if not questions:
            return batch
        read = as_question(self.thinker._pack([[item] for item in questions], [len(q.tokens) for q in questions]))
        tensors = {**read.tensors, HEARD: torch.cat(heard), HEARD_FROM: torch.cat(heard_from)}
        return replace(batch.with_tensors(**tensors), segments={**batch.segments, **read.segments})


def _outside_question() -> TesseraError:
    return TesseraError(
        "the talker reads media only in the user's turns",
        fix="move images, videos and sound into these turns",
        code="data.media-outside-question",
    )


def _without_speech(sample: Sample) -> Sample:
    messages = (
        replace(message, parts=tuple(part for part in message.parts if part.kind != "codes"))
        for message in sample.messages
    )
    return replace(sample, messages=tuple(messages))


def _of_media(sample: Sample, values: Sequence[Any]) -> list[Any]:
    """Return the values of the parts that are no codes. `values`: one for each part that is no text."""
    return [value for part, value in zip(sample.media(), values, strict=True) if part.kind != "codes"]


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

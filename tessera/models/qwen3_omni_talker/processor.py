"""The processor of the talker of Qwen3-Omni: conversations whose answers have codes of speech to batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

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
from tessera.models.processing.conversation import TextOptions, check_special_tokens, trained_positions, with_system
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
from tessera.models.qwen3_omni_talker.thinker import HEARD, HEARD_FROM, QUESTION, SPOKEN, as_question
from tessera.models.speech.family import CODED_FRAMES
from tessera.models.speech.generation import SpeechPrompts
from tessera.models.speech.processor import SpeechProcessor, SpokenSample

_SILENT = ("tokens", "trained", CODED_FRAMES)  # measures of the speech of a sample that are 0 without speech
_UNIT = 64  # the thinker's sequence of a micro-batch is padded to a multiple of this, or to `length` of all its rows
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
        media = config.reads_media or config.trains_thinker
        if media:
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
        if media:
            kind = OmniTrainingProcessor if config.trains_thinker else MediaTalkerProcessor
            return kind(*common, ids=ids, speaker=chosen.speaker, thinker=thinker)
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

    def speech_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for the speech of the last message of each sample."""
        openings = [
            Opening.of(self._tokens(sample, []), self.ids, self._voice(sample.messages[-1].speaker))
            for sample in samples
        ]
        return self._prompts([sample.id for sample in samples], openings)

    def answer_prompt(self, prompt: Batch, answer: Sequence[int], speaker: str) -> SpeechPrompts:
        """Return the prompt for the speech of an answer. `prompt`: that of the thinker; `answer`: the next tokens."""
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
            self.layout(part.kind, MediaSize(0, 0))  # raises the error of the talker: it reads no media here
        return self.encoder.encode(self._chat_spans(text, [], []), [])[0]

    def _spoken(self, sample: Sample, tokens: Sequence[int]) -> SpokenSample:
        """Return the sequence of the last answer of a conversation."""
        answer = sample.messages[-1]
        if not _speaks(sample):
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
        heard_from = _indices(runs)
        end = int(heard_from.max()) + 1  # later tokens change nothing, because attention is causal
        read = self.thinker._encode(question, of_media, of_sizes, layouts, spans)
        read = replace(read, tokens=read.tokens[:end], labels=read.labels[:end], positions=read.positions[:, :end])
        return self._hearing(TalkerSample, spoken, tokens, runs, layouts, read)

    def _hearing(
        self,
        kind: type[TalkerSample],
        spoken: SpokenSample,
        tokens: Sequence[int],
        runs: Sequence[tuple[int, int]],
        layouts: Sequence[MediaLayout],
        read: Encoded,
    ) -> TalkerSample:
        """Return a sample with what the thinker reads of it. `runs`: tokens of media in the conversation."""
        positions = {index: at for at, index in enumerate(SpokenTurns.of(tokens, self.ids).read)}
        if any(start not in positions for start, _ in runs):
            raise _outside_question()
        here = [(positions[start], count) for start, count in runs]
        return kind(
            spoken.id,
            spoken.tokens,
            spoken.labels,
            torch.from_numpy(self.thinker.positions(len(spoken.tokens), here, layouts)),
            {},
            spoken.counts,
            spoken.codes,
            spoken.targets,
            read,
            _indices(here),
            _indices(runs),
        )

    def _rendered(self, question: Sample, sizes: Sequence[MediaSize]) -> tuple[list[MediaLayout], list[ChatSpan]]:
        layouts = self.thinker._layouts(question, sizes)
        return layouts, self.thinker._chat_spans(question, sizes, layouts)

    def _tokens(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[int]:
        layouts, spans = self._rendered(_without_speech(sample), _of_media(sample, sizes))
        return self.encoder.encode(spans, token_runs(layouts))[0]

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        batch = super()._pack(rows, lengths, whole)
        questions, heard = _questions(rows, lengths)
        if not questions:
            return batch
        read = as_question(self.thinker._pack([[item] for item in questions], [len(q.tokens) for q in questions]))
        return replace(batch.with_tensors(**read.tensors, **heard), segments={**batch.segments, **read.segments})


@dataclass
class ConversationSample(TalkerSample):
    """Hold a sample whose text is trained on, too. Without speech, the talker's sequence is empty."""

    @property
    def length(self) -> int:
        return max(len(self.tokens), 0 if self.question is None else len(self.question.tokens))


@dataclass(frozen=True, eq=False)
class OmniTrainingProcessor(MediaTalkerProcessor):
    """Turn conversations, with speech or without, into batches that train the thinker and the talker.

    A row has room for `length` tokens of the thinker and as many of the talker. Only the talker's are padded to it.
    """

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), "trains_thinker"]

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        thinker = self.thinker.training_on(roles, last_only=last_only)
        return replace(super().training_on(roles, last_only=last_only), thinker=thinker)

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        read = self.thinker.measure(_without_speech(sample), _of_media(sample, sizes))
        spoken = super().measure(sample, sizes) if _speaks(sample) else dict.fromkeys(_SILENT, 0)
        return {
            **read,
            **{f"{QUESTION}{name}": value for name, value in read.items()},
            **{f"{SPOKEN}{name}": spoken[name] for name in ("tokens", "trained")},
            CODED_FRAMES: spoken[CODED_FRAMES],
            **{name: max(read[name], spoken[name]) for name in ("tokens", "trained")},
        }

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> SpokenSample:
        question, of_media = _without_speech(sample), _of_media(sample, media)
        of_sizes = [media_size(item) for item in of_media] if sizes is None else _of_media(sample, sizes)
        layouts, spans = self._rendered(question, of_sizes)
        tokens, _, runs = self.encoder.encode(spans, token_runs(layouts))
        read = self.thinker._encode(question, of_media, of_sizes, layouts, spans)
        if not _speaks(sample):
            nothing = torch.empty(0, dtype=torch.int64)
            codes = torch.empty(self.codebooks, 0, dtype=torch.int64)
            positions = torch.empty(self.axes, 0, dtype=torch.int64)
            return ConversationSample(
                sample.id, nothing, nothing, positions, {}, read.counts, codes, codes, read, nothing, nothing
            )
        spoken = self._spoken(sample, tokens)
        both = {name: read.counts[name] + spoken.counts[name] for name in ("tokens", "trained")}
        spoken = replace(spoken, counts={**read.counts, **both})
        return self._hearing(ConversationSample, spoken, tokens, runs, layouts, read)

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        batch = super().collate([[item for item in row if len(item.tokens)] for row in rows], length)
        questions, heard = _questions(rows, [length] * len(rows))
        total, room = sum(len(question.tokens) for question in questions), length * len(rows)
        # Pad the thinker's tokens: context parallel ranks must get equal parts, and the sequence must not be empty.
        padded = min(room, max(1, -(-total // _UNIT)) * _UNIT)
        read = self.thinker._pack([questions], [padded])
        read = as_question(read.with_tensors(trained=trained_positions(read["labels"])))
        counts = Counter(batch.counts)
        for row in rows:
            for item in row:
                if not len(item.tokens):
                    counts.update(item.counts)
        return replace(
            batch.with_tensors(**read.tensors, **heard),
            segments={**batch.segments, **read.segments},
            counts=dict(counts),
        )

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        return SpeechProcessor._pack(self, rows, lengths, whole)  # `collate` adds the conversations


def _questions(
    rows: Sequence[Sequence[Encoded]], lengths: Sequence[int]
) -> tuple[list[Encoded], dict[str, torch.Tensor]]:
    """Return the conversations that the thinker reads for these rows, and the tensors `HEARD` and `HEARD_FROM`."""
    questions: list[Encoded] = []
    nothing = torch.empty(0, dtype=torch.int64)
    heard, heard_from = [nothing], [nothing]
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
    return questions, {HEARD: torch.cat(heard), HEARD_FROM: torch.cat(heard_from)}


def _indices(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the indices of all tokens in runs of (start, length)."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(at, at + count) for at, count in runs)])


def _speaks(sample: Sample) -> bool:
    """Return whether the last message is an answer that contains codes of speech."""
    answer = sample.messages[-1]
    return answer.role == "assistant" and any(part.kind == "codes" for part in answer.parts)


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

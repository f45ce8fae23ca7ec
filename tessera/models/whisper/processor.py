"""The processor of Whisper: a recording, and its transcript after tokens for language, task and time stamps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from tessera.config.reader import Section, build
from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.sample import Encoded, MediaSize, Message, PartKind, Sample
from tessera.data.media.audio import AudioSampling
from tessera.data.media.read import MediaSampling
from tessera.errors import TesseraError, nearest
from tessera.models.audio.features import LogMel, mel_windows
from tessera.models.audio.processor import AUDIO, read_extractor
from tessera.models.files.side_files import GENERATION, IMAGE_FILE
from tessera.models.processing.chat import ChatSpan, ChatTemplate, MediaWords, Turn
from tessera.models.processing.conversation import ConversationProcessor, PromptEnding, check_special_tokens
from tessera.models.processing.streams import MediaLayout, MediaStream, MediaStreams, media_size
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer, write_tokenizer
from tessera.models.processing.transcription import Transcript
from tessera.models.vision.preprocessor_files import write_json
from tessera.models.whisper.config import LEAST_TOKENS, REACH, STRIDE, WhisperConfig
from tessera.models.whisper.generation import LANGUAGES, STAMPS, SUPPRESSED, SUPPRESSED_FIRST, after_stamps
from tessera.models.whisper.languages import language_code
from tessera.models.whisper.model import RECORDINGS
from tessera.nn.encoder_decoder import MEMORY
from tessera.runtime.files import read_json_mapping

END, START, NO_STAMPS = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
DEFAULT_LANGUAGE = "en"  # language of transcripts in training, if nothing names it
Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
FIRST_STAMP = "<|0.00|>"
_SECONDS_PER_STAMP = 0.02
_STAMP = re.compile(r"(<\|\d{1,3}\.\d\d\|>)")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_ENGLISH_ONLY = 51864  # size of the vocabulary of published models for English only


class WhisperOptions(Section):
    """Declare the keys of `data.processor`."""

    unlisted: ClassVar[frozenset[str]] = frozenset({"train_on"})  # errors do not list it: recipes set data.train_on
    train_on: tuple[str, ...] = ("assistant",)
    language: str | None = Field(
        None,
        description="language of the recordings; a sample may name another. Not set: English in training, detected in "
        "transcription",
    )
    task: Task = Field("transcribe", description="translate: write English; a sample may name another")
    timestamps: bool = Field(False, description="generate transcripts with time stamps")
    train_prefix: bool = Field(True, description="the loss includes the tokens for language, task and no time stamps")


class Directions(NamedTuple):
    """Hold the settings that the tokens before a transcript encode: language, task and time stamps."""

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = False


@dataclass(frozen=True, eq=False)
class WhisperProcessor(ConversationProcessor):
    version: ClassVar[str] = "whisper 1"
    axes: ClassVar[int] = 1
    streams: ClassVar[MediaStreams] = {AUDIO: MediaStream(RECORDINGS, ("audio",), "audio_frames", "audio_pairs")}

    mel: LogMel = field(default_factory=LogMel)
    directions: Directions = field(default_factory=Directions)
    train_prefix: bool = True
    max_length: int = 448
    multilingual: bool = True
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json of the folder

    @classmethod
    def load(cls, config: WhisperConfig, folder: Path, **options: Any) -> WhisperProcessor:
        chosen = build(WhisperOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        generation = read_json_mapping(folder / GENERATION) if (folder / GENERATION).is_file() else {}
        mel = expected = _features_of(config)
        if features := read_extractor(folder):
            mel = LogMel.read(features, str(folder / IMAGE_FILE))
        if mel != expected:
            raise TesseraError(
                f"the features are {mel}, and the model reads {expected}",
                where=str(folder / IMAGE_FILE),
                fix="use the preprocessor_config.json that belongs to the model",
                code="media.audio-features-differ",
            )
        control = [word for word in encoder.added_words if _LANGUAGE.fullmatch(word) or _STAMP.fullmatch(word)]
        template = ChatTemplate(
            special=(START, END, *(f"<|{task}|>" for task in TASKS), NO_STAMPS, FIRST_STAMP, *control),
            turns={"": Turn("", "")},
            media={"audio": MediaWords("")},
            system=None,
            end_of_text=END,
        )
        text = config.text
        ids = {START: text.decoder_start_token_id, END: text.eos_token_id}
        check_special_tokens(encoder, template, ids, text.vocab_size, folder)
        multilingual = generation.get("is_multilingual", text.vocab_size != _ENGLISH_ONLY)
        processor = cls(
            encoder,
            template,
            MediaSampling(audio=AudioSampling(mel.rate)),
            chosen.train_on,
            False,
            mel,
            Directions(chosen.language and language_code(chosen.language), chosen.task, chosen.timestamps),
            chosen.train_prefix,
            text.max_target_positions,
            bool(multilingual),
            generation,
        )
        processor._check_language(processor.directions.language or DEFAULT_LANGUAGE, "data.processor.language")
        return processor

    # ------------------------------------------------------------------------------------------ recordings

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        """Return the layout of a recording. It has no placeholder tokens. Short recordings are padded with silence,
        long ones are read window by window.
        """
        frames = max(size.samples, self.mel.longest) // self.mel.hop
        return MediaLayout((), (-(-frames // STRIDE),))

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        sound = np.asarray(media, dtype=np.float32)
        mel = self.mel(sound, max(len(sound), self.mel.longest))
        return mel_windows(mel, layout.lengths[0], len(mel), STRIDE, REACH)

    @property
    def _window(self) -> int:
        """Return the number of encoder positions of a window."""
        return self.mel.longest // self.mel.hop // STRIDE

    # ------------------------------------------------------------------------------------------ samples

    def fingerprint_fields(self) -> list[Any]:
        fixed = [self.directions, self.train_prefix, self.max_length, self.multilingual]
        return [*fixed, self.mel.bins, self.mel.rate, self.mel.seconds]

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        self._check_length(sizes)
        measures = super().measure(sample, sizes)
        return {**measures, "tokens": max(measures["tokens"], LEAST_TOKENS)}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        """Return an encoded sample, padded to `LEAST_TOKENS` tokens if the transcript is shorter."""
        self._check_length([media_size(item) for item in media] if sizes is None else sizes)
        encoded = super().encode(sample, media, sizes)
        missing = max(0, LEAST_TOKENS - len(encoded.tokens))
        length = len(encoded.tokens) + missing
        return replace(
            encoded,
            tokens=torch.nn.functional.pad(encoded.tokens, (0, missing), value=self._pad),
            labels=torch.nn.functional.pad(encoded.labels, (0, missing), value=IGNORE),
            positions=torch.arange(length),
            counts={**encoded.counts, "tokens": length},
        )

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        if length > self.max_length:
            raise TesseraError(
                f"the transcript has {length} tokens, including those before it, and this model has positions for "
                f"{self.max_length}",
                fix="cut the recording and its transcript",
                code="data.transcript-too-long",
            )
        return np.arange(length)

    def _check_length(self, sizes: Sequence[MediaSize]) -> None:
        for size in sizes:
            if size.samples > self.mel.longest:
                raise TesseraError(
                    f"the recording lasts {size.samples / self.mel.rate:.1f} s, and this model reads "
                    f"{self.mel.seconds} s",
                    fix="cut the recording where a sentence ends, and its transcript",
                    code="data.recording-too-long",
                )

    def _chat_spans(
        self, sample: Sample, sizes: Sequence[MediaSize], layouts: Sequence[MediaLayout], prompt: bool = False
    ) -> list[ChatSpan]:
        """Return the spans of the transcript and of the tokens before it; the recording has no placeholder tokens."""
        question, answer = _one_recording(sample)
        parts = () if answer is None else answer.parts
        written = [span for part in parts for span in self._transcript(str(part.value), "assistant" in self.train_on)]
        stamped = any(span.special for span in written) or (prompt and layouts[0].lengths[0] > self._window)
        named = self._directions(question)
        directions = named._replace(timestamps=stamped or (prompt and named.timestamps))
        trained = "assistant" in self.train_on and not prompt
        # A prompt without a language makes the model detect it.
        language = directions.language or (self._preset_language if prompt else DEFAULT_LANGUAGE)
        words = [f"<|{word}|>" for word in (language, directions.task) if word and self.multilingual]
        words += [] if directions.timestamps else [NO_STAMPS]
        before = [ChatSpan(word, "assistant", trained and self.train_prefix, special=True) for word in words]
        spans = [ChatSpan(START, "assistant", special=True), *before]
        if prompt:
            return spans
        return [*spans, *written, *([ChatSpan(END, "assistant", trained, special=True)] if answer is not None else [])]

    def _transcript(self, text: str, trained: bool) -> Iterator[ChatSpan]:
        for number, piece in enumerate(_STAMP.split(text)):
            if number % 2 and self.encoder.find(piece) is None:
                raise TesseraError(
                    f"the transcript has the time stamp {piece}, which this model does not have",
                    allowed=[f"{FIRST_STAMP} to <|{self.mel.seconds:.2f}|>, in steps of 0.02"],
                    code="data.unknown-time-stamp",
                )
            if piece:
                yield ChatSpan(piece, "assistant", trained, special=bool(number % 2))

    def _directions(self, question: Message) -> Directions:
        """Return language, task and time stamps of a sample: from its user message, such as "de translate", else from
        the recipe.
        """
        chosen = self.directions
        for word in (word for part in question.parts if part.kind == "text" for word in str(part.value).split()):
            if word == FIRST_STAMP:
                chosen = chosen._replace(timestamps=True)
                continue
            name = language_code(word)
            task = next((task for task in TASKS if task == name), None)
            if task is None:
                self._check_language(name, "text beside the recording")
            chosen = chosen._replace(language=name) if task is None else chosen._replace(task=task)
        return chosen

    @cached_property
    def _languages(self) -> tuple[str, ...]:
        words = self.encoder.added_words if self.multilingual else (f"<|{DEFAULT_LANGUAGE}|>",)
        return tuple(match[1] for word in words if (match := _LANGUAGE.fullmatch(word)))

    @property
    def _detectable(self) -> list[int]:
        """Return the tokens of the languages among which a multilingual model detects the language."""
        tokens = self.generation.get("lang_to_id") or self._languages
        return (
            list(tokens.values()) if isinstance(tokens, Mapping) else [self.encoder.id_of(f"<|{c}|>") for c in tokens]
        )

    @cached_property
    def _preset_language(self) -> str | None:
        """Return the language in generation_config.json, or None if the model is to detect it."""
        language = self.generation.get("language")
        code = language_code(language) if isinstance(language, str) else None
        return code if code in self._languages else None

    def _check_language(self, name: str, where: str) -> None:
        languages = self._languages
        if name not in languages:
            raise TesseraError(
                f"{name[:40]!r} is not a language of this model",
                where=where,
                allowed=[*sorted(languages), *TASKS],
                nearest=nearest(name, [*languages, *TASKS]),
                fix="in addition to the recording, write only its language and the task",
                code="data.unknown-language",
            )

    # ------------------------------------------------------------------------------------------ batches and text

    def prompt_of_tokens(self, tokens: Sequence[int]) -> Batch:
        raise TesseraError(
            "this model transcribes recordings, and does not answer text",
            fix="use /v1/audio/transcriptions, or /v1/chat/completions with input_audio",
            code="generation.no-plain-text",
        )

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
        ending: PromptEnding = "answer",
    ) -> Batch:
        """Return a batch of prompts, with the tokens that may not be generated."""
        batch = super().prompt(samples, media, sizes, ending)
        first = self.encoder.id_of(FIRST_STAMP)
        latest = first + int(self.generation.get("max_initial_timestamp_index") or self._window)
        end = self.encoder.id_of(END)
        return batch.with_tensors(
            **{
                SUPPRESSED: _ids(self.generation.get("suppress_tokens")),
                SUPPRESSED_FIRST: _ids(self.generation.get("begin_suppress_tokens")),
                STAMPS: torch.tensor([first, end, latest]),
                LANGUAGES: _ids(self._detectable if self.multilingual else ()),
            }
        )

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        batch = super()._pack(rows, lengths, whole)
        encoded: list[int] = []
        for row, length in zip(rows, lengths, strict=True):
            # The tokens in place of an unreadable sample attend to no recording, as padding does.
            encoded += [sum(item.streams[AUDIO].lengths) if AUDIO in item.streams else 0 for item in row]
            encoded += [0] if sum(len(item.tokens) for item in row) < length else []
        segments = {**batch.segments, MEMORY: Segments.of(encoded)}
        # Padding at the end of a row may have more tokens than there are position embeddings.
        positions = batch["positions"].remainder(self.max_length)
        return replace(batch, segments=segments).with_tensors(positions=positions)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a transcript.

        Time stamps, if the options ask for them, count from the beginning of the recording.
        """
        return self._text(tokens, self.encoder.decode, self.directions.timestamps)

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of a transcript with special tokens, such as the detected language, and time stamps from the
        beginning of the recording.
        """
        return self._text(tokens, self.encoder.spell, stamps=True)

    def _text(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], stamps: bool) -> str:
        first, end = self.encoder.id_of(FIRST_STAMP), self.encoder.id_of(END)
        pieces, begins = [], 0.0
        for window in _split(tokens, end):
            run: list[int] = []
            for token in window:
                if token < first:
                    run.append(token)
                    continue
                pieces.append(decode(run))
                run = []
                if stamps:
                    pieces.append(f"<|{begins + (token - first) * _SECONDS_PER_STAMP:.2f}|>")
            pieces.append(decode(run))
            begins += after_stamps(window, first, self._window * STRIDE)[1] * self.mel.hop / self.mel.rate
        return "".join(pieces)

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        if prompt:
            raise TesseraError(
                "this model accepts a language and a task beside the recording, but no other text, and prompt is set",
                fix="leave prompt out",
                code="generation.option-without-effect",
            )
        if language:
            self._check_language(language_code(language), "language")
        return " ".join([*([language_code(language)] if language else []), *([FIRST_STAMP] if timestamps else [])])

    def transcript(self, answer: str) -> Transcript:
        named = _LANGUAGE.match(answer)
        return Transcript(answer[named.end() if named else 0 :].strip(), named[1] if named else None)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self.encoder.id_of(END),)

    # ------------------------------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        write_tokenizer(
            folder, self.encoder.json, chat_template=None, end=END, pad=END, kind="PreTrainedTokenizerFast", begin=END
        )
        write_json(folder / IMAGE_FILE, {**self.mel.write(), "processor_class": "WhisperProcessor"})
        write_json(folder / GENERATION, {**self._default_generation(), **self.generation})

    def _default_generation(self) -> dict[str, Any]:
        """Return the content of generation_config.json that transformers needs, for a folder without this file."""
        words = [word for word in self.encoder.added_words if _LANGUAGE.fullmatch(word)]
        end, start, no_stamps = (self.encoder.id_of(word) for word in (END, START, NO_STAMPS))
        tasks = {task: id for task in TASKS if (id := self.encoder.find(f"<|{task}|>")) is not None}
        multilingual = {"lang_to_id": {word: self.encoder.id_of(word) for word in words}, "task_to_id": tasks}
        return {
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "decoder_start_token_id": start,
            "no_timestamps_token_id": no_stamps,
            "is_multilingual": self.multilingual,
            "max_length": self.max_length,
            "begin_suppress_tokens": [],
            "suppress_tokens": [],
            **(multilingual if self.multilingual else {}),
        }


def _features_of(config: WhisperConfig) -> LogMel:
    """Return the mel features that the encoder reads, with a frame every 10 ms as in all published models."""
    plain = LogMel(bins=config.audio.num_mel_bins)
    return replace(plain, seconds=config.audio.max_source_positions * STRIDE * plain.hop // plain.rate)


def _one_recording(sample: Sample) -> tuple[Message, Message | None]:
    """Return the message with the recording, and the message with its transcript. Raise for other conversations."""
    roles = Counter(message.role for message in sample.messages)
    kinds = [part.kind for part in sample.media()]
    question = sample.messages[0] if sample.messages else Message("user", ())
    answer = sample.messages[1] if len(sample.messages) > 1 else None
    fits = kinds == ["audio"] and [part.kind for part in question.parts].count("audio") == 1
    in_order = question.role == "user" and (answer is None or answer.role == "assistant") and len(sample.messages) <= 2
    if not fits or not in_order or any(part.regions for message in sample.messages for part in message.parts):
        contents = ", ".join([*(f"{count} of role {role}" for role, count in roles.items()), *kinds])
        raise TesseraError(
            f"Whisper writes the transcript of one recording, and this sample has {contents}",
            fix="give one message of the user with one recording, and one of the assistant with its transcript",
            code="data.not-a-transcript",
        )
    return question, answer


def _split(tokens: Sequence[int], at: int) -> list[list[int]]:
    """Split tokens at each occurrence of the token `at`, which is left out."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _ids(tokens: Any) -> torch.Tensor:
    """Return a list of token ids from generation_config.json. Old folders contain -1, which is no token."""
    return torch.tensor([token for token in tokens or () if token >= 0], dtype=torch.int64)

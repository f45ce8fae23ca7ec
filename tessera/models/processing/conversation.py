"""The base class of processors, which turn conversations into batches: tokens, labels, packing, files.

A family with images, video or audio declares a `MediaStream` for each encoder. Its processor defines how many tokens
media of a given size become (`MediaLayout`), their text, the positions of their tokens, and the inputs of the encoder
(patches, audio frames). Packing follows from that.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field

from tessera.config.reader import Section
from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.sample import Encoded, EncodedStream, MediaSize, Part, PartKind, Sample, VideoWithSound
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.regions import check_regions
from tessera.errors import TesseraError
from tessera.models.processing.chat import ChatSpan, ChatTemplate
from tessera.models.processing.streams import (
    EncodedMedium,
    MediaLayout,
    MediaStream,
    MediaStreams,
    encode_stream,
    media_size,
    pack_stream,
    token_runs,
)
from tessera.models.processing.tokenizer import (
    ChatEncoder,
    UnknownConversationError,
    class_for,
    read_chat_template,
    write_tokenizer,
)
from tessera.runtime.log import logger

PromptEnding = Literal["answer", "continue", "none"]
# If each row of a micro-batch has a single sample that fills at least 80 % of it, attention runs over full rows with
# their padding. Kernels for equal segments are up to twice as fast, but attention over padding takes extra FLOPs.
_MIN_FILLED = 0.8


@dataclass(frozen=True, eq=False)
class ConversationProcessor:
    """Turn conversations into batches and tokens back into text."""

    version: ClassVar[str]  # family name and a number; increase it if equal options give other tokens than before
    streams: ClassVar[MediaStreams] = {}  # inputs of media encoders (vision, audio), by name in the model's plan
    axes: ClassVar[int] = 3  # number of position axes: 3 (time, height, width) or 1
    position_type: ClassVar[type[np.generic]] = np.int64
    # `tokenizer_class` in exported tokenizer_config.json; None: chosen by the tokenizer (see `class_for`)
    tokenizer_kind: ClassVar[str | None] = None
    # Special tokens that the tokenizer may lack, because transformers' processor replaces them before tokenizing.
    replaced_words: ClassVar[tuple[str, ...]] = ()

    encoder: ChatEncoder
    template: ChatTemplate
    sampling: VideoSampling
    train_on: tuple[str, ...]
    last_only: bool

    def __post_init__(self) -> None:
        """Give the tokenizer the special tokens of the template, so that text of users cannot contain them."""
        template = self.template.with_words_of(self.encoder.added_words)
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "encoder", self.encoder.with_control(template.control_words()))

    # ------------------------------------------------------------------------------------------ what a family defines

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        """Return the layout of an image, video or recording of this size: its tokens, and the inputs of the encoder."""
        raise AssertionError("the chat template of this family refuses media")

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        """Return the tensors of an encoder's input, with one entry per patch or audio frame, in the encoder's order.

        `media`: a PIL image, frames [F, H, W, 3] or sound [samples].
        """
        raise AssertionError("the chat template of this family refuses media")

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Return (width, height) to which the processor resizes media, which may be decoded at a lower resolution.

        None: the processor needs full resolution.
        """
        return None

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        """Return the position ids of all tokens, [3, length] (time, height, width) or [length].

        `spans`: start and length of each run of tokens that stand for media.
        """
        return np.arange(length)

    def constants(self, stream: str) -> Mapping[str, np.ndarray]:
        """Return tensors that are the same in every batch with input for this encoder, such as a mean and a scale."""
        return {}

    def save_preprocessor(self, folder: Path) -> None:
        """Write preprocessor files for a Hugging Face folder."""
        return None

    def layouts(self, kinds: Sequence[PartKind], sizes: Sequence[MediaSize]) -> list[MediaLayout]:
        """Return the layouts of all media of a sample. A layout may depend on the sample's other media."""
        return [self.layout(kind, size) for kind, size in zip(kinds, sizes, strict=True)]

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        """Return the text and placeholder tokens that stand for an image, video or recording in the prompt."""
        return self.template.show(part, role)

    def write(self, part: Part, text: ChatSpan, images: Sequence[MediaSize]) -> list[ChatSpan]:
        """Return the spans of a text with boxes, points or names of objects. `text`: its span with placeholders."""
        raise TesseraError(
            "this model cannot write boxes and points",
            fix="remove such samples, or write the boxes into the text and leave out `objects`",
            code="model.no-box-words",
        )

    def fingerprint_fields(self) -> list[Any]:
        """Return JSON values that change what `measure` returns, besides tokenizer, template and frame sampling."""
        return []

    def named_tokens(self) -> dict[str, str]:
        """Return special tokens by the attribute names under which transformers' processor looks them up."""
        return {}

    # ------------------------------------------------------------------------------------------ one sample

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        return replace(self, train_on=tuple(roles), last_only=last_only)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that changes whenever `measure` could return other token counts."""
        settings = [asdict(self.template), asdict(self.sampling), self.fingerprint_fields(), *self.encoder.unmarked]
        facts = json.dumps([self.version, self.encoder.json, settings, self.train_on, self.last_only], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        layouts = self._layouts(sample, sizes)
        _, trained, _ = self.encoder.encode(self._chat_spans(sample, sizes, layouts), token_runs(layouts))
        measures = self._counts(sample, layouts, sizes, trained)
        for stream in self.streams.values():
            measures |= stream.measure(self._read_by(stream, sample, layouts))
        return measures

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        sizes = [media_size(item) for item in media] if sizes is None else sizes
        layouts = self._layouts(sample, sizes)
        return self._encode(sample, media, sizes, layouts, self._chat_spans(sample, sizes, layouts))

    def _layouts(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[MediaLayout]:
        parts = sample.media()
        assert len(parts) == len(sizes), "one size for each media part"
        for part in parts:
            self.template.words_of(part)  # raises an error for media that the family does not support
        return self.layouts([part.kind for part in parts], sizes)

    def _chat_spans(
        self, sample: Sample, sizes: Sequence[MediaSize], layouts: Sequence[MediaLayout], prompt: bool = False
    ) -> list[ChatSpan]:
        """Return the rendered conversation as text spans. `prompt`: stop where the assistant's answer begins."""
        remaining, images = iter(layouts), check_regions(sample, sizes)
        return self.template.render(
            sample.messages,
            () if prompt else self.train_on,
            last_only=self.last_only,
            answer=prompt,
            show=lambda part, role: self.show(part, role, next(remaining)),
            write=lambda part, text: self.write(part, text, images),
        )

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Any],
        sizes: Sequence[MediaSize],
        layouts: Sequence[MediaLayout],
        spans: Sequence[ChatSpan],
    ) -> Encoded:
        ids, trained, media_spans = self.encoder.encode(spans, token_runs(layouts))
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = torch.where(torch.tensor(trained), tokens, IGNORE)
        positions = torch.from_numpy(self.positions(len(ids), media_spans, layouts))
        streams = self._streams(sample, media, layouts, media_spans)
        return Encoded(sample.id, tokens, labels, positions, streams, self._counts(sample, layouts, sizes, trained))

    def _streams(
        self, sample: Sample, media: Sequence[Any], layouts: Sequence[MediaLayout], spans: Sequence[tuple[int, int]]
    ) -> dict[str, EncodedStream]:
        """Return the input of each encoder that has media in this sample."""
        remaining = iter(spans)
        inputs: dict[str, list[EncodedMedium]] = {}
        for part, medium, layout in zip(sample.media(), media, layouts, strict=True):
            runs = [(kind or part.kind, next(remaining)) for kind, _ in layout.runs()]
            for kind, content, track in _tracks(part.kind, medium, layout):
                arrays = self.elements(kind, content, track)
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
                its_runs = [run for of, run in runs if of == kind]
                inputs.setdefault(self._stream_of(kind), []).append((track, its_runs, tensors))
        return {name: encode_stream(read, self.streams[name].stream.dim) for name, read in inputs.items()}

    def _stream_of(self, kind: PartKind) -> str:
        return next(name for name, stream in self.streams.items() if kind in stream.kinds)

    def _read_by(self, stream: MediaStream, sample: Sample, layouts: Sequence[MediaLayout]) -> list[MediaLayout]:
        """Return the layouts of the media, including sound tracks, that the encoder of a stream reads."""
        parts = zip(sample.media(), layouts, strict=True)
        tracks = [track for part, layout in parts for track in _tracks(part.kind, None, layout)]
        return [layout for kind, _, layout in tracks if kind in stream.kinds]

    def _counts(
        self, sample: Sample, layouts: Sequence[MediaLayout], sizes: Sequence[MediaSize], trained: Sequence[bool]
    ) -> dict[str, int]:
        kinds = [part.kind for part in sample.media()]
        return {
            "samples": 1,
            "tokens": len(trained),
            "trained": sum(trained[1:]),  # the first token has no earlier token that could predict it
            "images": kinds.count("image"),
            "frames": sum(size.frames for kind, size in zip(kinds, sizes, strict=True) if kind == "video"),
            **{s.elements: s.count(self._read_by(s, sample, layouts)) for s in self.streams.values()},
        }

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        for row in rows:
            assert sum(len(item.tokens) for item in row) <= length, "the packer keeps rows within the length"
        alone = all(len(row) == 1 and len(row[0].tokens) >= _MIN_FILLED * length for row in rows)
        batch = self._pack(rows, [length] * len(rows), whole=alone)
        return batch.with_tensors(trained=trained_positions(batch["labels"]))

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
        ending: PromptEnding = "answer",
    ) -> Batch:
        """Return a batch of prompts.

        `ending`: "answer": end with the header of the assistant's answer. A final answer is left out, because the model
        generates it. "continue": end with the final answer, which the model continues. "none": end after the last
        message.
        """
        items = []
        for number, (sample, objects) in enumerate(zip(samples, media, strict=True)):
            questions = [n for n, message in enumerate(sample.messages, 1) if message.role != "assistant"]
            count = len(sample.messages) if ending == "none" else max(questions, default=0)
            question = Sample(sample.id, sample.messages[:count])
            objects = objects[: len(question.media())]
            read = [media_size(item) for item in objects] if sizes is None else sizes[number][: len(objects)]
            layouts = self._layouts(question, read)
            spans = self._chat_spans(question, read, layouts, prompt=ending != "none")
            if ending == "continue":
                spans += [span for message in sample.messages[count:] for span in self.template.beginning(message)]
            items.append(self._encode(question, objects, read, layouts, spans))
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        return replace(batch, sample_ids=tuple(item.id for item in items))

    def prompt_of_tokens(self, tokens: Sequence[int]) -> Batch:
        """Return a batch with one prompt of text tokens, without a chat template."""
        ids = torch.tensor(list(tokens), dtype=torch.int64)
        positions = torch.from_numpy(self.positions(len(ids), [], []))
        item = Encoded("tokens", ids, torch.full_like(ids, IGNORE), positions, {}, {"samples": 1, "tokens": len(ids)})
        return replace(self._pack([[item]], [len(ids)]), sample_ids=(item.id,))

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        """Return rows of samples as one packed batch. `whole`: attention runs over full rows, of one sample each."""
        total = sum(lengths)
        tokens = torch.full((total,), self._pad, dtype=torch.int64)
        labels = torch.full((total,), IGNORE, dtype=torch.int64)
        shape = (3, total) if self.axes == 3 else (total,)
        positions = torch.from_numpy(np.zeros(shape, dtype=self.position_type))
        texts: list[int] = []
        placed: list[tuple[Encoded, int]] = []  # each sample and the index of its first token in the batch
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            at, end = start, start + length
            for item in row:
                size = len(item.tokens)
                tokens[at : at + size] = item.tokens
                labels[at : at + size - 1] = item.labels[1:]
                positions[..., at : at + size] = item.positions  # [L] is broadcast to all axes
                placed.append((item, at))
                texts.append(size)
                at += size
            if at < end:
                positions[..., at:end] = torch.arange(end - at)
                texts.append(end - at)
            start = end
        tensors = {"tokens": tokens, "labels": labels, "positions": positions}
        segments = {"text": Segments.of(texts, rows=len(rows) if whole else 0)}
        for name, media in self.streams.items():
            parts = [(item.streams[name], at) for item, at in placed if name in item.streams]
            if parts:
                packed = pack_stream(media.stream, parts)
                tensors |= packed.tensors | {key: torch.from_numpy(v) for key, v in self.constants(name).items()}
                segments |= packed.segments
        counts = Counter({media.elements: 0 for media in self.streams.values()})
        for item, _ in placed:
            counts.update(item.counts)
        return Batch(tensors, segments, counts=dict(counts))

    # ------------------------------------------------------------------------------------------ text and files

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoder.decode(tokens)

    def spell(self, tokens: Sequence[int]) -> str:
        return self.encoder.spell(tokens)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        words = dict.fromkeys([*self.template.stop_words, self.template.end_of_text])
        return tuple(id for id in map(self.encoder.find, words) if id is not None)

    @cached_property
    def _pad(self) -> int:
        return self.stop_tokens[-1]

    def save(self, folder: Path) -> None:
        end = next(iter(self.template.stop_words), self.template.end_of_text)
        pad = self.template.end_of_text if self.encoder.find(self.template.end_of_text) is not None else end
        named = {
            name: word
            for name, word in self.named_tokens().items()
            if self.encoder.find(word) is not None or word in self.replaced_words
        }
        write_tokenizer(
            folder,
            self.encoder.json,
            chat_template=self.template.jinja(),
            end=end,
            pad=pad,
            kind=self.tokenizer_kind or class_for(self.encoder.json),
            named=named,
            begin=self.template.begin if self.encoder.find(self.template.begin) is not None else None,
        )
        self.save_preprocessor(folder)


def _tracks(kind: PartKind, medium: Any, layout: MediaLayout) -> list[tuple[PartKind, Any, MediaLayout]]:
    """Return kind, content and layout of a medium; for a video with sound, those of the frames and of the sound."""
    if layout.sound is None:
        return [(kind, medium.frames if isinstance(medium, VideoWithSound) else medium, layout)]
    frames, sound = medium or (None, None)
    return [(kind, frames, layout), ("audio", sound, layout.sound)]


def check_special_tokens(
    encoder: ChatEncoder, template: ChatTemplate, ids: dict[str, int], vocabulary: int, folder: Path
) -> None:
    """Raise an error unless tokenizer and model agree on special tokens, and the vocabulary has all token ids.

    A mismatched pair would train without learning. `ids`: ids of special tokens in the model's configuration.
    """
    for word in template.special_words():
        token = encoder.id_of(word)
        if token != ids.get(word, token):
            raise TesseraError(
                f"{word} has id {token} in the tokenizer and {ids[word]} in the model's configuration",
                where=str(folder / "tokenizer.json"),
                fix="use the tokenizer that belongs to the model, or set the ids in model.config",
                code="tokenizer.token-id-mismatch",
            )
    if encoder.size > vocabulary:
        raise TesseraError(
            f"the tokenizer has {encoder.size} tokens, and the model's vocabulary {vocabulary}",
            where=str(folder / "tokenizer.json"),
            fix="raise text.vocab_size in model.config",
            code="tokenizer.vocabulary-too-large",
        )


def first_template(encoder: ChatEncoder, templates: Sequence[ChatTemplate], folder: Path) -> ChatTemplate:
    """Return the first template whose special tokens the tokenizer has."""
    for template in templates:
        if all(encoder.find(word) is not None for word in template.special):
            return template
    raise UnknownConversationError(
        "the tokenizer lacks the special tokens of this family's chat templates",
        where=str(folder / "tokenizer.json"),
        allowed=[" ".join(template.special) for template in templates],
        fix="use the tokenizer of an instruction-tuned model",
        code="tokenizer.no-control-words",
    )


def check_rope_length(length: int, longest: int | None) -> None:
    """Raise an error if a sample has more than `longest` tokens (None: no limit): beyond this length dynamic rope
    would rescale the positions, and stored position embeddings end."""
    if longest is not None and length > longest:
        raise TesseraError(
            f"the sample has {length} tokens, and this model has positions for {longest}",
            fix="shorten the sample; with dynamic rope, model.family=transformers scales the positions of each sample",
            code="data.sample-beyond-rope",
        )


class TextOptions(Section):
    """Declare the keys of `data.processor` that concern text."""

    unlisted: ClassVar[frozenset[str]] = frozenset({"train_on"})  # errors do not list it: recipes set data.train_on
    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(None, description="system message of conversations without one")


def with_system(template: ChatTemplate, options: TextOptions, folder: Path) -> ChatTemplate:
    """Return the template with the system message of the recipe, else of the folder's chat template if it has one."""
    jinja = read_chat_template(folder)
    if "system" in options.model_fields_set:
        return replace(template, system=options.system)
    return template if jinja is None else replace(template, system=template.system_in(jinja))


def warn_of_another_template(processor: Any, folder: Path | None) -> None:
    """Warn if the model folder's chat template differs from the template that `processor` writes.

    A model that was tuned with a different template (Llama 2 with `[INST]`, for example) would be trained and prompted
    in a format that it does not know.
    """
    if folder is None or not isinstance(processor, ConversationProcessor):
        return
    jinja = read_chat_template(folder)
    if jinja is None or processor.template.headers_in(jinja):
        return
    logger().warning(
        f"the chat template of {folder} differs from this family's template "
        f"({processor.template.header('user').strip()!r}), which is used instead; if the model was tuned with "
        "the folder's template, set model.family: transformers, which uses it"
    )


def trained_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return the indices of the tokens that have a label."""
    return (labels != IGNORE).nonzero().squeeze(1)

"""Encode captions, frames and conditioning images with frozen encoders: for training, stored features and sampling.

In training, the batch tensors `frames`, `references` and `text_ids` become `clean`, `text`, `pooled` and `condition`.
Stored features are the same tensors. Padding and unreadable samples have zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.task import FrozenModule
from tessera.diffusion.autoencoders import VAE, Autoencoder
from tessera.diffusion.batches import EMPTY_STARTS, EMPTY_TEXT, IMAGE_EMBEDS, latent_lengths
from tessera.diffusion.captions import CaptionTokenizer, TextEmbedding, TextEncoder, cut_or_padded, joined
from tessera.diffusion.edit_images import EMPTY_IDS, SHOWN, SHOWN_GRIDS, EditImages, EditReader, edit_of_folder, resized
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, FrameEncoder, image_processor_name
from tessera.diffusion.given_images import Given, Grid, patchify
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.errors import TesseraError

# (index of a sample, pixels of its conditioning image) -> pixels with noise
DisturbSample = Callable[[int, Tensor], Tensor]
_PROMPTS = 8  # maximum number of prompts in one call of a text encoder
_OTHER_FOLDER = {
    "where": "train.task_options.encoders.folder",
    "fix": "leave the key out, or set it to the folder of model.path",
}
Encoder = TypeVar("Encoder", bound=nn.Module)


@dataclass(frozen=True)
class SampleConditions:
    """Hold the inputs of one sample to generate: embeddings of text and images, and latents of conditioning images."""

    text: Tensor  # token embeddings, [L, D]
    pooled: Tensor | None = None  # pooled text embedding, [Dp]
    image_embeds: Tensor | None = None  # embeddings of the conditioning frames by an image encoder, [M, Di]
    condition: Tensor | None = None  # [n, values]: condition channels beside the latents
    first: Tensor | None = None  # [n, values]: clean tokens of conditioning frames, which replace noise
    references: tuple[tuple[Tensor, Grid], ...] = ()  # tokens [n, values] and grid of each image to edit


@dataclass(frozen=True)
class Encoders:
    """Encode with the frozen components of a pipeline. `parts`: the folder of tokenizers and preprocessors.

    `given_frames`: the frames of training videos that the model gets as conditions. `stores_empty`: add the empty
    caption of each sample to its features if it differs between samples: if a text encoder also reads images or frames.
    """

    family: GenerationFamily
    components: Mapping[str, FrozenModule]
    parts: PipelineFolder
    given_frames: Given = "none"
    stores_empty: bool = False

    @cached_property
    def edit_images(self) -> EditImages | None:
        """Return the reader of images to edit; None: the text encoder of this pipeline does not read images."""
        edit = edit_of_folder(self.parts.folder, self.family.edits)
        return None if edit is None else EditImages.load(self.parts.folder, edit)

    @cached_property
    def tokenizers(self) -> list[CaptionTokenizer]:
        return [CaptionTokenizer.load(self.parts.folder, reader) for reader in self.family.captions]

    # ------------------------------------------------------------------------------------------ batches

    def encode(self, batch: Batch, dropped: Collection[int], disturb: DisturbSample | None = None) -> Batch:
        """Return the batch with features. Samples whose indices are in `dropped` get the empty caption."""
        (encoded,) = self.encode_all([batch], [dropped], [disturb])
        return encoded

    def encode_all(
        self, batches: Sequence[Batch], dropped: Sequence[Collection[int]], disturbed: Sequence[DisturbSample | None]
    ) -> list[Batch]:
        """Return the batches with features, as `encode` does. Every offloaded encoder moves to the device once for all
        batches."""
        encoded = self._with_text(batches, dropped)
        if self.family.image_embeds and self.given_frames != "none":
            with self._use(IMAGE_ENCODER, FrameEncoder) as frames:
                encoded = [self._with_image_embeds(batch, frames) for batch in encoded]
        with self._use(VAE, Autoencoder) as vae:
            pairs = zip(encoded, disturbed, strict=True)
            return [self._with_latents(batch, vae, disturb) for batch, disturb in pairs]

    @contextmanager
    def _use(self, name: str, kind: type[Encoder]) -> Iterator[Encoder]:
        with self.components[name].use() as module:
            assert isinstance(module, kind), name
            yield module

    def _with_latents(self, batch: Batch, vae: Autoencoder, disturb: DisturbSample | None) -> Batch:
        family, lengths = self.family, latent_lengths(batch, self.family)
        numbers = [number for number, shape in enumerate(batch.shapes["frames"]) if shape[0]]
        videos = _videos(batch)
        latents = vae.encode(videos)
        tokens = {n: [patchify(values, family.patch)] for n, values in zip(numbers, latents, strict=True)}
        if "references" in batch:
            owners = batch["reference_sample"].tolist()
            images = vae.encode(_split(batch["references"], batch.shapes["references"]))
            for owner, image in zip(owners, images, strict=True):
                tokens[owner].append(patchify(image, family.patch))
        clean = _joined_rows(tokens, lengths, family.patch_values, batch["frames"].device)
        if self.given_frames == "none":
            return batch.with_tensors(clean=clean)
        conditions = {}
        for number, video, values in zip(numbers, videos, latents, strict=True):
            noise = None if disturb is None else partial(disturb, number)
            channels = family.images.channels(vae, video, values.shape, self.given_frames, noise)
            if channels is not None:
                conditions[number] = [patchify(channels, family.patch)]
        width = math.prod(family.patch) * family.images.count(family.channels, vae.form.time_stride)
        assert width or not conditions, "`GivenImages.count` counts the channels of `GivenImages.channels`"
        if not width:
            return batch.with_tensors(clean=clean)
        return batch.with_tensors(clean=clean, condition=_joined_rows(conditions, lengths, width, clean.device))

    def _with_image_embeds(self, batch: Batch, encoder: FrameEncoder) -> Batch:
        places = (0,) if self.given_frames == "first" else (0, -1)
        frames = [video[at] for video in _videos(batch) for at in places]
        # If there are no frames, a black one is encoded: its embeddings are counted.
        black = batch["frames"].new_zeros(1, 1, 3)
        embeds = encoder.encode(frames or [black])
        count = len(embeds[0])
        lengths = [len(places) * count if shape[0] else 0 for shape in batch.shapes["frames"]]
        if IMAGE_EMBEDS in batch.segments and list(batch.segments[IMAGE_EMBEDS].lengths) != lengths:
            raise TesseraError(
                f"the image encoder makes {count} embeddings of a frame; the batch was packed for another number",
                **_OTHER_FOLDER,
                code="generation.image-embedding-mismatch",
            )
        segments = {**batch.segments, IMAGE_EMBEDS: Segments.of(lengths).to(batch["frames"].device)}
        rows = torch.cat(embeds)[: sum(lengths)]
        return replace(batch.with_tensors(**{IMAGE_EMBEDS: rows}), segments=segments)

    # ------------------------------------------------------------------------------------------ captions of batches

    def _with_text(self, batches: Sequence[Batch], dropped: Sequence[Collection[int]]) -> list[Batch]:
        embeddings: list[list[list[TextEmbedding]]] = [[] for _ in batches]  # indexed by batch, text encoder and sample
        # Embeddings of the empty captions, and the index of their first row, by batch.
        empty: dict[int, tuple[list[Tensor], list[int]]] = {}
        for number, reader in enumerate(self.family.captions):
            with self._use(reader.encoder, TextEncoder) as encoder:
                for at, (batch, without) in enumerate(zip(batches, dropped, strict=True)):
                    captions = self._captions(batch, number)
                    embeddings[at].append(self._encoded(encoder, number, batch, captions, without))
                    if self.stores_empty and (self.edit_images is not None or reader.reads_frames):
                        empty[at] = self._own_empty(encoder, number, batch, captions)
        encoded = []
        for at, (batch, by_encoder) in enumerate(zip(batches, embeddings, strict=True)):
            whole = [joined(self.family.captions, parts) for parts in zip(*by_encoder, strict=True)]
            texts = [sample.tokens for sample in whole if sample.tokens is not None]
            pooled = [sample.pooled for sample in whole if sample.pooled is not None]
            batch = _with_rows(batch, "text", texts) if texts else batch
            batch = batch.with_tensors(pooled=torch.stack(pooled)) if pooled else batch
            if at in empty:
                rows, starts = empty[at]
                batch = _with_rows(batch, EMPTY_TEXT, rows)
                first = [torch.tensor([start][: len(text)]) for start, text in zip(starts, texts, strict=True)]
                batch = _with_rows(batch, EMPTY_STARTS, first)
            encoded.append(batch)
        return encoded

    def _captions(self, batch: Batch, number: int) -> list[Tensor]:
        """Return the token ids of each caption of a batch for one text encoder."""
        captions = _rows(batch, self.family.id_names[number])
        if any(map(len, captions)) and (EMPTY_IDS in batch) != (self.edit_images is not None):
            raise TesseraError(
                "the text encoder of the model's pipeline reads images to edit, but the one in the encoders' folder "
                "does not"
                if EMPTY_IDS in batch
                else "the text encoder in the encoders' folder reads images to edit, but the batch has none",
                **_OTHER_FOLDER,
                code="generation.edit-captions-mismatch",
            )
        return captions

    def _empty_ids(self, batch: Batch, number: int, captions: Sequence[Tensor]) -> list[Tensor]:
        """Return the token ids of the empty caption for each sample."""
        if EMPTY_IDS in batch:
            return _rows(batch, EMPTY_IDS)
        ids = captions[0].new_tensor(self.tokenizers[number].empty())
        return [ids if len(caption) else caption for caption in captions]

    def _encoded(
        self, encoder: TextEncoder, number: int, batch: Batch, captions: Sequence[Tensor], dropped: Collection[int]
    ) -> list[TextEmbedding]:
        """Return the embeddings of all captions. For dropped samples, these are embeddings of the empty caption,
        truncated or padded to the length of the caption."""
        ids, edit = list(captions), self.edit_images
        own_empty = edit is not None or encoder.captions.reads_frames  # the empty caption differs between samples
        if dropped and own_empty:
            empty = self._empty_ids(batch, number, captions)
            ids = [empty[at] if at in dropped else caption for at, caption in enumerate(captions)]
        embeddings, last = self._embedded(encoder, number, batch, ids, with_empty=bool(dropped))
        if dropped and not own_empty:
            embeddings = [last if at in dropped else embedding for at, embedding in enumerate(embeddings)]
        count = encoder.captions.embeddings if edit is None else edit.embeddings
        return [
            embedding.resized(count(len(caption)) if len(caption) else 0)
            for embedding, caption in zip(embeddings, captions, strict=True)
        ]

    def _embedded(
        self, encoder: TextEncoder, number: int, batch: Batch, captions: Sequence[Tensor], *, with_empty: bool = False
    ) -> tuple[list[TextEmbedding], TextEmbedding]:
        """Return embeddings of the token ids `captions` (blank for samples without ids), and of one further caption.

        The further caption lets a rank with only padding call the encoder, which may be sharded. `with_empty`: it is
        the empty caption; otherwise its embedding has no meaning. Images or frames are those of the batch.
        """
        ids, device = [caption for caption in captions if len(caption)], captions[0].device
        if self.edit_images is not None:
            patches, grids = self.edit_images.blank(device)
            if SHOWN in batch:
                patches, grids = torch.cat([batch[SHOWN], patches]), torch.cat([batch[SHOWN_GRIDS], grids])
            extra = captions[0].new_tensor([encoder.image_token])
            *embeddings, last = self.edit_images.encode(encoder, [*ids, extra], patches, grids)
        elif encoder.captions.reads_frames:
            frames = [video[0] for video in _videos(batch)]
            black = torch.zeros(1, 1, 3, dtype=torch.uint8, device=device)
            extra = captions[0].new_tensor(self.tokenizers[number].empty())
            *embeddings, last = encoder.encode([*ids, extra], [*frames, black])
        else:
            extra = captions[0].new_tensor(self.tokenizers[number].empty() if with_empty else [0])
            *embeddings, last = encoder.encode([*ids, extra])
        rest = iter(embeddings)
        return [next(rest) if len(caption) else last.blank() for caption in captions], last

    def _own_empty(
        self, encoder: TextEncoder, number: int, batch: Batch, captions: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[int]]:
        """Return the embeddings of each sample's empty caption from row s on, and s.

        Row s is the first whose token differs from the sample's caption. Attention is causal: earlier rows are equal.
        """
        empty = self._empty_ids(batch, number, captions)
        embeddings, _ = self._embedded(encoder, number, batch, empty)
        if self.edit_images is not None:
            edit = self.edit_images
            starts = [edit.embeddings(_common(*pair)) for pair in zip(captions, empty, strict=True)]
        else:
            starts = [encoder.captions.embeddings(0)] * len(captions)
        tokens = [embedding.tokens for embedding in embeddings if embedding.tokens is not None]
        return [rows[start:] for rows, start in zip(tokens, starts, strict=True)], starts

    @torch.no_grad()
    def empty_caption(self, device: torch.device) -> dict[str, Tensor]:
        """Return the features of the empty caption. Text encoders whose empty caption differs between samples are left
        out."""
        if self.edit_images is not None:
            return {}
        embeddings = []
        for reader, tokenizer in zip(self.family.captions, self.tokenizers, strict=True):
            if reader.reads_frames:
                embeddings.append(TextEmbedding(None, None))
                continue
            with self._use(reader.encoder, TextEncoder) as encoder:
                embeddings += encoder.encode([torch.tensor(tokenizer.empty(), device=device)])
        whole = joined(self.family.captions, embeddings)
        rows = {"text": whole.tokens, "pooled": None if whole.pooled is None else whole.pooled.unsqueeze(0)}
        return {name: values.cpu().contiguous() for name, values in rows.items() if values is not None}

    # ------------------------------------------------------------------------------------------ sampling

    @torch.no_grad()
    def prompts(
        self, texts: Sequence[str], device: torch.device, frame: Image.Image | None = None, *, negative: bool = False
    ) -> list[TextEmbedding]:
        """Return the embeddings of prompts by all text encoders. `frame`: conditioning first frame, for encoders that
        read a frame. `negative`: whether these are negative prompts."""
        embeddings: list[list[TextEmbedding]] = [[] for _ in texts]
        for reader, tokenizer in zip(self.family.captions, self.tokenizers, strict=True):
            ids = [tokenizer.cut(tokenizer.ids(text, may_be_empty=True)) for text in texts]
            captions = [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in ids]
            pixels = []
            if reader.reads_frames and frame is not None:
                pixels = list(self.parts.image_processor("image_processor")(frame, return_tensors="pt").pixel_values)
            with self._use(reader.encoder, TextEncoder) as encoder:
                for at in range(0, len(captions), _PROMPTS):
                    part = captions[at : at + _PROMPTS]
                    frames = [image.to(device) for image in pixels] * len(part)
                    for number, embedding in enumerate(encoder.encode(part, frames, negative=negative), at):
                        embeddings[number].append(embedding)
        return [joined(self.family.captions, parts) for parts in embeddings]

    @torch.no_grad()
    def edit_prompts(
        self, texts: Sequence[str], images: Sequence[Image.Image], pixels: int, device: torch.device
    ) -> list[TextEmbedding]:
        """Return prompt embeddings of a text encoder that also reads images to edit. `pixels`: area of the images for
        the VAE."""
        assert self.edit_images is not None, "images for a model that does not edit were refused"
        edit = replace(self.edit_images, pixels=pixels)
        reader = EditReader(edit, CaptionTokenizer.load(self.parts.folder, edit.edit.captions))
        sizes = [image.size for image in images]
        patches = torch.cat([edit.cut(image) for image in images]).to(device)
        grids = torch.tensor([edit.grid(*size) for size in sizes], device=device)
        embeddings = []
        with self._use(edit.edit.captions.encoder, TextEncoder) as encoder:
            for text in texts:
                ids = torch.tensor(reader.ids(text, sizes, may_be_empty=True), device=device)
                embeddings += edit.encode(encoder, [ids], patches, grids)
        return embeddings

    @torch.no_grad()
    def references(self, images: Sequence[Image.Image], pixels: int, device: torch.device) -> SampleConditions:
        """Encode images to edit, and return their latents as tokens. `pixels`: area to which each image is resized."""
        assert self.edit_images is not None, "images for a model that does not edit were refused"
        edit = replace(self.edit_images, pixels=pixels)
        with self._use(VAE, Autoencoder) as vae:
            sized = [resized(image, edit.size(*image.size)) for image in images]
            tokens = tuple(self._image_tokens(vae, image, device) for image in sized)
        return SampleConditions(torch.empty(0), references=tokens)

    @torch.no_grad()
    def conditions(
        self, images: Sequence[Image.Image], last: Image.Image | None, size: Grid, device: torch.device
    ) -> SampleConditions:
        """Return the model inputs made from a conditioning first and last frame, for every sample. `size`: frames,
        height and width of the video in pixels."""
        family, nothing = self.family, SampleConditions(torch.empty(0))
        frames, height, width = size
        if not images:
            form, blank = self.parts.vae_form(), family.images.blank_channels(family.channels)
            if not blank:
                return nothing
            sizes = zip(form.latent_shape(*size), family.patch, strict=True)
            empty = torch.zeros(blank, *(-(-count // step) * step for count, step in sizes))
            return replace(nothing, condition=patchify(empty.to(device), family.patch))
        fitted = [family.fit_image(image, height, width) for image in images]
        with self._use(VAE, Autoencoder) as vae:
            first = resized(fitted[0], (width, height))
            video = torch.zeros(frames, height, width, 3, dtype=torch.uint8)
            video[0] = torch.from_numpy(np.array(first))
            if last is not None:
                video[-1] = torch.from_numpy(np.array(resized(last, (width, height))))
            shape = (family.channels, *vae.form.latent_shape(*size))
            channels = family.images.channels(vae, video.to(device), shape, "first" if last is None else "first_last")
            if channels is None:
                return replace(nothing, first=self._image_tokens(vae, first, device)[0])
        embeds = self._image_embeds([fitted[0], *([] if last is None else [last])], device)
        return replace(nothing, condition=patchify(channels, family.patch), image_embeds=embeds)

    def _image_tokens(self, vae: Autoencoder, image: Image.Image, device: torch.device) -> tuple[Tensor, Grid]:
        """Return the latents of an image as tokens [n, values], and their grid."""
        (latents,) = vae.encode([torch.from_numpy(np.array(image)).unsqueeze(0).to(device)])
        frames, rows, columns = (n // step for n, step in zip(latents.shape[1:], self.family.patch, strict=True))
        return patchify(latents, self.family.patch), (frames, rows, columns)

    def _image_embeds(self, images: Sequence[Image.Image], device: torch.device) -> Tensor | None:
        """Return the image encoder's embeddings of conditioning frames; None if the model reads none. The image
        processor of the folder prepares the frames, as in diffusers."""
        if not self.family.image_embeds:
            return None
        with self._use(IMAGE_ENCODER, FrameEncoder) as encoder:
            processor = self.parts.image_processor(image_processor_name(type(encoder.encoder).__name__))
            pixels = processor(images=list(images), return_tensors="pt").pixel_values
            return torch.cat(encoder.encode(list(pixels.to(device))))


# ---------------------------------------------------------------------------------------------- packed rows


def without_captions(batch: Batch, dropped: Collection[int]) -> Batch:
    """Return a batch of features in which the samples `dropped` have the empty caption.

    Its embeddings are `empty_text` and `empty_pooled` of the batch, or zeros if the batch has none. If `empty_starts`
    is in the batch, rows before that index are those of the sample's own caption.
    """
    changed = {}
    if EMPTY_STARTS in batch:
        texts, ends, starts = (_rows(batch, name) for name in ("text", EMPTY_TEXT, EMPTY_STARTS))
        for number in dropped:
            if len(starts[number]):
                begin = texts[number][: int(starts[number])]
                texts[number] = cut_or_padded(torch.cat([begin, ends[number].to(begin)]), len(texts[number]))
        changed["text"] = torch.cat(texts)
    for name, lengths in (("text", list(batch.segments["text"].lengths)), ("pooled", 1)):
        if name in batch and name not in changed:
            rows, empty = batch[name], batch.get(f"empty_{name}")
            empty = rows[:0] if empty is None else empty.to(rows)
            parts = list(torch.split(rows, lengths))
            for number in dropped:
                parts[number] = cut_or_padded(empty, len(parts[number]))
            changed[name] = torch.cat(parts)
    return batch.with_tensors(**changed)


def _rows(batch: Batch, name: str) -> list[Tensor]:
    """Split the rows of a packed tensor by sample."""
    return list(torch.split(batch[name], [*batch.segments[name].lengths]))


def _with_rows(batch: Batch, name: str, parts: Sequence[Tensor]) -> Batch:
    """Return the batch with an added packed tensor and its segments."""
    rows = torch.cat(list(parts)).to(batch["frames"].device)
    segments = Segments.of([len(part) for part in parts]).to(rows.device)
    return replace(batch.with_tensors(**{name: rows}), segments={**batch.segments, name: segments})


def _videos(batch: Batch) -> list[Tensor]:
    """Return the image or video, uint8 [F, H, W, 3], of each sample of a batch that could be read."""
    return _split(batch["frames"], [shape for shape in batch.shapes["frames"] if shape[0]])


def _split(pixels: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return packed pixels as images and videos [F, H, W, 3]."""
    counts = [frames * height * width for frames, height, width in shapes]
    return [part.view(*shape, 3) for part, shape in zip(torch.split(pixels, counts), shapes, strict=True)]


def _joined_rows(
    tokens: Mapping[int, Sequence[Tensor]], lengths: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """Return the tokens of all segments as one tensor, with zeros at the end of segments with fewer tokens."""
    rows = torch.zeros(sum(lengths), width, device=device)
    at = 0
    for number, length in enumerate(lengths):
        segment = torch.cat(list(tokens[number])) if number in tokens else rows[:0]
        if len(segment) > length:
            raise TesseraError(
                f"the encoders made {len(segment)} latent tokens for a segment of {length}",
                where="data.processor",
                code="generation.segment-length-mismatch",
            )
        rows[at : at + len(segment)] = segment
        at += length
    return rows


def _common(caption: Tensor, other: Tensor) -> int:
    """Return the length of the common prefix of two lists of token ids."""
    least = min(len(caption), len(other))
    differs = (caption[:least] != other[:least]).nonzero().flatten()
    return int(differs[0]) if len(differs) else least

"""Encode the media and captions of a packed batch with frozen encoders: what features hold, made in every step.

`frames`, `references` and `text_ids` of the batch become `clean`, `text`, `pooled` and `condition`. Padding, and
samples that could not be read, have zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.task import FrozenModule
from tessera.diffusion.edit_images import EMPTY_IDS, SHOWN, SHOWN_GRIDS, EditImages
from tessera.diffusion.forms import GenerationForm
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, FrameEncoder
from tessera.diffusion.pipeline_parts import VAE, Autoencoder, TextEmbedding, TextEncoder, VaeForm, joined
from tessera.errors import TesseraError

# Which frames of a video are given to a model that continues images: none, the first, or the first and the last.
Given = Literal["none", "first", "first_last"]
# Changes the pixels of a given image, by the number of its sample.
Disturb = Callable[[int, Tensor], Tensor]
IMAGE_EMBEDS = "image_embeds"
# Features of a sample whose images the text encoder reads: the embeddings of the empty caption from the row on that
# `empty_starts` has. Those before it are those of the caption.
EMPTY_TEXT, EMPTY_STARTS = "empty_text", "empty_starts"
CHANNELS = ("mask_channels", "channels", "channels_mask")  # the conditions that are channels beside noisy latents


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Return latents [C, f, h, w] as tokens [n, C x patch], values in the order channel, frame, row, column."""
    channels, *sizes = latents.shape
    pairs = [number for size, side in zip(sizes, patch, strict=True) for number in (size // side, side)]
    return latents.reshape(channels, *pairs).permute(1, 3, 5, 0, 2, 4, 6).flatten(3).flatten(0, 2)


def from_tokens(tokens: Tensor, patch: tuple[int, int, int], grid: tuple[int, int, int]) -> Tensor:
    """Return the latents [C, F, H, W] of tokens: `patchify` undone."""
    channels = tokens.shape[1] // (patch[0] * patch[1] * patch[2])
    laid = tokens.reshape(*grid, channels, *patch).permute(3, 0, 4, 1, 5, 2, 6)
    return laid.reshape(channels, *(count * step for count, step in zip(grid, patch, strict=True)))


def id_names(form: GenerationForm) -> list[str]:
    """Return the batch tensors that hold the token ids of captions, one for each text encoder."""
    return ["text_ids" + (f"_{number + 1}" if number else "") for number in range(len(form.text))]


@dataclass(frozen=True)
class SampleEncoders:
    """Encode batches. `empty`: token ids of the empty caption for each text encoder, where captions are dropped.

    `edit`: of a pipeline whose text encoder reads the images to edit, too. It also reads them with the empty caption,
    which therefore is another one for each sample; `stores_empty`: add it to the features of samples.
    """

    form: GenerationForm
    parts: Mapping[str, FrozenModule]
    given: Given = "none"
    empty: Sequence[Sequence[int]] = ()
    edit: EditImages | None = None
    stores_empty: bool = False

    def encode(self, batch: Batch, dropped: Collection[int], disturb: Disturb | None = None) -> Batch:
        """Return the batch with features; samples whose numbers are in `dropped` get the empty caption. `disturb` adds
        noise to given images."""
        (found,) = self.encode_all([batch], [dropped], [disturb])
        return found

    def encode_all(
        self, batches: Sequence[Batch], dropped: Sequence[Collection[int]], disturbed: Sequence[Disturb | None]
    ) -> list[Batch]:
        """Return batches with features, of which each is what `encode` makes of it. Every encoder comes to the device
        once for all of them."""
        found = self._with_text(batches, dropped)
        if self.form.image_embeds and self.given != "none":
            with self.parts[IMAGE_ENCODER].use() as encoder:
                assert isinstance(encoder, FrameEncoder)
                found = [self._with_image_embeds(batch, encoder) for batch in found]
        with self.parts[VAE].use() as vae:
            assert isinstance(vae, Autoencoder)
            return [self._with_latents(batch, vae, disturb) for batch, disturb in zip(found, disturbed, strict=True)]

    # ------------------------------------------------------------------------------------------ latents

    def _with_latents(self, batch: Batch, vae: Autoencoder, disturb: Disturb | None) -> Batch:
        shapes, sizes = batch.shapes["frames"], latent_lengths(batch, self.form)
        numbers = [number for number, shape in enumerate(shapes) if shape[0]]
        videos = _split(batch["frames"], [shapes[number] for number in numbers])
        latents = vae.encode(videos)
        tokens = {number: [patchify(one, self.form.patch)] for number, one in zip(numbers, latents, strict=True)}
        if "references" in batch:
            owners = batch["reference_sample"].tolist()
            images = vae.encode(_split(batch["references"], batch.shapes["references"]))
            for owner, image in zip(owners, images, strict=True):
                tokens[owner].append(patchify(image, self.form.patch))
        clean = _joined_rows(tokens, sizes, self.form.patch_values, batch["frames"].device)
        found = {"clean": clean}
        if self.given != "none" and self.form.condition in CHANNELS:
            conditions = [
                given_channels(
                    self.form,
                    vae,
                    video,
                    latent.shape,
                    self.given,
                    None if disturb is None else partial(disturb, number),
                )
                for number, video, latent in zip(numbers, videos, latents, strict=True)
            ]
            width = conditions[0].shape[1] if conditions else 0
            by_number = {number: [one] for number, one in zip(numbers, conditions, strict=True)}
            found["condition"] = _joined_rows(by_number, sizes, width, clean.device)
        return batch.with_tensors(**found)

    def _with_image_embeds(self, batch: Batch, encoder: FrameEncoder) -> Batch:
        shapes = batch.shapes["frames"]
        videos = _split(batch["frames"], [shape for shape in shapes if shape[0]])
        chosen = (0,) if self.given == "first" else (0, -1)
        found = encoder.encode([video[at] for video in videos for at in chosen])
        if not found:
            return batch
        lengths = [len(chosen) * len(found[0]) if shape[0] else 0 for shape in shapes]
        if IMAGE_EMBEDS in batch.segments and list(batch.segments[IMAGE_EMBEDS].lengths) != lengths:
            raise TesseraError(
                f"the image encoder makes {len(found[0])} embeddings of a frame, and others have a place in the batch",
                where="train.task_options.encoders.folder",
                fix="leave it out, or name the folder that model.path names",
            )
        segments = {**batch.segments, IMAGE_EMBEDS: Segments.of(lengths).to(batch["frames"].device)}
        return replace(batch.with_tensors(**{IMAGE_EMBEDS: torch.cat(found)}), segments=segments)

    # ------------------------------------------------------------------------------------------ captions

    def _with_text(self, batches: Sequence[Batch], dropped: Sequence[Collection[int]]) -> list[Batch]:
        if self.edit is not None:
            with self.parts[self.edit.form.text.encoder].use() as encoder:
                assert isinstance(encoder, TextEncoder)
                return [
                    self._with_edited_text(encoder, self.edit, batch, without)
                    for batch, without in zip(batches, dropped, strict=True)
                ]
        if any(SHOWN in batch for batch in batches):
            raise TesseraError(
                "the batch shows the images to edit to the text encoder, and the encoders' folder has none that reads "
                "them",
                where="train.task_options.encoders.folder",
                fix="leave it out, or name the folder that model.path names",
            )
        found: list[list[list[TextEmbedding]]] = [[] for _ in batches]
        for number, name in enumerate(id_names(self.form)):
            with self.parts[self.form.text[number].encoder].use() as encoder:
                assert isinstance(encoder, TextEncoder)
                for into, batch, without in zip(found, batches, dropped, strict=True):
                    into.append(self._captions(encoder, number, batch, name, without))
        made = [self._joined_text(batch, by_encoder) for batch, by_encoder in zip(batches, found, strict=True)]
        return [self._with_own_empty(batch) for batch in made] if self.stores_empty else made

    def _with_own_empty(self, batch: Batch) -> Batch:
        """Return the batch with the empty caption of each sample, by the encoder that reads its frame, too: from where
        it differs from the caption."""
        number = next(at for at, one in enumerate(self.form.text) if one.shown is not None)
        form, name = self.form.text[number], id_names(self.form)[number]
        assert form.shown is not None, "one was found"
        captions = list(torch.split(batch[name], [*batch.segments[name].lengths]))
        with self.parts[form.encoder].use() as encoder:
            assert isinstance(encoder, TextEncoder)
            found = self._shown_to(encoder, batch, captions, captions[0].new_tensor(self.empty[number]), None)
        states = form.shown.states
        texts = [one.tokens[states:] for one in found if one.tokens is not None]
        made = self._with_segments(batch, EMPTY_TEXT, texts)
        starts = [torch.tensor([states][: len(ids)], dtype=torch.int64) for ids in captions]
        return self._with_segments(made, EMPTY_STARTS, starts)

    def _captions(
        self, encoder: TextEncoder, number: int, batch: Batch, name: str, dropped: Collection[int]
    ) -> list[TextEmbedding]:
        """Return what one text encoder makes of the captions of a batch."""
        captions = list(torch.split(batch[name], [*batch.segments[name].lengths]))
        # One caption more: a sharded encoder is called on every rank, also on one that has only padding.
        extra = captions[0].new_tensor(self.empty[number] if self.empty else [0])
        if encoder.form.shown is not None:
            return self._shown_to(encoder, batch, captions, extra, dropped)
        some = encoder.encode([*(ids for ids in captions if len(ids)), extra])
        rest = iter(some)
        blank = some[-1]
        by_sample = [next(rest) if len(ids) else _no_text(blank) for ids in captions]
        return [_fitted(blank, one) if at in dropped else one for at, one in enumerate(by_sample)]

    def _shown_to(
        self,
        encoder: TextEncoder,
        batch: Batch,
        captions: Sequence[Tensor],
        extra: Tensor,
        dropped: Collection[int] | None,
    ) -> list[TextEmbedding]:
        """Return what an encoder makes of captions that reads first frames, too. The empty caption is another one for
        each sample, since its frame is shown all the same. `dropped`: samples that get it, in the length of their own;
        None: all, as it is."""
        frames = iter(first_frames(batch))
        read = [number for number, ids in enumerate(captions) if len(ids)]
        chosen = [extra if dropped is None or number in dropped else captions[number] for number in read]
        shown = [next(frames) for _ in read]
        blank = torch.zeros(1, 1, 3, dtype=torch.uint8, device=extra.device)
        *some, last = encoder.encode([*chosen, extra], [*shown, blank])
        found = dict(zip(read, some, strict=True))
        if dropped is None:
            return [found.get(number, _no_text(last)) for number in range(len(captions))]
        wanted = [encoder.form.embeddings(len(ids)) if len(ids) else 0 for ids in captions]
        return [
            _sized(found[number], wanted[number]) if number in found else _no_text(last)
            for number in range(len(captions))
        ]

    def _with_edited_text(
        self, encoder: TextEncoder, edit: EditImages, batch: Batch, dropped: Collection[int]
    ) -> Batch:
        """Return the batch with the embeddings of captions with images."""
        name = id_names(self.form)[0]
        own = list(torch.split(batch[name], [*batch.segments[name].lengths]))
        empty = list(torch.split(batch[EMPTY_IDS], [*batch.segments[EMPTY_IDS].lengths])) if EMPTY_IDS in batch else own
        if any(len(ids) and not len(blank) for ids, blank in zip(own, empty, strict=True)) or (
            EMPTY_IDS not in batch and any(len(ids) for ids in own)
        ):
            raise TesseraError(
                f"the text encoder of a {edit.form.pipeline} reads the images to edit, and the batch shows none",
                where="train.task_options.encoders.folder",
                fix="leave it out, or name the folder that model.path names",
            )
        chosen = [blank if at in dropped else ids for at, (ids, blank) in enumerate(zip(own, empty, strict=True))]
        found = self._shown_captions(encoder, edit, batch, chosen)
        texts = [_cut_or_padded(text, _kept(ids, edit)) for text, ids in zip(found, own, strict=True)]
        made = self._with_segments(batch, "text", texts)
        if not self.stores_empty:
            return made
        # Tokens see those before them alone: up to where the captions begin to differ, the embeddings are the same.
        same = [_common(ids.tolist(), blank.tolist(), edit) for ids, blank in zip(own, empty, strict=True)]
        blanks = self._shown_captions(encoder, edit, batch, empty)
        made = self._with_segments(made, EMPTY_TEXT, [text[at:] for text, at in zip(blanks, same, strict=True)])
        starts = [torch.tensor([at][: len(ids)]) for at, ids in zip(same, own, strict=True)]
        return self._with_segments(made, EMPTY_STARTS, starts)

    def _shown_captions(
        self, encoder: TextEncoder, edit: EditImages, batch: Batch, captions: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the embeddings of captions [L, D] with the images of a batch, in one call; none for empty ids."""
        blank, grid = edit.blank(captions[0].device)
        shown, grids = (batch[SHOWN], batch[SHOWN_GRIDS]) if SHOWN in batch else (blank[:0], grid[:0])
        # One caption more: a sharded encoder is called on every rank, with an image, also where there is only padding.
        word: int = encoder.encoder.config.image_token_id  # type: ignore[union-attr, assignment]
        extra = captions[0].new_tensor([word])
        some = edit.encode(
            encoder,
            [*(ids for ids in captions if len(ids)), extra],
            torch.cat([shown, blank]),
            torch.cat([grids, grid]),
        )
        rows = [one.tokens for one in some if one.tokens is not None]
        rest = iter(rows)
        return [next(rest) if len(ids) else rows[-1][:0] for ids in captions]

    @staticmethod
    def _with_segments(batch: Batch, name: str, parts: Sequence[Tensor]) -> Batch:
        whole = torch.cat(list(parts)).to(batch["frames"].device)
        segments = Segments.of([len(part) for part in parts]).to(whole.device)
        return replace(batch.with_tensors(**{name: whole}), segments={**batch.segments, name: segments})

    def _joined_text(self, batch: Batch, found: Sequence[Sequence[TextEmbedding]]) -> Batch:
        whole = [joined(self.form.text, some) for some in zip(*found, strict=True)]
        tensors, segments = {}, dict(batch.segments)
        texts = [one.tokens for one in whole if one.tokens is not None]
        if texts:
            tensors["text"] = torch.cat(texts)
            segments["text"] = Segments.of([len(text) for text in texts]).to(tensors["text"].device)
        pooled = [one.pooled for one in whole if one.pooled is not None]
        if pooled:
            tensors["pooled"] = torch.stack(pooled)
        return replace(batch.with_tensors(**tensors), segments=segments)


def first_frames(batch: Batch) -> list[Tensor]:
    """Return the first frame, uint8 [H, W, 3], of each sample of a batch that has one."""
    return [video[0] for video in _split(batch["frames"], [shape for shape in batch.shapes["frames"] if shape[0]])]


def _sized(own: TextEmbedding, count: int) -> TextEmbedding:
    assert own.tokens is not None, "an encoder that reads frames gives the states of tokens"
    return TextEmbedding(_cut_or_padded(own.tokens, count), own.pooled)


def _no_text(like: TextEmbedding) -> TextEmbedding:
    tokens = None if like.tokens is None else like.tokens[:0]
    return TextEmbedding(tokens, None if like.pooled is None else torch.zeros_like(like.pooled))


def _fitted(empty: TextEmbedding, own: TextEmbedding) -> TextEmbedding:
    """Return the empty caption with as many embeddings as the sample's own has: rows are packed by their number."""
    if own.tokens is None or empty.tokens is None:
        return empty
    return TextEmbedding(_cut_or_padded(empty.tokens, len(own.tokens)), empty.pooled)


def without_captions(batch: Batch, dropped: Collection[int]) -> Batch:
    """Return a batch of features in which some samples have the empty caption: its features where the batch has them
    (`empty_text`, `empty_pooled`), and zeros otherwise. Where every sample has its own, it begins as the caption does:
    up to the row that `empty_starts` has."""
    changed = {}
    if EMPTY_STARTS in batch:
        names = ("text", EMPTY_TEXT, EMPTY_STARTS)
        texts, ends, starts = (list(torch.split(batch[name], [*batch.segments[name].lengths])) for name in names)
        for number in dropped:
            if len(starts[number]):
                begun = texts[number][: int(starts[number])]
                texts[number] = _cut_or_padded(torch.cat([begun, ends[number].to(begun)]), len(texts[number]))
        changed["text"] = torch.cat(texts)
    for name, lengths in (("text", list(batch.segments["text"].lengths)), ("pooled", 1)):
        if name in batch and name not in changed:
            own, empty = batch[name], batch.get(f"empty_{name}")
            empty = own[:0] if empty is None else empty.to(own)
            parts = list(torch.split(own, lengths))
            for number in dropped:
                parts[number] = _cut_or_padded(empty, len(parts[number]))
            changed[name] = torch.cat(parts)
    return batch.with_tensors(**changed)


def _kept(ids: Tensor, edit: EditImages) -> int:
    """Return how many embeddings a caption with images gives."""
    return max(0, len(ids) - edit.form.text.skip)


def _common(own: Sequence[int], other: Sequence[int], edit: EditImages) -> int:
    """Return how many embeddings two captions have in common at their beginning."""
    pairs = enumerate(zip(own, other, strict=False))
    first = next((at for at, (one, two) in pairs if one != two), min(len(own), len(other)))
    return max(0, first - edit.form.text.skip)


def _cut_or_padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows[:count], rows.new_zeros(max(0, count - len(rows)), rows.shape[1])])


def latent_lengths(batch: Batch, form: GenerationForm) -> list[int]:
    """Return the latent tokens of each segment of the main sequence, in which joint families have conditions, too."""
    lengths = batch.segments["latents"].lengths
    if not form.joint:
        return list(lengths)
    texts = batch.segments["text"].lengths
    embeds = batch.segments[IMAGE_EMBEDS].lengths if IMAGE_EMBEDS in batch.segments else [0] * len(texts)
    return [whole - text - more for whole, text, more in zip(lengths, texts, embeds, strict=True)]


def _split(pixels: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return images and videos [F, H, W, 3] of packed pixels."""
    counts = [frames * height * width for frames, height, width in shapes]
    return [part.view(*shape, 3) for part, shape in zip(torch.split(pixels, counts), shapes, strict=True)]


def _joined_rows(
    tokens: Mapping[int, Sequence[Tensor]], sizes: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """Return the tokens of all segments as one tensor; what segments lack is zero."""
    found = torch.zeros(sum(sizes), width, device=device)
    at = 0
    for number, size in enumerate(sizes):
        own = torch.cat(list(tokens[number])) if number in tokens else found[:0]
        if len(own) > size:
            raise TesseraError(f"a sample of {len(own)} latent tokens in a segment of {size}", where="data.processor")
        found[at : at + len(own)] = own
        at += size
    return found


# ---------------------------------------------------------------------------------------------- given frames


def given_channels(
    form: GenerationForm,
    vae: Autoencoder,
    video: Tensor,
    latents: Sequence[int],
    given: Given,
    disturb: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the channels that tell a model the given frames of a video, as tokens. `disturb` changes the pixels of a
    first frame, which lie between -1 and 1."""
    pixels = video.float() / 127.5 - 1
    if form.condition != "mask_channels":  # the latents of the first image, and zeros for later frames
        (first,) = vae.encode([pixels[:1] if disturb is None else disturb(pixels[:1])])
        if form.condition == "channels_mask":
            first = torch.cat([first, torch.ones_like(first[:1])])
        whole = first.new_zeros(first.shape[0], *latents[1:])
        whole[:, : first.shape[1]] = first
        return patchify(whole, form.patch)
    kept = torch.zeros_like(pixels)  # in the middle between black and white
    kept[0] = pixels[0]
    if given == "first_last":
        kept[-1] = pixels[-1]
    (encoded,) = vae.encode([kept])
    mask = given_mask(vae.form, len(video), latents[2:], given).to(encoded)
    return patchify(torch.cat([mask, encoded]), form.patch)


def given_mask(vae: VaeForm, frames: int, size: Sequence[int], given: Given) -> Tensor:
    """Return [time_stride, f, h, w] with 1 where a frame is given: a channel for each frame of a latent frame. The
    first latent frame stands for one frame, which fills all channels."""
    given_frames = torch.zeros(frames + vae.time_stride - 1)
    given_frames[: vae.time_stride] = 1
    if given == "first_last":
        given_frames[-1] = 1
    by_latent = given_frames.view(-1, vae.time_stride).T
    return by_latent[:, :, None, None].expand(-1, -1, *size)

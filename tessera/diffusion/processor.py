"""Process samples of generation families, from images and videos with captions or from stored features, into packed
batches.

A sample is a caption, perhaps with images to edit, and the image or video to generate. Media are resized to cover their
target size and center-cropped; target sizes follow from file headers. Rows are packed by tokens of the main sequence:
latents, and in joint families also text.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.config.reader import build
from tessera.core.batch import Batch
from tessera.core.sample import MediaSize, PartKind, Sample
from tessera.data.media.images import to_rgb
from tessera.data.media.video_frames import VideoSampling
from tessera.diffusion.autoencoders import VAE
from tessera.diffusion.batches import IMAGE_EMBEDS, pack
from tessera.diffusion.captions import CaptionTokenizer, cut_or_padded
from tessera.diffusion.edit_images import (
    EMPTY_IDS,
    SHOWN,
    SHOWN_GRIDS,
    EditImages,
    EditReader,
    edit_of_folder,
    reference_size,
    resized,
)
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.feature_facts import check_made_for
from tessera.diffusion.feature_folder import StoredSample
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, frame_embeddings
from tessera.diffusion.given_images import Grid
from tessera.diffusion.samples import CaptionedSample, EncodedMedia, GenerationOptions
from tessera.errors import TesseraError
from tessera.models.files.side_files import copy_side_files
from tessera.models.processing.streams import media_size
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import pipeline_folder


@dataclass(frozen=True, eq=False)
class GenerationProcessor:
    """Turn captions and media into batches of a generation model."""

    version: ClassVar[str] = "generation 2"  # changes when a release makes different batches from the same options

    family: GenerationFamily
    options: GenerationOptions
    stride: tuple[int, int] | None  # frames and pixels per latent; None: unknown, which stored features allow
    tokenizers: tuple[CaptionTokenizer, ...]  # one for each text encoder; empty if the folder has no tokenizers
    folder: Path | None = None  # diffusers folder with tokenizers and VAE
    images_only: bool = False  # whether the VAE encodes only images
    edit: EditReader | None = None  # set for pipelines whose text encoder reads the images to edit
    # number of embeddings that the image encoder adds to the main sequence for a conditioning frame; None: unknown
    embeds: int | None = None

    @classmethod
    def load(cls, family: GenerationFamily, folder: Path | None, **options: Any) -> Self:
        """Return the processor of a diffusers folder. A folder with only the transformer is enough for training on
        features."""
        options.pop("train_on", None)  # an option of conversation data, unused here
        chosen = build(GenerationOptions, options, "data.processor")
        folder = None if folder is None else pipeline_folder(folder) or folder
        stride, images_only, edit, embeds = chosen.vae_stride, False, None, None
        tokenizers: tuple[CaptionTokenizer, ...] = ()
        if folder is not None and stride is None and (folder / VAE / "config.json").is_file():
            config = folder / VAE / "config.json"
            vae = family.vae_form(read_json_mapping(config), str(config))
            stride, images_only = (vae.time_stride, vae.space_stride), vae.images_only
        if folder is not None and any((folder / reader.tokenizer).is_dir() for reader in family.captions):
            tokenizers = tuple(CaptionTokenizer.load(folder, reader) for reader in family.captions)
            published = edit_of_folder(folder, family.edits)
            if published is not None:
                images = EditImages.load(folder, published, chosen.reference_pixels)
                edit = EditReader(images, CaptionTokenizer(published.captions, tokenizers[0].json))
        if folder is not None and family.embeds_in_sequence and (folder / IMAGE_ENCODER).is_dir():
            embeds = frame_embeddings(folder)
        processor = cls(family, chosen, stride, tokenizers, folder, images_only, edit, embeds)
        if stride is not None and chosen.height is not None and chosen.width is not None:
            processor.fit(chosen.width, chosen.height)  # raises if the model does not support this size
        return processor

    # ------------------------------------------------------------------------------------------ sizes

    @cached_property
    def sampling(self) -> VideoSampling:
        """Return how frames of a video are sampled: their number is 1 plus a multiple of the VAE's time stride."""
        time = 1 if self.stride is None else self.stride[0]
        return VideoSampling(self.options.fps, 1, self.options.num_frames, multiple=time, rule="pace")

    @property
    def _strides(self) -> tuple[int, int]:
        if self.stride is None:
            raise TesseraError(
                "the VAE's strides from pixels to latents are unknown, because the model's folder has no VAE",
                where="model.path",
                fix="set model.path to the folder of a diffusers pipeline; or set data.processor.vae_stride=[4,8] "
                "(frames and pixels per latent); or train on features (tessera data features)",
                code="generation.unknown-vae-stride",
            )
        return self.stride

    @property
    def _unit(self) -> tuple[int, int]:
        """Return the height and width in pixels of the image area that becomes one token."""
        space = self._strides[1]
        return space * self.family.patch[1], space * self.family.patch[2]

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image or frame of this size is resized and cropped."""
        tall, wide = self._unit
        options = self.options
        if options.height is not None and options.width is not None:
            if options.height % tall or options.width % wide:
                near = [
                    max(1, round(side / unit)) * unit for side, unit in ((options.height, tall), (options.width, wide))
                ]
                raise TesseraError(
                    f"{options.width}x{options.height} pixels are not a multiple of the patch size {wide}x{tall}",
                    where="data.processor.height",
                    fix=f"set height={near[0]} and width={near[1]}",
                    code="generation.size-not-whole-patches",
                )
            return options.width, options.height
        scale = min(1.0, math.sqrt(options.max_pixels / (width * height)))
        size = int(width * scale + 1e-6) // wide * wide, int(height * scale + 1e-6) // tall * tall
        if 0 in size:
            raise TesseraError(
                f"{width}x{height} pixels are smaller than one patch of {wide}x{tall}",
                fix="remove this sample, or set data.processor.height and width, which enlarges media",
                code="media.smaller-than-patch",
            )
        return size

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int]:
        width, height = self.fit(size.width, size.height)
        scale = max(width / size.width, height / size.height)
        return max(width, round(size.width * scale)), max(height, round(size.height * scale))

    def frames(self, taken: int) -> int:
        """Return how many of `taken` frames of a video are used: the largest number that fills complete patches."""
        time, patch = self._strides[0], self.family.patch[0]
        latents = ((taken - 1) // time + 1) // patch * patch
        if latents == 0:
            raise TesseraError(
                f"{taken} frames do not fill one patch of {patch} latent frames",
                fix="use a longer video",
                code="media.fewer-frames-than-patch",
            )
        return 1 + time * (latents - 1)

    def grid(self, size: MediaSize) -> Grid:
        """Return the size of an image or video in patches: frames, rows and columns."""
        width, height = self.fit(size.width, size.height)
        tall, wide = self._unit
        latents = (self.frames(size.frames) - 1) // self._strides[0] + 1
        return latents // self.family.patch[0], height // tall, width // wide

    @cached_property
    def fingerprint(self) -> str:
        facts: list[Any] = [self.version, self.family.fingerprint_fields(), self.options.model_dump(), self.stride]
        facts += [self.images_only, self.embeds, [tokenizer.json for tokenizer in self.tokenizers]]
        if self.edit is not None:
            facts += [self.edit.images.edit.facts(), asdict(self.edit.images.patches)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------ one sample

    def check_tokenizers(self) -> None:
        """Raise if the family reads captions and its tokenizers are missing."""
        if self.family.captions and not self.tokenizers:
            names = ", ".join(reader.tokenizer for reader in self.family.captions)
            raise TesseraError(
                f"captions cannot be tokenized: {names} missing",
                where="model.path or model.tokenizer",
                fix="set model.tokenizer to the folder of a complete diffusers pipeline",
                code="generation.missing-tokenizer",
            )

    def tokenize(self, caption: str) -> tuple[list[list[int]], bool]:
        """Return the token ids of a caption for each text encoder, and whether the caption was truncated."""
        self.check_tokenizers()
        full = [tokenizer.ids(caption) for tokenizer in self.tokenizers]
        cut = [tokenizer.cut(ids) for tokenizer, ids in zip(self.tokenizers, full, strict=True)]
        # The text encoder with the largest maximum length decides whether a caption counts as truncated.
        main = max(range(len(cut)), key=lambda number: self.family.captions[number].length)
        too_long = len(cut[main]) < len(full[main])
        if too_long and self.options.long_captions == "leave_out":
            raise TesseraError(
                f"the caption has {len(full[main])} tokens; the model reads at most {len(cut[main])}",
                fix="shorten the caption, or set data.processor.long_captions=cut",
                code="generation.caption-over-tokens",
            )
        return cut, too_long

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        request = CaptionedSample.of(sample)
        if isinstance(request.wanted.value, StoredSample):
            return self._with_pairs(self._stored_counts(request.wanted.value))
        ids, too_long = self._ids(request, sizes)
        return self._with_pairs(self._counts(request, ids, sizes), too_long)

    def _counts(
        self, request: CaptionedSample, ids: Sequence[Sequence[int]], sizes: Sequence[MediaSize]
    ) -> dict[str, int]:
        kind, size = request.wanted.kind, sizes[-1]
        if kind == "video" and self.images_only:
            raise TesseraError(
                "the sample is a video, and the VAE of this model encodes only images",
                fix="use images, or a model for videos",
                code="media.video-for-image-model",
            )
        if kind == "video" and self.frames(size.frames) < self.options.min_frames:
            raise TesseraError(
                f"only {self.frames(size.frames)} of the {size.total} frames of this video are used at this fps, but "
                f"min_frames is {self.options.min_frames}",
                fix="lower data.processor.min_frames, or raise fps",
                code="media.too-few-frames",
            )
        grids = self._grids(request, sizes)
        frames = self.frames(size.frames) if kind == "video" else 0
        counts = self._sequence_counts(self._text(ids), grids, self._embeds())
        return {**counts, "images": len(request.references) + int(kind == "image"), "frames": frames}

    def _embeds(self) -> int:
        """Return how many embeddings of a conditioning frame are in the main sequence."""
        if not self.family.embeds_in_sequence:
            return 0
        return self.embeds if self.embeds is not None else frame_embeddings(self.folder)

    def _sequence_counts(self, text: int, grids: Sequence[Grid], embeds: int) -> dict[str, int]:
        latents = sum(math.prod(grid) for grid in grids)
        tokens = latents + (text + embeds if self.family.joint else 0)
        return {
            "samples": 1,
            "tokens": tokens,
            "latents": latents,
            "text": text,
            "trained": math.prod(grids[0]),
        }

    def _with_pairs(self, counts: Mapping[str, int], too_long: bool = False) -> dict[str, int]:
        """Add the numbers of query-key pairs of self-attention and of cross attention to text, to estimate costs."""
        tokens, text = counts["tokens"], 0 if self.family.joint else counts["text"]
        return {**counts, "token_pairs": tokens**2, "text_pairs": tokens * text, "cut_captions": int(too_long)}

    def _grids(self, request: CaptionedSample, sizes: Sequence[MediaSize]) -> list[Grid]:
        """Return the size in patches of the image or video to generate, and of each image to edit."""
        references = [sizes[index] for index in request.references]
        if references and not self.family.joint:
            raise TesseraError(
                f"this model does not edit images, and the sample has {len(references)} to edit",
                fix="remove the images to edit, or use a model that edits images",
                code="generation.model-edits-no-images",
            )
        if references and self.family.edits and self.edit is None:
            names = ", ".join(edit.pipeline for edit in self.family.edits)
            raise TesseraError(
                "to edit images, the text encoder must read them, but the pipeline of model.path gives it only text",
                fix=f"set model.path to the folder of a {names}",
                code="generation.not-an-edit-pipeline",
            )
        grids = [self.grid(sizes[-1]), *(self._reference_grid(size) for size in references)]
        self.family.check_grids(grids)
        return grids

    def _reference_size(self, size: MediaSize) -> tuple[int, int]:
        """Return the width and height to which an image to edit is resized."""
        if self.edit is not None:
            return self.edit.images.size(size.width, size.height)
        if self.options.reference_pixels is None:
            return self.fit(size.width, size.height)
        tall, wide = self._unit
        return reference_size(size.width, size.height, self.options.reference_pixels, math.lcm(tall, wide, 32))

    def _reference_grid(self, size: MediaSize) -> Grid:
        (width, height), (tall, wide) = self._reference_size(size), self._unit
        if height % tall or width % wide:
            raise TesseraError(
                f"the size {width}x{height} of an image to edit is not a multiple of the patch size {wide}x{tall}",
                code="generation.edit-image-not-whole-patches",
            )
        return 1, height // tall, width // wide

    def whole_media(self, sample: Sample) -> Sequence[int]:
        """Return the indices of the images to edit that must be decoded at their full size."""
        sized = self.edit is not None or self.options.reference_pixels is not None
        return range(len(sample.media()) - 1) if sized else ()

    def _ids(self, request: CaptionedSample, sizes: Sequence[MediaSize]) -> tuple[list[list[int]], bool]:
        """Return the token ids of a caption for each text encoder, including tokens of images to edit, and whether it
        was truncated."""
        if self.edit is None:
            return self.tokenize(request.caption)
        return [self.edit.ids(request.caption, self._image_sizes(request, sizes))], False

    @staticmethod
    def _image_sizes(request: CaptionedSample, sizes: Sequence[MediaSize]) -> list[tuple[int, int]]:
        return [(sizes[index].width, sizes[index].height) for index in request.references]

    def _text(self, ids: Sequence[Sequence[int]]) -> int:
        """Return the number of text embeddings that the model reads. `ids`: token ids for each text encoder."""
        if self.edit is not None:
            return self.edit.images.embeddings(len(ids[0]))
        return self.family.text_length([len(numbers) for numbers in ids])

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> EncodedMedia:
        request = CaptionedSample.of(sample)
        if isinstance(request.wanted.value, StoredSample):
            return self._encode_stored(sample.id, request.wanted.value, media[-1])
        sizes = [media_size(item) for item in media] if sizes is None else sizes
        ids, _ = self._ids(request, sizes)
        counts = self._counts(request, ids, sizes)
        grids = self._grids(request, sizes)
        tensors = {
            name: torch.tensor(numbers, dtype=torch.int64)
            for name, numbers in zip(self.family.id_names, ids, strict=True)
        }
        tensors["frames"] = self._frames(media[-1], request.wanted.kind, sizes[-1])
        images = [self._reference(media[index], sizes[index]) for index in request.references]
        if self.edit is not None:
            image_sizes, reader = self._image_sizes(request, sizes), self.edit.images
            tensors[SHOWN] = torch.cat([reader.cut(to_rgb(media[index])) for index in request.references])
            tensors[SHOWN_GRIDS] = torch.tensor([reader.grid(*size) for size in image_sizes])
            tensors[EMPTY_IDS] = torch.tensor(self.edit.ids("", image_sizes, may_be_empty=True), dtype=torch.int64)
        more = (tuple(grids[1:]), counts, tuple(images), self._embeds())
        return EncodedMedia(sample.id, counts["tokens"], grids[0], counts["text"], tensors, *more)

    def _reference(self, media: Any, size: MediaSize) -> Tensor:
        """Return an image to edit, uint8 [1, H, W, 3]."""
        if self.edit is None and self.options.reference_pixels is None:
            return self._frames(media, "image", size)
        return torch.from_numpy(np.array(resized(to_rgb(media), self._reference_size(size)))).unsqueeze(0)

    def _frames(self, media: Any, kind: PartKind, size: MediaSize) -> Tensor:
        """Return frames, uint8 [F, H, W, 3], resized to cover the target size and center-cropped."""
        width, height = self.fit(size.width, size.height)
        cover = self.target(kind, size)
        images = [to_rgb(media)] if isinstance(media, Image.Image) else list(map(Image.fromarray, media))
        images = images[: self.frames(len(images))]
        start, top = (cover[0] - width) // 2, (cover[1] - height) // 2
        frames = np.empty((len(images), height, width, 3), dtype=np.uint8)
        for into, image in zip(frames, images, strict=True):
            covering = image if image.size == cover else image.resize(cover, Image.Resampling.BICUBIC)
            into[:] = np.asarray(covering)[top : top + height, start : start + width]
        return torch.from_numpy(frames)

    # ------------------------------------------------------------------------------------------ features

    def _stored_counts(self, stored: StoredSample) -> dict[str, int]:
        clean, text = stored.shape("clean"), stored.shape("text")
        latents, values = sum(math.prod(grid) for grid in stored.grids), self.family.patch_values
        if clean != (latents, values) or text is None:
            raise TesseraError(
                f"latents in {stored.file.name} have the shape {clean}, and the model reads {latents} tokens of "
                f"{values} values: {self.family.channels} channels in patches of {self.family.patch}",
                fix="make the features with the VAE of this model: tessera data features",
                code="data.features-shape-mismatch",
            )
        length = max(text[0], self.family.zeros_to)
        return {**self._sequence_counts(length, stored.grids, self._stored_embeds(stored)), "images": 0, "frames": 0}

    def _stored_embeds(self, stored: StoredSample) -> int:
        """Return how many embeddings of a conditioning frame a sample of stored features has in the main sequence."""
        shape = stored.shape(IMAGE_EMBEDS) if self.family.embeds_in_sequence else (0,)
        if shape is None:
            raise TesseraError(
                f"{stored.file.name} has no embeddings of the first frame, which this model needs",
                fix="make the features with train.task_options.given=first: tessera data features",
                code="data.features-without-frame-embeddings",
            )
        return shape[0]

    def _encode_stored(self, id: str, stored: StoredSample, features: Mapping[str, Tensor]) -> EncodedMedia:
        counts, grids = self._stored_counts(stored), stored.grids
        tensors = {**features, "text": cut_or_padded(features["text"], counts["text"])}
        more = (grids[1:], counts, (), self._stored_embeds(stored))
        return EncodedMedia(id, counts["tokens"], grids[0], counts["text"], tensors, *more)

    def check_features(self, facts: Mapping[str, Any], where: str) -> None:
        edit = None if self.edit is None else self.edit.images.edit
        check_made_for(self.family, edit, self.folder, facts, where, knows_pipeline=bool(self.tokenizers))

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[EncodedMedia]], length: int) -> Batch:
        segments: list[EncodedMedia] = []
        for row in rows:
            used = sum(item.length for item in row)
            assert used <= length, "the packer keeps rows within the length"
            segments += [*row, *([EncodedMedia("", length - used)] if used < length else [])]
        return self.pack(segments)

    def hole(self, id: str, length: int, like: Mapping[str, Tensor] | None = None) -> EncodedMedia:
        """Return a sample of zeros in place of an unreadable sample.

        `like`: empty tensors that define widths and dtypes, in case that no sample of the batch is readable.
        """
        counts = {"clean": length, "condition": length, "pooled": 1}
        empty = {} if like is None else like
        tensors = {name: some.new_zeros(counts.get(name, 0), *some.shape[1:]) for name, some in empty.items()}
        return EncodedMedia(id, length, tensors=tensors)

    def pack(self, items: Sequence[EncodedMedia]) -> Batch:
        """Return samples as one packed batch with a segment each."""
        return pack(self.family, items)

    # ------------------------------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        """Write the tokenizers and the configurations of VAE and image encoder, with the names of a diffusers
        folder."""
        for tokenizer in self.tokenizers:
            name = tokenizer.captions.tokenizer
            if self.folder is not None and (self.folder / name).is_dir():
                copy_side_files(self.folder / name, folder / name)
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        if self.edit is not None and self.folder is not None:
            self.edit.images.save(self.folder, folder)
        for part in (VAE, *([] if self.embeds is None else [IMAGE_ENCODER])):
            config, target = None if self.folder is None else self.folder / part / "config.json", folder / part
            if config is not None and config.is_file() and config.resolve() != (target / "config.json").resolve():
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(config, target / "config.json")

"""Wrap the frozen components of a diffusers folder: a VAE and text encoders, each behind one small interface.

Their classes are those of diffusers and transformers. A folder names them, and only the classes that are listed here
are made: a file must not choose what is imported. Weights are read from safetensors files alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tessera.data.tokenizer import load_tokenizer
from tessera.diffusion.forms import GenerationForm, ShownFrame, TextForm
from tessera.diffusion.frame_encoder import IMAGE_ENCODER, SIGLIP, FrameEncoder, FrameForm, prepared, read_frame_form
from tessera.errors import TesseraError, first_line, foreign_values, nearest
from tessera.runtime.log import without_bars
from tessera.weights.layouts import DiffusersFolder

VAE = "vae"
VAES = (
    *("AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLHunyuanVideo"),
    *("AutoencoderKLHunyuanVideo15", "AutoencoderKLCogVideoX", "AutoencoderKLLTXVideo"),
)
ENCODERS = (
    *("T5EncoderModel", "UMT5EncoderModel", "CLIPTextModel", "CLIPTextModelWithProjection", "LlamaModel"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextModel", "CLIPVisionModel", "CLIPVisionModelWithProjection"),
    *(SIGLIP, "LlavaForConditionalGeneration"),
)
_IMAGES_ONLY = "AutoencoderKL"  # has no dimension for frames
_MOST_PIXELS = 1 << 25  # of one call of a VAE: about 80 frames of 480 x 832


@dataclass(frozen=True)
class VaeForm:
    """Describe the latents of a VAE, as its config.json does: what turns sizes in pixels into sizes in latents."""

    channels: int
    time_stride: int  # frames that one latent frame stands for; the first frame has one to itself
    space_stride: int
    # Latents as transformers read them are (latents - mean) / std, by channel.
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    images_only: bool = False
    one_by_one: bool = False  # whether the library's class takes one video at a time only
    timed_decoder: bool = False  # whether the decoder removes the last noise: it is given a time of zero

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return frames, rows and columns of the latents."""
        return (frames - 1) // self.time_stride + 1, height // self.space_stride, width // self.space_stride

    @staticmethod
    def of(config: Mapping[str, Any], where: str) -> VaeForm:
        """Return the form of a VAE by its config.json."""
        name = config.get("_class_name")
        if name not in VAES:
            raise _unknown("VAE", name, VAES, where)
        with foreign_values(where):
            levels = 2 ** (len(config.get("block_out_channels", (0, 0, 0, 0))) - 1)
            if name in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
                down = config.get("temperal_downsample", (False, True, True))
                time, space = 2 ** sum(map(bool, down)), 2 ** len(down)
                if name == "AutoencoderKLWan":
                    time, space = config.get("scale_factor_temporal") or 4, config.get("scale_factor_spatial") or 8
                mean, std = _floats(config["latents_mean"]), _floats(config["latents_std"])
                return VaeForm(int(config["z_dim"]), int(time), int(space), mean, std)
            channels = int(config["latent_channels"])
            scale = float(config.get("scaling_factor") or 1.0)
            std = (1 / scale,)
            if name == _IMAGES_ONLY:
                return VaeForm(channels, 1, levels, (float(config.get("shift_factor") or 0.0),), std, images_only=True)
            if name == "AutoencoderKLLTXVideo":  # the mean and the standard deviation are in the weights
                down = [bool(one) for one in config.get("spatio_temporal_scaling", (True, True, True, False))]
                patch, patch_t = int(config.get("patch_size", 4)), int(config.get("patch_size_t", 1))
                space = config.get("spatial_compression_ratio") or patch * 2 ** sum(down)
                time = config.get("temporal_compression_ratio") or patch_t * 2 ** sum(down)
                return VaeForm(
                    channels, int(time), int(space), std=std, timed_decoder=bool(config.get("timestep_conditioning"))
                )
            space = levels if name == "AutoencoderKLCogVideoX" else config["spatial_compression_ratio"]
            alone = name == "AutoencoderKLHunyuanVideo15"  # its attention has the mask of a single video
            return VaeForm(channels, int(config["temporal_compression_ratio"]), int(space), std=std, one_by_one=alone)


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


class Autoencoder(nn.Module):
    """Turn images and videos into latents as transformers read them, and back."""

    def __init__(self, vae: nn.Module, form: VaeForm) -> None:
        super().__init__()
        self.vae = vae
        self.form = form

    @property
    def dtype(self) -> torch.dtype:
        return next(self.vae.parameters()).dtype

    def spare_memory(self, *, tiling: bool, slicing: bool) -> None:
        """Say whether large frames are taken in overlapping tiles, and a batch one by one: either takes less memory.
        Where neither is asked for, a class does what it does by itself."""
        for wanted, name in ((tiling, "tiling"), (slicing, "slicing")):
            if wanted:
                getattr(self.vae, f"enable_{name}")()

    def encode(self, videos: Sequence[Tensor]) -> list[Tensor]:
        """Return the latents [C, f, h, w] in fp32 of each video [F, H, W, 3]: uint8, or pixels between -1 and 1. Videos
        of one shape share a call."""
        found: dict[int, Tensor] = {}
        for numbers in self._together(videos, 1):
            frames = torch.stack([videos[n] for n in numbers])
            if not frames.is_floating_point():
                frames = frames.to(torch.float32) / 127.5 - 1
            pixels = frames.permute(0, 4, 1, 2, 3).to(self.dtype)
            found.update(zip(numbers, self(pixels).unbind(), strict=True))
        return [found[n] for n in range(len(videos))]

    def decode(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Return the videos, uint8 [F, H, W, 3], of latents [C, f, h, w]."""
        found: dict[int, Tensor] = {}
        for numbers in self._together(latents, self.form.time_stride * self.form.space_stride**2):
            pixels = self(torch.stack([latents[n] for n in numbers]), "decode")
            frames = ((pixels.to(torch.float32) / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            found.update(zip(numbers, frames.permute(0, 2, 3, 4, 1).unbind(), strict=True))
        return [found[n] for n in range(len(latents))]

    def forward(self, values: Tensor, direction: Literal["encode", "decode"] = "encode") -> Tensor:
        """Return latents of pixels [B, 3, F, H, W] between -1 and 1, or pixels of latents. Both ways pass here, because
        a sharded module gathers its weights when it is called."""
        mean, scale = self._statistics(values.device)
        frames = values.shape[2]
        if self.form.images_only and frames != 1:
            raise TesseraError(f"this VAE encodes images, and was given {frames} frames", where=VAE)
        if direction == "decode":
            values = (values.to(torch.float32) * scale + mean).to(self.dtype)
        values = values.squeeze(2) if self.form.images_only else values
        if direction == "decode":
            timed = {"temb": values.new_zeros(len(values))} if self.form.timed_decoder else {}
            pixels: Tensor = self.vae.decode(values, return_dict=False, **timed)[0]  # type: ignore[operator]
            return pixels.unsqueeze(2) if self.form.images_only else pixels
        # The mode, not a draw: features that are written once are then what is computed in every step.
        latents = self.vae.encode(values).latent_dist.mode()  # type: ignore[operator]
        latents = latents.unsqueeze(2) if self.form.images_only else latents
        return (latents.to(torch.float32) - mean) / scale  # type: ignore[no-any-return]

    def _together(self, tensors: Sequence[Tensor], scale: int) -> list[list[int]]:
        """Return the numbers of tensors of one shape, so many that one call can take them; `scale`: pixels by value."""
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            by_shape[tuple(tensor.shape)].append(number)
        found = []
        for numbers in by_shape.values():
            pixels = scale * tensors[numbers[0]].numel() // 3
            most = 1 if self.form.one_by_one else max(1, _MOST_PIXELS // max(1, pixels))
            found += [numbers[at : at + most] for at in range(0, len(numbers), most)]
        return found

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(some, device=device).view(1, -1, 1, 1, 1) for some in (self.form.mean, self.form.std))
        buffers = dict(self.vae.named_buffers(recurse=False))
        if "latents_mean" in buffers:  # of LTX-Video
            mean, own = (buffers[name].float().view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
            std = own * std
        return mean, std


@dataclass(frozen=True)
class TextEmbedding:
    """Hold what one text encoder makes of a caption. None: the family does not read it."""

    tokens: Tensor | None  # [L, D]
    pooled: Tensor | None  # [D]


class TextEncoder(nn.Module):
    """Turn captions, as token ids, into embeddings as a family reads them."""

    def __init__(
        self, encoder: nn.Module, form: TextForm, pad: int = 0, frames: FrameForm | None = None, mark: int = -1
    ) -> None:
        """Make the encoder. `frames`: how frames are prepared for one that reads them, too; `mark`: the id of the word
        that ends what asks for an answer."""
        super().__init__()
        self.encoder = encoder
        self.form = form
        self.pad = pad
        self.frames = frames
        self.mark = mark

    def encode(
        self, captions: Sequence[Tensor], frames: Sequence[Tensor] = (), every: int | None = None
    ) -> list[TextEmbedding]:
        """Return the embeddings of captions, each [ids] with its template and without padding.

        `frames`: the first one of each sample for an encoder that reads them, too, uint8 [H, W, 3], or floats [3, H, W]
        as they are prepared for it. `every`: of the states of a frame, the first of so many; default: as the form says.
        """
        form = self.form
        captions = [ids[: form.length + form.skip] for ids in captions]
        if not captions:
            return []
        if form.shown is not None:
            shown = form.shown if every is None else replace(form.shown, every=every)
            return self._encode_shown(captions, frames, shown)
        longest = max(len(ids) for ids in captions)
        length = form.length + form.skip if form.padding in ("encoded", "read") else max(longest, 1)
        ids = captions[0].new_full((len(captions), length), self.pad)
        for row, caption in zip(ids, captions, strict=True):
            row[: len(caption)] = caption
        counts = torch.tensor([len(caption) for caption in captions], device=ids.device)
        mask = torch.arange(length, device=ids.device) < counts[:, None]
        tokens, pooled = self(ids, mask.long() if form.masked else None)
        return [
            TextEmbedding(
                None if tokens is None else self._kept(tokens[n], len(caption)), None if pooled is None else pooled[n]
            )
            for n, caption in enumerate(captions)
        ]

    def forward(self, ids: Tensor, mask: Tensor | None, **images: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the embeddings of tokens [B, L, D] and of whole captions [B, D]. `images`: what an encoder is told of
        images that stand in the captions."""
        form = self.form
        deep = form.tokens and form.layer != -1
        found = self.encoder(
            input_ids=ids, attention_mask=mask, output_hidden_states=deep or _has_no_output(self), **images
        )
        pooled = None
        if form.pooled:
            pooled = found.text_embeds if "text_embeds" in found else found.pooler_output
        if not form.tokens:
            return None, pooled
        shown = found.hidden_states[form.layer] if deep or _has_no_output(self) else found.last_hidden_state
        return shown, pooled

    def _encode_shown(
        self, captions: Sequence[Tensor], frames: Sequence[Tensor], shown: ShownFrame
    ) -> list[TextEmbedding]:
        """Return the states of frames and captions: a frame stands in its caption as so many tokens."""
        assert self.frames is not None, "whoever reads frames knows how they are prepared"
        word: int = self.encoder.config.image_token_id  # type: ignore[union-attr, assignment]
        places = [int((ids == word).nonzero()[0]) for ids in captions]
        longest, more = max(len(ids) for ids in captions), shown.tokens - 1
        ids = captions[0].new_full((len(captions), longest + more), self.pad)
        mask = torch.zeros_like(ids)
        for row, kept, caption, at in zip(ids, mask, captions, places, strict=True):
            row[: len(caption) + more] = torch.cat([caption[:at], caption[at].expand(shown.tokens), caption[at + 1 :]])
            kept[: len(caption) + more] = 1
        ready = (one if one.is_floating_point() else prepared(one, self.frames) for one in frames)
        pixels = torch.stack(list(ready))
        dtype = next(self.encoder.parameters()).dtype
        states, _ = self(ids, mask, pixel_values=pixels.to(dtype), logits_to_keep=1, use_cache=False)
        assert states is not None, "the states of tokens are read"
        found = []
        for state, caption, at in zip(states, captions, places, strict=True):
            marks = (caption == self.mark).nonzero().flatten().tolist()
            last = marks[-1] if len(marks) > 2 else len(caption) - 1  # the end of a long caption is cut off
            text = state[more:]  # numbered as the caption is, behind its frame
            parts = [text[self.form.skip : last + 1 - shown.closing], text[last + 1 : len(caption)]]
            found.append(TextEmbedding(torch.cat([state[at : at + shown.tokens : shown.every], *parts]), None))
        return found

    def _kept(self, tokens: Tensor, ids: int) -> Tensor:
        if self.form.padding != "encoded":
            tokens = tokens[:ids]
        tokens = tokens[self.form.skip :]
        missing = self.form.length - len(tokens) if self.form.padding == "zeros" else 0
        return torch.cat([tokens, tokens.new_zeros(missing, tokens.shape[1])]) if missing > 0 else tokens


def _has_no_output(encoder: TextEncoder) -> bool:
    """Return whether a class returns logits, beside hidden states, and no `last_hidden_state`."""
    return type(encoder.encoder).__name__.endswith("ForConditionalGeneration")


def joined(forms: Sequence[TextForm], found: Sequence[TextEmbedding]) -> TextEmbedding:
    """Return one caption's embeddings by all encoders as one: tokens one after another, or beside those before; shorter
    ones get zeros as further features."""
    rows: list[Tensor] = []
    for form, embedding in zip(forms, found, strict=True):
        if embedding.tokens is not None:
            if form.beside:
                rows[-1] = torch.cat([rows[-1], embedding.tokens.to(rows[-1])], -1)
            else:
                rows.append(embedding.tokens)
    pooled = [embedding.pooled for embedding in found if embedding.pooled is not None]
    width = max((tokens.shape[1] for tokens in rows), default=0)
    wide = [nn.functional.pad(tokens, (0, width - tokens.shape[1])) for tokens in rows]
    return TextEmbedding(torch.cat(wide) if wide else None, torch.cat(pooled) if pooled else None)


@dataclass(frozen=True)
class PipelineFolder:
    """Find and make the frozen components of a diffusers folder. Nothing is read before a component is asked for."""

    folder: Path

    def vae_form(self) -> VaeForm:
        layout = self._layout()
        return VaeForm.of(layout.config(VAE), str(layout.component_folder(VAE)))

    def autoencoder(
        self, *, dtype: torch.dtype = torch.float32, tiling: bool = False, slicing: bool = False, meta: bool = False
    ) -> Autoencoder:
        """Return the VAE on the host. `tiling`, `slicing`: encode large frames in overlapping tiles, and a batch one by
        one, which takes less memory. `meta`: without weights, on the meta device."""
        made = Autoencoder(self._component(VAE, "diffusers", VAES, dtype, meta), self.vae_form())
        made.spare_memory(tiling=tiling, slicing=slicing)
        return made

    def text_encoder(self, form: TextForm, *, dtype: torch.dtype = torch.float32, meta: bool = False) -> TextEncoder:
        """Return one of the text encoders, as `autoencoder` does."""
        encoder = self._component(form.encoder, "transformers", ENCODERS, dtype, meta)
        pad = form.pad if form.pad is not None else self._layout().config(form.encoder).get("pad_token_id")
        pad = pad if isinstance(pad, int) else 0
        if form.shown is None:
            return TextEncoder(encoder, form, pad)
        vision: Any = encoder.config.vision_config  # type: ignore[union-attr]
        frames = read_frame_form(self.folder, "", vision)
        if (frames.size // vision.patch_size) ** 2 != form.shown.tokens:
            raise TesseraError(
                f"frames of {frames.size} x {frames.size} pixels in patches of {vision.patch_size} are not the "
                f"{form.shown.tokens} tokens that this family reads",
                where=str(self.folder / form.encoder),
            )
        mark = None if meta else load_tokenizer(self.folder / form.tokenizer).token_to_id(form.shown.mark)
        return TextEncoder(encoder, form, pad, frames, -1 if mark is None else mark)

    def frame_encoder(self, *, dtype: torch.dtype = torch.float32, meta: bool = False) -> FrameEncoder:
        """Return the encoder of given frames, as `autoencoder` does."""
        encoder = self._component(IMAGE_ENCODER, "transformers", ENCODERS, dtype, meta)
        return FrameEncoder(encoder, read_frame_form(self.folder, type(encoder).__name__, encoder.config))

    def empty_caption(self, form: GenerationForm) -> list[list[int]]:
        """Return the token ids of the empty caption for each text encoder."""
        return [list(load_tokenizer(self.folder / text.tokenizer).encode(text.prompt("")).ids) for text in form.text]

    def _layout(self) -> DiffusersFolder:
        if not DiffusersFolder.detect(self.folder):
            raise TesseraError(
                f"no {DiffusersFolder.marker} in {self.folder}: VAE and text encoders are parts of a diffusers folder",
                where="train.task_options.encoders.folder",
                fix="name the folder of a diffusers pipeline, or train on features that are written beforehand: "
                "tessera data features",
            )
        return DiffusersFolder(self.folder)

    def _component(self, name: str, library: str, allowed: Sequence[str], dtype: torch.dtype, meta: bool) -> nn.Module:
        layout = self._layout()
        folder, named = layout.component_folder(name), layout.index[name][1]
        if named not in allowed:
            raise _unknown(name, named, allowed, str(self.folder / layout.marker))
        try:
            made_by = getattr(_classes(library), named)
        except (ImportError, AttributeError) as error:
            raise TesseraError(
                f"{name} of {self.folder} is a {named} of {library}, which is not installed or too old: "
                f"{first_line(error)}",
                where=name,
                fix="pip install tessera-mm[hf]",
            ) from None
        with foreign_values(str(folder)):
            if meta:
                return _on_meta(made_by, library, folder, dtype)
            layout.weight_files(name)  # refuses pickles and files outside of the folder
            word = "torch_dtype" if library == "diffusers" else "dtype"
            try:
                with without_bars(_classes(library)):
                    made: nn.Module = made_by.from_pretrained(
                        folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **{word: dtype}
                    )
            except (OSError, RuntimeError, SafetensorError) as error:  # files that are cut, tensors of other shapes
                message = f"{library} cannot read the weights of {name}: {first_line(error)}"
                raise TesseraError(message, where=str(folder), fix="download or copy this folder again") from error
            return made


def _classes(library: str) -> Any:
    """Return the library that has a class; both are slow to import."""
    if library == "diffusers":
        import diffusers

        return diffusers
    import transformers

    return transformers


def _on_meta(made_by: Any, library: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return a component without weights, in the type in which `from_pretrained` reads it."""
    with torch.device("meta"):
        if library == "diffusers":
            made: nn.Module = made_by.from_config(made_by.load_config(folder))
        else:
            made = made_by(made_by.config_class.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    return nn.Module.to(made, dtype)  # the method of diffusers' classes warns of every cast


def _unknown(what: str, name: Any, allowed: Sequence[str], where: str) -> TesseraError:
    near = nearest(name, allowed) if isinstance(name, str) else None
    return TesseraError(f"no {what} that this library knows: {name!r}", where=where, allowed=allowed, nearest=near)

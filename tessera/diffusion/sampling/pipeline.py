"""Generate images and videos: prompts become embeddings, noise becomes latents, latents become frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tessera.config.reader import build
from tessera.core.batch import Batch
from tessera.diffusion.edit_images import edit_form, reference_size
from tessera.diffusion.forms import GenerationForm, Grid
from tessera.diffusion.frame_encoder import image_processor_name
from tessera.diffusion.pipeline_parts import Autoencoder, PipelineFolder, TextEmbedding, VaeForm
from tessera.diffusion.sample_encoders import from_tokens, patchify
from tessera.diffusion.sampling.denoise import ALONE, Expert, denoise
from tessera.diffusion.sampling.files import Generated
from tessera.diffusion.sampling.guidance import Guidance
from tessera.diffusion.sampling.images import cropped, frame_condition, image_tokens, open_images, pixels_of
from tessera.diffusion.sampling.over_ranks import PassRanks
from tessera.diffusion.sampling.pack import SampleConditions, packed
from tessera.diffusion.sampling.prompts import PromptEncoder, image_processor
from tessera.diffusion.sampling.request import Request
from tessera.diffusion.sampling.solver import Solver, make_solver, scheduler_config, with_shift, with_solver
from tessera.errors import TesseraError

OnStep = Callable[[int, int, int, int], None]  # samples that are finished, samples of all, step, steps


@dataclass(frozen=True)
class Prepared:
    """Hold what samples of a request are made from, encoded: it serves again and again."""

    prompts: Mapping[str, SampleConditions]
    negative: SampleConditions | None  # None: nothing is led away from
    images: SampleConditions  # what given images add to every sample


class Pipeline:
    """Sample with a generation model and the frozen parts of a diffusers folder."""

    def __init__(
        self,
        experts: Sequence[tuple[Callable[[Batch], Any], float]],
        form: GenerationForm,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        ranks: PassRanks = ALONE,
    ) -> None:
        """Make the pipeline. `experts`: models, each with the time (of 1000) from which on it is asked, falling.
        `ranks`: those that compute the passes of guidance in turn; all call everything here together."""
        self.form = form
        self.parts = PipelineFolder(folder)
        self.vae_form: VaeForm = self.parts.vae_form()
        self.edit = edit_form(folder, form)
        self.device, self.dtype = device, dtype
        self._experts = experts
        self._ranks = ranks
        self._prompts = PromptEncoder(self.parts, form.text, device, dtype)
        self._vae: Autoencoder | None = None
        self._vae_spares = (False, False)
        self._scheduler = scheduler_config(folder) or {}

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        images: Sequence[str | Path | Image.Image] = (),
        last_image: str | Path | Image.Image | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Generated]:
        """Return a sample for each prompt. `options`: fields of `Request`, such as height, steps and seed."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        request = build(Request, {"prompts": texts, **options}, "generate")
        return self.run(self.resolved(request), images, last_image, on_step)

    def resolved(self, request: Request) -> Request:
        """Return the request with the family's defaults for what it leaves open; raise if the model cannot make it."""
        usual, space = self.form.sampling, self.vae_form.space_stride
        chosen = {
            name: getattr(usual, name)
            for name in ("height", "width", "frames", "fps", "steps", "guidance", "negative")
            if getattr(request, name) is None
        }
        full = request.model_copy(update=chosen)
        if full.guidance_2 is not None and len(self._experts) == 1:
            raise TesseraError("this model has one expert, which --guidance is for", where="--guidance-2")
        if full.true_guidance is not None and not self.form.guidance:
            raise TesseraError(
                "this model has no embedded guidance beside which --true-guidance could stand",
                where="--true-guidance",
                fix="use --guidance",
            )
        frames, height, width = _size(full)
        _check_multiple("height", height, space * self.form.patch[1], 0)
        _check_multiple("width", width, space * self.form.patch[2], 0)
        time, joined = self.vae_form.time_stride, self.form.patch[0]
        _check_multiple("frames", frames, time, 1)
        if full.images or full.last_image is not None:  # the latents of given images fill whole patches
            _check_multiple("frames", frames, time * joined, 1 + time * (joined - 1))
        if self.vae_form.images_only and frames != 1:
            raise TesseraError("this model makes images", where="--frames", allowed=[1])
        self._solvers(full, [0])  # raises where the folder's scheduler and the request do not fit
        return full

    def run(
        self,
        request: Request,
        images: Sequence[str | Path | Image.Image] = (),
        last_image: str | Path | Image.Image | None = None,
        on_step: OnStep | None = None,
    ) -> list[Generated]:
        """Return the samples of a resolved request, in its order."""
        return self.sample(request, self.prepare(request, images, last_image), on_step)

    @torch.no_grad()
    def prepare(
        self,
        request: Request,
        images: Sequence[str | Path | Image.Image] = (),
        last_image: str | Path | Image.Image | None = None,
    ) -> Prepared:
        """Encode prompts and images of a resolved request. Images may be given here as objects."""
        last = last_image if last_image is not None else request.last_image
        opened = open_images(images or request.images)
        ending = None if last is None else open_images([last])[0]
        self._check_images(opened, ending)
        self._read_autoencoder(request)  # one that cannot be read is refused before any step, and not behind the last
        negative = request.negative if self._scales(request)[0] > 1 else None
        conditions = self._conditions(request, opened, ending)
        if self.form.text_reads_frames:
            led_away = None
            if negative is not None:
                led_away = self._described([negative], _black(request), negative=True)[negative]
            return Prepared(self._described(request.prompts, opened[0]), led_away, conditions)
        texts = self._texts(request, opened, negative)
        return Prepared(texts, None if negative is None else texts[negative], conditions)

    @torch.no_grad()
    def sample(self, request: Request, prepared: Prepared, on_step: OnStep | None = None) -> list[Generated]:
        """Return the samples of a resolved request, in its order."""
        made: list[Generated] = []
        every = list(enumerate(request.texts, request.seed))
        for at in range(0, len(every), request.batch):
            part = every[at : at + request.batch]
            follow = None if on_step is None else partial(on_step, at, len(every))
            latents = self._sampled(request, part, prepared, follow)
            for (seed, text), video in zip(part, self._decoded(latents, request), strict=True):
                made.append(Generated(text, seed, video.cpu().numpy()))
        return made

    def release_encoders(self) -> None:
        """Free the memory of text encoders; they are read again when a prompt is to be encoded."""
        self._prompts = PromptEncoder(self.parts, self.form.text, self.device, self.dtype)

    # ------------------------------------------------------------------------------------------ conditions

    def _check_images(self, images: Sequence[Image.Image], last: Image.Image | None) -> None:
        condition = self.form.condition
        reads = self.form.image_embeds or self.form.text_reads_frames
        if (condition in ("mask_channels", "channels") or reads) and not images:
            raise TesseraError(
                "this model makes videos from an image", where="--image", fix="give the first frame with --image FILE"
            )
        if images and condition == "none" and self.edit is None:
            raise TesseraError("this model makes images or videos from text alone", where="--image")
        if condition != "none" and len(images) > 1:
            raise TesseraError(f"{len(images)} images: a video has one first frame", where="--image")
        if images and condition == "none" and self.edit is not None:
            self.edit.template(len(images), "--image")  # raises where the model edits another number of images
        if last is not None and condition != "mask_channels":
            raise TesseraError("this model is not given a last frame", where="--last-image")

    def _texts(
        self, request: Request, images: Sequence[Image.Image], negative: str | None
    ) -> dict[str, SampleConditions]:
        """Return the embeddings of all prompts: encoders are on the device once."""
        wanted = list(dict.fromkeys([*request.prompts, *([] if negative is None else [negative])]))
        if images and self.edit is not None:
            found = self._prompts.encode_with_images(self.edit, wanted, images, request.reference_pixels)
        else:
            found = self._prompts.encode(wanted)
        return _by_text(wanted, found)

    def _described(
        self, texts: Sequence[str], frame: Image.Image, *, negative: bool = False
    ) -> dict[str, SampleConditions]:
        """Return the embeddings of prompts by an encoder that reads the first frame, too."""
        wanted = list(dict.fromkeys(texts))
        return _by_text(wanted, self._prompts.encode(wanted, frame, negative=negative))

    def _conditions(
        self, request: Request, images: Sequence[Image.Image], last: Image.Image | None
    ) -> SampleConditions:
        """Return what given images add to every sample."""
        nothing, condition = SampleConditions(torch.empty(0)), self.form.condition
        if not images and condition == "channels_mask":  # which says that nothing is given
            frames, rows, columns = self._grid(request)
            values = self.form.patch_values // self.form.channels * (self.form.channels + 1)
            return replace(nothing, condition=torch.zeros(frames * rows * columns, values, device=self.device))
        if not images:
            return nothing
        size = _size(request)
        if self.form.sampling.crop_images:
            images = [cropped(one, *size[1:]) for one in images]
        vae = self._autoencoder(request)
        try:
            if condition in ("mask_channels", "channels", "channels_mask"):
                channels = frame_condition(vae, self.form, images[0], last, size, self.device)
                embeds = self._image_embeds([images[0], *([] if last is None else [last])])
                return replace(nothing, condition=channels, image_embeds=embeds)
            if condition == "replace":
                tokens, _ = image_tokens(vae, self.form, pixels_of(images[0], *size[1:]), self.device)
                return replace(nothing, first=tokens)
            assert self.edit is not None, "images of a model that edits none are refused"
            sizes = [reference_size(*one.size, request.reference_pixels, self.edit.multiple)[::-1] for one in images]
            shown = [pixels_of(one, *size) for one, size in zip(images, sizes, strict=True)]
            tokens_of = [image_tokens(vae, self.form, pixels, self.device) for pixels in shown]
            return replace(nothing, references=tuple(tokens_of))
        finally:
            vae.to("cpu")

    def _image_embeds(self, images: Sequence[Image.Image]) -> Tensor | None:
        """Return the features of given frames by the folder's image encoder; None if the model reads none."""
        if not self.form.image_embeds:
            return None
        encoder = self.parts.frame_encoder(dtype=self.dtype).eval().to(self.device)
        processor = image_processor(self.parts, image_processor_name(type(encoder.encoder).__name__))
        pixels = processor(images=list(images), return_tensors="pt").pixel_values
        embeddings: Tensor = encoder(pixels.to(self.device, self.dtype))
        return embeddings.flatten(0, 1)

    # ------------------------------------------------------------------------------------------ sampling

    def _scales(self, request: Request) -> tuple[float, float]:
        """Return how far the prompt leads away from the negative one, with each of two experts."""
        assert request.guidance is not None, "the request is resolved"
        if self.form.guidance:
            scale = request.true_guidance or 1.0
            return scale, scale
        return request.guidance, request.guidance if request.guidance_2 is None else request.guidance_2

    def _grid(self, request: Request) -> Grid:
        """Return how many patches are sampled: where frames do not fill the last one, more than are kept."""
        shape = self.vae_form.latent_shape(*_size(request))
        frames, rows, columns = (-(-size // step) for size, step in zip(shape, self.form.patch, strict=True))
        return frames, rows, columns

    def _noise(self, request: Request, seed: int) -> Tensor:
        """Return the noise of a sample as tokens, drawn from a generator of its own as diffusers' pipelines draw it."""
        usual, patch = self.form.sampling, self.form.patch
        frames, rows, columns = (count * step for count, step in zip(self._grid(request), patch, strict=True))
        generator = torch.Generator("cpu").manual_seed(seed)
        dtype = torch.float32 if usual.noise_in_float32 else self.dtype
        lead = (frames, self.form.channels) if usual.frames_first else (self.form.channels, frames)
        drawn = torch.randn(*lead, rows, columns, generator=generator, dtype=dtype)
        drawn = drawn.transpose(0, 1) if usual.frames_first else drawn
        return patchify(drawn, patch).to(self.device)

    def _solvers(self, request: Request, seeds: Sequence[int]) -> list[Solver]:
        config = dict(self._scheduler)
        if request.solver is not None:
            config = with_solver(config, request.solver)
        if request.shift is not None:
            config = with_shift(config, request.shift)
        frames, rows, columns = self._grid(request)
        assert request.steps is not None, "the request is resolved"
        return [
            make_solver(
                config,
                request.steps,
                frames * rows * columns,
                spaced_by_family=self.form.sampling.even_levels,
                generator=torch.Generator("cpu").manual_seed(seed),
            )
            for seed in seeds
        ]

    def _sampled(
        self,
        request: Request,
        samples: Sequence[tuple[int, str]],
        prepared: Prepared,
        on_step: Callable[[int, int], None] | None,
    ) -> list[Tensor]:
        """Return the latents [C, F, H, W] of one batch of samples, each a seed and a prompt."""
        grid, common = self._grid(request), prepared.images
        described = [_joined(prepared.prompts[prompt], common) for _, prompt in samples]
        guided = [described]
        if prepared.negative is not None:
            guided.append([_joined(prepared.negative, common)] * len(samples))
        if request.batched_guidance:
            guided = [[sample for part in guided for sample in part]]
        assert request.guidance is not None, "the request is resolved"
        scales = self._scales(request)
        first = 0 if common.first is None else len(common.first)
        found = denoise(
            [Expert(model, scale, since) for (model, since), scale in zip(self._experts, scales, strict=False)],
            [packed(part, self.form, grid, request.guidance, self.dtype) for part in guided],
            [self._mixed(self._noise(request, seed), common, grid)[first:] for seed, _ in samples],
            self._solvers(request, [seed for seed, _ in samples]),
            Guidance(self.form.sampling.keep_norm, request.dynamic_guidance),
            self._ranks,
            on_step,
        )
        if common.first is not None:
            found = [torch.cat([common.first.to(tokens), tokens]) for tokens in found]
        kept = self.vae_form.latent_shape(*_size(request))[0]  # the last ones, as in diffusers
        return [from_tokens(tokens, self.form.patch, grid)[:, -kept:] for tokens in found]

    def _mixed(self, noise: Tensor, given: SampleConditions, grid: Grid) -> Tensor:
        """Return noise with a share of the latents of a given image in every frame, where the family has one."""
        share, count = self.form.sampling.image_share, grid[1] * grid[2]
        image = given.first if given.first is not None else given.condition
        if not share or image is None:
            return noise
        tokens = image[:count, : self.form.patch_values].to(noise)  # a mask, if there is one, follows the latents
        return noise * (1 - share) + tokens.repeat(grid[0], 1) * share

    def _read_autoencoder(self, request: Request) -> Autoencoder:
        """Return the VAE. One that takes tiles is another one: classes differ in what turns tiles off."""
        spare = (request.vae_tiling, request.vae_slicing)
        if self._vae is None or self._vae_spares != spare:
            self._vae = self.parts.autoencoder(tiling=spare[0], slicing=spare[1]).eval()
            self._vae_spares = spare
        return self._vae

    def _autoencoder(self, request: Request) -> Autoencoder:
        """Return the VAE on the device."""
        return self._read_autoencoder(request).to(self.device)

    def _decoded(self, latents: Sequence[Tensor], request: Request) -> list[Tensor]:
        vae = self._autoencoder(request)
        try:
            return [video[self.form.sampling.left_out :] for video in vae.decode(latents)]
        finally:
            vae.to("cpu")


def _size(request: Request) -> tuple[int, int, int]:
    """Return frames, height and width of a resolved request."""
    sizes = (request.frames, request.height, request.width)
    frames, height, width = (size for size in sizes if size is not None)
    return frames, height, width


def _by_text(texts: Sequence[str], found: Sequence[TextEmbedding]) -> dict[str, SampleConditions]:
    made = {}
    for text, one in zip(texts, found, strict=True):
        assert one.tokens is not None, "a family reads the tokens of a caption"
        made[text] = SampleConditions(one.tokens, one.pooled)
    return made


def _black(request: Request) -> Image.Image:
    _, height, width = _size(request)
    return Image.new("RGB", (width, height))


def _joined(text: SampleConditions, images: SampleConditions) -> SampleConditions:
    return replace(images, text=text.text, pooled=text.pooled)


def _check_multiple(name: str, value: int, step: int, rest: int) -> None:
    if value % step != rest % step:
        below = max(rest, value - (value - rest) % step)
        near = [str(number) for number in (below, below + step) if number > 0]
        raise TesseraError(
            f"{name} is {value}",
            where=f"--{name}",
            allowed=[f"multiples of {step}" + (f" and {rest} more" if rest else "")],
            fix=f"--{name} {' or '.join(near)}",
        )

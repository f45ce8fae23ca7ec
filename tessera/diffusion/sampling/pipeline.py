"""Generate images and videos: encode prompts, denoise latents, and decode frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tessera.config.reader import build
from tessera.core.batch import Batch
from tessera.core.task import FrozenModule
from tessera.data.media.files import Limits
from tessera.data.media.images import read_image, to_rgb
from tessera.diffusion.autoencoders import VAE, Autoencoder, VaeForm
from tessera.diffusion.captions import TextEmbedding
from tessera.diffusion.encoders import Encoders, SampleConditions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.frame_encoder import IMAGE_ENCODER
from tessera.diffusion.given_images import Grid, from_tokens, patchify
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.sampling.denoise import ALONE, Expert, denoise, packed
from tessera.diffusion.sampling.files import Generated
from tessera.diffusion.sampling.over_ranks import PassRanks
from tessera.diffusion.sampling.request import MediaRequest
from tessera.diffusion.sampling.solver import Solver, make_solver, scheduler_config, with_shift, with_solver
from tessera.errors import TesseraError, with_fix

# Called with: number of finished samples, number of samples, finished steps of the current sample, number of steps.
OnStep = Callable[[int, int, int, int], None]
ImageSource = str | Path | Image.Image


@dataclass(frozen=True)
class Prepared:
    """Hold the encoded conditions of a request, for repeated sampling."""

    prompts: Mapping[str, TextEmbedding]
    negative: TextEmbedding | None  # None: sample without a negative prompt
    images: SampleConditions  # model inputs from conditioning images, shared by all samples


class Pipeline:
    """Sample with a generation model and the frozen components of a diffusers folder."""

    def __init__(
        self,
        experts: Sequence[tuple[Callable[[Batch], Any], float]],
        family: GenerationFamily,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        ranks: PassRanks = ALONE,
    ) -> None:
        """Create the pipeline. `experts`: models, each with the lowest timestep (of 1000) at which it is used, in
        descending order. `ranks`: data-parallel ranks that share the passes of guidance. They must all call the same
        methods."""
        self.family = family
        self.parts = PipelineFolder(folder, family.vaes)
        self.vae_form: VaeForm = self.parts.vae_form()
        self.device, self.dtype = device, dtype
        self._experts = experts
        self._ranks = ranks
        self._components: dict[str, FrozenModule] = {}
        self._encoders = Encoders(family, self._components, self.parts)
        self._vae_options = (False, False)
        self._scheduler = scheduler_config(folder) or {}

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        images: Sequence[ImageSource] = (),
        last_image: ImageSource | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> list[Generated]:
        """Return a sample for each prompt. `options`: fields of `MediaRequest`, such as height, steps and seed."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        request = build(MediaRequest, {"prompts": texts, **options}, "generate")
        return self.run(self.resolved(request), images, last_image, on_step)

    def resolved(self, request: MediaRequest) -> MediaRequest:
        """Return the request with the family's defaults for unset fields; raise if the model does not support the
        request."""
        space, patch = self.vae_form.space_stride, self.family.patch
        defaults = {name: value for name, value in vars(self.family.sampling).items() if getattr(request, name) is None}
        full = request.model_copy(update=defaults)
        if full.guidance_2 is not None and len(self._experts) == 1:
            raise TesseraError(
                "this model has only one expert, and --guidance sets its guidance scale",
                where="--guidance-2",
                code="generation.model-has-one-expert",
            )
        if full.true_guidance is not None and not self.family.guidance_input:
            raise TesseraError(
                "this model has no embedded guidance; --guidance sets its classifier-free guidance",
                where="--true-guidance",
                fix="use --guidance",
                code="generation.no-embedded-guidance",
            )
        frames, height, width = _size(full)
        _check_multiple("height", height, space * patch[1], 0)
        _check_multiple("width", width, space * patch[2], 0)
        time, joined = self.vae_form.time_stride, patch[0]
        _check_multiple("frames", frames, time, 1)
        if full.images or full.last_image is not None:  # conditioning images need sizes of complete patches
            _check_multiple("frames", frames, time * joined, 1 + time * (joined - 1))
        if self.vae_form.images_only and frames != 1:
            raise TesseraError(
                "this model generates only images",
                where="--frames",
                allowed=[1],
                code="generation.image-model-makes-no-video",
            )
        self._solvers(full, [0])  # raises if the scheduler does not support the request
        return full

    def run(
        self,
        request: MediaRequest,
        images: Sequence[ImageSource] = (),
        last_image: ImageSource | None = None,
        on_step: OnStep | None = None,
    ) -> list[Generated]:
        """Return the samples of a resolved request, in the order of its prompts."""
        return self.sample(request, self.prepare(request, images, last_image), on_step)

    @torch.no_grad()
    def prepare(
        self,
        request: MediaRequest,
        images: Sequence[ImageSource] = (),
        last_image: ImageSource | None = None,
    ) -> Prepared:
        """Encode prompts and images of a resolved request. `images`, `last_image`: used instead of those of the
        request."""
        last = last_image if last_image is not None else request.last_image
        opened = [_opened(image) for image in images or request.images]
        ending = None if last is None else _opened(last)
        self._check_images(opened, ending)
        self._load(request)
        negative = request.negative if self._scales(request)[0] > 1 else None
        encoders, edits = self._encoders, self._encoders.edit_images is not None
        if opened and edits:
            conditions = encoders.references(opened, request.reference_pixels, self.device)
        else:
            conditions = encoders.conditions(opened, ending, _size(request), self.device)
        texts = list(dict.fromkeys(request.prompts))
        if negative is None:
            return Prepared(self._prompts(texts, opened, request), None, conditions)
        if self.family.captions_read_frames:  # the text encoder reads a negative prompt with a black image
            _, height, width = _size(request)
            black = [Image.new("RGB", (width, height))]
            described = self._prompts(texts, opened, request)
            return Prepared(described, self._prompts([negative], black, request, negative=True)[negative], conditions)
        described = self._prompts(list(dict.fromkeys([*texts, negative])), opened, request)
        return Prepared(described, described[negative], conditions)

    @torch.no_grad()
    def sample(self, request: MediaRequest, prepared: Prepared, on_step: OnStep | None = None) -> list[Generated]:
        """Return the samples of a resolved and prepared request, in the order of its prompts."""
        samples: list[Generated] = []
        every = list(enumerate(request.texts, request.seed))
        for at in range(0, len(every), request.batch):
            part = every[at : at + request.batch]
            follow = None if on_step is None else partial(on_step, at, len(every))
            latents = self._sampled(request, part, prepared, follow)
            for (seed, text), video in zip(part, self._decoded(latents, request), strict=True):
                samples.append(Generated(text, seed, video.cpu().numpy()))
        return samples

    def release_encoders(self) -> None:
        """Free the memory of text and image encoders. The next call of `prepare` loads them again."""
        for name in [name for name in self._components if name != VAE]:
            del self._components[name]

    # ------------------------------------------------------------------------------------------ conditions

    def _load(self, request: MediaRequest) -> None:
        """Load all components before sampling, so that damaged files are reported early. With other options the VAE is
        loaded again, because some classes cannot disable tiling."""
        options = (request.vae_tiling, request.vae_slicing)
        if VAE not in self._components or self._vae_options != options:
            vae = self.parts.autoencoder(tiling=options[0], slicing=options[1])
            self._components[VAE], self._vae_options = self._offloaded(vae), options
        for reader in self.family.captions:
            if reader.encoder not in self._components:
                encoder = self.parts.text_encoder(reader, dtype=self.dtype)
                self._components[reader.encoder] = self._offloaded(encoder)
        if self.family.image_embeds and IMAGE_ENCODER not in self._components:
            self._components[IMAGE_ENCODER] = self._offloaded(self.parts.frame_encoder(dtype=self.dtype))

    def _offloaded(self, module: nn.Module) -> FrozenModule:
        """Return a module that is on the device only while it is used."""
        return FrozenModule(module, self.device, "offloaded")

    def _check_images(self, images: Sequence[Image.Image], last: Image.Image | None) -> None:
        reads, edit = self.family.images, self._encoders.edit_images
        if reads.required and not images:
            raise TesseraError(
                "this model needs an image as the first frame",
                where="--image",
                fix="give the first frame with --image FILE",
                code="generation.missing-first-frame",
            )
        if reads.reads_first and len(images) > 1:
            raise TesseraError(
                f"{len(images)} images were passed; this model takes one first frame",
                where="--image",
                code="generation.more-than-one-first-frame",
            )
        if images and not reads.reads_first:
            if edit is None:
                raise TesseraError(
                    "this model takes no images, only text",
                    where="--image",
                    code="generation.model-reads-no-image",
                )
            edit.edit.template(len(images), "--image")  # raises if the model edits another number of images
        if last is not None and not reads.reads_last:
            raise TesseraError(
                "this model takes no last frame",
                where="--last-image",
                code="generation.model-reads-no-last-frame",
            )

    def _prompts(
        self, texts: Sequence[str], images: Sequence[Image.Image], request: MediaRequest, *, negative: bool = False
    ) -> dict[str, TextEmbedding]:
        """Return the embeddings of each prompt."""
        if images and self._encoders.edit_images is not None:
            embeddings = self._encoders.edit_prompts(texts, images, request.reference_pixels, self.device)
        else:
            frame = images[0] if images else None
            embeddings = self._encoders.prompts(texts, self.device, frame, negative=negative)
        return dict(zip(texts, embeddings, strict=True))

    # ------------------------------------------------------------------------------------------ sampling

    def _scales(self, request: MediaRequest) -> tuple[float, float]:
        """Return the scales of classifier-free guidance for the first and the second expert."""
        assert request.guidance is not None, "the request is resolved"
        if self.family.guidance_input:
            scale = request.true_guidance or 1.0
            return scale, scale
        return request.guidance, request.guidance if request.guidance_2 is None else request.guidance_2

    def _grid(self, request: MediaRequest) -> Grid:
        """Return the size of the sampled latents in patches, rounded up to complete patches."""
        shape = self.vae_form.latent_shape(*_size(request))
        frames, rows, columns = (-(-size // step) for size, step in zip(shape, self.family.patch, strict=True))
        return frames, rows, columns

    def _noise(self, request: MediaRequest, seed: int) -> Tensor:
        """Return the initial noise of a sample as tokens. It depends only on the seed and the size."""
        patch, generator = self.family.patch, torch.Generator("cpu").manual_seed(seed)
        frames, rows, columns = (count * step for count, step in zip(self._grid(request), patch, strict=True))
        return patchify(self.family.draw_noise((frames, rows, columns), generator, self.dtype), patch).to(self.device)

    def _solvers(self, request: MediaRequest, seeds: Sequence[int]) -> list[Solver]:
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
                sigmas=self.family.sigmas(request.steps),
                generator=torch.Generator("cpu").manual_seed(seed),
            )
            for seed in seeds
        ]

    def _sampled(
        self,
        request: MediaRequest,
        samples: Sequence[tuple[int, str]],
        prepared: Prepared,
        on_step: Callable[[int, int], None] | None,
    ) -> list[Tensor]:
        """Return the latents [C, F, H, W] of a batch of samples. `samples`: seed and prompt of each."""
        grid, family, common = self._grid(request), self.family, prepared.images
        described = [_joined(prepared.prompts[prompt], common) for _, prompt in samples]
        guided = [described]
        if prepared.negative is not None:
            guided.append([_joined(prepared.negative, common)] * len(samples))
        assert request.guidance is not None, "the request is resolved"
        first = 0 if common.first is None else len(common.first)
        image = common.first if common.first is not None else common.condition
        if image is not None:  # take the latents of the first frame, without mask channels
            image = image[: grid[1] * grid[2], : family.patch_values]
        noise = [family.mix_noise(self._noise(request, seed), image, grid[0])[first:] for seed, _ in samples]
        scales = self._scales(request)
        latents = denoise(
            [Expert(model, scale, since) for (model, since), scale in zip(self._experts, scales, strict=False)],
            [packed(part, family, grid, request.guidance, self.dtype) for part in guided],
            noise,
            self._solvers(request, [seed for seed, _ in samples]),
            family.guide,
            dynamic=request.dynamic_guidance,
            ranks=self._ranks,
            on_step=on_step,
        )
        if common.first is not None:
            latents = [torch.cat([common.first.to(tokens), tokens]) for tokens in latents]
        # If latent frames were added to complete a patch, that many are dropped at the beginning, as in diffusers.
        frames = self.vae_form.latent_shape(*_size(request))[0]
        return [from_tokens(tokens, family.patch, grid)[:, -frames:] for tokens in latents]

    def _decoded(self, latents: Sequence[Tensor], request: MediaRequest) -> list[Tensor]:
        with self._components[VAE].use() as vae:
            assert isinstance(vae, Autoencoder)
            return [self.family.trim(video) for video in vae.decode(latents)]


def _size(request: MediaRequest) -> tuple[int, int, int]:
    """Return frames, height and width of a resolved request."""
    sizes = (request.frames, request.height, request.width)
    frames, height, width = (size for size in sizes if size is not None)
    return frames, height, width


def _opened(image: ImageSource) -> Image.Image:
    """Return an image in RGB, rotated upright."""
    if isinstance(image, Image.Image):
        return to_rgb(image)
    with with_fix(str(image), "use an image file that can be opened"):
        return read_image(Path(image), Limits())


def _joined(text: TextEmbedding, images: SampleConditions) -> SampleConditions:
    assert text.tokens is not None, "every family reads the tokens of a caption"
    return replace(images, text=text.tokens, pooled=text.pooled)


def _check_multiple(name: str, value: int, step: int, rest: int) -> None:
    if value % step != rest % step:
        below = max(rest, value - (value - rest) % step)
        near = [str(number) for number in (below, below + step) if number > 0]
        raise TesseraError(
            f"{name} {value} does not fit the strides of the VAE and the patches of the model",
            where=f"--{name}",
            allowed=[f"multiples of {step}" + (f" plus {rest}" if rest else "")],
            fix=f"set --{name} to {' or '.join(near)}",
            code="generation.size-not-whole-patches",
        )

"""Define generation families: how a model reads latents, captions and conditioning images, and how samples are drawn.

Data, encoders, objective, features, export proofs and sampling use only the methods of `GenerationFamily`. A family
with different behavior overrides a method in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.core.outputs import LATENTS
from tessera.core.spec import ModelSpec
from tessera.diffusion.autoencoders import VAES, Autoencoder, VaeForm, read_vae_form
from tessera.diffusion.captions import Captions
from tessera.diffusion.edit_images import EditPipeline
from tessera.diffusion.given_images import GivenImages, Grid
from tessera.diffusion.noise_levels import Objective
from tessera.errors import TesseraError


@dataclass(frozen=True)
class SamplingDefaults:
    """Hold the defaults of a family's published pipeline."""

    height: int = 480  # height and width are in pixels
    width: int = 832
    frames: int = 1
    fps: float = 16.0
    steps: int = 50
    guidance: float = 5.0
    negative: str | None = ""  # the negative prompt; None: sample without one


@dataclass(frozen=True)
class GenerationFamily:
    """Describe a configured generation model. Families override the methods, which implement the defaults.

    `timesteps` of a batch run from 0 (data) to 1000 (noise).
    """

    channels: int  # channels of the VAE's latents, which the model predicts; its input may have condition channels, too
    patch: Grid  # frames, rows and columns of latents in one token
    joint: bool = False  # whether text and latents form one sequence; otherwise latents cross-attend to the text
    # Whether each context-parallel rank gets all text tokens of a joint sequence, as a text refiner needs.
    whole_text: bool = False
    captions: tuple[Captions, ...] = (Captions(),)  # one for each text encoder
    images: GivenImages = field(default_factory=GivenImages)
    image_embeds: bool = False  # whether the model reads embeddings of conditioning frames by an image encoder
    token_times: bool = False  # whether each token, rather than each sample, may have its own timestep
    guidance_input: bool = False  # whether the guidance scale is an input of the model (guidance distillation)
    objective: Objective = "flow"
    sampling: SamplingDefaults = SamplingDefaults()

    # ------------------------------------------------------------------------------------------ latents

    @property
    def vaes(self) -> Mapping[str, type[Autoencoder]]:
        """Return the wrappers of the VAE classes that this family supports, by the class name in diffusers folders."""
        return VAES

    def vae_form(self, config: Mapping[str, Any], where: str) -> VaeForm:
        """Return sizes and scaling of a VAE's latents from its config.json."""
        return read_vae_form(self.vaes, config, where)

    @property
    def patch_values(self) -> int:
        """Return the number of latent values in a patch, which becomes one token."""
        frames, rows, columns = self.patch
        return self.channels * frames * rows * columns

    def positions(self, text: int, grids: Sequence[Grid]) -> Tensor:
        """Return frame, row and column [3, T] of each token of a sample: first `text` text tokens, then the latents
        of the image or video and of its reference images. `grids`: their sizes in tokens.

        By default, text is at position 0, and reference images are additional frames after those of the sample.
        """
        first = np.cumsum([0, *(frames for frames, _, _ in grids)])
        parts = [grid_positions((int(start), 0, 0), grid) for start, grid in zip(first, grids, strict=False)]
        return torch.cat([torch.zeros(3, text, dtype=torch.int64), *parts], dim=1)

    def check_grids(self, grids: Sequence[Grid]) -> None:
        """Raise if the model has no positions for images or videos of these sizes, given in tokens."""

    # ------------------------------------------------------------------------------------------ captions and images

    @property
    def captions_read_frames(self) -> bool:
        """Return whether a text encoder reads the first frame of a video beside the caption."""
        return any(reader.reads_frames for reader in self.captions)

    @property
    def embeds_in_sequence(self) -> bool:
        """Return whether embeddings of conditioning frames are part of the main sequence."""
        return self.joint and self.image_embeds

    @property
    def zeros_to(self) -> int:
        """Return the number of text embeddings up to which short captions are padded with zeros; 0: no padding."""
        return self.captions[0].zeros_to if len(self.captions) == 1 else 0

    @property
    def id_names(self) -> list[str]:
        """Return the names of the batch tensors with token ids of captions, one for each text encoder."""
        return ["text_ids" + (f"_{number + 1}" if number else "") for number in range(len(self.captions))]

    def text_length(self, ids: Sequence[int]) -> int:
        """Return the number of text embeddings of a caption. `ids`: its number of token ids for each text encoder."""
        pairs = zip(self.captions, ids, strict=True)
        return sum(reader.embeddings(count) for reader, count in pairs if not reader.beside)

    @property
    def edits(self) -> tuple[EditPipeline, ...]:
        """Return the published pipelines whose text encoder reads the images to edit beside the caption."""
        return ()

    def edit(self, pipeline: object) -> EditPipeline | None:
        """Return how the pipeline class `pipeline` reads images to edit; None: its text encoder does not read
        images."""
        return next((edit for edit in self.edits if edit.pipeline == pipeline), None)

    def facts(self) -> dict[str, Any]:
        """Return the settings that stored features depend on, as JSON. The keys are part of the format of feature
        folders."""
        text = [reader.facts() for reader in self.captions]
        return {"channels": self.channels, "patch": list(self.patch), "joint": self.joint, "text": text}

    def fingerprint_fields(self) -> list[Any]:
        """Return the settings of the family that change batches of images and videos, as JSON."""
        edits = [edit.facts() for edit in self.edits]
        return [type(self).__qualname__, self.facts(), self.image_embeds, edits, asdict(self.images)]

    # ------------------------------------------------------------------------------------------ sampling

    def sigmas(self, steps: int) -> np.ndarray | None:
        """Return the noise levels of a sampler before they are shifted; None: diffusers' scheduler chooses them."""
        return None

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return noise [channels, frames, rows, columns], drawn as in the published pipeline. `dtype`: type of the
        model."""
        return torch.randn(self.channels, *shape, generator=generator)

    def mix_noise(self, noise: Tensor, image: Tensor | None, frames: int) -> Tensor:
        """Return the initial tokens of sampling. `image`: latents of a conditioning first frame, as tokens."""
        return noise

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Return the prediction [N, values] with classifier-free guidance."""
        return without + scale * (with_prompt - without)

    def fit_image(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Return a conditioning image, cropped as in the published pipeline. The caller resizes it afterwards."""
        return image

    def trim(self, video: Tensor) -> Tensor:
        """Return a decoded video without extra frames, such as copies of the conditioning image at the beginning."""
        return video


def grid_positions(start: Grid, size: Grid) -> Tensor:
    """Return frame, row and column [3, T] of the tokens of a grid whose first token is at `start`."""
    ranges = (torch.arange(begin, begin + count) for begin, count in zip(start, size, strict=True))
    return torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1)


class EvenLevels:
    """Sample at evenly spaced noise levels, before they are shifted. A mixin for families."""

    def sigmas(self, steps: int) -> np.ndarray | None:
        return np.linspace(1.0, 1 / steps, steps)


class NoiseInModelType:
    """Draw noise in the dtype of the model, as a mixin of families whose published pipeline does so."""

    channels: int

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.channels, *shape, generator=generator, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class GenerationSpec(ModelSpec):
    """Describe a family that generates images or videos. `generation`: returns the `GenerationFamily` of a
    configuration."""

    generation: Callable[[Any], GenerationFamily]
    task: str = "diffusion"
    outputs: tuple[str, ...] | None = (LATENTS,)


def family_of(spec: ModelSpec, config: Any) -> GenerationFamily | None:
    """Return the `GenerationFamily` of a model; None if the model does not generate images or videos."""
    return spec.generation(config) if isinstance(spec, GenerationSpec) else None


def generation_family_of(spec: ModelSpec, config: Any, where: str, fix: str | None = None) -> GenerationFamily:
    """Return the `GenerationFamily` of a model; raise if it does not generate images or videos."""
    family = family_of(spec, config)
    if family is None:
        raise TesseraError(
            f"the model family {spec.name} does not generate images or videos",
            where=where,
            fix=fix,
            code="generation.not-a-generation-model",
        )
    return family

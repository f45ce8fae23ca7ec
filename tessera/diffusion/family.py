"""Define a generation family: how latents, captions and given images are read, and how samples are drawn.

Data, encoders, objective, features, proofs of exports and sampling ask an object of `GenerationFamily` and nothing
else. A family that behaves in another way overrides a method in its own folder.
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

    height: int = 480  # in pixels
    width: int = 832
    frames: int = 1
    fps: float = 16.0
    steps: int = 50
    guidance: float = 5.0
    negative: str | None = ""  # the negative prompt; None: sample without one


@dataclass(frozen=True)
class GenerationFamily:
    """Describe a configured generation model; the methods are those of the plainest family.

    `timesteps` of a batch run from 0 (data) to 1000 (noise).
    """

    channels: int  # of the VAE's latents, which the model predicts; conditions may add channels to its input
    patch: Grid  # frames, rows and columns of latents in one token
    joint: bool = False  # whether text and latents are one sequence; otherwise latents attend to the text
    # Whether every rank that shares a joint sequence gets the full text: the model computes something over all of it.
    whole_text: bool = False
    captions: tuple[Captions, ...] = (Captions(),)  # one for each text encoder
    images: GivenImages = field(default_factory=GivenImages)
    image_embeds: bool = False  # whether the model also reads embeddings of given frames by an image encoder
    token_times: bool = False  # whether `timesteps` has an entry per token of the sequence, not per sample
    guidance_input: bool = False  # whether the model reads the guidance scale that it was distilled for
    objective: Objective = "flow"
    sampling: SamplingDefaults = SamplingDefaults()

    # ------------------------------------------------------------------------------------------ latents

    @property
    def vaes(self) -> Mapping[str, type[Autoencoder]]:
        """Return the VAEs that this family reads, by the class that a diffusers folder names."""
        return VAES

    def vae_form(self, config: Mapping[str, Any], where: str) -> VaeForm:
        """Return the form of a VAE from its config.json."""
        return read_vae_form(self.vaes, config, where)

    @property
    def patch_values(self) -> int:
        """Return the number of values in one token of latents."""
        frames, rows, columns = self.patch
        return self.channels * frames * rows * columns

    def positions(self, text: int, grids: Sequence[Grid]) -> Tensor:
        """Return frame, row and column [3, T] of each element of a sample: `text` tokens of text, then the latents of
        its image or video and of its reference images, whose sizes in tokens are `grids`.

        Here text is at 0, and reference images are frames behind those of the sample.
        """
        first = np.cumsum([0, *(frames for frames, _, _ in grids)])
        parts = [grid_positions((int(start), 0, 0), grid) for start, grid in zip(first, grids, strict=False)]
        return torch.cat([torch.zeros(3, text, dtype=torch.int64), *parts], dim=1)

    def check_grids(self, grids: Sequence[Grid]) -> None:
        """Raise if the model has no positions for images or videos of these sizes in tokens."""

    # ------------------------------------------------------------------------------------------ captions and images

    @property
    def captions_read_frames(self) -> bool:
        """Return whether a text encoder also reads the first frame of a video."""
        return any(reader.reads_frames for reader in self.captions)

    @property
    def embeds_in_sequence(self) -> bool:
        """Return whether embeddings of given frames are elements of the main sequence."""
        return self.joint and self.image_embeds

    @property
    def zeros_to(self) -> int:
        """Return the number of text embeddings up to which zeros follow those of a caption; 0: none do."""
        return self.captions[0].zeros_to if len(self.captions) == 1 else 0

    @property
    def id_names(self) -> list[str]:
        """Return the batch tensors with the token ids of captions, one for each text encoder."""
        return ["text_ids" + (f"_{number + 1}" if number else "") for number in range(len(self.captions))]

    def text_length(self, ids: Sequence[int]) -> int:
        """Return the number of text embeddings of a caption, given its number of token ids for each text encoder."""
        pairs = zip(self.captions, ids, strict=True)
        return sum(reader.embeddings(count) for reader, count in pairs if not reader.beside)

    @property
    def edits(self) -> tuple[EditPipeline, ...]:
        """Return the published pipelines whose text encoder also reads the images to edit."""
        return ()

    def edit(self, pipeline: object) -> EditPipeline | None:
        """Return how a pipeline of this class reads images to edit; None: its text encoder reads none."""
        return next((edit for edit in self.edits if edit.pipeline == pipeline), None)

    def facts(self) -> dict[str, Any]:
        """Return what features depend on, as JSON. Features of earlier releases have the same keys."""
        text = [reader.facts() for reader in self.captions]
        return {"channels": self.channels, "patch": list(self.patch), "joint": self.joint, "text": text}

    def fingerprint_fields(self) -> list[Any]:
        """Return what batches of media depend on, as JSON."""
        edits = [edit.facts() for edit in self.edits]
        return [type(self).__qualname__, self.facts(), self.image_embeds, edits, asdict(self.images)]

    # ------------------------------------------------------------------------------------------ sampling

    def sigmas(self, steps: int) -> np.ndarray | None:
        """Return the noise levels of a sampler before they are shifted; None: the scheduler spaces them."""
        return None

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return noise [channels, frames, rows, columns] as the published pipeline draws it. `dtype`: of the model."""
        return torch.randn(self.channels, *shape, generator=generator)

    def mix_noise(self, noise: Tensor, image: Tensor | None, frames: int) -> Tensor:
        """Return the tokens to begin with. `image`: latents of the first frame as tokens, if one is given."""
        return noise

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Return the guided prediction of tokens [N, values]."""
        return without + scale * (with_prompt - without)

    def fit_image(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Return a given image, cropped where the published pipeline crops it; later it is stretched to the size."""
        return image

    def trim(self, video: Tensor) -> Tensor:
        """Return the frames of a decoded video that are part of the sample."""
        return video


def grid_positions(start: Grid, size: Grid) -> Tensor:
    """Return frame, row and column [3, T] of the tokens of a grid that begins at `start`."""
    ranges = (torch.arange(begin, begin + count) for begin, count in zip(start, size, strict=True))
    return torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1)


class EvenLevels:
    """Sample at noise levels of even distances before they are shifted. A mixin of families."""

    def sigmas(self, steps: int) -> np.ndarray | None:
        return np.linspace(1.0, 1 / steps, steps)


class NoiseInModelType:
    """Draw noise in the type in which the model computes. A mixin of families."""

    channels: int

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.channels, *shape, generator=generator, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class GenerationSpec(ModelSpec):
    """Describe a family that generates images or videos. `generation`: (config) -> its `GenerationFamily`."""

    generation: Callable[[Any], GenerationFamily]
    task: str = "diffusion"
    outputs: tuple[str, ...] | None = (LATENTS,)


def family_of(spec: ModelSpec, config: Any) -> GenerationFamily | None:
    """Return how a model generates images or videos; None if it does not."""
    return spec.generation(config) if isinstance(spec, GenerationSpec) else None


def generation_family_of(spec: ModelSpec, config: Any, where: str, fix: str | None = None) -> GenerationFamily:
    """Return how a model generates images or videos; raise if it does not."""
    family = family_of(spec, config)
    if family is None:
        raise TesseraError(
            f"family {spec.name} generates no images or videos",
            where=where,
            fix=fix,
            code="generation.not-a-generation-model",
        )
    return family

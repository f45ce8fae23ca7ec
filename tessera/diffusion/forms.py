"""Describe image and video generation families to what surrounds them: data, objective, encoders and sampling.

A family says how latents of its VAE become tokens and how captions become embeddings. What a family says is plain
data.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tessera.errors import TesseraError

# What the model predicts from latents with noise: the velocity from data to noise, the noise, or v.
Objective = Literal["flow", "epsilon", "v"]
# How a model reads given images: not at all; as channels beside the noisy latents, after a mask of the frames that are
# given; as channels alone; as channels before a mask of latent frames, which may say that none is given; or in place of
# the noisy latents, with a time of zero.
ImageCondition = Literal["none", "mask_channels", "channels", "channels_mask", "replace"]
# What follows the embeddings of a short caption, up to `TextForm.length`: nothing, zeros, or what the encoder makes of
# padding tokens; or nothing, although the encoder reads the padding tokens.
TextPadding = Literal["none", "zeros", "encoded", "read"]
# How frames, rows and columns of latents are counted, and where text lies:
# grid      from 0, the first reference image in the frames behind those of the sample; text at 0
# centered  rows and columns from the middle; text on the diagonal, behind the largest of them
# layered   as centered, with the last image at frame -1: the layers of an image, and then the image
# table     as grid, in the middle of a square table of `table` rows; text at 0
PositionStyle = Literal["grid", "centered", "layered", "table"]
Grid = tuple[int, int, int]  # frames, rows and columns, in tokens


@dataclass(frozen=True)
class ShownFrame:
    """Describe how a text encoder reads the first frame of a video, and which of its states the model then reads: some
    of the frame's, and those of the caption without the words that ask for an answer."""

    word: str  # what stands for the frame in the template
    every: int  # of the states of the frame, the first of so many
    mark: str  # the word that ends what asks for an answer
    closing: int = 4  # so many words, up to the last mark, are left out
    tokens: int = 576  # that a frame is for the encoder
    negative_every: int = 2  # as `every`, with a negative prompt, which is read with a black image

    @property
    def states(self) -> int:
        """Return how many states of the frame the model reads."""
        return -(-self.tokens // self.every)


@dataclass(frozen=True)
class TextForm:
    """Describe how a family reads captions with one of its text encoders."""

    encoder: str = "text_encoder"  # a component of a diffusers folder, as is the tokenizer
    tokenizer: str = "tokenizer"
    length: int = 512  # tokens of a caption at most, without those that `skip` leaves out; longer ones are cut
    template: str = "{}"  # what is tokenised: the caption stands for {}
    image: str = ""  # what stands in the template for an image to edit that the encoder reads, too
    shown: ShownFrame | None = None  # where the encoder reads the first frame of a video, too
    blank: str = ""  # what stands there for an empty caption
    tidy: bool = False  # whether entities of HTML and runs of spaces in a caption are resolved first
    skip: int = 0  # embeddings at the beginning that are left out: those of the template
    padding: TextPadding = "none"
    pad: int | None = None  # the id of padding tokens; None: as the encoder's config.json says
    masked: bool = True  # whether the encoder gets a mask of padding
    layer: int = -1  # which of the encoder's hidden states are the embeddings; -1: its output
    tokens: bool = True  # whether the model reads the embeddings of tokens
    pooled: bool = False  # whether the model reads the embedding of the whole caption
    beside: bool = False  # whether its embeddings are further features of those of the encoder before it

    def embeddings(self, ids: int) -> int:
        """Return how many embeddings a caption of so many token ids gives, with its template."""
        if not self.tokens:
            return 0
        if self.padding in ("zeros", "encoded"):
            return self.length
        read = min(ids, self.length + self.skip) - self.skip
        return max(0, read) if self.shown is None else self.shown.states + max(0, read - self.shown.closing)

    def prompt(self, caption: str, template: str | None = None) -> str:
        """Return the text that is tokenised for a caption. `template`: another one than the form's own."""
        if self.tidy:
            caption = " ".join(html.unescape(html.unescape(caption)).split())
        return (self.template if template is None else template).replace("{}", caption or self.blank, 1)


@dataclass(frozen=True)
class EditForm:
    """Describe how the text encoder of a published pipeline reads captions together with the images to edit."""

    pipeline: str  # the class that model_index.json names
    text: TextForm  # in place of `GenerationForm.text`; `text.image` stands in its template for every image
    each: str = ""  # what stands at {images} of the template, once for each image, with its number for {}
    # Pixels that the text encoder is shown of an image, and that the VAE encodes; None: it is shown what the VAE gets.
    shown_pixels: int | None = None
    pixels: int = 1 << 20
    multiple: int = 32  # sides of resized images are multiples of it
    processor: str = "processor"  # the part of the pipeline that says how the text encoder's images are normalised

    def template(self, images: int, where: str | None = None) -> str:
        """Return the template for so many images; raise if the pipeline does not read so many."""
        shown = self.text.template
        if self.each:
            numbered = (self.each.replace("{}", str(number + 1)) for number in range(images))
            shown = shown.replace("{images}", "".join(numbered))
        wanted = max(1, self.text.template.count(self.text.image))
        if images < 1 or shown.count(self.text.image) != images:
            number = "one or more" if self.each else str(wanted)
            raise TesseraError(f"{images or 'no'} images to edit: this model edits {number}", where=where)
        return shown


@dataclass(frozen=True)
class SamplingForm:
    """Describe how a family's published pipeline samples: its defaults, and what differs between families."""

    height: int = 480  # in pixels
    width: int = 832
    frames: int = 1
    fps: float = 16.0
    steps: int = 50
    guidance: float = 5.0
    negative: str | None = ""  # the negative prompt where none is given; None: then nothing is led away from
    even_levels: bool = False  # whether noise levels are even before they are shifted, or spaced by the scheduler
    keep_norm: bool = False  # whether guidance leaves the length of a prediction as it is with the prompt
    frames_first: bool = False  # whether noise is drawn as [frames, channels, rows, columns]
    noise_in_float32: bool = True  # or in the type that the model computes in
    image_share: float = 0.0  # of the latents of a given image in the noise of every frame
    left_out: int = 0  # frames at the beginning that are no part of a sample
    crop_images: bool = False  # whether a given image is cropped to the shape of the video, or stretched to it


@dataclass(frozen=True)
class GenerationForm:
    """Describe what a generation model reads and predicts. `timesteps` of a batch run from 0 (data) to 1000 (noise)."""

    channels: int  # of the VAE's latents, which is what the model predicts; its input may have more, as conditions
    patch: tuple[int, int, int]  # frames, rows and columns of latents that make one token
    joint: bool = False  # whether tokens of text and latents are one sequence; if not, latents attend to the text
    # Whether ranks that share a sequence of both read the whole text: the model computes something over all of it.
    whole_text: bool = False
    text: tuple[TextForm, ...] = (TextForm(),)
    edit: tuple[EditForm, ...] = ()  # published pipelines whose text encoder reads reference images, too
    objective: Objective = "flow"
    condition: ImageCondition = "none"
    # Whether it reads embeddings of given frames, too, which an image encoder makes: in joint families as elements of
    # the main sequence.
    image_embeds: bool = False
    token_times: bool = False  # `timesteps` has an entry for each element of the main sequence, not for each sample
    guidance: bool = False  # whether the model reads the guidance scale that it was distilled for
    sampling: SamplingForm = SamplingForm()
    positions: PositionStyle = "grid"
    table: int = 0  # rows and columns of a table of positions

    @property
    def text_reads_frames(self) -> bool:
        """Return whether a text encoder reads the first frame of a video, too."""
        return any(one.shown is not None for one in self.text)

    def edit_of(self, pipeline: object) -> EditForm | None:
        """Return how a pipeline of this class reads images to edit; None: its text encoder reads none."""
        return next((one for one in self.edit if one.pipeline == pipeline), None)

    @property
    def zeros_to(self) -> int:
        """Return up to how many embeddings of text zeros follow those of a caption; 0: none do."""
        only = self.text[0] if len(self.text) == 1 else TextForm()
        return only.length if only.padding == "zeros" else 0

    @property
    def patch_values(self) -> int:
        """Return the numbers in one token of latents."""
        frames, rows, columns = self.patch
        return self.channels * frames * rows * columns


def sample_positions(form: GenerationForm, text: int, grids: Sequence[Grid]) -> Tensor:
    """Return frame, row and column [3, T] of each element of a sample: `text` tokens of text, then the latents of its
    image or video and of its reference images, whose sizes are `grids`."""
    centered = form.positions in ("centered", "layered")
    parts, first = [], 0
    for number, (frames, rows, columns) in enumerate(grids):
        start = -1 if form.positions == "layered" and number == len(grids) - 1 else first
        row, column = (-(size - size // 2) if centered else 0 for size in (rows, columns))
        if form.positions == "table":
            if max(rows, columns) > form.table:
                raise TesseraError(
                    f"an image of {rows} x {columns} tokens: the model has positions for {form.table} x {form.table}",
                    where="latents",
                    fix="make the image smaller",
                )
            row, column = (form.table - rows) // 2, (form.table - columns) // 2
        axes = ((start, frames), (row, rows), (column, columns))
        ranges = (torch.arange(begin, begin + size) for begin, size in axes)
        parts.append(torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1))
        first = number + 1 if centered else first + frames
    words = torch.zeros(3, text, dtype=torch.int64)
    if centered:
        begin = max((max(rows // 2, columns // 2) for _, rows, columns in grids), default=0)
        begin = max(begin, len(grids) - 1) if form.positions == "layered" else begin
        words = torch.arange(begin, begin + text).expand(3, -1)
    return torch.cat([words, *parts], dim=1)

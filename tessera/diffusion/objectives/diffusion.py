"""Train image and video generation: predict what takes noise out of latents, at noise levels of all strengths.

The loss is a sum of squared errors over the latents that are trained on, divided once by their number in the global
batch: any split of it trains alike. Noise, level and dropped captions of a sample follow from the seed of its row and
its place there, so that no layout changes them. They are drawn on the host for whole samples; where ranks share a
sequence, each takes its part.

Latents and embeddings come with the batch as features, or from frozen encoders (`encoders`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.config.reader import build
from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.model_plan import Stream
from tessera.core.outputs import LATENTS as PREDICTION
from tessera.core.outputs import Outputs, tensor
from tessera.core.spec import Component, ModelSpec, Residence
from tessera.core.task import Counts, FrozenModule, Losses, LossTerm, Metric, Task
from tessera.diffusion.edit_images import EMPTY_IDS, SHOWN, EditImages, edit_form
from tessera.diffusion.feature_facts import reads_features, reads_media
from tessera.diffusion.forms import GenerationForm, Objective
from tessera.diffusion.frame_encoder import IMAGE_ENCODER
from tessera.diffusion.noise_levels import TIMES, NoiseLevel, NoiseLevels, training_target
from tessera.diffusion.objectives.options import DTYPES, DiffusionOptions, EncoderOptions, SampleSegment
from tessera.diffusion.pipeline_parts import VAE, PipelineFolder
from tessera.diffusion.sample_encoders import (
    IMAGE_EMBEDS,
    Disturb,
    SampleEncoders,
    id_names,
    latent_lengths,
    without_captions,
)
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.distributed import World
from tessera.runtime.rng import generator
from tessera.weights.layouts import pipeline_folder

log = logging.getLogger("tessera")
LATENTS = "latents"  # the count: numbers in the latents that are trained on
LOSS = "diffusion_loss"
BANDS = ("low", "middle", "high")  # thirds of the times, by noise


class DiffusionTask(Task):
    """Train a generation model by flow matching, or to predict noise or v. Options: `DiffusionOptions`."""

    reads = (PREDICTION,)
    section: ClassVar[type[DiffusionOptions]] = DiffusionOptions

    def __init__(self, **options: Any) -> None:
        self.options = build(self.section, options, "train.task_options")
        self._form: GenerationForm | None = None
        self._index = ""  # the tensor with the elements of the main sequence that a rank has
        self._objective: Objective = self.options.objective or "flow"
        self._levels = NoiseLevels(self.options, self._objective)
        self._online = self.options.encoders is not None  # and not features of all data
        self._previews = False
        self._encoders: SampleEncoders | None = None
        self._empty: Callable[[], Sequence[Sequence[int]]] = tuple
        self._edit: Callable[[], EditImages] | None = None

    # ------------------------------------------------------------------------------------------ the run

    @property
    def form(self) -> GenerationForm:
        assert self._form is not None, "the task is bound to a family before it is used"
        return self._form

    def bind(self, spec: ModelSpec, config: Any) -> None:
        if spec.generation is None:
            raise TesseraError(
                f"family {spec.name} generates no images or videos",
                where="train.task=diffusion",
                fix=f"leave train.task out: the family's own is {spec.task}",
            )
        self._form = spec.generation(config)
        stream = spec.main.plan(config).main
        self._index = "" if stream is None else stream.index
        self._objective = self.options.objective or self._form.objective
        self._check_options()
        self._levels = NoiseLevels(self.options, self._objective)

    def _check_options(self) -> None:
        flow, weighting = self._objective == "flow", self.options.weighting
        if weighting != "none" and flow != (weighting != "min_snr"):
            raise TesseraError(
                f"{weighting} weighs no levels of the objective {self._objective}",
                where="train.task_options.weighting",
                allowed=["none", "sigma_sqrt", "cosmap", "gaussian"] if flow else ["none", "min_snr"],
            )
        if not flow:
            moved = {"shift": self.options.shift != 1, "shift_by_tokens": self.options.shift_by_tokens is not None}
            for key, changed in {**moved, "steps": self.options.steps is None}.items():
                if changed:
                    raise TesseraError(
                        f"the objective {self._objective} has the levels of `betas`, which {key} does not change",
                        where=f"train.task_options.{key}",
                        fix="leave it out; betas.snr_shift moves these levels towards noise",
                    )
        given = self.options.given
        if given != "none" and (self.form.condition == "none" or (given == "first_last" and not self._reads_last)):
            allowed: list[str] = ["none", "first"] if self.form.condition != "none" else ["none"]
            raise TesseraError(
                "this model reads no such frames of a video", where="train.task_options.given", allowed=allowed
            )
        for key, asked in (
            ("given_noise", self.options.given_noise is not None),
            ("given_dropout", self.options.given_dropout > 0),
        ):
            if asked and self.form.condition != "channels":
                raise TesseraError(
                    "this model does not read a given image as channels alone",
                    where=f"train.task_options.{key}",
                    fix=f"leave {key} out: it is for models such as CogVideoX I2V",
                )
        always = self.form.condition == "replace" and not self.form.token_times  # first frames have the time 0
        always |= (self.form.joint and self.form.image_embeds) or self.form.text_reads_frames
        if given == "none" and (self.form.condition in ("mask_channels", "channels") or always):
            raise TesseraError(
                "this model continues given images",
                where="train.task_options.given",
                allowed=["first", "first_last"] if self._reads_last else ["first"],
                fix="train.task_options.given=first",
            )

    def _check_features(self) -> None:
        """Raise where the options ask for what features cannot give."""
        if self.options.given_noise is not None:
            raise TesseraError(
                "features hold given images as they were encoded, without noise",
                where="train.task_options.given_noise",
                fix="train on the videos themselves and encode in every step (train.task_options.encoders={}), or "
                "leave given_noise out",
            )

    @property
    def _reads_last(self) -> bool:
        return self.form.condition == "mask_channels"

    def _choose_encoders(self, config: RunConfig) -> EncoderOptions | None:
        """Return the encoders of the recipe; if it names none, for media those of the model's folder."""
        folder = None if config.model.path is None else pipeline_folder(config.model.path)
        given = "encoders" in self.options.model_fields_set
        if not given and folder is not None and (folder / VAE).is_dir() and reads_media(config):
            self.options = self.options.model_copy(update={"encoders": EncoderOptions()})
        return self.options.encoders

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        chosen = self._choose_encoders(config)
        self._online = chosen is not None and not reads_features(config)
        if not self._online:
            self._check_features()
        if chosen is None:
            return {}
        if not self._online:
            self._previews = config.train.generate_every > 0
            return {}
        folder = chosen.folder or config.model.path
        if folder is None:
            raise TesseraError(
                "online encoding needs a VAE and text encoders",
                where="train.task_options.encoders.folder",
                fix="name a diffusers folder that has them, here or as model.path",
            )
        parts, vae, text = PipelineFolder(pipeline_folder(folder) or folder), chosen.vae, chosen.text
        edit = edit_form(parts.folder, self.form)
        if edit is not None:
            self._edit = partial(EditImages.load, parts.folder, edit)
        elif self.options.caption_dropout or self.form.text_reads_frames:
            self._empty = partial(parts.empty_caption, self.form)
        make = partial(parts.autoencoder, dtype=DTYPES[vae.dtype], tiling=vae.tiling, slicing=vae.slicing)
        encoders = {VAE: _encoder(make, vae.residence)}
        if self.form.image_embeds:
            encoders[IMAGE_ENCODER] = _encoder(partial(parts.frame_encoder, dtype=DTYPES[vae.dtype]), vae.residence)
        for form in self.form.text:
            make_text = partial(parts.text_encoder, form, dtype=DTYPES[text.dtype])
            encoders[form.encoder] = _encoder(make_text, text.residence)
        return encoders

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        if self.options.encoders is not None and not self._online:
            later = "; previews read them to sample" if self._previews else ""
            log.info("the data are features: VAE and text encoders are not loaded to train%s", later)
        if self._online and components:  # a later stage of a pipeline has none
            edit = None if self._edit is None else self._edit()
            self._encoders = SampleEncoders(self.form, components, self.options.given, self._empty(), edit)

    # ------------------------------------------------------------------------------------------ counts

    def prepare(self, batch: Batch) -> Batch:
        """Draw the noise: for a long video this takes the host as long as some percent of a step."""
        return batch.with_tensors(noise=self._noise(batch))

    def counts(self, batch: Batch) -> Counts:
        trained, level = self._trained(batch), self._level_of_latents(batch, [_band(one) for one in self._drawn(batch)])
        values = self.form.patch_values
        found: dict[str, int | Tensor] = {LATENTS: trained.sum() * values}
        for number, band in enumerate(BANDS):
            found[f"{LATENTS}_{band}"] = (trained & (level == number)).sum() * values
        return found

    def _samples(self, batch: Batch) -> list[SampleSegment]:
        """Return the segments of the main sequence: rows of one length follow each other."""
        lengths, latents = batch.segments["latents"].lengths, latent_lengths(batch, self.form)
        row = max(1, sum(lengths) // max(1, len(batch.seeds)))
        found, at, counts = [], 0, [0] * len(batch.seeds)
        for length, own in zip(lengths, latents, strict=True):
            number = min(at // row, len(counts) - 1)
            found.append(SampleSegment(batch.seeds[number], counts[number], own))
            counts[number] += 1
            at += length
        return found

    def _drawn(self, batch: Batch) -> list[NoiseLevel]:
        samples = self._samples(batch)
        sizes = batch.shapes["latents"]
        tokens = [frames * rows * columns for frames, rows, columns in sizes]
        return [self._levels.draw(one.chance("level"), count) for one, count in zip(samples, tokens, strict=True)]

    def _dropped(self, batch: Batch) -> set[int]:
        share = self.options.caption_dropout
        if not share:
            return set()
        drawn = [one.chance("caption").random() for one in self._samples(batch)]
        return {number for number, value in enumerate(drawn) if value < share}

    def _disturb(self, batch: Batch) -> Disturb | None:
        """Return what adds noise to given images: the same for a sample, wherever it is encoded."""
        asked, samples = self.options.given_noise, self._samples(batch)
        if asked is None:
            return None

        def disturb(number: int, pixels: Tensor) -> Tensor:
            one = samples[number]
            strength = math.exp(one.chance("given noise").gauss(asked.mean, asked.std))
            drawn = torch.randn(pixels.shape, generator=generator("cpu", one.seed, "given noise", one.index))
            return pixels + strength * drawn.to(pixels)

        return disturb

    def _kept_images(self, batch: Batch) -> list[float]:
        """Return 1 for samples that keep their given image, and 0 for the others."""
        share = self.options.given_dropout
        return [float(one.chance("given image").random() >= share) for one in self._samples(batch)]

    # ------------------------------------------------------------------------------------------ parts of a sequence

    def _own(self, batch: Batch) -> Tensor | None:
        """Return which of all latent tokens this rank computes; None: all of them."""
        return batch.get(Stream.sources("latent_index") if self.form.joint else self._index)

    def _part(self, batch: Batch, whole: Tensor) -> Tensor:
        own = self._own(batch)
        return whole if own is None else whole.index_select(0, own)

    def _still(self, batch: Batch) -> Tensor:
        """Return which of all latent tokens belong to frames that are given in place of noise."""
        found = torch.zeros(sum(latent_lengths(batch, self.form)), dtype=torch.bool)
        if self.options.given != "none" and self.form.condition == "replace":
            at = 0
            for (frames, rows, columns), length in zip(
                batch.shapes["latents"], latent_lengths(batch, self.form), strict=True
            ):
                found[at : at + (rows * columns if frames > 1 else 0)] = True
                at += length
        return found.to(batch["sample_index"].device, non_blocking=True)

    def _trained(self, batch: Batch) -> Tensor:
        """Return which of this rank's latent tokens are trained on."""
        still, own = self._still(batch), self._part(batch, self._still(batch))
        if "trained" not in batch:  # of a family's example
            return ~own
        if Stream.sources("trained") in batch:  # positions among this rank's own already
            return torch.zeros_like(own).index_fill(0, batch["trained"], True) & ~own
        return self._part(batch, torch.zeros_like(still).index_fill(0, batch["trained"], True)) & ~own

    def _level_of_latents(self, batch: Batch, values: Sequence[float]) -> Tensor:
        """Return one value for each of this rank's latent tokens, given one for each sample."""
        by_sample = devices.send(values, torch.float32, batch["sample_index"].device)
        return by_sample.index_select(0, self._sample_of_latents(batch))

    def _sample_of_latents(self, batch: Batch) -> Tensor:
        index = batch["sample_index"]
        return index.index_select(0, batch["latent_index"]) if self.form.joint else index

    # ------------------------------------------------------------------------------------------ inputs

    @property
    def encode_steps(self) -> int:
        return self.options.encoders.steps if self.options.encoders is not None and self._online else 1

    def encode(self, batches: Sequence[Batch]) -> list[Batch]:
        if self._encoders is None or any("clean" in batch for batch in batches):
            return list(batches)
        # Pixels need not wait on the device.
        read = {"frames", "references", SHOWN, EMPTY_IDS, *id_names(self.form)}
        return [
            replace(batch, tensors={name: one for name, one in batch.tensors.items() if name not in read})
            for batch in self._encoders.encode_all(
                batches, [self._dropped(batch) for batch in batches], [self._disturb(batch) for batch in batches]
            )
        ]

    def inputs(self, batch: Batch) -> Batch:
        if "clean" not in batch or not any(map(any, batch.shapes.get("frames", ()))):  # not encoded from media
            batch = self._features(batch, self._dropped(batch))
        if self.form.image_embeds and IMAGE_EMBEDS not in batch:
            raise TesseraError(
                "this model reads embeddings of given frames, and the batch has none",
                where="data.train",
                fix="write features again with the folder of this model, which has an image_encoder",
            )
        device, levels = batch["clean"].device, self._drawn(batch)
        noise = batch["noise"] if "noise" in batch else self._noise(batch).to(device)
        clean, noise = (self._part(batch, whole.to(torch.float32)) for whole in (batch["clean"], noise))
        trained = self._trained(batch)
        clean_share, noise_share, weight = (
            self._level_of_latents(batch, values).unsqueeze(1)
            for values in zip(*((one.clean_share, one.noise_share, one.weight) for one in levels), strict=True)
        )
        noisy = torch.where(trained.unsqueeze(1), clean_share * clean + noise_share * noise, clean)
        if self.form.condition == "channels_mask" and "condition" not in batch:  # no frame is given
            noisy = F.pad(noisy, (0, noisy.shape[1] + noisy.shape[1] // self.form.channels))
        elif "condition" in batch:
            given = self._part(batch, batch["condition"]).to(noisy)
            if self.options.given_dropout:
                given = given * self._level_of_latents(batch, self._kept_images(batch)).unsqueeze(1)
            noisy = torch.cat([noisy, given], -1)
        times = [one.time for one in levels]
        found = {
            "latents": noisy,
            "target": training_target(self._objective, clean, noise, clean_share, noise_share),
            "token_weights": weight.squeeze(1) * trained,
            "trained_here": trained,
            "sample_of_latents": self._sample_of_latents(batch),
            "noise_band": self._level_of_latents(batch, [_band(one) for one in levels]),
        }
        if self.form.token_times and self.options.given != "none":  # given frames have a time of zero, the last entry
            still = self._part(batch, self._still(batch))
            found["time_index"] = torch.where(still, len(times), batch["sample_index"])
            times.append(0.0)
        found["timesteps"] = devices.send(times, torch.float32, device)
        if self.form.guidance:
            found["guidance"] = torch.full((len(levels),), self.options.guidance, device=device)
        if "text" in batch and self.form.joint and not self.form.whole_text:
            sources = batch.get(Stream.sources("text_index"))
            found["text"] = batch["text"] if sources is None else batch["text"].index_select(0, sources)
        return batch.with_tensors(**found)

    def _features(self, batch: Batch, dropped: set[int]) -> Batch:
        if "clean" not in batch and "latents" in batch:  # a family's example has what the model reads
            clean, given = batch["latents"].tensor_split([self.form.patch_values], 1)
            batch = batch.with_tensors(clean=clean, **({"condition": given} if given.shape[1] else {}))
        if "clean" not in batch:
            raise TesseraError(
                "the batch has images or videos, and no latents of them",
                where="train.task_options.encoders",
                fix="train.task_options.encoders.folder=FOLDER encodes them in every step, with the VAE and text "
                "encoders of a diffusers folder; `tessera data features` writes latents once",
            )
        values, found = self.form.patch_values, batch["clean"].shape[1]
        if found != values:
            raise TesseraError(
                f"tokens of {found} numbers in the data; the model reads {values}: {self.form.channels} channels in "
                f"patches of {self.form.patch}",
                where="data.train",
                fix="write features with the VAE that belongs to this model",
            )
        batch = batch.with_tensors(**{name: self._spread(batch, name) for name in ("condition",) if name in batch})
        return without_captions(batch, dropped) if dropped else batch

    def _spread(self, batch: Batch, name: str) -> Tensor:
        """Return features of samples as features of all latent tokens: padding has zeros."""
        some, sizes = batch[name], latent_lengths(batch, self.form)
        if name not in batch.segments or len(some) == sum(sizes):
            return some
        whole, parts = some.new_zeros(sum(sizes), some.shape[1]), torch.split(some, [*batch.segments[name].lengths])
        for into, part in zip(torch.split(whole, sizes), parts, strict=True):
            into[: len(part)] = part
        return whole

    def _noise(self, batch: Batch) -> Tensor:
        """Return noise for all latent tokens, of whole samples: a sample's noise depends on no other."""
        return torch.cat([one.noise(self.form.patch_values) for one in self._samples(batch)])

    # ------------------------------------------------------------------------------------------ losses

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        error = (tensor(outputs, PREDICTION).to(torch.float32) - batch["target"]).square().sum(1)
        weights = batch["token_weights"]
        metrics = {}
        with torch.no_grad():
            plain = error * batch["trained_here"]
            for number, band in enumerate(BANDS):
                own = plain * (batch["noise_band"] == number)
                metrics[f"error_at_{band}_noise"] = Metric(own.sum(), f"{LATENTS}_{band}")
        return Losses([LossTerm(LOSS, (error * weights).sum(), LATENTS)], metrics)


def _encoder(make: Callable[..., nn.Module], residence: Residence) -> Component:
    return Component(
        lambda _: make(meta=True), trained=False, load=lambda _: make(), residence=residence, stage="first"
    )


def _band(level: NoiseLevel) -> int:
    """Return the number of the third of all times that a level lies in."""
    return min(int(level.time * len(BANDS) / TIMES), len(BANDS) - 1)


TASK = DiffusionTask

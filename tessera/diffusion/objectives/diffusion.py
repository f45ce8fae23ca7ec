"""Train image and video generation: predict the velocity, the noise or v of noisy latents, at random noise levels.

The loss is the sum of squared errors over the trained latents, divided by their number in the global batch, so that any
split of the batch gives the same gradient. Noise, level and caption dropout of a sample depend only on the seed of its
row and its number in the row, and not on the layout. They are drawn on the host for full samples; with context
parallelism each rank selects its part.

Latents and embeddings are stored features, or come from frozen encoders (`encoders`).
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
from tessera.diffusion.autoencoders import VAE
from tessera.diffusion.batches import IMAGE_EMBEDS, latent_lengths
from tessera.diffusion.edit_images import EMPTY_IDS, SHOWN
from tessera.diffusion.encoders import DisturbSample, Encoders, without_captions
from tessera.diffusion.family import GenerationFamily, generation_family_of
from tessera.diffusion.feature_facts import reads_features, reads_media
from tessera.diffusion.frame_encoder import IMAGE_ENCODER
from tessera.diffusion.noise_levels import TIMES, NoiseLevel, NoiseLevels, Objective, training_target
from tessera.diffusion.objectives.options import DTYPES, DiffusionOptions, EncoderOptions, SampleSegment
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.distributed import World
from tessera.runtime.rng import generator
from tessera.weights.layouts import pipeline_folder

log = logging.getLogger("tessera")
LATENTS = "latents"  # number of latent values in the loss: the loss is averaged over them
LOSS = "diffusion_loss"
BANDS = ("low", "middle", "high")  # metrics are reported for three ranges of noise levels


class DiffusionTask(Task):
    """Train a generation model to predict the velocity (flow matching), the noise or v. Options: `DiffusionOptions`."""

    reads = (PREDICTION,)
    section: ClassVar[type[DiffusionOptions]] = DiffusionOptions

    def __init__(self, **options: Any) -> None:
        self.options = build(self.section, options, "train.task_options")
        self._family: GenerationFamily | None = None
        self._index = ""  # name of the batch tensor with indices of this rank's tokens in the main sequence
        self._objective: Objective = self.options.objective or "flow"
        self._levels = NoiseLevels(self.options, self._objective)
        self._online = self.options.encoders is not None  # whether encoders run in every step
        self._previews = False
        self._parts: PipelineFolder | None = None
        self._encoders: Encoders | None = None

    # ------------------------------------------------------------------------------------------ the run

    @property
    def family(self) -> GenerationFamily:
        assert self._family is not None, "`bind` is called first"
        return self._family

    def bind(self, spec: ModelSpec, config: Any) -> None:
        fix = f"leave train.task out: the default task of the family is {spec.task}"
        self._family = generation_family_of(spec, config, "train.task=diffusion", fix)
        stream = spec.main.plan(config).main
        self._index = "" if stream is None else stream.index
        self._objective = self.options.objective or self._family.objective
        self._check_levels()
        self._check_given()
        self._levels = NoiseLevels(self.options, self._objective)

    def _check_levels(self) -> None:
        flow, weighting = self._objective == "flow", self.options.weighting
        if weighting != "none" and flow != (weighting != "min_snr"):
            raise TesseraError(
                f"the weighting {weighting} is not defined for the objective {self._objective}",
                where="train.task_options.weighting",
                allowed=["none", "sigma_sqrt", "cosmap", "gaussian"] if flow else ["none", "min_snr"],
                code="generation.weighting-without-levels",
            )
        if not flow:
            moved = {"shift": self.options.shift != 1, "shift_by_tokens": self.options.shift_by_tokens is not None}
            for key, changed in {**moved, "steps": self.options.steps is None}.items():
                if changed:
                    raise TesseraError(
                        f"{key} has no effect on the objective {self._objective}, whose noise levels follow from "
                        "`betas`",
                        where=f"train.task_options.{key}",
                        fix=f"remove {key}; betas.snr_shift shifts these levels towards noise",
                        code="generation.levels-fixed-by-betas",
                    )

    def _check_given(self) -> None:
        images, frames = self.family.images, self.options.given
        if frames not in images.choices:
            raise TesseraError(
                "this model needs a conditioning image for every sample"
                if frames == "none"
                else f"this model does not support given={frames}",
                where="train.task_options.given",
                allowed=list(images.choices),
                fix="set train.task_options.given=first" if frames == "none" else None,
                code="generation.given-frames-mismatch",
            )
        noise = {"given_noise": self.options.given_noise is not None, "given_dropout": self.options.given_dropout > 0}
        for key, chosen in noise.items():
            if chosen and not images.takes_noise:
                raise TesseraError(
                    f"{key} needs a model that reads conditioning images as channels of latents without a mask",
                    where=f"train.task_options.{key}",
                    fix=f"remove {key}, which is for models such as CogVideoX I2V",
                    code="generation.image-dropout-unsupported",
                )

    def _check_features(self) -> None:
        """Raise if the options need pixels, which stored features do not have."""
        if self.options.given_noise is not None:
            raise TesseraError(
                "given_noise adds noise before encoding, but stored features are encoded already",
                where="train.task_options.given_noise",
                fix="train on videos and encode them in every step (train.task_options.encoders={}), or "
                "remove given_noise",
                code="generation.given-noise-with-features",
            )

    def _choose_encoders(self, config: RunConfig) -> EncoderOptions | None:
        """Return the recipe's encoder options. Without any, runs on media use the encoders in the model's folder."""
        folder = None if config.model.path is None else pipeline_folder(config.model.path)
        chosen = "encoders" in self.options.model_fields_set
        if not chosen and folder is not None and (folder / VAE).is_dir() and reads_media(config):
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
                fix="set this key or model.path to a diffusers folder with these components",
                code="generation.missing-encoders",
            )
        vae, text = chosen.vae, chosen.text
        self._parts = parts = PipelineFolder(pipeline_folder(folder) or folder, self.family.vaes)
        make = partial(parts.autoencoder, dtype=DTYPES[vae.dtype], tiling=vae.tiling, slicing=vae.slicing)
        encoders = {VAE: _encoder(make, vae.residence)}
        if self.family.image_embeds:
            encoders[IMAGE_ENCODER] = _encoder(partial(parts.frame_encoder, dtype=DTYPES[vae.dtype]), vae.residence)
        for reader in self.family.captions:
            make_text = partial(parts.text_encoder, reader, dtype=DTYPES[text.dtype])
            encoders[reader.encoder] = _encoder(make_text, text.residence)
        return encoders

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        if self.options.encoders is not None and not self._online:
            later = "; previews load them to sample" if self._previews else ""
            log.info("the data are stored features: training does not load VAE and text encoders%s", later)
        # `components` is empty on all pipeline stages but the first.
        if self._online and self._parts is not None and components:
            self._encoders = Encoders(self.family, components, self._parts, self.options.given)

    # ------------------------------------------------------------------------------------------ noise and sizes

    def prepare(self, batch: Batch) -> Batch:
        """Draw the noise of the next step in advance: for long videos, drawing takes a few percent of a step."""
        return batch.with_tensors(noise=self._noise(batch))

    def counts(self, batch: Batch) -> Counts:
        bands = [_band(level) for level in self._drawn(batch)]
        trained, band_of_latents = self._trained(batch), self._level_of_latents(batch, bands)
        values = self.family.patch_values
        counts: dict[str, int | Tensor] = {LATENTS: trained.sum() * values}
        for number, band in enumerate(BANDS):
            counts[f"{LATENTS}_{band}"] = (trained & (band_of_latents == number)).sum() * values
        return counts

    def _samples(self, batch: Batch) -> list[SampleSegment]:
        """Return a `SampleSegment` for each segment of the main sequence. All rows have the same length."""
        lengths, latents = batch.segments["latents"].lengths, latent_lengths(batch, self.family)
        row = max(1, sum(lengths) // max(1, len(batch.seeds)))
        samples, at, counts = [], 0, [0] * len(batch.seeds)
        for length, count in zip(lengths, latents, strict=True):
            number = min(at // row, len(counts) - 1)
            samples.append(SampleSegment(batch.seeds[number], counts[number], count))
            counts[number] += 1
            at += length
        return samples

    def _drawn(self, batch: Batch) -> list[NoiseLevel]:
        samples = self._samples(batch)
        sizes = batch.shapes["latents"]
        tokens = [frames * rows * columns for frames, rows, columns in sizes]
        pairs = zip(samples, tokens, strict=True)
        return [self._levels.draw(sample.chance("level"), count) for sample, count in pairs]

    def _dropped(self, batch: Batch) -> set[int]:
        share = self.options.caption_dropout
        if not share:
            return set()
        drawn = [sample.chance("caption").random() for sample in self._samples(batch)]
        return {number for number, value in enumerate(drawn) if value < share}

    def _disturb(self, batch: Batch) -> DisturbSample | None:
        """Return the function that adds noise to conditioning images; None: no noise. Each sample has its own seed."""
        options, samples = self.options.given_noise, self._samples(batch)
        if options is None:
            return None

        def disturb(number: int, pixels: Tensor) -> Tensor:
            sample = samples[number]
            strength = math.exp(sample.chance("given noise").gauss(options.mean, options.std))
            drawn = torch.randn(pixels.shape, generator=generator("cpu", sample.seed, "given noise", sample.index))
            return pixels + strength * drawn.to(pixels)

        return disturb

    def _image_shares(self, batch: Batch) -> list[float]:
        """Return 1 for each sample that keeps its conditioning image, and 0 for each sample that is trained without."""
        share = self.options.given_dropout
        return [float(sample.chance("given image").random() >= share) for sample in self._samples(batch)]

    # ------------------------------------------------------------------------------------------ parts of a sequence

    def _part(self, batch: Batch, values: Tensor) -> Tensor:
        """Return the rows of `values` for the latent tokens of this rank. `values` has a row for every latent token."""
        index = batch.get(Stream.sources("latent_index") if self.family.joint else self._index)
        return values if index is None else values.index_select(0, index)

    def _still(self, batch: Batch) -> Tensor:
        """Return a mask of all latent tokens (of all ranks): True for those of conditioning frames, without noise."""
        lengths = latent_lengths(batch, self.family)
        still = torch.zeros(sum(lengths), dtype=torch.bool)
        if self.options.given != "none":
            at = 0
            for grid, length in zip(batch.shapes["latents"], lengths, strict=True):
                still[at : at + self.family.images.replaced_tokens((grid[0], grid[1], grid[2]))] = True
                at += length
        return still.to(batch["sample_index"].device, non_blocking=True)

    def _trained(self, batch: Batch) -> Tensor:
        """Return a mask of this rank's latent tokens, True for those in the loss."""
        still = self._still(batch)
        noisy = ~self._part(batch, still)
        if "trained" not in batch:  # an example batch of a family has no mask
            return noisy
        if Stream.sources("trained") in batch:  # context parallelism: "trained" lists only tokens of this rank
            return torch.zeros_like(noisy).index_fill(0, batch["trained"], True) & noisy
        return self._part(batch, torch.zeros_like(still).index_fill(0, batch["trained"], True)) & noisy

    def _level_of_latents(self, batch: Batch, values: Sequence[float]) -> Tensor:
        """Return for each latent token of this rank the value of its sample. `values`: one for each sample."""
        by_sample = devices.send(values, torch.float32, batch["sample_index"].device)
        return by_sample.index_select(0, self._sample_of_latents(batch))

    def _sample_of_latents(self, batch: Batch) -> Tensor:
        index = batch["sample_index"]
        return index.index_select(0, batch["latent_index"]) if self.family.joint else index

    # ------------------------------------------------------------------------------------------ inputs

    @property
    def encode_steps(self) -> int:
        return self.options.encoders.steps if self.options.encoders is not None and self._online else 1

    def encode(self, batches: Sequence[Batch]) -> list[Batch]:
        if self._encoders is None or any("clean" in batch for batch in batches):
            return list(batches)
        # Free the pixels and token ids on the device.
        read = {"frames", "references", SHOWN, EMPTY_IDS, *self.family.id_names}
        return [
            replace(batch, tensors={name: tensor for name, tensor in batch.tensors.items() if name not in read})
            for batch in self._encoders.encode_all(
                batches, [self._dropped(batch) for batch in batches], [self._disturb(batch) for batch in batches]
            )
        ]

    def inputs(self, batch: Batch) -> Batch:
        family = self.family
        if "clean" not in batch or not any(map(any, batch.shapes.get("frames", ()))):  # stored features
            batch = self._features(batch, self._dropped(batch))
        if family.image_embeds and IMAGE_EMBEDS not in batch:
            raise TesseraError(
                "this model needs embeddings of conditioning frames, and the batch has none",
                where="data.train",
                fix="write the features again, with the image_encoder in the folder of this model",
                code="data.features-without-frame-embeddings",
            )
        device, levels = batch["clean"].device, self._drawn(batch)
        noise = batch["noise"] if "noise" in batch else self._noise(batch).to(device)
        clean, noise = (self._part(batch, values.to(torch.float32)) for values in (batch["clean"], noise))
        trained = self._trained(batch)
        clean_share, noise_share, weight = (
            self._level_of_latents(batch, values).unsqueeze(1)
            for values in zip(*((level.clean_share, level.noise_share, level.weight) for level in levels), strict=True)
        )
        noisy = torch.where(trained.unsqueeze(1), clean_share * clean + noise_share * noise, clean)
        tensors = {
            "latents": self._with_condition(batch, noisy),
            "target": training_target(self._objective, clean, noise, clean_share, noise_share),
            "token_weights": weight.squeeze(1) * trained,
            "trained_here": trained,
            "sample_of_latents": self._sample_of_latents(batch),
            "noise_band": self._level_of_latents(batch, [_band(level) for level in levels]),
        }
        times = [level.time for level in levels]
        # conditioning frames use the last timestep, which is zero
        if family.token_times and self.options.given != "none":
            still = self._part(batch, self._still(batch))
            tensors["time_index"] = torch.where(still, len(times), batch["sample_index"])
            times.append(0.0)
        tensors["timesteps"] = devices.send(times, torch.float32, device)
        if family.guidance_input:
            tensors["guidance"] = torch.full((len(levels),), self.options.guidance, device=device)
        if "text" in batch and family.joint and not family.whole_text:
            sources = batch.get(Stream.sources("text_index"))
            tensors["text"] = batch["text"] if sources is None else batch["text"].index_select(0, sources)
        return batch.with_tensors(**tensors)

    def _with_condition(self, batch: Batch, noisy: Tensor) -> Tensor:
        """Return noisy latents, with condition channels of conditioning images."""
        if "condition" not in batch:
            blank = self.family.images.blank_channels(self.family.channels)
            return F.pad(noisy, (0, noisy.shape[1] // self.family.channels * blank)) if blank else noisy
        images = self._part(batch, batch["condition"]).to(noisy)
        if self.options.given_dropout:
            images = images * self._level_of_latents(batch, self._image_shares(batch)).unsqueeze(1)
        return torch.cat([noisy, images], -1)

    def _features(self, batch: Batch, dropped: set[int]) -> Batch:
        family = self.family
        # Example batches contain noisy `latents`, which stand for `clean` here.
        if "clean" not in batch and "latents" in batch:
            clean, images = batch["latents"].tensor_split([family.patch_values], 1)
            batch = batch.with_tensors(clean=clean, **({"condition": images} if images.shape[1] else {}))
        if "clean" not in batch:
            raise TesseraError(
                "the batch has images or videos instead of latents",
                where="train.task_options.encoders",
                fix="set train.task_options.encoders.folder to a diffusers folder, whose encoders then run in every "
                "step; or write latents once: tessera data features",
                code="generation.batch-without-latents",
            )
        values = batch["clean"].shape[1]
        if values != family.patch_values:
            raise TesseraError(
                f"latent tokens have {values} values; the model reads {family.patch_values}: {family.channels} "
                f"channels in patches of {family.patch}",
                where="data.train",
                fix="write the features with the VAE of this model",
                code="generation.latent-channels-mismatch",
            )
        return without_captions(batch, dropped) if dropped else batch

    def _noise(self, batch: Batch) -> Tensor:
        """Return noise for the latent tokens of all samples. The noise of a sample does not depend on other samples."""
        return torch.cat([sample.noise(self.family.patch_values) for sample in self._samples(batch)])

    # ------------------------------------------------------------------------------------------ losses

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        error = (tensor(outputs, PREDICTION).to(torch.float32) - batch["target"]).square().sum(1)
        weights = batch["token_weights"]
        metrics = {}
        with torch.no_grad():
            plain = error * batch["trained_here"]
            for number, band in enumerate(BANDS):
                in_band = plain * (batch["noise_band"] == number)
                metrics[f"error_at_{band}_noise"] = Metric(in_band.sum(), f"{LATENTS}_{band}")
        return Losses([LossTerm(LOSS, (error * weights).sum(), LATENTS)], metrics)


def _encoder(make: Callable[..., nn.Module], residence: Residence) -> Component:
    """Return the component of a frozen encoder, which only the first pipeline stage loads."""
    return Component(
        lambda _: make(meta=True), trained=False, load=lambda _: make(), residence=residence, stage="first"
    )


def _band(level: NoiseLevel) -> int:
    """Return the index in `BANDS` of the range that contains a noise level."""
    return min(int(level.time * len(BANDS) / TIMES), len(BANDS) - 1)


TASK = DiffusionTask

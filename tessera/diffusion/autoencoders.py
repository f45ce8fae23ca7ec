"""Encode images and videos to latents and decode them, with the VAE of a diffusers folder.

An `Autoencoder` wraps one VAE class. `GenerationFamily.vaes` lists the wrappers that a family supports. A family with
its own VAE derives a class of `Autoencoder` in its folder, with `form_of` and `build`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError, foreign_values, nearest

VAE = "vae"
_MOST_PIXELS = 1 << 25  # maximum pixels per VAE call of several videos: about 80 frames of 480 x 832


@dataclass(frozen=True)
class VaeForm:
    """Describe the latents of a VAE: strides from pixels to latents, and scaling."""

    channels: int
    time_stride: int  # frames per latent frame; the first latent frame encodes only one frame
    space_stride: int
    # The transformer reads (latents - mean) / std, by channel.
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    images_only: bool = False

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the size of the latents: frames, rows and columns."""
        return (frames - 1) // self.time_stride + 1, height // self.space_stride, width // self.space_stride


class Autoencoder(nn.Module):
    """Encode images and videos to scaled latents, and decode them. `vae`: a module with `encode` and `decode` as in
    diffusers."""

    most_per_call: ClassVar[int | None] = None  # maximum number of videos per call; None: no maximum

    def __init__(self, vae: nn.Module, form: VaeForm) -> None:
        super().__init__()
        self.vae = vae
        self.form = form

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        """Return strides and scaling of the latents from the VAE's config.json."""
        raise NotImplementedError

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> nn.Module | None:
        """Return the module without weights; None: load the class of diffusers that the folder names."""
        return None

    # Subclasses may override `to_latents` and `to_pixels`. Tensors are [B, channels, frames, rows, columns].

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Return unscaled latents of pixels, which are between -1 and 1."""
        # Take the mode of the VAE's distribution, not a sample: stored features equal latents encoded in training.
        return self.vae.encode(pixels).latent_dist.mode()  # type: ignore[operator]

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Return pixels of unscaled latents."""
        return self.vae.decode(latents, return_dict=False)[0]  # type: ignore[operator]

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the latents, by channel."""
        mean, std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in (self.form.mean, self.form.std)
        )
        return mean, std

    @property
    def dtype(self) -> torch.dtype:
        return next(self.vae.parameters()).dtype

    def spare_memory(self, *, tiling: bool, slicing: bool) -> None:
        """Save memory: compute large frames in overlapping tiles, and the videos of a batch one by one.

        An option that is False keeps the default of the VAE class. Raise if the VAE lacks `enable_tiling` or
        `enable_slicing`.
        """
        for chosen, name in ((tiling, "tiling"), (slicing, "slicing")):
            if not chosen:
                continue
            enable = getattr(self.vae, f"enable_{name}", None)
            if enable is None:
                raise TesseraError(
                    f"the VAE of this model does not support {name}",
                    where=f"{type(self.vae).__name__}.enable_{name}",
                    fix=f"remove the option for VAE {name}, or add this method to the VAE class",
                    code="generation.vae-option-not-supported",
                )
            enable()

    def encode(self, videos: Sequence[Tensor]) -> list[Tensor]:
        """Return the latents [C, f, h, w] of each video [F, H, W, 3], in float32. `videos`: uint8, or floats between -1
        and 1. Videos of the same shape share a call."""
        latents: dict[int, Tensor] = {}
        for numbers in self._calls(videos, 1):
            frames = torch.stack([videos[n] for n in numbers])
            if not frames.is_floating_point():
                frames = frames.to(torch.float32) / 127.5 - 1
            pixels = frames.permute(0, 4, 1, 2, 3).to(self.dtype)
            latents.update(zip(numbers, self(pixels).unbind(), strict=True))
        return [latents[n] for n in range(len(videos))]

    def decode(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Return the videos, uint8 [F, H, W, 3], of latents [C, f, h, w]."""
        videos: dict[int, Tensor] = {}
        for numbers in self._calls(latents, self.form.time_stride * self.form.space_stride**2):
            pixels = self(torch.stack([latents[n] for n in numbers]), "decode")
            frames = ((pixels.to(torch.float32) / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            videos.update(zip(numbers, frames.permute(0, 2, 3, 4, 1).unbind(), strict=True))
        return [videos[n] for n in range(len(latents))]

    def forward(self, values: Tensor, direction: Literal["encode", "decode"] = "encode") -> Tensor:
        """Return scaled latents of pixels, or pixels of scaled latents. Both directions use `forward`, because a
        sharded module gathers its weights only there."""
        mean, std = self.statistics(values.device)
        if direction == "decode":
            return self.to_pixels((values.to(torch.float32) * std + mean).to(self.dtype))
        return (self.to_latents(values).to(torch.float32) - mean) / std

    def _calls(self, tensors: Sequence[Tensor], scale: int) -> list[list[int]]:
        """Group tensors of the same shape into VAE calls of limited size, or of one larger tensor. `scale`: pixels per
        tensor value."""
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            by_shape[tuple(tensor.shape)].append(number)
        calls = []
        for numbers in by_shape.values():
            pixels = scale * tensors[numbers[0]].numel() // 3
            most = self.most_per_call or max(1, _MOST_PIXELS // max(1, pixels))
            calls += [numbers[at : at + most] for at in range(0, len(numbers), most)]
        return calls


class ImageVae(Autoencoder):
    """Wrap `AutoencoderKL`, whose tensors have no dimension for frames."""

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        shift = (float(config.get("shift_factor") or 0.0),)
        return VaeForm(_channels(config), 1, _halvings(config), shift, _scale(config), images_only=True)

    def to_latents(self, pixels: Tensor) -> Tensor:
        assert pixels.shape[2] == 1, "the processor refuses videos for this VAE"
        return super().to_latents(pixels.squeeze(2)).unsqueeze(2)

    def to_pixels(self, latents: Tensor) -> Tensor:
        return super().to_pixels(latents.squeeze(2)).unsqueeze(2)


class QwenImageVae(Autoencoder):
    """Wrap `AutoencoderKLQwenImage`, whose config.json contains mean and standard deviation of the latents."""

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        mean, std = (tuple(float(value) for value in config[name]) for name in ("latents_mean", "latents_std"))
        time, space = cls.strides(config)
        return VaeForm(int(config["z_dim"]), int(time), int(space), mean, std)

    @classmethod
    def strides(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the VAE's strides: frames per latent frame, and pixels per latent along height or width."""
        down = config.get("temperal_downsample", (False, True, True))
        return 2 ** sum(map(bool, down)), 2 ** len(down)


class WanVae(QwenImageVae):
    """Wrap `AutoencoderKLWan`, whose config.json contains its strides."""

    @classmethod
    def strides(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        return config.get("scale_factor_temporal") or 4, config.get("scale_factor_spatial") or 8


class HunyuanVideoVae(Autoencoder):
    """Wrap `AutoencoderKLHunyuanVideo`."""

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        time, space = config["temporal_compression_ratio"], config["spatial_compression_ratio"]
        return VaeForm(_channels(config), int(time), int(space), std=_scale(config))


class HunyuanVideo15Vae(HunyuanVideoVae):
    """Wrap `AutoencoderKLHunyuanVideo15`, whose attention mask supports only one video per call."""

    most_per_call = 1


class CogVideoXVae(Autoencoder):
    """Wrap `AutoencoderKLCogVideoX`."""

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        time = int(config["temporal_compression_ratio"])
        return VaeForm(_channels(config), time, _halvings(config), std=_scale(config))


class LTXVideoVae(Autoencoder):
    """Wrap `AutoencoderKLLTXVideo`. Its buffers contain mean and standard deviation of the latents. The decoder of some
    releases performs the last denoising step and gets timestep zero."""

    @classmethod
    def form_of(cls, config: Mapping[str, Any]) -> VaeForm:
        halvings = 2 ** sum(map(bool, config.get("spatio_temporal_scaling", (True, True, True, False))))
        space = config.get("spatial_compression_ratio") or int(config.get("patch_size", 4)) * halvings
        time = config.get("temporal_compression_ratio") or int(config.get("patch_size_t", 1)) * halvings
        return VaeForm(_channels(config), int(time), int(space), std=_scale(config))

    def to_pixels(self, latents: Tensor) -> Tensor:
        timed = {}
        if self.vae.config.timestep_conditioning:  # type: ignore[union-attr]
            timed = {"temb": latents.new_zeros(len(latents))}
        return self.vae.decode(latents, return_dict=False, **timed)[0]  # type: ignore[operator]

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        buffers = dict(self.vae.named_buffers(recurse=False))
        mean, std = (buffers[name].float().view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        return mean, std * super().statistics(device)[1]


# Wrappers by class name in diffusers. A folder may name only these classes; others are never imported.
VAES: Mapping[str, type[Autoencoder]] = {
    "AutoencoderKL": ImageVae,
    "AutoencoderKLWan": WanVae,
    "AutoencoderKLQwenImage": QwenImageVae,
    "AutoencoderKLHunyuanVideo": HunyuanVideoVae,
    "AutoencoderKLHunyuanVideo15": HunyuanVideo15Vae,
    "AutoencoderKLCogVideoX": CogVideoXVae,
    "AutoencoderKLLTXVideo": LTXVideoVae,
}


def vae_class(vaes: Mapping[str, type[Autoencoder]], name: Any, where: str) -> type[Autoencoder]:
    """Return the wrapper of a VAE class; raise if the family does not support the class."""
    if name not in vaes:
        near = nearest(name, vaes) if isinstance(name, str) else None
        raise TesseraError(
            f"this family does not support the VAE class {name!r}",
            where=where,
            allowed=list(vaes),
            nearest=near,
            code="generation.unknown-vae",
        )
    return vaes[name]


def read_vae_form(vaes: Mapping[str, type[Autoencoder]], config: Mapping[str, Any], where: str) -> VaeForm:
    """Return strides and scaling of a VAE's latents from its config.json."""
    wrapper = vae_class(vaes, config.get("_class_name"), where)
    with foreign_values(where):
        return wrapper.form_of(config)


def _channels(config: Mapping[str, Any]) -> int:
    return int(config["latent_channels"])


def _halvings(config: Mapping[str, Any]) -> int:
    """Return the VAE's spatial stride, 2 ** (encoder levels - 1): pixels per latent along height or width."""
    return int(2 ** (len(config.get("block_out_channels", (0, 0, 0, 0))) - 1))


def _scale(config: Mapping[str, Any]) -> tuple[float]:
    return (1 / float(config.get("scaling_factor") or 1.0),)

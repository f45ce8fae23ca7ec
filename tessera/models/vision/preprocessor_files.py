"""Options of processors, and the preprocessor files of families that cut images into grids of patches.

preprocessor_config.json and video_preprocessor_config.json are read and written as transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models.processing.conversation import TextOptions
from tessera.models.vision.patches import CLIP_MEAN, CLIP_STD, Patches
from tessera.runtime import files

Bounds = tuple[int | None, int | None]
Sizes = tuple[int, int, int]  # pixels along a side of a patch, patches along a side of a block, frames of a patch
BICUBIC = 3  # value of `Image.Resampling.BICUBIC` in Pillow


@dataclass(frozen=True)
class GridFiles:
    """Hold the class names of a family's preprocessor files and its default pixel bounds."""

    processor: str = "Qwen2VLProcessor"
    image: str = "Qwen2VLImageProcessor"
    video: str = "Qwen2VLVideoProcessor"
    image_bounds: tuple[int, int] = (56 * 56, 1280 * 28 * 28)
    video_bounds: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    whole_clips: bool = False  # pixel bounds apply to all frames of a video together

    def read(
        self, folder: Path, sizes: Sizes, *, image_bounds: Bounds, video_bounds: Bounds
    ) -> tuple[Patches, Patches]:
        """Return the patch settings of images and of videos. The recipe's pixel bounds override those of the folder."""
        image_file, video_file = read_files(folder)
        defaults = {"image_mean": self.mean, "image_std": self.std}
        if not video_file:  # as in transformers, videos are normalised like images, and have the default pixel bounds
            video_file = {
                key: image_file[key] for key in ("image_mean", "image_std", "rescale_factor") if key in image_file
            }
        image_file, video_file = {**defaults, **image_file}, {**defaults, **video_file}
        image = _patches(image_file, sizes, image_bounds, self.image_bounds, folder / IMAGE_FILE, "")
        video = _patches(video_file, sizes, video_bounds, self.video_bounds, folder / VIDEO_FILE, "video_")
        return image, replace(video, whole_clips=self.whole_clips)

    def write(self, folder: Path, image: Patches, video: Patches, sampling: VideoSampling, **more: Any) -> None:
        """Write the files. `more`: further fields of the file for images, such as those of a feature extractor."""
        processor = {"processor_class": self.processor}
        image_fields = {"image_processor_type": self.image, **_patch_fields(image), **more}
        write_json(folder / IMAGE_FILE, {**processor, **image_fields})
        video_fields = {
            **processor,
            "video_processor_type": self.video,
            **_patch_fields(video),
            "cap_pixels_per_frame": False,
            "do_sample_frames": True,
        }
        write_json(folder / VIDEO_FILE, {**video_fields, **sampling_fields(sampling)})


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings for images and for videos, from separate files or from processor_config.json."""
    both = read_json(folder / BOTH_FILE)
    image = read_json(folder / IMAGE_FILE) or both.get("image_processor") or {}
    return image, read_json(folder / VIDEO_FILE) or both.get("video_processor") or {}


def read_sampling(folder: Path) -> dict[str, Any]:
    """Return the settings of video sampling in a folder, under Tessera's names (`frames` is `num_frames` there)."""
    data = read_files(folder)[1]
    names = {"fps": "fps", "min_frames": "min_frames", "max_frames": "max_frames", "frames": "num_frames"}
    settings = {ours: data.get(theirs) for ours, theirs in names.items()}
    return {ours: value for ours, value in settings.items() if isinstance(value, (int, float)) and value > 0}


def sampling_fields(sampling: VideoSampling) -> dict[str, Any]:
    if sampling.frames is not None:
        return {"num_frames": sampling.frames}
    return {"fps": sampling.fps, "min_frames": sampling.min_frames, "max_frames": sampling.max_frames}


def read_norm(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields mean, std and scale that a preprocessor file contains."""
    norm: dict[str, Any] = {}
    for key, name in (("image_mean", "mean"), ("image_std", "std")):
        values = data.get(key)
        if values is None:
            continue
        if (
            not isinstance(values, list | tuple)
            or len(values) != 3
            or not all(isinstance(n, int | float) for n in values)
        ):
            raise TesseraError(
                f"{key} = {values!r} must be a list of three numbers", where=str(path), code="media.preprocessor-value"
            )
        norm[name] = tuple(map(float, values))
    scale = data.get("rescale_factor")
    if scale is not None and not isinstance(scale, int | float):
        raise TesseraError(
            f"rescale_factor = {scale!r} must be a number", where=str(path), code="media.preprocessor-value"
        )
    return norm if scale is None else {**norm, "scale": float(scale)}


def pixel_fields(patches: Patches) -> dict[str, Any]:
    """Return the fields of a preprocessor file that describe the normalisation of pixels."""
    return {
        "do_convert_rgb": True,
        **_STEPS,
        "rescale_factor": patches.scale,
        "image_mean": list(patches.mean),
        "image_std": list(patches.std),
    }


def check_fields(data: Mapping[str, Any], path: Path, **needed: Any) -> None:
    """Raise if a field of a preprocessor file differs from the value that the model needs. Missing fields are right."""
    for key, value in {**needed, **_STEPS}.items():
        if data.get(key) is not None and data[key] != value:
            raise TesseraError(
                f"{key} = {data[key]!r}, but the model needs {value!r}",
                where=str(path),
                code="media.preprocessor-mismatch",
            )


_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC}


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = files.read_json(path)
    return data if isinstance(data, dict) else {}


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _patches(
    data: Mapping[str, Any], sizes: Sizes, bounds: Bounds, default: tuple[int, int], path: Path, prefix: str
) -> Patches:
    patch, merge, temporal = sizes
    check_fields(data, path, patch_size=patch, merge_size=merge, temporal_patch_size=temporal)
    size = data["size"] if isinstance(data.get("size"), dict) else {}
    least = bounds[0] or data.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
    most = bounds[1] or data.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
    if least > most:
        raise TesseraError(
            f"{prefix}min_pixels ({least}) is more than {prefix}max_pixels ({most})",
            where="data.processor",
            code="media.bounds-crossed",
        )
    return Patches(int(least), int(most), patch, merge, temporal, **read_norm(data, path))


def _patch_fields(patches: Patches) -> dict[str, Any]:
    return {
        **pixel_fields(patches),
        "patch_size": patches.patch,
        "temporal_patch_size": patches.temporal,
        "merge_size": patches.merge,
        "min_pixels": patches.min_pixels,
        "max_pixels": patches.max_pixels,
        "size": {"shortest_edge": patches.min_pixels, "longest_edge": patches.max_pixels},
    }


class VideoOptions(TextOptions):
    """Declare the keys of `data.processor` for videos. Missing keys get the values of the model's folder."""

    fps: float = Field(2.0, ge=1e-6, le=1e6, description="frames taken from each second of a video")
    min_frames: int = Field(4, gt=0, le=10**6, description="least number of frames of a video")
    max_frames: int = Field(768, gt=0, le=10**6, description="largest number of frames of a video")
    frames: int | None = Field(
        None, gt=0, le=10**6, description="frames taken from every video, in place of fps and its bounds"
    )

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> Self:
        if self.frames is not None and self.model_fields_set & {"fps", "min_frames", "max_frames"}:
            raise ValueError("set frames, or fps with min_frames and max_frames, but not both")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames ({self.min_frames}) is more than max_frames ({self.max_frames})")
        return self

    def sampling(self, folder: Path) -> VideoSampling:
        """Return the video sampling of the recipe, completed by the model's folder."""
        rates = {name: getattr(self, name) for name in ("fps", "min_frames", "max_frames")}
        if self.frames is not None:
            return VideoSampling(**rates, frames=self.frames)
        in_recipe = self.model_fields_set & rates.keys()
        stored = {name: value for name, value in read_sampling(folder).items() if name not in in_recipe}
        if in_recipe:
            stored.pop("frames", None)  # the recipe sets a frame rate, so the folder's number of frames does not apply
        return VideoSampling(**{**rates, **stored})

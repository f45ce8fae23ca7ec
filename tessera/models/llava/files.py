"""Preprocessor files of LLaVA folders, as transformers reads and writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError
from tessera.data.media.clips import VideoSampling
from tessera.data.patches import CLIP_MEAN, CLIP_STD, Patches
from tessera.data.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models._chat.preprocessor_files import read_json
from tessera.models.llava.config import LlavaConfig
from tessera.models.llava.pictures import Squares

_BICUBIC = 3  # Pillow's number for it
_HALF = (0.5, 0.5, 0.5)


def read_squares(folder: Path, config: LlavaConfig) -> Squares:
    path = folder / IMAGE_FILE
    data = read_json(path) or read_json(folder / BOTH_FILE).get("image_processor") or {}
    vision = config.vision
    for key, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", _BICUBIC)):
        if data.get(key) is not None and data[key] != wanted:
            raise TesseraError(f"{key} = {data[key]!r}, the model needs {wanted!r}", where=str(path))
    clip = vision.kind == "clip"
    mean = tuple(map(float, data.get("image_mean") or (CLIP_MEAN if clip else _HALF)))
    std = tuple(map(float, data.get("image_std") or (CLIP_STD if clip else _HALF)))
    scale = float(data.get("rescale_factor") or 1 / 255)
    # Squares have one size: there are no bounds.
    patches = Patches(1, 1 << 62, vision.patch_size, merge=1, temporal=1, mean=mean, std=std, scale=scale)
    if config.tiles is not None:
        _check_tiles(data, config, path)
        return Squares(vision.image_size, patches, vision.class_token, fit="stretch")
    size = data.get("size")
    crops = data.get("do_center_crop", clip)
    if size is None:
        size = {"shortest_edge": vision.image_size} if crops else {"height": vision.image_size}
    shortest = int(size if isinstance(size, int) else size.get("shortest_edge") or 0)
    fit_size = vision.image_size if shortest else size.get("height")
    if crops and shortest:
        given = data.get("crop_size") or vision.image_size
        fit_size = given if isinstance(given, int) else given.get("height")
    if fit_size != vision.image_size or (shortest and (not crops or shortest < vision.image_size)):
        raise TesseraError(
            f"size {size} (crop: {data.get('crop_size') if crops else None}) does not give pictures of "
            f"{vision.image_size}x{vision.image_size}, which the model needs",
            where=str(path),
        )
    return Squares(
        vision.image_size,
        patches,
        vision.class_token,
        fit="crop" if shortest else "stretch",
        shortest=shortest,
        pad=bool(data.get("do_pad")),
    )


def _check_tiles(data: dict[str, Any], config: LlavaConfig, path: Path) -> None:
    """Model and preprocessor each have a list of resolutions: two that differ train without an error, and wrong."""
    assert config.tiles is not None
    given = data.get("image_grid_pinpoints")
    if given is not None and tuple(map(tuple, given)) != config.tiles.pinpoints:
        raise TesseraError(
            "image_grid_pinpoints are others than the model's", where=str(path), fix="set them as in config.json"
        )
    size = data.get("size") or {}
    side = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge")
    if side not in (None, config.vision.image_size):
        raise TesseraError(f"size {size}, the model needs {config.vision.image_size}", where=str(path))


def write_files(folder: Path, config: LlavaConfig, squares: Squares, sampling: VideoSampling) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tiled = config.tiles is not None
    named = {"processor_class": "LlavaOnevisionProcessor" if tiled else "LlavaProcessor"}
    side = {"height": squares.size, "width": squares.size}
    common = {
        **named,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": _BICUBIC,
        "rescale_factor": squares.patches.scale,
        "image_mean": list(squares.patches.mean),
        "image_std": list(squares.patches.std),
    }
    if tiled:
        image = {**common, **_tiled_image(config), "size": side}
        video = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": side, "do_sample_frames": True}
        _write(folder / VIDEO_FILE, {**common, **video, **_sampled(sampling)})
    elif squares.fit == "crop":
        kind = {"image_processor_type": "LlavaImageProcessor", "do_pad": squares.pad, "do_center_crop": True}
        image = {**common, **kind, "size": {"shortest_edge": squares.shortest}, "crop_size": side}
    else:
        kind = {"image_processor_type": "LlavaImageProcessor", "do_pad": squares.pad, "do_center_crop": False}
        image = {**common, **kind, "size": side}
    _write(folder / IMAGE_FILE, image)
    _write(folder / BOTH_FILE, {**named, **_processor(config)})


def _tiled_image(config: LlavaConfig) -> dict[str, Any]:
    assert config.tiles is not None
    return {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "do_pad": True,
        "image_grid_pinpoints": [list(size) for size in config.tiles.pinpoints],
    }


def _sampled(sampling: VideoSampling) -> dict[str, Any]:
    if sampling.frames is not None:
        return {"num_frames": sampling.frames}
    return {"fps": sampling.fps, "min_frames": sampling.min_frames, "max_frames": sampling.max_frames}


def _processor(config: LlavaConfig) -> dict[str, Any]:
    vision = config.vision
    fields: dict[str, Any] = {
        "image_token": "<image>",
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    if config.tiles is None:
        return {
            **fields,
            "patch_size": vision.patch_size,
            "num_additional_image_tokens": int(vision.class_token),
        }
    return {
        **fields,
        "video_token": "<video>",
        "num_image_tokens": vision.patches,
        "vision_aspect_ratio": f"anyres_max_{config.tiles.most}",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

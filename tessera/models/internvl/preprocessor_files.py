"""preprocessor_config.json, video_preprocessor_config.json and processor_config.json of InternVL folders, as
transformers reads and writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError
from tessera.data.media.clips import VideoSampling
from tessera.data.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models._chat.preprocessor_files import BICUBIC, read_json
from tessera.models.internvl.config import VisionConfig
from tessera.models.internvl.tiles import Tiles


def read_tiles(folder: Path, vision: VisionConfig, least: int | None, most: int | None) -> tuple[Tiles, Tiles]:
    """For stills and for clips. Numbers that are given win over the folder's.

    `crop_to_patches` is not read: published folders say false, and transformers' processor cuts all the same.
    """
    both = read_json(folder / BOTH_FILE)
    image_file = read_json(folder / IMAGE_FILE) or both.get("image_processor") or {}
    video_file = read_json(folder / VIDEO_FILE) or both.get("video_processor") or image_file
    fewest = least or image_file.get("min_patches") or 1
    largest = most or image_file.get("max_patches") or max(12, fewest)
    if fewest > largest:
        raise TesseraError(f"min_tiles ({fewest}) is more than max_tiles ({largest})", where="data.processor")
    image = _tiles(image_file, vision, folder / IMAGE_FILE)
    video = _tiles(video_file, vision, folder / VIDEO_FILE)
    return replace(image, least=fewest, most=largest), replace(video, least=1, most=1)


def write_tiles(folder: Path, image: Tiles, video: Tiles, sampling: VideoSampling) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = {"processor_class": "InternVLProcessor"}
    still = {
        **named,
        "image_processor_type": "GotOcr2ImageProcessor",
        **_common(image),
        "crop_to_patches": image.most > 1,
        "min_patches": image.least,
        "max_patches": image.most,
    }
    # Transformers takes the frames it is given as they are, as from published folders, unless it is told how many to
    # take: its own rate of frames knows no bounds. What is written of ours is for whoever trains on.
    clip = {**named, "video_processor_type": "InternVLVideoProcessor", **_common(video)}
    if sampling.frames is None:
        bounds = {"fps": sampling.fps, "min_frames": sampling.min_frames, "max_frames": sampling.max_frames}
        clip |= {"do_sample_frames": False, **bounds}
    else:
        clip |= {"do_sample_frames": True, "num_frames": sampling.frames}
    joint = {**named, "image_seq_length": image.tokens}
    for name, content in ((IMAGE_FILE, still), (VIDEO_FILE, clip), (BOTH_FILE, joint)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tiles(data: Mapping[str, Any], vision: VisionConfig, path: Path) -> Tiles:
    side = vision.image_size
    checks: dict[str, Any] = {
        "size": {"height": side, "width": side},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": BICUBIC,
    }
    for key, wanted in checks.items():
        if data.get(key) is not None and data[key] != wanted:
            raise TesseraError(f"{key} = {data[key]!r}, the model needs {wanted!r}", where=str(path))
    extra: dict[str, Any] = {}
    if data.get("image_mean") is not None and data.get("image_std") is not None:
        extra |= {"mean": tuple(map(float, data["image_mean"])), "std": tuple(map(float, data["image_std"]))}
    if data.get("rescale_factor") is not None:
        extra["scale"] = float(data["rescale_factor"])
    return Tiles(side, vision.patch_size, vision.spatial_merge_size, **extra)


def _common(tiles: Tiles) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": BICUBIC,
        "rescale_factor": tiles.scale,
        "image_mean": list(tiles.mean),
        "image_std": list(tiles.std),
        "size": {"height": tiles.size, "width": tiles.size},
    }

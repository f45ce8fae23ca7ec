"""Preprocessing of images and frames for LLaVA's vision encoders, and the preprocessor files that describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models.llava.config import LlavaConfig
from tessera.models.vision.patches import CLIP_MEAN, CLIP_STD, Patches
from tessera.models.vision.preprocessor_files import (
    check_fields,
    pixel_fields,
    read_files,
    read_norm,
    sampling_fields,
    write_json,
)

# How an image becomes a square: resized and cropped at its centre, or stretched.
Fit = Literal["crop", "stretch"]


@dataclass(frozen=True)
class SquareImages:
    """Turn images into squares of one size and cut them into patches, for CLIP and SigLIP encoders."""

    size: int  # side of the square in pixels
    patches: Patches  # how squares are cut; pixels at the right and lower edges that fill no patch are dropped
    class_row: bool  # add a patch of zeros before those of each square, as a placeholder of the class token
    fit: Fit = "crop"
    shortest: int = 0  # for "crop": shorter side after resizing, in pixels
    pad: bool = False  # pad images to a square with the mean colour before resizing

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of an image after resizing, before the crop."""
        if self.fit == "stretch":
            return self.size, self.size
        short, long = min(width, height), max(width, height)
        new_long = int(self.shortest * long / short)
        return (self.shortest, new_long) if width <= height else (new_long, self.shortest)

    def square(self, image: Image.Image) -> np.ndarray:
        """Return an RGB image as a square [size, size, 3]: padded if `pad`, resized, and cropped at its centre."""
        if self.pad:
            image = self.padded(image)
        pixels = np.asarray(_resize(image, *self.resized(*image.size)))
        top, side = (pixels.shape[0] - self.size) // 2, (pixels.shape[1] - self.size) // 2
        return pixels[top : top + self.size, side : side + self.size]

    def stretched(self, image: Image.Image) -> np.ndarray:
        return np.asarray(_resize(image, self.size, self.size))

    def padded(self, image: Image.Image) -> Image.Image:
        """Return the image padded to a square with the mean colour."""
        width, height = image.size
        if width == height:
            return image
        side = max(width, height)
        around = Image.new("RGB", (side, side), tuple(int(value * 255) for value in self.patches.mean))
        around.paste(image, ((side - width) // 2, (side - height) // 2))
        return around

    def tiled(self, image: Image.Image, down: int, across: int) -> np.ndarray:
        """Return [tiles, size, size, 3]: the full image scaled down, then its tiles, padded with black."""
        high, wide = down * self.size, across * self.size
        width, height = image.size
        if wide / width < high / height:
            new = (wide, min(math.ceil(height * (wide / width)), high))
        else:
            new = (min(math.ceil(width * (high / height)), wide), high)
        canvas = np.zeros((high, wide, 3), dtype=np.uint8)
        top, side = (high - new[1]) // 2, (wide - new[0]) // 2
        canvas[top : top + new[1], side : side + new[0]] = np.asarray(_resize(image, *new))
        cut = canvas.reshape(down, self.size, across, self.size, 3).transpose(0, 2, 1, 3, 4)
        return np.concatenate([self.stretched(image)[None], cut.reshape(-1, self.size, self.size, 3)])

    def cut(self, squares: np.ndarray) -> np.ndarray:
        """Return the patches of all squares [squares, size, size, 3] in order."""
        side = self.size // self.patches.patch
        used = side * self.patches.patch
        rows = self.patches.cut(np.ascontiguousarray(squares[:, :used, :used]), (len(squares), side, side))
        if not self.class_row:
            return rows
        with_class = np.zeros((len(squares), side * side + 1, rows.shape[1]), dtype=rows.dtype)
        with_class[:, 1:] = rows.reshape(len(squares), side * side, -1)
        return with_class.reshape(-1, rows.shape[1])


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


NEWLINE = -1
_DOWNSCALE_FROM = 1.1  # a grid of features is scaled down if its side exceeds the limit by more than this factor


@dataclass(frozen=True)
class FeatureInterpolation:
    """Hold the indices [tokens, K] and weights of the features that each token is interpolated from.

    `weights` None: K is 1, and each token is one feature.
    """

    index: np.ndarray
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class AnyResTiles:
    """Choose the tiles of an image and the features that become tokens ("anyres" of LLaVA-OneVision)."""

    side: int  # number of features along a side of a tile
    size: int  # side of a tile in pixels
    pinpoints: tuple[tuple[int, int], ...]  # candidate resolutions (height, width)
    most: int  # limit on the tokens of tiles, in tokens of one tile (see `_DOWNSCALE_FROM`)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles that keep the most pixels of an image and then waste the least area."""
        best, best_rank = self.pinpoints[0], (0, -math.inf)
        for high, wide in self.pinpoints:
            scale = min(wide / width, high / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            rank = (pixels, pixels - high * wide)
            if rank > best_rank:
                best, best_rank = (high, wide), rank
        return best[0] // self.size, best[1] // self.size

    def image(self) -> FeatureInterpolation:
        """Return the features that become tokens of a one-tile image: all of the tile, then the newline embedding."""
        return FeatureInterpolation(np.append(np.arange(self.side**2), NEWLINE)[:, None])

    def tiled_image(self, height: int, width: int) -> FeatureInterpolation:
        """Return the features that become the tokens of an image in several tiles, the only image of its sample."""
        down, across = self.grid(height, width)
        rows, columns = self._unpadded(height, width, down * self.side, across * self.side)
        lines, weights = self._features(rows, columns, across)[..., None], None
        ratio = math.sqrt(len(rows) * len(columns) / (self.most * self.side**2))
        if ratio > _DOWNSCALE_FROM:
            lines, weights = _smaller(lines[..., 0], int(len(rows) // ratio), int(len(columns) // ratio))
        ends = np.full((len(lines), 1, lines.shape[-1]), NEWLINE)
        index = np.concatenate([lines, ends], axis=1).reshape(-1, lines.shape[-1])
        whole = np.zeros((self.side**2, lines.shape[-1]), dtype=index.dtype)
        whole[:, 0] = np.arange(self.side**2)
        if weights is None:
            return FeatureInterpolation(np.concatenate([whole, index]))
        alone = np.eye(1, weights.shape[-1], dtype=np.float32)
        shares = np.concatenate([weights, np.broadcast_to(alone, (len(weights), *alone.shape))], axis=1)
        shares = np.concatenate([np.repeat(alone, len(whole), axis=0), shares.reshape(-1, alone.shape[1])])
        return FeatureInterpolation(np.concatenate([whole, index]), shares)

    def video(self, frames: int) -> FeatureInterpolation:
        """Return the features that become tokens of a video: each frame is interpolated to half its side.

        The last token of the video is the model's newline embedding.
        """
        half = math.ceil(self.side / 2)
        index, weights = _smaller(np.arange(self.side**2).reshape(self.side, self.side), half, half)
        width = index.shape[-1]
        moved = index.reshape(1, -1, width) + (np.arange(frames) * self.side**2)[:, None, None]
        ending = np.full((1, width), NEWLINE)
        shares = np.concatenate([np.tile(weights.reshape(-1, width), (frames, 1)), np.eye(1, width, dtype=np.float32)])
        return FeatureInterpolation(np.concatenate([moved.reshape(-1, width), ending]), shares)

    def _unpadded(self, height: int, width: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and columns of features that are not padding. The image is centred in its tiles."""
        top = side = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            side = (columns - int(round(width * (rows / height), 7))) // 2
        return np.arange(top, rows - top), np.arange(side, columns - side)

    def _features(self, rows: np.ndarray, columns: np.ndarray, across: int) -> np.ndarray:
        """Return feature indices [rows, columns] of the tiles. The features of the scaled-down image come before
        them."""
        tile = 1 + rows[:, None] // self.side * across + columns[None] // self.side
        numbers: np.ndarray = tile * self.side**2 + rows[:, None] % self.side * self.side + columns[None] % self.side
        return numbers


def _smaller(features: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return feature indices [rows, columns, 4] and weights of a bilinear interpolation to this size."""
    top, bottom, below = _between(features.shape[0], rows)
    near, far, beside = _between(features.shape[1], columns)
    corners = [features[np.ix_(y, x)] for y in (top, bottom) for x in (near, far)]
    shares = [np.outer(h, w) for h in (1 - below, below) for w in (1 - beside, beside)]
    return np.stack(corners, axis=-1), np.stack(shares, axis=-1)


def _between(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each of `new` evenly spaced points two neighbours among `old` points, and the weight of the second."""
    scale = np.float32(old) / np.float32(new)
    points = np.maximum((np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    first = np.minimum(points.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), (points - first).astype(np.float32)


_HALF = (0.5, 0.5, 0.5)


def read_squares(folder: Path, config: LlavaConfig) -> SquareImages:
    path, data, vision = folder / IMAGE_FILE, read_files(folder)[0], config.vision
    check_fields(data, path)
    is_clip = vision.kind == "clip"
    defaults = {"mean": CLIP_MEAN, "std": CLIP_STD} if is_clip else {"mean": _HALF, "std": _HALF}
    norm = {**defaults, "scale": 1 / 255, **read_norm(data, path)}
    # The pixel bounds 1 and 1 << 62 have no effect: all squares have the same size.
    patches = Patches(1, 1 << 62, vision.patch_size, merge=1, temporal=1, **norm)
    if config.tiles is not None:
        _check_tiles(data, config, path)
        return SquareImages(vision.image_size, patches, vision.class_token, fit="stretch")
    size = data.get("size")
    crops = data.get("do_center_crop", is_clip)
    if size is None:
        size = {"shortest_edge": vision.image_size} if crops else {"height": vision.image_size}
    shortest = int(size if isinstance(size, int) else size.get("shortest_edge") or 0)
    fit_size = vision.image_size if shortest else size.get("height")
    if crops and shortest:
        crop = data.get("crop_size") or vision.image_size
        fit_size = crop if isinstance(crop, int) else crop.get("height")
    if fit_size != vision.image_size or (shortest and (not crops or shortest < vision.image_size)):
        raise TesseraError(
            f"size {size} (crop: {data.get('crop_size') if crops else None}) does not produce images of "
            f"{vision.image_size}x{vision.image_size}, which the model needs",
            where=str(path),
            code="media.preprocessor-mismatch",
        )
    fit: Fit = "crop" if shortest else "stretch"
    return SquareImages(vision.image_size, patches, vision.class_token, fit, shortest, pad=bool(data.get("do_pad")))


def _check_tiles(data: dict[str, Any], config: LlavaConfig, path: Path) -> None:
    """Raise if tile resolutions or tile size of a preprocessor file differ from config.json, which is used."""
    assert config.tiles is not None
    pinpoints = data.get("image_grid_pinpoints")
    if pinpoints is not None and tuple(map(tuple, pinpoints)) != config.tiles.pinpoints:
        raise TesseraError(
            "image_grid_pinpoints differ from those of config.json",
            where=str(path),
            fix="copy them from config.json into this file",
            code="media.preprocessor-mismatch",
        )
    size = data.get("size") or {}
    side = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge")
    if side not in (None, config.vision.image_size):
        raise TesseraError(
            f"size is {size}, but the model needs {config.vision.image_size}",
            where=str(path),
            code="media.preprocessor-mismatch",
        )


def write_files(folder: Path, config: LlavaConfig, squares: SquareImages, sampling: VideoSampling) -> None:
    vision, tiles = config.vision, config.tiles
    processor = {"processor_class": "LlavaProcessor" if tiles is None else "LlavaOnevisionProcessor"}
    common, side = {**processor, **pixel_fields(squares.patches)}, {"height": squares.size, "width": squares.size}
    both = {
        **processor,
        "image_token": "<image>",
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    if tiles is None:
        crops = squares.fit == "crop"
        sizes = {"size": {"shortest_edge": squares.shortest}, "crop_size": side} if crops else {"size": side}
        kind = {"image_processor_type": "LlavaImageProcessor", "do_pad": squares.pad, "do_center_crop": crops}
        write_json(folder / IMAGE_FILE, {**common, **kind, **sizes})
        extra = {"patch_size": vision.patch_size, "num_additional_image_tokens": int(vision.class_token)}
        write_json(folder / BOTH_FILE, {**both, **extra})
        return
    image = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "do_pad": True,
        "image_grid_pinpoints": [list(resolution) for resolution in tiles.pinpoints],
        "size": side,
    }
    write_json(folder / IMAGE_FILE, {**common, **image})
    video = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": side, "do_sample_frames": True}
    write_json(folder / VIDEO_FILE, {**common, **video, **sampling_fields(sampling)})
    tokens = {"video_token": "<video>", "num_image_tokens": vision.patches}
    write_json(folder / BOTH_FILE, {**both, **tokens, "vision_aspect_ratio": f"anyres_max_{tiles.most}"})

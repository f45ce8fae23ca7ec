"""What a test needs of the machine, where torch itself does not have it."""

from __future__ import annotations

import pytest


def need_transparency_over_white() -> None:
    """Skip where transformers drops the transparency of an image. Later ones lay it over white, as ours does."""
    from PIL import Image
    from transformers.image_transforms import convert_to_rgb

    converted = convert_to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    if converted.getpixel((0, 0)) != (255, 255, 255):
        pytest.skip("this version of transformers drops transparency")

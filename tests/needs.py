"""What a test needs of the machine, where torch itself does not have it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def has_half_attention() -> bool:
    """Whether attention in bf16 runs on this CPU. Where ATEN_CPU_CAPABILITY asks for less than the CPU has, torch packs
    keys for units that it was told not to use, and then refuses itself."""
    x = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(x, x, x)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        return False
    return True


def need_half_attention() -> None:
    if not has_half_attention():
        pytest.skip("torch's attention in bf16 refuses this ATEN_CPU_CAPABILITY")


def need_transparency_over_white() -> None:
    """Skip where transformers drops the transparency of an image. Later ones lay it over white, as ours does."""
    from PIL import Image
    from transformers.image_transforms import convert_to_rgb

    shown = convert_to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    if shown.getpixel((0, 0)) != (255, 255, 255):
        pytest.skip("this version of transformers drops transparency")

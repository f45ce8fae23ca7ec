"""List every generation family that is compared with diffusers. A new one adds a module and one line."""

from __future__ import annotations

import pytest
from generation import GenerationFamily
from joint_generation import Flux, QwenImage, StableDiffusion3
from ltx_generation import LTXVideo
from video_generation import CogVideoX, HunyuanVideo, HunyuanVideo15
from wan_generation import Wan

FAMILIES: tuple[GenerationFamily, ...] = (
    CogVideoX(),
    Flux(),
    HunyuanVideo(),
    HunyuanVideo15(),
    LTXVideo(),
    QwenImage(),
    StableDiffusion3(),
    Wan(),
)
GENERATION = {family.spec.name: family for family in FAMILIES}
CASES = [
    pytest.param(name, config, marks=[] if config in family.quick else [pytest.mark.slow])
    for name, family in GENERATION.items()
    for config in family.configs
]
# What the first configuration of a family shows for nearly all of them; three of eight families in `make test`.
FIRST_CASES = [
    pytest.param(name, config, marks=[] if number == 0 and name in ("cogvideox", "flux", "wan") else [pytest.mark.slow])
    for name, family in GENERATION.items()
    for number, config in enumerate(family.configs)
]

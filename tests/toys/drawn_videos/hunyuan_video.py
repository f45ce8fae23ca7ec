from __future__ import annotations

from tessera.diffusion.hunyuan_video import SPEC as PUBLISHED
from tests.toys.drawn_videos import drawn

SPEC = drawn(PUBLISHED)
